#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the support matrix in docs/support.md and the list of kernels docs/kernels.csv, as the library's own functions answer
(support_matrix.cpp).

    cmake --build --preset ci --target flash3_support_matrix
    python3 tools/codegen/support_matrix.py [--program build/ci/bin/flash3_support_matrix] [--check]

`--check` compares instead of writing: the gate that keeps both files and the library together. Needs no GPU.
"""
import argparse
import csv
import io
import subprocess
import sys

from generated_block import ROOT, update

DOCUMENT, KERNELS = "docs/support.md", "docs/kernels.csv"
# The columns of the list: how each begins in the tables of the kernels. Kernels for few queries lack some.
COLUMNS = ("kernel", "head_dim", "tile", "consumer warpgroups", "stages", "shared memory", "registers")


def kernel_list(tables):
    """The tables of the kernels as one list, in CSV."""
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow(COLUMNS)
    for table in tables.strip().split("\n\n"):
        header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
        for row in rows:
            cells = dict(zip(header, row, strict=True))
            writer.writerow([next((cell.strip("`") for title, cell in cells.items() if title.startswith(column)), "") for column in COLUMNS])
    return made.getvalue()


def update_list(text, check):
    """Writes the list, or with check=True compares it. Returns an exit status."""
    path = ROOT / KERNELS
    if path.exists() and path.read_text(encoding="utf-8") == text:
        print(f"{KERNELS} is up to date")
        return 0
    if check:
        print(f"{KERNELS} is not the library's list of kernels")
        return 1
    path.write_text(text, encoding="utf-8")
    print(f"{KERNELS}: written")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=ROOT / "build/ci/bin/flash3_support_matrix")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    try:
        text = subprocess.run([args.program], capture_output=True, encoding="utf-8", check=True).stdout
    except OSError as error:
        return f"{error}; build it: cmake --build --preset ci --target flash3_support_matrix"
    matrix, _, kernels = text.partition("\n\n")  # the first table, and those of the kernels
    status = update(DOCUMENT, "support", matrix, args.check) | update_list(kernel_list(kernels), args.check)
    if status:
        print("the documents are not what the library answers: run tools/codegen/support_matrix.py")
    return status


if __name__ == "__main__":
    sys.exit(main())
