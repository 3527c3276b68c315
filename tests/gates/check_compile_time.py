#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A kernel file compiles within 20 s, and all of them within 6 minutes on two cores.

It counts CPU time (user + system), so that a busy machine does not fail it.
"""
import re
import sys

from cuda_objects import log_of, parse_args

SECONDS_A_FILE = 20
SECONDS_ALL_TWO_CORES = 360


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
    for obj, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"{spent:6.1f} s  {obj.name}{'   over ' + str(SECONDS_A_FILE) + ' s' if spent > SECONDS_A_FILE else ''}")
    wall = sum(seconds.values()) / 2
    print(f"{len(seconds)} files, {wall:.0f} s on two cores, {SECONDS_ALL_TWO_CORES} allowed")
    return max(seconds.values()) > SECONDS_A_FILE or wall > SECONDS_ALL_TWO_CORES


if __name__ == "__main__":
    sys.exit(main())
