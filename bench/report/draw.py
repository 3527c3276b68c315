#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of speed, docs/images/*.svg, from the committed measurements in bench/results, each for a light page and for a dark one:

- flash3's speed over each library's, README.md's figure (draw_speed.py);
- TFLOP/s over the sequence length, a panel for each head dim and mask;
- the losses of trainings with a simulated FP8 backward, for docs/fp8.md;
- the timelines of context parallelism, from the newest context_profile_*.json of bench/results/trials.zip (draw_context.py);
- its speed over the number of ranks, from all context_parallel_*.json (draw_ranks.py);
- error, memory and kernels' timelines, from that archive, as `python -m flash3.bench plot` draws them.

    python3 -m bench.report.draw [--check]

Plain SVG text, the same bytes on every machine. `--check` compares instead of writing: the gate that keeps figures and measurements
together. `python -m flash3.bench plot` draws any file.
"""
import argparse
import importlib
import json
import sys
import types
from xml.sax.saxutils import escape

from bench import RESULTS, ROOT
from bench.report import draw_context, draw_ranks, draw_speed, trials
from bench.report.parts import PAGES, for_both_themes, text
from bench.report.tables import NAMES, mask, of_speed

IMAGES = ROOT / "docs/images"
FIGURES = {"forward": "forward_h200.json", "backward": "backward_h200.json", "fp8": "fp8_h200.json"}
TRAINING = "fp8_backward_study_cpu.json"
CHARTS = ("accuracy_cpu", "memory_cpu")
# The lines that trainings are drawn as.
ARMS = {"float32": "fa2", "bf16": "flash3_bf16", "fp8_forward": "fa4", "fp8_forward_dequantised": "cudnn", "fp8": "flash3", "fp8_dout_e5m2": "fa3"}
WINDOW = 20  # steps, of which a mean is drawn
# What is not drawn: a GEMM is no attention, and the figure of the forward has cuDNN's bf16.
LEFT_OUT = {"fp8_gemm"}
FP8_TITLES = {"flash3": "flash3", "flash3_from_bf16": "flash3 with quantise", "flash3_bf16": "flash3, bf16",
              "cudnn_fp8": "cuDNN (out in e4m3)", "fa3_fp8": "FlashAttention-3"}
THEMES = {
    "light": {**PAGES["light"],
              "lines": {"flash3": "#cf222e", "flash3_bf16": "#953800", "flash3_from_bf16": "#cf222e", "cudnn": "#1a7f37",
                        "cudnn_fp8": "#1a7f37", "fa2": "#6e7781", "fa3": "#0969da", "fa3_fp8": "#0969da", "fa4": "#8250df"}},
    "dark": {**PAGES["dark"],
             "lines": {"flash3": "#ff7b72", "flash3_bf16": "#f0883e", "flash3_from_bf16": "#ff7b72", "cudnn": "#3fb950",
                       "cudnn_fp8": "#3fb950", "fa2": "#8b949e", "fa3": "#58a6ff", "fa3_fp8": "#58a6ff", "fa4": "#bc8cff"}},
}
# Dashes and marks tell the lines apart without their colours.
DASHES = {"flash3_from_bf16": "2 3", "fa4": "7 3", "cudnn": "5 2 1 2", "fa2": "1 3"}
SQUARE_MARKS = {"cudnn", "cudnn_fp8", "fa4"}

WIDTH, PANEL_WIDTH, PANEL_HEIGHT = 900, 250, 150
LEFT, TOP, GAP_X, GAP_Y, BOTTOM = 46, 84, 44, 46, 40
STEP = 200  # TFLOP/s between grid lines


def panels(report):
    """{(head dim, causal): points by sequence length}, in the order in which they are drawn."""
    points = report.get("points") or report["fp8_points"]
    keys = sorted({(p["causal"], p["dim"]) for p in points})
    return {(dim, causal): sorted((p for p in points if (p["causal"], p["dim"]) == (causal, dim)), key=lambda p: p["seq"])
            for causal, dim in keys}


def series(report):
    """The libraries' keys in the file and what they are called, flash3 first."""
    points = report.get("points") or report["fp8_points"]
    found = dict.fromkeys(name for p in points for name in p["tflops"] if name not in LEFT_OUT)
    titles = FP8_TITLES if "fp8_points" in report else {"flash3": "flash3", **NAMES}
    return {name: title for name, title in titles.items() if name in found}


def mark(x, y, name):
    if name in SQUARE_MARKS:
        return f'<rect x="{x - 2.5:.1f}" y="{y - 2.5:.1f}" width="5" height="5" class="{name} mark"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.8" class="{name} mark"/>'


def line(places, name):
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return [f'<polyline points="{path}" class="{name} line"/>', *(mark(x, y, name) for x, y in places)]


