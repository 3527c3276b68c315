# SPDX-License-Identifier: Apache-2.0
"""Charts as SVG text, the same bytes on every machine: panels of lines, for a light page and for a dark one.

It imports nothing but Python's own modules, so that it draws where neither torch nor the library is.
"""
import math
from dataclasses import dataclass
from xml.sax.saxutils import escape

THEMES = {
    "light": {"page": "#ffffff", "text": "#1f2328", "faint": "#59636e", "grid": "#d1d9e0",
              "lines": {"red": "#cf222e", "brown": "#953800", "green": "#1a7f37", "grey": "#6e7781", "blue": "#0969da",
                        "violet": "#8250df", "pink": "#bf3989"}},
    "dark": {"page": "#0d1117", "text": "#f0f6fc", "faint": "#9198a1", "grid": "#3d444d",
             "lines": {"red": "#ff7b72", "brown": "#f0883e", "green": "#3fb950", "grey": "#8b949e", "blue": "#58a6ff",
                       "violet": "#bc8cff", "pink": "#f778ba"}},
}
WIDTH, HEIGHT, GAP_X, GAP_Y = 250, 150, 60, 46  # of a panel, and between two
LEFT, TOP, RIGHT, BOTTOM = 58, 84, 18, 56
MOST_LINES = 6  # of a grid


@dataclass(frozen=True)
class Look:
    """How a line is drawn. Dashes and marks tell the lines apart without their colours."""
    title: str
    colour: str
    dash: str = ""
    square: bool = False
    wide: bool = False


LOOKS = {
    "flash3": Look("flash3", "red", wide=True),
    "flash3_fp8": Look("flash3, FP8", "brown", wide=True),
    "flash3_quantize_fp8": Look("flash3, FP8 with quantise", "brown", "2 3"),
    "cudnn": Look("cuDNN", "green", "5 2 1 2", square=True),
    "cudnn_fp8": Look("cuDNN, FP8 (out in e4m3)", "green", square=True),
    "fa2": Look("FlashAttention-2", "grey", "1 3"),
    "fa3": Look("FlashAttention-3", "blue"),
    "fa3_fp8": Look("FlashAttention-3, FP8 without scales", "blue", "2 3"),
    "fa4": Look("FlashAttention-4", "violet", "7 3", square=True),
    "flex": Look("FlexAttention (Triton)", "pink", "4 2"),
    "torch": Look("torch SDPA", "grey", square=True),
    "torch_flash": Look("torch SDPA, flash", "blue"),
    "torch_math": Look("torch SDPA, math", "green", "5 2 1 2", square=True),
    "plain": Look("plain operations in 16 bits", "violet", "7 3", square=True),
    "scores": Look("the score matrix", "grey", "1 3"),
}


def look(name):
    return LOOKS.get(name, Look(name, "pink"))


@dataclass(frozen=True)
class Panel:
    """values: {a line's name: a number for each label, None where it has none}."""
    title: str
    labels: list
    values: dict


@dataclass(frozen=True)
class Chart:
    """panels stand in rows of `columns`; scale: "linear" from 0, or "log"; those of a row share one where rows_apart, otherwise all do."""
    heading: str
    about: str
    panels: list
    columns: int
    scale: str = "linear"
    rows_apart: bool = False

    def names(self):
        """The lines, in the order of LOOKS, then the others."""
        found = dict.fromkeys(name for panel in self.panels for name in panel.values)
        return sorted(found, key=lambda name: list(LOOKS).index(name) if name in LOOKS else len(LOOKS))


def ticks(values, scale):
    """Where grid lines go: round numbers from 0, or from below the least, to above the most."""
    most = max(values)
    if scale == "log":
        lowest, highest = math.floor(math.log10(min(values))), math.ceil(math.log10(most))
        return [10.0 ** e for e in range(lowest, max(highest, lowest + 1) + 1)]
    magnitude = 10.0 ** math.floor(math.log10(most / MOST_LINES))
    step = next(s * magnitude for s in (1, 2, 2.5, 5, 10) if most <= s * magnitude * MOST_LINES)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def number(value):
    """A grid line's number: 0, 0.25, 400, 10000."""
    return f"{value:.6g}"


def length(seq):
    return f"{seq // 1024}k" if seq % 1024 == 0 else str(seq)


def text(x, y, content, size=12, anchor="start", kind="text", weight="normal"):
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">{escape(content)}</text>'


