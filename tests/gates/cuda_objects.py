# SPDX-License-Identifier: Apache-2.0
"""The Hopper backend's compiled objects, the logs that nvcc left beside them, and what cuobjdump reads in them."""
import argparse
import pathlib
import re
import subprocess


def parse_args(description, cuobjdump=True):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--objects", required=True, type=pathlib.Path, help="file that lists the objects")
    if cuobjdump:
        parser.add_argument("--cuobjdump", required=True)
    args = parser.parse_args()
    args.objects = [pathlib.Path(line) for line in args.objects.read_text(encoding="utf-8").split()]
    if not args.objects:
        raise SystemExit("no CUDA object in the build: the gate looks in the wrong place")
    return args


def log_of(obj):
    """What nvcc said when it made this object (cmake/nvcc_logged.sh)."""
    log = pathlib.Path(f"{obj}.log")
    if not obj.exists() or not log.exists():
        raise SystemExit(f"{obj} or its .log is not there; build first")
    return log.read_text(encoding="utf-8", errors="replace")


def cuobjdump(program, option, obj):
    try:
        return subprocess.run([program, option, str(obj)], capture_output=True, text=True, check=True).stdout
    except OSError as error:
        raise SystemExit(f"cannot run cuobjdump: {error}; scripts/setup.sh gates brings it") from error
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"cuobjdump {option} {obj}: {error.stderr}") from error


def demangle(name):
    try:
        return subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()
    except OSError:
        return name


def is_attention(obj):
    """Kernel families keep their kernels in instances/; anything else is a helper (copies, conversions)."""
    return "/instances/" in str(obj)


def sass_by_kernel(text):
    """{kernel: [instruction, …]} from cuobjdump -sass, predicates stripped."""
    kernels, current = {}, None
    for line in text.splitlines():
        if match := re.match(r"\s*Function : (\S+)", line):
            current = kernels.setdefault(match[1], [])
        elif (match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", line)) and current is not None:
            current.append(match[1])
    return kernels
