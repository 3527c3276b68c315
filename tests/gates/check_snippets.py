#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every block of C and C++ in README.md and docs/*.md compiles as it stands, without a warning. (Those of Python: tests/python/test_docs.py.)"""
import argparse
import re
import subprocess
import sys
import textwrap
from typing import NamedTuple

from sources import ROOT

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


# The code in README.md and in the pages of docs/: fenced blocks, and what says that one is not run.
#
# A block whose fence names a language, `python`, `c` or `cpp`, runs or compiles as it stands. Those of Python run in their page's order and share its
# names. A comment on the line before the fence keeps a block from it, and says why:
#
#     <!-- not run: needs a Hopper GPU -->
#
# A block whose fence names no language is a command, what it prints, a formula, or pseudocode.

FENCE = re.compile(r"^(?:(?P<before>[^\n]*)\n)?(?P<indent> *)```(?P<language>[\w{}+-]*)[^\n]*\n(?P<code>.*?)^(?P=indent)```[ ]*$", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
LANGUAGES = {"", "python", "c", "cpp", "cmake", "{toctree}", "{gallery}"}
# What a block without a language must not look like.
CODE = re.compile(r"^(import \w|from \w+(\.\w+)* import |#include )", re.M)


class Block(NamedTuple):
    language: str  #: of the fence; "" for none
    code: str
    line: int  #: of its first line in the page
    not_run: str  #: why it is not run; "" for one that is


def pages():
    """README.md and the pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text):
    """The fenced blocks of a page, in order."""
    for match in FENCE.finditer(text):
        marker = NOT_RUN.fullmatch((match["before"] or "").strip())
        yield Block(match["language"], textwrap.dedent(match["code"]), text.count("\n", 0, match.start("code")) + 1, marker[1] if marker else "")


def complaints(text):
    """What is wrong with the fences of a page themselves: (line, words)."""
    found = list(blocks(text))
    for block in found:
        if block.language not in LANGUAGES:
            yield block.line, f"a block of {block.language}, which no test knows"
        elif not block.language and CODE.search(block.code):
            yield block.line, "a block of code whose fence names no language, so that no test runs it"
        elif block.not_run and block.language not in ("python", "c", "cpp"):
            yield block.line, "a block that no test would run is marked as one that is not run"
    if sum(bool(block.not_run) for block in found) != len(re.findall("<!-- *not run", text)):
        yield 1, "a comment \"not run: why\" must stand on the line before a fence"


if __name__ == "__main__":
    sys.exit(main())
