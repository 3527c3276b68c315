#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What compiling each kernel file of a build took, in seconds of CPU time (user + system), from the logs of cmake/nvcc_logged.sh.

    python3 -m bench.cpu.compile_time [BUILD] [--json bench/results/compile_time.json]

A machine that does something else as well takes up to twice as long, so a test judges counts instead (tests/gates/check_kernels.py);
these seconds help to divide kernels into files (src/cuda/CMakeLists.txt). Build from nothing, on a quiet machine.
"""
import argparse
import json
import pathlib
import re
import sys


def cpu_seconds(log):
    """The last line of a log: what `times` says of the shell's children, "1m2.50s 0m0.30s"."""
    match = re.search(r"(\d+)m([\d.]+)s (\d+)m([\d.]+)s\s*$", log)
    if not match:
        raise SystemExit("no CPU time at the end of a compile log; was it made by cmake/nvcc_logged.sh?")
    user_m, user_s, sys_m, sys_s = map(float, match.groups())
    return round(60 * (user_m + sys_m) + user_s + sys_s, 2)


def model_of_cpu():
    text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    match = re.search(r"^model name\s*: (.*)$", text, re.M)
    return match[1] if match else "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?", type=pathlib.Path, default=pathlib.Path("build/release"))
    parser.add_argument("--json", type=pathlib.Path, help="write the seconds to this file too")
    args = parser.parse_args()
    listed = args.build / "cuda_objects.txt"
    if not listed.exists():
        return f"{listed} is not there: build with kernels and FLASH3_CHECK=ON, as make check does"
    objects = [pathlib.Path(line) for line in listed.read_text(encoding="utf-8").split()]
    seconds = {obj.name.removesuffix(".o"): cpu_seconds(pathlib.Path(f"{obj}.log").read_text(encoding="utf-8", errors="replace"))
               for obj in objects}
    for name, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"{spent:6.1f} s  {name}")
    print(f"{sum(seconds.values()):6.1f} s  all {len(seconds)} files")
    if args.json:
        args.json.write_text(json.dumps({"cpu": model_of_cpu(), "files": seconds}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
