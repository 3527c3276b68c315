#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a small call costs the host with two builds of the package or more, beside each other: bench/gpu/call_overhead.py in a process for
each, whose rounds are interleaved, and the median of the rounds.

    python3 -m bench.gpu.compare_call_overhead old=OLD/build/release/python:OLD/bindings/dropin new=build/release/python:bindings/dropin
"""
import argparse
import json
import statistics
import subprocess
import sys

from bench import environment

SCRIPT = "bench.gpu.call_overhead"


class Package:
    """A process that times rounds of calls, with a PYTHONPATH."""

    def __init__(self, path, options):
        self._process = subprocess.Popen([sys.executable, "-m", SCRIPT, "--serve", *options], env=environment(PYTHONPATH=path),
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def one_round(self):
        print(file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{SCRIPT} ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", metavar="NAME=PYTHONPATH")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--calls", type=int, default=500, help="in a round")
    args = parser.parse_args()
    options = [f"--device={args.device}", f"--calls={args.calls}"]
    packages = {name: Package(path, options) for name, _, path in (each.partition("=") for each in args.packages)}
    rounds = {name: [] for name in packages}
    for number in range(args.rounds + 1):
        for name, package in packages.items():
            times = package.one_round()
            if number > 0:  # the first one warms up
                rounds[name].append(times)
    for package in packages.values():
        package.close()

    print(f"{'us of CPU time a call':44}", *(f"{name:>9}" for name in packages), "  over the first")
    for way in next(iter(rounds.values()))[0]:
        first, *others = median = [statistics.median(times[way] for times in rounds[name]) for name in packages]
        print(f"{way:44}", *(f"{value:9.2f}" for value in median), *(f"{value - first:+9.2f}" for value in others))


if __name__ == "__main__":
    main()
