#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""No file is longer than a reader takes in: 450 lines of C++, CUDA or Python, 120 of README.md, 150 of a README beside kernels. Nor is what
one reads for a kernel: the files of this repository that it includes, through all of them, and their lines."""
import re
import sys

from sources import ROOT, SUFFIXES, sources

SOURCE, FRONT_PAGE, KERNEL_PAGE = 450, 120, 150


def bounds(root, source_files):
    """How many lines each file may have, by path."""
    kernel_pages = sorted(root.glob("src/cuda/**/README*.md"))
    if not kernel_pages:
        raise SystemExit(f"no README in {root}/src/cuda: the gate looks in the wrong place")
    return {**dict.fromkeys(source_files, SOURCE), root / "README.md": FRONT_PAGE, **dict.fromkeys(kernel_pages, KERNEL_PAGE)}


def too_long(root, source_files):
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in bounds(root, source_files)}
    return [f"{path.relative_to(root)}: {lengths[path]} lines, {most} allowed"
            for path, most in bounds(root, source_files).items() if lengths[path] > most]


# A kernel by what it is put together from, and how many files and lines that may be.
KERNELS = {
    "the 16-bit forward kernel": (("cuda/sm90/forward/kernel_16bit.cuh",), 25, 3485),
    "the FP8 forward kernel": (("cuda/sm90/forward/kernel_fp8.cuh",), 30, 4146),
    "the backward kernel": (("cuda/sm90/backward/kernel.cuh", "cuda/sm90/backward/consume.cuh"), 26, 3313),
}


def read_for(src, entries):
    """{path below src: lines} of the entries and of all that they include. What the build generates is not read."""
    lines, waiting = {}, list(entries)
    while waiting:
        name = waiting.pop()
        path = src / name
        if name in lines or not path.exists() and name.endswith(".inc"):
            continue
        if not path.exists():
            raise SystemExit(f"{path} is not there")
        text = path.read_text(encoding="utf-8")
        lines[name] = len(text.splitlines())
        waiting += re.findall(r'^#include "([^"]+)"', text, flags=re.M)
    return lines


def complaint(name, lines, most_files, most_lines):
    """What is wrong with what one reads for a kernel; "": nothing."""
    files, count = len(lines), sum(lines.values())
    if files <= most_files and count <= most_lines:
        return ""
    longest = ", ".join(f"{path} {n}" for path, n in sorted(lines.items(), key=lambda item: -item[1]))
    return f"{name}: {files} files and {count} lines, {most_files} and {most_lines} allowed: {longest}"


def main():
    files = sources("src", "include", "bindings", "tests", "tools", "fuzz", "bench", "examples", suffixes=SUFFIXES | {".py"})
    complaints = too_long(ROOT, files)
    print("\n".join(complaints) or f"{len(bounds(ROOT, files))} files, none too long")
    bad = bool(complaints)
    for name, (entries, most_files, most_lines) in KERNELS.items():
        lines = read_for(ROOT / "src", entries)
        wrong = complaint(name, lines, most_files, most_lines)
        print(wrong or f"{name}: {len(lines)} files and {sum(lines.values())} lines, {most_files} and {most_lines} allowed")
        bad += bool(wrong)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
