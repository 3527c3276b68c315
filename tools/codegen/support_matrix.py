#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the support matrix in README.md, as the library's own functions answer (support_matrix.cpp).

    cmake --build --preset ci --target flash3_support_matrix
    python3 tools/codegen/support_matrix.py [--program build/ci/bin/flash3_support_matrix] [--check]

`--check` compares instead of writing: the gate that keeps README.md and the library together. Needs no GPU.
"""
import argparse
import subprocess
import sys

from generated_block import ROOT, update


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=ROOT / "build/ci/bin/flash3_support_matrix")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    try:
        text = subprocess.run([args.program], capture_output=True, encoding="utf-8", check=True).stdout
    except OSError as error:
        return f"{error}; build it: cmake --build --preset ci --target flash3_support_matrix"
    status = update("README.md", "support", text, args.check)
    if status:
        print("README.md is not what the library answers: run tools/codegen/support_matrix.py")
    return status


if __name__ == "__main__":
    sys.exit(main())
