#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Each source file says its licence in its first lines, in the form that machines read. --fix writes it where it is missing."""
import argparse
import sys

from sources import ROOT, SUFFIXES

IDENTIFIER = "SPDX-License-" + "Identifier: Apache-2.0"  # in two, so that this line is not taken for the file's own
HASH_SUFFIXES = (".py", ".sh", ".cmake", ".cmake.in")
HASH_NAMES = {"CMakeLists.txt", "Makefile", "run"}
FIRST_LINES = 3  # a shebang may stand before it


def is_source(path):
    parts = path.relative_to(ROOT).parts
    if any(part.startswith(("build", "dist", ".")) and part != ".ci" or part == "__pycache__" for part in parts[:-1]):
        return False
    return path.suffix in SUFFIXES or path.name.endswith(HASH_SUFFIXES) or path.name in HASH_NAMES


def comment(path, text):
    if path.suffix not in SUFFIXES:
        return f"# {IDENTIFIER}\n"
    # A C file keeps to C's comments; the first one tells.
    return f"/* {IDENTIFIER} */\n" if text.startswith("/*") or path.suffix == ".c" else f"// {IDENTIFIER}\n"


def with_identifier(path, text):
    lines = text.splitlines(keepends=True)
    shebang = 1 if lines and lines[0].startswith("#!") else 0
    return "".join([*lines[:shebang], comment(path, text), *lines[shebang:]])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()

    files = sorted(path for path in ROOT.rglob("*") if path.is_file() and is_source(path))
    missing = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        if not any(IDENTIFIER in line for line in text.splitlines()[:FIRST_LINES]):
            missing.append(path)
            if args.fix:
                path.write_text(with_identifier(path, text), encoding="utf-8")
    for path in missing:
        print(f"{path.relative_to(ROOT)}: {'written' if args.fix else f'its first lines lack {IDENTIFIER}'}")
    print(f"{len(files)} files, {len(missing)} without it")
    return bool(missing) and not args.fix


if __name__ == "__main__":
    sys.exit(main())
