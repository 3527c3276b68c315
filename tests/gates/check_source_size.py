#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""No file is longer than a reader takes in: 450 lines of a source, 120 of README.md, 150 of a README beside kernels."""
import sys

from sources import ROOT, sources

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


def main():
    files = sources("src", "include", "bindings")
    complaints = too_long(ROOT, files)
    print("\n".join(complaints) or f"{len(bounds(ROOT, files))} files, none too long")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
