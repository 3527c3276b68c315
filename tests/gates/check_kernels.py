#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the compiler has made of the kernels.

    check_kernels.py resources     the ptxas report of every kernel: no spill, no stack frame, no serialised wgmma, registers within the launch
                                   bounds. It reads the report that nvcc printed when it compiled the file, and the launch bounds out of the object
    check_kernels.py instructions  the machine code holds what was meant: every attention kernel has HGMMA (wgmma; FP8: QGMMA) and UTMALDG (TMA
                                   load), those of the backward add to dQ's sums without reading them back (UBLKRED, by the copy engine, or REDG,
                                   from registers), the kernels that measure the tensor cores' ceiling have every HGMMA or QGMMA that they count
                                   as work, and no kernel touches local memory (LDL, STL)
    check_kernels.py code          what nvcc has to compile does not grow unnoticed: the instructions of all kernels together, and those of the
                                   longest file. Machine instructions predict compile time best of what can be counted: over the 67 files of a
                                   build they correlate with its seconds of CPU time by 0.86, and are the same on every machine, however busy.
                                   tests/gates/kernel_code.json holds what --write noted last; a quarter more fails
"""
import argparse
import json
import pathlib
import re
import sys

from cuda_objects import demangle, instructions_of, is_attention, launch_bounds, log_of, read_objects, sections_of

# ---- resources ----

REGISTERS_PER_SM = 65536
# Anything of the sort costs a multiple of its own time: C7510 and C7514 are "wgmma serialized".
BAD_LINES = re.compile(r"Potential Performance Loss|\(C75\d\d\)|\bwarning\b|local memory used|Local memory", re.I)


def register_limit(threads):
    """What one block of this many threads can have: allocated in units of 8 a thread, 255 at most."""
    return min(255, REGISTERS_PER_SM // threads // 8 * 8)


def reports(log):
    """(function, stack frame, spill stores, spill loads) and {kernel: registers}."""
    frames = re.findall(
        r"Function properties for (\S+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers, kernel = {}, None
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)'", line):
            kernel = match[1]
        elif kernel and (match := re.search(r"Used (\d+) registers", line)):
            registers[kernel] = int(match[1])
    return [(name, *map(int, sizes)) for name, *sizes in frames], registers


def check_resources(obj, cuobjdump):
    """(complaints, lines of the table) for one object."""
    log = log_of(obj)
    frames, registers = reports(log)
    bounds = launch_bounds(sections_of(obj, cuobjdump))
    bad = [f"{obj.name}: ptxas says: {line.strip()}" for line in log.splitlines() if BAD_LINES.search(line)]
    if is_attention(obj) and not registers:
        bad.append(f"{obj.name}: no kernel in its ptxas report")
    if set(registers) != {name for name, *_ in frames} & set(registers):
        bad.append(f"{obj.name}: the ptxas report tells no stack frame of a kernel; has its form changed?")
    for name, stack, stores, loads in frames:
        if stack or stores or loads:
            bad.append(f"{demangle(name)}: {stack} bytes stack frame, {stores} spill stores, {loads} spill loads; all must be 0")
    table = []
    for kernel, used in registers.items():
        if kernel not in bounds:
            bad.append(f"{demangle(kernel)}: no __launch_bounds__")
            continue
        limit = register_limit(bounds[kernel])
        table.append(f"{used:4} of {limit} registers, {bounds[kernel]:4} threads  {demangle(kernel)}")
        if used > limit:
            bad.append(f"{demangle(kernel)}: {used} registers, {limit} allowed for {bounds[kernel]} threads")
    return bad, table


def resources(args):
    bad, table = [], []
    for obj in args.objects:
        more_bad, more_table = check_resources(obj, args.cuobjdump)
        bad += more_bad
        table += more_table
    print("\n".join(sorted(table)))
    print("\n".join(["", "WRONG:", *bad]) if bad else f"{len(table)} kernels, none wrong")
    return bool(bad) or not table


# ---- instructions ----

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


def instructions(args):
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


# ---- code ----

COUNTS = pathlib.Path(__file__).with_name("kernel_code.json")
GROWTH = 1.25
BYTES_OF_INSTRUCTION = 16


def count(files):
    """What is noted, of {file: [instructions of each kernel]}."""
    return {"files": len(files), "kernels": sum(map(len, files.values())), "instructions": sum(map(sum, files.values())),
            "instructions of the longest file": max(map(sum, files.values()))}


def complaints(files, noted):
    """What has grown by more than a quarter over what was noted."""
    now = count(files)
    if not now["kernels"]:
        yield "no kernel in any object: the gate looks in the wrong place"
    for name in ("instructions", "instructions of the longest file"):
        if now[name] > GROWTH * noted[name]:
            yield f"{name}: {now[name]}, but {noted[name]} are noted in {COUNTS.name}, and at most {GROWTH * noted[name]:.0f} allowed"
    longest = GROWTH * noted["instructions of the longest file"]
    for file, kernels in files.items():
        if sum(kernels) > longest:
            yield f"{file}: {sum(kernels)} instructions in {len(kernels)} kernels; divide it (src/cuda/CMakeLists.txt)"


def kernels_of(obj, cuobjdump):
    return [len(code) // BYTES_OF_INSTRUCTION for name, code in sections_of(obj, cuobjdump).items() if name.startswith(".text.")]


def code(args):
    files = {obj.name: kernels_of(obj, args.cuobjdump) for obj in args.objects}
    for file, kernels in sorted(files.items(), key=lambda item: -sum(item[1])):
        print(f"{sum(kernels):7} instructions in {len(kernels):2} kernels  {file}")
    now = count(files)
    print(", ".join(f"{number} {name}" for name, number in now.items()))
    if args.write:
        COUNTS.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
        return 0
    if not COUNTS.exists():
        return f"{COUNTS} is not there: --write makes it"
    bad = list(complaints(files, json.loads(COUNTS.read_text(encoding="utf-8"))))
    print("\n".join(bad) or "no more than noted, and a quarter")
    return bool(bad)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("resources", "instructions", "code"))
    parser.add_argument("--objects", required=True, type=pathlib.Path, help="file that lists the objects")
    parser.add_argument("--cuobjdump", required=True)
    parser.add_argument("--nvdisasm", help="for the instructions")
    parser.add_argument("--write", action="store_true", help=f"code: note the counts in {COUNTS.name}")
    args = parser.parse_args()
    args.objects = read_objects(args.objects)
    return {"resources": resources, "instructions": instructions, "code": code}[args.what](args)


if __name__ == "__main__":
    sys.exit(main())