def mark(x, y, name):
    if look(name).square:
        return f'<rect x="{x - 2.5:.1f}" y="{y - 2.5:.1f}" width="5" height="5" class="{name} mark"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.8" class="{name} mark"/>'


def line(places, name):
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return [f'<polyline points="{path}" class="{name} line"/>', *(mark(x, y, name) for x, y in places)]


def placer(top, grid, scale):
    """The function from a value to its y."""
    at = math.log10 if scale == "log" else float
    low, high = at(grid[0]), at(grid[-1])
    return lambda value: top + HEIGHT * (1 - (at(value) - low) / (high - low))


def draw_panel(left, top, panel, names, grid, scale):
    place_y = placer(top, grid, scale)
    place_x = lambda i: left + WIDTH * (i + 0.5) / len(panel.labels)
    parts = [text(left, top - 8, panel.title, weight="bold")]
    for value in grid:
        y = place_y(value)
        parts.append(f'<path d="M{left} {y:.1f}h{WIDTH}" class="grid"/>')
        parts.append(text(left - 6, round(y + 4, 1), number(value), 11, "end", "faint"))
    parts += [text(place_x(i), top + HEIGHT + 16, str(label), 11, "middle", "faint") for i, label in enumerate(panel.labels)]
    for name in reversed(names):  # flash3 on top
        values = panel.values.get(name, ())
        parts += line([(place_x(i), place_y(value)) for i, value in enumerate(values) if value is not None], name)
    return parts


def draw_legend(names, right):
    """(lines, how far down they reach): as many names side by side as there is room for."""
    parts, x, y = [], LEFT, 46
    for name in names:
        wide = 52 + 6.9 * len(look(name).title)
        if x > LEFT and x + wide > right:
            x, y = LEFT, y + 20
        parts += [*line([(x, y), (x + 26, y)], name), text(x + 34, y + 4, look(name).title)]
        x = round(x + wide, 1)
    return parts, y - 46


def style(theme, names):
    rules = [".text{fill:%(text)s}.faint{fill:%(faint)s}.grid{stroke:%(grid)s;stroke-width:1}" % theme, ".line{fill:none;stroke-width:1.8}"]
    for name in names:
        colour, dash = theme["lines"][look(name).colour], f"stroke-dasharray:{look(name).dash}" if look(name).dash else ""
        width = ";stroke-width:2.6" if look(name).wide else ""
        rules.append(f".{name}.line{{stroke:{colour}{width};{dash}}}.{name}.mark{{fill:{colour}}}")
    return f"<style>{''.join(rules)}</style>"


def grids(chart):
    """The grid lines of each row of panels."""
    rows = [chart.panels[i:i + chart.columns] for i in range(0, len(chart.panels), chart.columns)]
    shown = lambda panels: [v for panel in panels for values in panel.values.values() for v in values if v is not None]
    return [ticks(shown(row if chart.rows_apart else chart.panels), chart.scale) for row in rows]


def draw(chart, theme):
    """The chart for a page of this theme, "light" or "dark"."""
    theme, names = THEMES[theme], chart.names()
    columns = min(chart.columns, len(chart.panels))
    width = max(LEFT + columns * (WIDTH + GAP_X) - GAP_X + RIGHT, int(LEFT + 9.2 * len(chart.heading)), int(LEFT + 6.4 * len(chart.about)))
    legend, lower = draw_legend(names, width - RIGHT)
    row_grids = grids(chart)
    height = TOP + lower + len(row_grids) * (HEIGHT + GAP_Y) - GAP_Y + BOTTOM
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
             'font-family="system-ui,-apple-system,\'Segoe UI\',\'DejaVu Sans\',sans-serif">',
             f"<title>{escape(chart.heading)}</title>", style(theme, names), f'<rect width="{width}" height="{height}" fill="{theme["page"]}"/>',
             text(LEFT, 22, chart.heading, 15, weight="bold"), *legend]
    for i, panel in enumerate(chart.panels):
        row, column = divmod(i, chart.columns)
        parts += draw_panel(LEFT + column * (WIDTH + GAP_X), TOP + lower + row * (HEIGHT + GAP_Y), panel, names, row_grids[row], chart.scale)
    parts.append(text(LEFT, height - 8, chart.about, 11, kind="faint"))
    return "\n".join([*parts, "</svg>", ""])
