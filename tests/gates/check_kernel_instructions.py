#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The machine code holds what was meant: every attention kernel has HGMMA (wgmma; FP8: QGMMA) and UTMALDG (TMA load), those of the
backward add to dQ's sums without reading them back (UBLKRED, by the copy engine, or REDG, from registers), the kernels that
measure the tensor cores' ceiling have every HGMMA or QGMMA that they count as work, and no kernel touches local memory (LDL, STL)."""
import re
import sys

from cuda_objects import demangle, instructions_of, is_attention, parse_args

NEEDED = ("HGMMA", "UTMALDG")
FP8_NEEDED = ("QGMMA", "UTMALDG", "LDSM", "STSM")  # the last two transpose V
FP8_CACHE_NEEDED = ("HGMMA", "UTMALDG", "LDSM")  # e4m3 becomes float16 on its way to the tensor cores
ADDITIONS = ("UBLKRED", "REDG")
FORBIDDEN = ("LDL", "STL")


def ceiling_products(kernel):
    """(instruction, how many) in the loop of a ceiling kernel, by the template arguments in its name; None for any other kernel.

    A round is S = Q·Kᵀ, head_dim / 16 of them (FP8: / 32), and P·V, keys / 16; the loop holds one round for each of two stages. FP8
    with Q in registers: one.
    """
    match = re.search(r"CeilingTraitsI\w*?ElementE(\d+)ELi(\d+)ELi(\d+)EE", kernel)
    if not match:
        return None
    fp8, head_dim, keys = match[1] == "2", int(match[2]), int(match[3])
    step, rounds = (32, 1 if head_dim > 192 else 2) if fp8 else (16, 2)
    return "QGMMA" if fp8 else "HGMMA", rounds * (head_dim // step + keys // step)


def needed(obj, kernel):
    if not is_attention(obj):
        return ()
    if "7ElementE2" not in kernel:  # of e4m3
        return NEEDED
    return FP8_CACHE_NEEDED if "DecodeConfig" in kernel else FP8_NEEDED


def main():
    args = parse_args(__doc__, ("cuobjdump", "nvdisasm"))
    bad, seen = [], 0
    for obj, kernels in instructions_of(args.objects, args.cuobjdump, args.nvdisasm).items():
        if (is_attention(obj) or "ceiling" in obj.name) and not kernels:
            bad.append(f"{obj.name}: no kernel in it")
        for kernel, count in kernels.items():
            seen += 1
            shown = "".join(f",{count[name]:4} {name}" for name in dict.fromkeys((*NEEDED, *FP8_NEEDED, *ADDITIONS)) if count[name])
            print(f"{count.total():6} instructions{shown}  {demangle(kernel)}")
            bad += [f"{demangle(kernel)}: no {name}" for name in needed(obj, kernel) if not count[name]]
            if is_attention(obj) and "/cuda/sm90/backward/" in str(obj) and not any(count[name] for name in ADDITIONS):
                bad.append(f"{demangle(kernel)}: no {' or '.join(ADDITIONS)}")
            products = ceiling_products(kernel)
            if products is None and "ceiling" in obj.name:
                bad.append(f"{demangle(kernel)}: not a ceiling kernel as this gate knows them")
            if products is not None and count[products[0]] != products[1]:
                bad.append(f"{demangle(kernel)}: {count[products[0]]} {products[0]}; its rounds have {products[1]}: ptxas drops those whose "
                           f"result is never read")
            bad += [f"{demangle(kernel)}: {count[name]} {name}" for name in FORBIDDEN if count[name]]
    print("\n".join(["", "WRONG:", *bad]) if bad else f"{seen} kernels, none wrong")
    return bool(bad) or not seen


if __name__ == "__main__":
    sys.exit(main())
