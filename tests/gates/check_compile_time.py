#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A kernel file compiles within UNITS_A_FILE units of CPU time (user + system), and all of them within UNITS_ALL.

A unit is the median of this build's five shortest files, which is what nvcc's start and CUDA's own headers take: machines differ in
speed by half, and so does one with what else it does. An empty file compiled here, later than the build, would not do: as the
machine's other work began and ended, it took 1.4 to 2.4 s.
"""
import re
import statistics
import sys

from cuda_objects import log_of, parse_args

# A quarter above what files took when they were last divided (cmake/kernel_instances.cmake): the longest 11.4, all 410.
UNITS_A_FILE = 14
UNITS_ALL = 520


def cpu_seconds(log):
    """The last line of the log: what `times` says of the shell's children, "1m2.50s 0m0.30s"."""
    match = re.search(r"(\d+)m([\d.]+)s (\d+)m([\d.]+)s\s*$", log)
    if not match:
        raise SystemExit("no CPU time at the end of a compile log; was it made by cmake/nvcc_logged.sh?")
    user_m, user_s, sys_m, sys_s = map(float, match.groups())
    return 60 * (user_m + sys_m) + user_s + sys_s


def main():
    args = parse_args(__doc__)
    seconds = {obj: cpu_seconds(log_of(obj)) for obj in args.objects}
    unit = statistics.median(sorted(seconds.values())[:5])
    for obj, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        units = spent / unit
        print(f"{spent:6.1f} s  {units:5.1f} units  {obj.name}{f'   over {UNITS_A_FILE} units' if units > UNITS_A_FILE else ''}")
    spent = sum(seconds.values())
    print(f"{len(seconds)} files, {spent:.0f} s: {spent / unit:.0f} units of {unit:.2f} s, {UNITS_ALL} allowed")
    return max(seconds.values()) > UNITS_A_FILE * unit or spent > UNITS_ALL * unit


if __name__ == "__main__":
    sys.exit(main())
