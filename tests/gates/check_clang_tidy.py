#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""clang-tidy, in the pinned version, finds nothing in what ships (--all: in every source of the build); .clang-tidy has the checks."""
import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys

from sources import ROOT, sources

# What ships. A file takes seconds, which all of the tests and tools are not worth in each `make check`: `make tidy` does them.
SHIPPED = ("include", "src", "bindings")
EVERYTHING = SHIPPED + ("tools", "tests", "examples", "bench")
# Besides .clang-tidy: tools and tests wait for what they call, and cost is looked for in what ships; an example may end with an exception,
# whose text is the message.
LEFT_OUT = {"tools": "-performance-*", "tests": "-performance-*", "examples": "-bugprone-exception-escape"}
# One source, src/cpu/kernels/*-inl.hpp, compiled for each instruction set: once is enough.
SAME_AS_AVX3 = re.compile(r"src/cpu/kernels/(baseline|avx2|avx3_zen4)\.cpp")


def pinned_version():
    text = (ROOT / "scripts/requirements-tools.txt").read_text(encoding="utf-8")
    return re.search(r"^clang-tidy==(\S+)", text, re.M)[1]


def commands(build, folders):
    """{file: its entry in compile_commands.json}; of a file in several targets, that of the first."""
    found = {}
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        path = pathlib.Path(entry["directory"], entry["file"]).resolve()
        if not path.is_relative_to(ROOT) or path.suffix not in (".c", ".cpp"):
            continue
        name = path.relative_to(ROOT).as_posix()
        if name.split("/")[0] in folders and not SAME_AS_AVX3.fullmatch(name):
            found.setdefault(path, entry)
    return dict(sorted(found.items()))


def what_all_see(version):
    """A hash of what else a file's result may depend on: every header is simpler than the right ones."""
    digest = hashlib.sha256(version.encode())
    for path in [ROOT / ".clang-tidy", *(p for p in sources(*EVERYTHING) if p.suffix in (".h", ".hpp", ".cuh"))]:
        digest.update(path.read_bytes())
    return digest


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clang-tidy", default=str(ROOT / "build/toolchain/venv/bin/clang-tidy"))
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/ci", help="folder with compile_commands.json")
    parser.add_argument("--all", action="store_true", help="tools, tests, examples and bench too")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()

    try:
        version = subprocess.run([args.clang_tidy, "--version"], capture_output=True, text=True, check=True).stdout
    except OSError as error:
        return f"cannot run clang-tidy: {error}; scripts/setup.sh gates brings it"
    if pinned_version() not in version:
        return f"{args.clang_tidy} is {version.strip()!r}; the project's is {pinned_version()}: scripts/setup.sh gates"

    common, clean = what_all_see(version), args.build / "clang_tidy"
    clean.mkdir(exist_ok=True)

    def check(item):
        """The findings in a file; none also if it was clean before and nothing has changed since."""
        path, entry = item
        digest = common.copy()
        digest.update(entry["command"].encode() + path.read_bytes())
        stamp = clean / digest.hexdigest()
        if stamp.exists():
            return ""
        # Warnings are .clang-tidy's to choose, and the compiler's -Werror would hide which check it was. A header that GCC has
        # precompiled is read as text.
        left_out = LEFT_OUT.get(path.relative_to(ROOT).parts[0])
        result = subprocess.run([args.clang_tidy, "-p", clean, "--quiet", "--extra-arg=-Wno-error", "--extra-arg=-Wno-ignored-gch",
                                 *([f"--checks={left_out}"] if left_out else []), path], capture_output=True, text=True, check=False)
        if result.returncode == 0:
            stamp.touch()
            return ""
        return result.stdout or result.stderr

    files = commands(args.build, EVERYTHING if args.all else SHIPPED)
    if not files:
        return f"no source in {args.build}/compile_commands.json: the gate looks in the wrong place"
    # The chosen entries alone: of a file with two, clang-tidy would check both.
    (clean / "compile_commands.json").write_text(json.dumps(list(files.values())), encoding="utf-8")
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        found = [text for text in pool.map(check, files.items()) if text]
    print("\n".join(found) or f"{len(files)} files, nothing found")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
