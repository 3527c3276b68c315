#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The shared library exports the functions of the C headers: all of them, and nothing else."""
import argparse
import pathlib
import re
import subprocess
import sys


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nm", required=True)
    parser.add_argument("--library", required=True)
    parser.add_argument("--headers", required=True, type=pathlib.Path, help="their folder")
    args = parser.parse_args()

    listing = subprocess.run([args.nm, "-D", "--defined-only", args.library], capture_output=True, text=True, check=True)
    exported = {line.split()[-1] for line in listing.stdout.splitlines()}
    headers = "".join(path.read_text(encoding="utf-8") for path in sorted(args.headers.glob("*.h")))
    declared = set(re.findall(r"^FLASH3_API\b[^;(]*?(\w+)\(", headers, re.M))
    if not declared:
        return f"no FLASH3_API function in {args.headers}: the gate no longer reads them"

    wrong = [f"exported, but in no header: {name}" for name in sorted(exported - declared)]
    wrong += [f"in a header, but not exported: {name}" for name in sorted(declared - exported)]
    print("\n".join(wrong) or f"{len(exported)} functions exported, each of them in a header")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
