#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What nvcc has to compile does not grow unnoticed: the instructions of all kernels together, and those of the longest file.

Machine instructions predict compile time best of what can be counted: over the 67 files of a build they correlate with its seconds of CPU
time by 0.86, the objects' bytes by 0.85, the number of kernels by 0.08. They are the same on every machine, however busy; the seconds are
not (bench/cpu/compile_time.py prints them). tests/gates/kernel_code.json holds what --write noted last; a quarter more fails.
--write notes what is there now.
"""
import argparse
import json
import pathlib
import sys

from cuda_objects import read_objects, sections_of

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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", required=True, type=pathlib.Path, help="file that lists the objects")
    parser.add_argument("--cuobjdump", required=True)
    parser.add_argument("--write", action="store_true", help=f"note the counts in {COUNTS.name}")
    args = parser.parse_args()
    files = {obj.name: kernels_of(obj, args.cuobjdump) for obj in read_objects(args.objects)}
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


if __name__ == "__main__":
    sys.exit(main())
