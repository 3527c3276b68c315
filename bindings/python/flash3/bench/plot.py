"""The papers' figures, from the JSON of measurements: TFLOP/s over sequence length, a panel for each head dim and mask."""
import json

from .peers import NAMES

_COLOURS = {"flash3": "#c0392b", "fa2": "#7f8c8d", "fa3": "#2c6fbb", "fa4": "#8e44ad", "cudnn": "#27ae60", "flex": "#e67e22",
            "torch": "#34495e"}


def is_drawable(report):
    return bool(report.get("points")) and all("tflops" in point for point in report["points"])


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
                                        f"commit {report['commit']}" if "commit" in report else None, report.get("date")) if x)
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
        report = json.loads(path.read_text(encoding="utf-8"))
        if is_drawable(report):
            written += draw(report, folder / path.stem)
        else:
            skipped.append(path)
    return written, skipped
