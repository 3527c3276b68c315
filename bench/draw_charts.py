#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/images/*.svg of error and of memory, from the committed measurements in bench/results, as `python -m flash3.bench plot` does.

    python3 bench/draw_charts.py [--check]

`--check` compares instead of writing: the gate that keeps figures and measurements together. README's figures are bench/draw.py's.
"""
import argparse
import importlib
import json
import pathlib
import sys
import types

ROOT = pathlib.Path(__file__).resolve().parents[1]
IMAGES, RESULTS = ROOT / "docs/images", ROOT / "bench/results"
FIGURES = ("accuracy_cpu", "memory_cpu")


def package_parts():
    """(flash3.bench.chart, flash3.bench.reports), where flash3 itself, which needs its library, is not there."""
    package = types.ModuleType("flash3_bench")
    package.__path__ = [str(ROOT / "bindings/python/flash3/bench")]
    sys.modules[package.__name__] = package
    sys.dont_write_bytecode = True
    return (importlib.import_module(f"{package.__name__}.{name}") for name in ("chart", "reports"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    chart, reports = package_parts()
    status = 0
    for name in FIGURES:
        made = reports.chart_of(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))
        for theme in chart.THEMES:
            path, svg = IMAGES / f"{name}_{theme}.svg", chart.draw(made, theme)
            if path.exists() and path.read_text(encoding="utf-8") == svg:
                print(f"{path.relative_to(ROOT)} is up to date")
            elif args.check:
                print(f"{path.relative_to(ROOT)} is not what bench/results/{name}.json holds: run bench/draw_charts.py")
                status = 1
            else:
                path.write_text(svg, encoding="utf-8")
                print(f"{path.relative_to(ROOT)}: drawn")
    return status


if __name__ == "__main__":
    sys.exit(main())
