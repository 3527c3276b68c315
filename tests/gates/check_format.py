#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every source is as clang-format, in the pinned version, writes it. --fix rewrites those that are not."""
import argparse
import re
import shutil
import subprocess
import sys

from sources import ROOT, sources

FOLDERS = ("include", "src", "bindings", "tools", "tests", "examples", "bench", "fuzz")


def pinned_version():
    text = (ROOT / "scripts/requirements-tools.txt").read_text(encoding="utf-8")
    return re.search(r"^clang-format==(\S+)", text, re.M)[1]


def default_program():
    pinned = ROOT / "build/toolchain/venv/bin/clang-format"
    return str(pinned) if pinned.exists() else shutil.which("clang-format") or "clang-format"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clang-format", default=default_program())
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()

    try:
        version = subprocess.run([args.clang_format, "--version"], capture_output=True, text=True, check=True).stdout
    except OSError as error:
        return f"cannot run clang-format: {error}; scripts/setup.sh gates brings it"
    if pinned_version() not in version:
        return f"{args.clang_format} is {version.strip()!r}; the project's is {pinned_version()}: scripts/setup.sh gates"

    files = [str(path) for path in sources(*FOLDERS)]
    mode = ["-i"] if args.fix else ["--dry-run", "--Werror", "--ferror-limit=3"]
    if subprocess.run([args.clang_format, *mode, *files], check=False).returncode:
        return "not as clang-format writes it: make format"
    print(f"{len(files)} files {'formatted' if args.fix else 'in form'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
