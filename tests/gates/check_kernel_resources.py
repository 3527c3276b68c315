#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The ptxas report of every kernel: no spill, no stack frame, no serialised wgmma, registers within the launch bounds.

Reads the report that nvcc printed when it compiled the file, and the launch bounds out of the object.
"""
import re
import sys

from cuda_objects import demangle, is_attention, launch_bounds, log_of, parse_args, sections_of

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


def check(obj, cuobjdump):
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


def main():
    args = parse_args(__doc__, ("cuobjdump",))
    bad, table = [], []
    for obj in args.objects:
        more_bad, more_table = check(obj, args.cuobjdump)
        bad += more_bad
        table += more_table
    print("\n".join(sorted(table)))
    print("\n".join(["", "WRONG:", *bad]) if bad else f"{len(table)} kernels, none wrong")
    return bool(bad) or not table


if __name__ == "__main__":
    sys.exit(main())
