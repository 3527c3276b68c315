#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every block of C and C++ in README.md and docs/*.md compiles as it stands, without a warning. (Those of Python: tests/python/test_docs.py.)"""
import argparse
import subprocess
import sys

from snippets import ROOT, blocks, complaints, pages

FLAGS = {"c": ["-std=c11", "-x", "c"], "cpp": ["-std=c++20", "-x", "c++"]}
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wno-unused-parameter", "-Werror"]


def error_of(block, compilers, place):
    """What the compiler says against a block; empty if it compiles."""
    command = [compilers[block.language], *FLAGS[block.language], *WARNINGS, "-fsyntax-only", f"-I{ROOT / 'include'}", "-"]
    source = f'#line {block.line} "{place}"\n{block.code}'
    run = subprocess.run(command, input=source, capture_output=True, encoding="utf-8")
    return run.stderr if run.returncode else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--cxx", default="c++")
    args = parser.parse_args()
    bad, compiled = [], 0
    for page in pages():
        text, place = page.read_text(encoding="utf-8"), page.relative_to(ROOT)
        bad += [f"{place}:{line}: {words}" for line, words in complaints(text)]
        for block in blocks(text):
            if block.language in FLAGS and not block.not_run:
                compiled += 1
                if error := error_of(block, {"c": args.cc, "cpp": args.cxx}, place):
                    bad.append(error)
    if not compiled:
        bad.append("no block of C or C++ was found: the gate no longer reads the pages")
    print("\n".join(bad) or f"{compiled} blocks compile")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
