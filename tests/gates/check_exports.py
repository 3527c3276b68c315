#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The shared library exports the functions of flash3.h: all of them, and nothing else."""
import argparse
import pathlib
import re
import subprocess
import sys


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nm", required=True)
    parser.add_argument("--library", required=True)
    parser.add_argument("--header", required=True, type=pathlib.Path)
    args = parser.parse_args()

    listing = subprocess.run([args.nm, "-D", "--defined-only", args.library], capture_output=True, text=True, check=True)
    exported = {line.split()[-1] for line in listing.stdout.splitlines()}
    header = args.header.read_text(encoding="utf-8")
    declared = set(re.findall(r"^FLASH3_API\b[^;(]*?(\w+)\(", header, re.M))
    if not declared:
        return f"no FLASH3_API function in {args.header}: the gate no longer reads it"

    wrong = [f"exported, but not in the header: {name}" for name in sorted(exported - declared)]
    wrong += [f"in the header, but not exported: {name}" for name in sorted(declared - exported)]
    print("\n".join(wrong) or f"{len(exported)} functions exported, each of them in the header")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
