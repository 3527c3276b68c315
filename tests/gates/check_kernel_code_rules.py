#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_kernel_code.py tells of what has grown, and of nothing else."""
import sys

from check_kernel_code import complaints, count

FILES = {"a.cu.o": [100, 300], "b.cu.o": [350], "c.cu.o": [50]}
NOTED = count(FILES)

# Files, and what must be in the complaints about them; nothing: there is none.
CASES = [
    (FILES, []),
    ({**FILES, "b.cu.o": [500]}, []),  # the longest, by a quarter exactly
    ({**FILES, "b.cu.o": [501]}, ["instructions of the longest file: 501", "b.cu.o: 501 instructions in 1 kernels"]),
    ({**FILES, "d.cu.o": [201]}, ["instructions: 1001, but 800 are noted"]),
    ({**FILES, "d.cu.o": [200]}, []),
    ({"a.cu.o": [1] * 800}, ["instructions of the longest file: 800", "a.cu.o"]),
    ({"a.cu.o": []}, ["no kernel in any object"]),
]


def main():
    bad = 0
    for files, expected in CASES:
        found = list(complaints(files, NOTED))
        if len(found) != len(expected) or not all(part in line for part, line in zip(expected, found)):
            bad += 1
            print(f"{files}: {found}, but expected {expected}")
    print(f"{bad} of {len(CASES)} cases wrong")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
