# SPDX-License-Identifier: Apache-2.0
"""The figures of JSON files, as SVG for a light page and for a dark one: speed, error or memory by sequence length, or a kernel's timeline."""
import json

from . import chart, timeline
from .reports import chart_of


def svgs_of(report):
    """{theme: SVG} of what a report holds; empty if there is nothing to draw."""
    if not isinstance(report, dict):
        return {}
    of, draw = (timeline.timeline_of, timeline.draw) if "traceEvents" in report else (chart_of, chart.draw)
    drawn = of(report)
    return {theme: draw(drawn, theme) for theme in chart.THEMES} if drawn else {}


def draw_report(report, stem):
    """Writes stem_light.svg and stem_dark.svg, and returns their paths; none if there is nothing to draw."""
    written = []
    for theme, svg in svgs_of(report).items():
        written.append(stem.with_name(f"{stem.name}_{theme}.svg"))
        written[-1].write_text(svg, encoding="utf-8")
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
