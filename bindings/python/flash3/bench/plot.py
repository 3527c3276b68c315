# SPDX-License-Identifier: Apache-2.0
"""The figures of JSON files of measurements, as SVG: speed, error or memory by sequence length, for a light page and for a dark one."""
import json

from .chart import THEMES, draw
from .reports import chart_of


def draw_report(report, stem):
    """Writes stem_light.svg and stem_dark.svg, and returns their paths; none if there is nothing to draw."""
    chart = chart_of(report) if isinstance(report, dict) else None
    written = []
    for theme in THEMES if chart else ():
        written.append(stem.with_name(f"{stem.name}_{theme}.svg"))
        written[-1].write_text(draw(chart, theme), encoding="utf-8")
    return written


def draw_all(paths, folder):
    """Draws each of these files that holds something to draw; returns (written files, files without). Raises ValueError for what is no JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    written, skipped = [], []
    for path in paths:
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as problem:
            raise ValueError(f"{path} is no JSON: {problem}") from None
        drawn = draw_report(report, folder / path.stem)
        written += drawn
        if not drawn:
            skipped.append(path)
    return written, skipped
