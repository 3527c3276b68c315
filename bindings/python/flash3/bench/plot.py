# SPDX-License-Identifier: Apache-2.0
"""The papers' figures, from the JSON of measurements: TFLOP/s over sequence length, a panel for each head dim and mask."""
import json

from .peers import NAMES

_COLOURS = {"flash3": "#c0392b", "flash3_fp8": "#f39c12", "flash3_quantize_fp8": "#f7dc6f", "cudnn_fp8": "#82e0aa",
            "fa2": "#7f8c8d", "fa3": "#2c6fbb", "fa4": "#8e44ad", "cudnn": "#27ae60", "flex": "#e67e22", "torch": "#34495e"}


def _fp8_suite(report):
    """What `flash3 bench --suite fp8` wrote, as points: cases such as e4m3/b2/q1024/k1024/h4/d64/causal/…, each beside one in 16 bits."""
    points = []
    for result in report["results"]:
        dtype, _, seq, _, _, dim, mask = result["case"].split("/")[:7]
        if dtype != "e4m3" or "beside_tflops" not in result:
            return []
        points.append({"dim": int(dim[1:]), "seq": int(seq[1:]), "causal": mask == "causal",
                       "tflops": {"flash3_fp8": result["tflops"], "flash3": result["beside_tflops"]}})
    return points


def drawable(report):
    """The report with points to draw; None if it has none."""
    if "fp8_points" in report:
        # The GEMM is of another shape, and flash3's name stands for FP8 there.
        names = {"flash3": "flash3_fp8", "flash3_bf16": "flash3", "flash3_from_bf16": "flash3_quantize_fp8"}
        points = [{**p, "tflops": {names.get(n, n): x for n, x in p["tflops"].items() if n != "fp8_gemm"}} for p in report["fp8_points"]]
        return {**report, "points": points, "dtype": "FP8"} if points else None
    if report.get("metadata", {}).get("suite") == "fp8":
        points = _fp8_suite(report)
        return {**report["metadata"], "points": points, "dtype": "FP8 and 16 bits"} if points else None
    points = report.get("points")
    return report if points and all("tflops" in point for point in points) else None


def _length(seq):
    return f"{seq // 1024}k" if seq % 1024 == 0 else str(seq)


def _panel(axes, points, names, with_values):
    points = sorted(points, key=lambda point: point["seq"])
    width = 0.84 / len(names)
    for i, name in enumerate(names):
        at = [x + (i - (len(names) - 1) / 2) * width for x in range(len(points))]
        values = [point["tflops"].get(name, 0) for point in points]
        bars = axes.bar(at, values, width, label=NAMES.get(name, name), color=_COLOURS.get(name))
        if with_values:
            axes.bar_label(bars, [f"{v:.0f}" if v >= 10 else f"{v:.2g}" if v else "" for v in values], fontsize=5, rotation=90,
                           padding=2)
    axes.set_xticks(range(len(points)), [_length(point["seq"]) for point in points])
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def title(report):
    what = {"forward": "forward", "backward": "backward"}[report.get("pass", "forward")]
    more = ", deterministic" if report.get("deterministic") else ""
    about = " · ".join(str(x) for x in (f"torch {report['torch']}" if "torch" in report else None,
                                        f"commit {report['commit']}" if "commit" in report else None,
                                        report.get("date", "")[:10]) if x)
    return f"Attention {what}{more}, {report.get('dtype', 'bf16')}, {report['device']}\n{about}"


def draw(report, stem):
    """Writes stem.png and stem.svg, and returns their paths."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    matplotlib.rcParams["svg.hashsalt"] = "flash3"  # the same bytes each time

    points = report["points"]
    dims, masks = sorted({p["dim"] for p in points}), sorted({p["causal"] for p in points})
    names = list(dict.fromkeys(name for p in points for name in p["tflops"]))
    figure, grid = plt.subplots(len(masks), len(dims), figsize=(1.2 + 3.6 * len(dims), 0.9 + 2.4 * len(masks)), sharey="row",
                                squeeze=False, layout="constrained")
    for row, causal in zip(grid, masks):
        for axes, dim in zip(row, dims):
            _panel(axes, [p for p in points if p["dim"] == dim and p["causal"] == causal], names, True)
            axes.set_title(f"head dim {dim}, {'causal' if causal else 'full'}", fontsize=9)
        row[0].set_ylabel("TFLOP/s")
    for axes in grid[-1]:
        axes.set_xlabel("sequence length")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(names), frameon=False, fontsize=8)
    figure.suptitle(title(report), fontsize=9)
    written = []
    for suffix, options in ((".png", {"dpi": 160}), (".svg", {"metadata": {"Date": None}})):
        written.append(stem.with_name(stem.name + suffix))
        figure.savefig(written[-1], **options)
    plt.close(figure)
    return written


def draw_all(paths, folder):
    """Draws each report of these files that has points; returns (written files, files without)."""
    folder.mkdir(parents=True, exist_ok=True)
    written, skipped = [], []
    for path in paths:
        report = drawable(json.loads(path.read_text(encoding="utf-8")))
        if report:
            written += draw(report, folder / path.stem)
        else:
            skipped.append(path)
    return written, skipped