def length(seq):
    return f"{seq // 1024}k" if seq % 1024 == 0 else str(seq)


def panel(left, top, points, names, highest, title):
    place_y = lambda tflops: top + PANEL_HEIGHT * (1 - tflops / highest)
    place_x = lambda i: left + PANEL_WIDTH * (i + 0.5) / len(points)
    lines = [text(left, top - 8, title, weight="bold")]
    for value in range(0, highest + 1, STEP):
        y = place_y(value)
        lines.append(f'<path d="M{left} {y:.1f}h{PANEL_WIDTH}" class="grid"/>')
        lines.append(text(left - 6, y + 4, str(value), 11, "end", "faint"))
    lines += [text(place_x(i), top + PANEL_HEIGHT + 16, length(p["seq"]), 11, "middle", "faint") for i, p in enumerate(points)]
    for name in reversed(names):  # flash3 on top
        lines += line([(place_x(i), place_y(p["tflops"][name])) for i, p in enumerate(points) if name in p["tflops"]], name)
    return lines


def legend(titles):
    lines, x = [], LEFT
    for name, title in titles.items():
        lines += [*line([(x, 46), (x + 26, 46)], name), text(x + 34, 50, title)]
        x += 52 + 6.9 * len(title)
    return lines


def style(theme, names):
    rules = [".text{fill:%(text)s}.faint{fill:%(faint)s}.grid{stroke:%(grid)s;stroke-width:1}" % theme, ".line{fill:none;stroke-width:1.8}"]
    for name in names:
        colour = theme["lines"][name]
        dash = f"stroke-dasharray:{DASHES[name]}" if name in DASHES else ""
        width = ";stroke-width:2.6" if name == "flash3" else ""
        rules.append(f".{name}.line{{stroke:{colour}{width};{dash}}}.{name}.mark{{fill:{colour}}}")
    return f"<style>{''.join(rules)}</style>"


def cudnn_version(number):
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def draw(report, theme):
    """The figure of a report of peers, for a page of this theme."""
    theme = THEMES[theme]
    grid, titles = panels(report), series(report)
    columns = len({dim for dim, _ in grid})
    rows = len(grid) // columns
    most = max(p["tflops"].get(name, 0) for points in grid.values() for p in points for name in titles)
    highest = -(-int(most + 1) // STEP) * STEP
    height = TOP + rows * (PANEL_HEIGHT + GAP_Y) + BOTTOM - GAP_Y + 16
    what = f"Attention {report.get('pass', 'forward')}, {'FP8 and bf16' if 'fp8_points' in report else report['dtype']}, {report['device']}"
    heading = f"{what}: TFLOP/s by sequence length"
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
             'font-family="system-ui,-apple-system,\'Segoe UI\',\'DejaVu Sans\',sans-serif">',
             f"<title>{escape(heading)}</title>", style(theme, titles), f'<rect width="{WIDTH}" height="{height}" fill="{theme["page"]}"/>',
             text(LEFT, 22, heading, 15, weight="bold"), *legend(titles)]
    for i, ((dim, causal), points) in enumerate(grid.items()):
        left, top = LEFT + i % columns * (PANEL_WIDTH + GAP_X), TOP + i // columns * (PANEL_HEIGHT + GAP_Y)
        lines += panel(left, top, points, list(titles), highest, f"head_dim {dim}, {mask({'causal': causal})}")
    about = (f"16k tokens, hidden size 2048; libraries interleaved in one run, medians; torch {report['torch']}, cuDNN "
             f"{cudnn_version(report['cudnn'])}; commit {report['commit']}, {report['date']}")
    lines.append(text(LEFT, height - 8, about, 11, kind="faint"))
    return "\n".join([*lines, "</svg>", ""])


def windows(training):
    """{arm: the mean of its seeds' losses over each window of steps}."""
    found = {}
    for arm in training["arms"]:
        runs = [run["loss"] for run in training["runs"] if run["arm"] == arm]
        means = [sum(step) / len(runs) for step in zip(*runs)]
        found[arm] = [sum(means[i:i + WINDOW]) / WINDOW for i in range(0, len(means) - WINDOW + 1, WINDOW)]
    return found


def curves(left, title, lines, low, high, step, wide, digits):
    """A panel of lines {arm: values}, with a scale of its own."""
    place_y = lambda value: TRAINING_TOP + PANEL_HEIGHT * (1 - (value - low) / (high - low))
    parts = [text(left, TRAINING_TOP - 8, title, weight="bold")]
    for i in range(round((high - low) / step) + 1):
        value = low + i * step
        parts.append(f'<path d="M{left} {place_y(value):.1f}h{wide}" class="grid"/>')
        parts.append(text(left - 6, place_y(value) + 4, f"{value:.{digits}f}", 11, "end", "faint"))
    for arm in reversed(lines):
        values = lines[arm]
        places = [(left + wide * (i + 0.5) / len(values), place_y(value)) for i, value in enumerate(values)]
        parts += line(places, ARMS[arm])
    count = len(next(iter(lines.values())))
    parts += [text(left + wide * i / count, TRAINING_TOP + PANEL_HEIGHT + 16, str(i * WINDOW), 11, "middle", "faint") for i in range(0, count + 1, 5)]
    return parts


