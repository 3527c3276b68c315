#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Programs built with an earlier flash3.h go on working with this one: abidiff against the dumps in abi/ (docs/abi.md).

    python3 tests/gates/check_abi.py --write      writes abi/flash3-VERSION.abi: part of a release
    python3 tests/gates/check_abi.py --release    that dump is there, and has all that the headers have
"""
import argparse
import re
import sys

import abi

SKIPPED = 77


def version():
    return re.search(r'FLASH3_VERSION_STRING "(.+)"', (abi.ROOT / "include/flash3/version.h").read_text(encoding="utf-8"))[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="cc")
    parser.add_argument("--abidw", default="abidw")
    parser.add_argument("--abidiff", default="abidiff")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--release", action="store_true")
    args = parser.parse_args()
    own = abi.DUMPS / f"flash3-{version()}.abi"

    new = abi.dump(args.compiler, args.abidw)
    if args.write:
        own.write_text(new, encoding="utf-8")
        print(f"wrote {own.relative_to(abi.ROOT)}")
        return 0
    if args.release and not own.is_file():
        return f"{own.relative_to(abi.ROOT)} is not there: tests/gates/check_abi.py --write"
    dumps = sorted(abi.DUMPS.glob("flash3-*.abi"))
    if not dumps:
        return f"no dump in {abi.DUMPS}: the gate looks in the wrong place"
    failed = False
    for path in dumps:
        old = path.read_text(encoding="utf-8")
        if abi.architecture(old) != abi.architecture(new):
            print(f"{path.name} is of {abi.architecture(old)}, this machine is {abi.architecture(new)}")
            return SKIPPED
        changes = abi.incompatible(old, new, args.abidiff)
        if args.release and path == own and (lacking := abi.incompatible(new, old, args.abidiff)):
            print(f"{path.name} lacks what the headers have (tests/gates/check_abi.py --write):\n{lacking}")
            failed = True
        print(f"{path.name}: programs built with it would break:\n{changes}" if changes else f"{path.name}: compatible")
        failed = failed or bool(changes)
    return failed


if __name__ == "__main__":
    sys.exit(main())
