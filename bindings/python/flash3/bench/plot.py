# SPDX-License-Identifier: Apache-2.0
"""The figures of JSON files, as SVG for a light page and for a dark one: speed, error or memory by sequence length, or a kernel's timeline.
Which JSON holds what, and how that is drawn. Needs neither torch nor the library."""
import json

from . import timeline
from .chart import THEMES, Chart, Panel, draw, length

MIB = 1 << 20


def _about(report, *more):
    facts = [*more, f"torch {report['torch']}" if "torch" in report else None, f"commit {report['commit']}" if "commit" in report else None,
             report.get("date", "")[:10]]
    return "; ".join(fact for fact in facts if fact)


def _columns(points, names, value):
    """{name: value of each point, None where it has none}"""
    return {name: [value(point, name) for point in points] for name in names}


def _of_fp8_suite(results):
    """What `flash3 bench --suite fp8` wrote, as points: cases such as e4m3/b2/q1024/k1024/h4/d64/causal/…, each beside one in 16 bits."""
    points = []
    for result in results:
        dtype, _, seq, _, _, dim, mask = result["case"].split("/")[:7]
        if dtype != "e4m3" or "beside_tflops" not in result:
            return []
        points.append({"dim": int(dim[1:]), "seq": int(seq[1:]), "causal": mask == "causal",
                       "tflops": {"flash3_fp8": result["tflops"], "flash3": result["beside_tflops"]}})
    return points


def _speed_points(report):
    """(what the report is about, its points of speed); no points if it has none."""
    if "fp8_points" in report:
        # The GEMM is of another shape, and flash3's name stands for FP8 there.
        names = {"flash3": "flash3_fp8", "flash3_bf16": "flash3", "flash3_from_bf16": "flash3_quantize_fp8"}
        points = [{**p, "tflops": {names.get(n, n): x for n, x in p["tflops"].items() if n != "fp8_gemm"}} for p in report["fp8_points"]]
        return {**report, "dtype": "FP8"}, points
    if report.get("metadata", {}).get("suite") == "fp8":
        return {**report["metadata"], "dtype": "FP8 and 16 bits"}, _of_fp8_suite(report["results"])
    points = report.get("points") or []
    return report, points if all("tflops" in point for point in points) else []


def speed(report):
    """TFLOP/s by sequence length, a panel for each head dim and mask."""
    about, points = _speed_points(report)
    if not points:
        return None
    names = list(dict.fromkeys(name for p in points for name in p["tflops"]))
    dims, masks = sorted({p["dim"] for p in points}), sorted({p["causal"] for p in points})
    panels = []
    for causal in masks:
        for dim in dims:
            these = sorted((p for p in points if (p["causal"], p["dim"]) == (causal, dim)), key=lambda p: p["seq"])
            panels.append(Panel(f"head_dim {dim}, {'causal' if causal else 'full'}", [length(p["seq"]) for p in these],
                                _columns(these, names, lambda p, name: p["tflops"].get(name))))
    what = "Attention " + about.get("pass", "forward") + (", deterministic" if about.get("deterministic") else "")
    return Chart(f"{what}, {about.get('dtype', 'bf16')}, {about['device']}: TFLOP/s by sequence length", _about(about), panels, len(dims))


def error(report):
    """The root mean square error of each library by sequence length, a panel for each dtype and head dim."""
    points = report.get("error_points")
    if not points or not all("rmse" in point for point in points):
        return None
    names = list(dict.fromkeys(name for p in points for name in p["rmse"]))
    dtypes, dims = list(dict.fromkeys(p["dtype"] for p in points)), sorted({p["dim"] for p in points})
    panels = []
    for dtype in dtypes:
        for dim in dims:
            these = sorted((p for p in points if (p["dtype"], p["dim"]) == (dtype, dim)), key=lambda p: p["seq"])
            panels.append(Panel(f"{dtype}, head_dim {dim}", [length(p["seq"]) for p in these],
                                _columns(these, names, lambda p, name: 1e3 * p["rmse"][name] if name in p["rmse"] else None)))
    return Chart("Error of out beside float64: RMSE · 1000 by sequence length", _about(report, report["device"], report.get("data")), panels,
                 len(dims), rows_apart=True)


def memory(report):
    """What a call adds to the memory of its process, by sequence length, a panel for each pass."""
    points = report.get("memory_points")
    if not points:
        return None
    names = list(dict.fromkeys(name for p in points for name in p["bytes"]))
    panels = []
    for which in dict.fromkeys(p["pass"] for p in points):
        these = sorted((p for p in points if p["pass"] == which), key=lambda p: p["seq"])
        panels.append(Panel(which, [length(p["seq"]) for p in these],
                            _columns(these, names, lambda p, name: p["bytes"][name] / MIB if p["bytes"].get(name) else None)))
    return Chart("Memory of a call beyond its inputs: MiB by sequence length", _about(report, report["device"], report.get("data")), panels,
                 len(panels), scale="log")


def chart_of(report):
    """The Chart of a report of any kind; None if there is nothing in it that is drawn."""
    return speed(report) or error(report) or memory(report)


def svgs_of(report):
    """{theme: SVG} of what a report holds; empty if there is nothing to draw."""
    if not isinstance(report, dict):
        return {}
    of, drawing = (timeline.timeline_of, timeline.draw) if "traceEvents" in report else (chart_of, draw)
    drawn = of(report)
    return {theme: drawing(drawn, theme) for theme in THEMES} if drawn else {}


def draw_report(report, stem):
    """Writes stem_light.svg and stem_dark.svg, and returns their paths; none if there is nothing to draw."""
    written = []
    for theme, svg in svgs_of(report).items():
        written.append(stem.with_name(f"{stem.name}_{theme}.svg"))
        written[-1].write_text(svg, encoding="utf-8")
    return written


def draw_all(paths, folder):
    """Draws each of these files that holds something to draw; returns (written files, files without). Raises ValueError for what is not JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    written, skipped = [], []
    for path in paths:
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as problem:
            raise ValueError(f"{path} is not JSON: {problem}") from None
        drawn = draw_report(report, folder / path.stem)
        written += drawn
        if not drawn:
            skipped.append(path)
    return written, skipped