TRAINING_TOP, TRAINING_WIDTH = 130, 385


def draw_training(report, theme):
    theme = THEMES[theme]
    training = report["training"]
    found, titles = windows(training), {ARMS[arm]: title for arm, title in training["arms"].items()}
    beyond = {arm: [a - b for a, b in zip(values, found["bf16"])] for arm, values in found.items()}
    most = max(abs(x) for values in beyond.values() for x in values)
    step = next(s for s in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1) if most <= 3 * s)
    height = TRAINING_TOP + PANEL_HEIGHT + 60
    seeds = len({run["seed"] for run in training["runs"]})
    heading = f"A small GPT by its attention, mean of {seeds} seeds: nats per byte by step"
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
             'font-family="system-ui,-apple-system,\'Segoe UI\',\'DejaVu Sans\',sans-serif">',
             f"<title>{escape(heading)}</title>", style(theme, titles), f'<rect width="{WIDTH}" height="{height}" fill="{theme["page"]}"/>',
             text(LEFT, 22, heading, 15, weight="bold")]
    for i, (name, title) in enumerate(titles.items()):
        x, y = LEFT + i % 3 * 300, 48 + i // 3 * 24
        lines += [*line([(x, y), (x + 26, y)], name), text(x + 34, y + 4, title)]
    high = -(-max(map(max, found.values())) // 0.5) * 0.5
    low = min(map(min, found.values())) // 0.5 * 0.5
    lines += curves(LEFT, f"loss, means of {WINDOW} steps", found, low, high, 0.5, TRAINING_WIDTH, 1)
    lines += curves(LEFT + TRAINING_WIDTH + 69, "the same beyond bf16's", beyond, -3 * step, 3 * step, step, TRAINING_WIDTH, 3)
    lines.append(text(LEFT, height - 8, f"simulated on a CPU; torch {report['torch']}; commit {report['commit']}, {report['date']}", 11, kind="faint"))
    return "\n".join([*lines, "</svg>", ""])


def plot():
    """flash3.bench.plot, where flash3 itself, which needs its library, is not there."""
    package = types.ModuleType("flash3_bench")
    package.__path__ = [str(ROOT / "bindings/python/flash3/bench")]
    sys.modules[package.__name__] = package
    sys.dont_write_bytecode = True
    return importlib.import_module(f"{package.__name__}.plot")


def figures():
    """{name of a figure: (the file in bench/results, or a list of them, the function of what it holds that draws it: {theme: SVG})}"""
    def by_theme(draws):
        return lambda report: {theme: draws(report, theme) for theme in PAGES}

    found = {name: (file, by_theme(draw)) for name, file in FIGURES.items()}
    found["speed"] = of_speed(), by_theme(draw_speed.draw)
    found["fp8_backward_training"] = TRAINING, by_theme(draw_training)
    archived = trials.load()
    profiles = sorted((json.loads(text)["date"], name) for name, text in archived.items() if name.startswith("context_profile_"))
    if profiles:  # the newest
        found["context_profile"] = profiles[-1][1], by_theme(draw_context.draw)
    ranks = sorted(path.name for path in RESULTS.glob("context_parallel_*.json"))
    if ranks:
        found["context_ranks"] = ranks, by_theme(draw_ranks.draw)
    svgs_of = plot().svgs_of
    traces = (name.removesuffix(".json") for name in archived if name.startswith("trace_"))
    return found | {name: (f"{name}.json", svgs_of) for name in (*CHARTS, *traces)}


def loaded(file):
    """What a file or one of the archive holds; of a list of files, a list."""
    if isinstance(file, list):
        return [loaded(one) for one in file]
    return json.loads((RESULTS / file).read_text(encoding="utf-8") if (RESULTS / file).exists() else trials.load()[file])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    status = 0
    for name, (file, drawn) in figures().items():
        path, svg = IMAGES / f"{name}.svg", for_both_themes(**drawn(loaded(file)))
        if path.exists() and path.read_text(encoding="utf-8") == svg:
            print(f"{path.relative_to(ROOT)} is up to date")
        elif args.check:
            print(f"{path.relative_to(ROOT)} is not what {file} of bench/results holds: run bench/report/draw.py")
            status = 1
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(svg, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: drawn")
    return status


if __name__ == "__main__":
    sys.exit(main())
