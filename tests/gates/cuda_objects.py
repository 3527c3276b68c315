# SPDX-License-Identifier: Apache-2.0
"""The Hopper backend's compiled objects, and the logs that nvcc left beside them."""
import argparse
import pathlib
import subprocess


def parse_args(description, programs=()):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--objects", required=True, type=pathlib.Path, help="file that lists the objects")
    for program in programs:
        parser.add_argument(f"--{program}", required=True)
    args = parser.parse_args()
    args.objects = read_objects(args.objects)
    return args


def read_objects(listed):
    objects = [pathlib.Path(line) for line in listed.read_text(encoding="utf-8").split()]
    if not objects:
        raise SystemExit("no CUDA object in the build: the gate looks in the wrong place")
    return objects


def log_of(obj):
    """What nvcc said when it made this object (cmake/nvcc_logged.sh)."""
    log = pathlib.Path(f"{obj}.log")
    if not obj.exists() or not log.exists():
        raise SystemExit(f"{obj} or its .log is not there; build first")
    return log.read_text(encoding="utf-8", errors="replace")


def demangle(name):
    try:
        return subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()
    except OSError:
        return name


def is_attention(obj):
    """Kernel families keep their kernels in instances/; anything else is a helper (copies, conversions)."""
    return "/instances/" in str(obj)
