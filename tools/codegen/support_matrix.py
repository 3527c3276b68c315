#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the support matrix and the kernels in docs/support.md, as the library's own functions answer (support_matrix.cpp).

    cmake --build --preset ci --target flash3_support_matrix
    python3 tools/codegen/support_matrix.py [--program build/ci/bin/flash3_support_matrix] [--check]

`--check` compares instead of writing: the gate that keeps docs/support.md and the library together. Needs no GPU.
"""
import argparse
import subprocess
import sys

from generated_block import ROOT, update

DOCUMENT = "docs/support.md"


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
    status = update(DOCUMENT, "support", matrix, args.check) | update(DOCUMENT, "kernels", kernels, args.check)
    if status:
        print(f"{DOCUMENT} is not what the library answers: run tools/codegen/support_matrix.py")
    return status


if __name__ == "__main__":
    sys.exit(main())
