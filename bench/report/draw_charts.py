#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/images/*.svg of error, of memory and of kernels' timelines, from the committed measurements in bench/results, as `python -m flash3.bench plot` does.

    python3 -m bench.report.draw_charts [--check]

`--check` compares instead of writing: the gate that keeps figures and measurements together. README's figures are bench/report/draw.py's.
"""
import argparse
import importlib
import json
import sys
import types

from bench import RESULTS, ROOT

IMAGES = ROOT / "docs/images"
FIGURES = ("accuracy_cpu", "memory_cpu", *sorted(path.stem for path in RESULTS.glob("trace_*.json")))


def plot():
    """flash3.bench.plot, where flash3 itself, which needs its library, is not there."""
    package = types.ModuleType("flash3_bench")
    package.__path__ = [str(ROOT / "bindings/python/flash3/bench")]
    sys.modules[package.__name__] = package
    sys.dont_write_bytecode = True
    return importlib.import_module(f"{package.__name__}.plot")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    svgs_of = plot().svgs_of
    status = 0
    for name in FIGURES:
        for theme, svg in svgs_of(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))).items():
            path = IMAGES / f"{name}_{theme}.svg"
            if path.exists() and path.read_text(encoding="utf-8") == svg:
                print(f"{path.relative_to(ROOT)} is up to date")
            elif args.check:
                print(f"{path.relative_to(ROOT)} is not what bench/results/{name}.json holds: run bench/report/draw_charts.py")
                status = 1
            else:
                path.write_text(svg, encoding="utf-8")
                print(f"{path.relative_to(ROOT)}: drawn")
    return status


if __name__ == "__main__":
    sys.exit(main())
