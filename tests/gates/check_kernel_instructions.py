#!/usr/bin/env python3
"""The machine code holds what was meant: every attention kernel has HGMMA (wgmma) and UTMALDG (TMA load), and no
kernel touches local memory (LDL, STL)."""
import sys
from collections import Counter

from cuda_objects import cuobjdump, demangle, is_attention, parse_args, sass_by_kernel

NEEDED = ("HGMMA", "UTMALDG")
FORBIDDEN = ("LDL", "STL")


def main():
    args = parse_args(__doc__)
    bad, seen = [], 0
    for obj in args.objects:
        kernels = sass_by_kernel(cuobjdump(args.cuobjdump, "-sass", obj))
        if is_attention(obj) and not kernels:
            bad.append(f"{obj.name}: no kernel in it")
        for kernel, instructions in kernels.items():
            seen += 1
            count = Counter(instruction.split(".")[0] for instruction in instructions)
            print(f"{len(instructions):6} instructions, {count['HGMMA']:4} HGMMA, {count['UTMALDG']:3} UTMALDG  {demangle(kernel)}")
            bad += [f"{demangle(kernel)}: no {name}" for name in NEEDED if is_attention(obj) and not count[name]]
            bad += [f"{demangle(kernel)}: {count[name]} {name}" for name in FORBIDDEN if count[name]]
    print("\n".join(["", "WRONG:", *bad]) if bad else f"{seen} kernels, none wrong")
    return bool(bad) or not seen


if __name__ == "__main__":
    sys.exit(main())
