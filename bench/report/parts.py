# SPDX-License-Identifier: Apache-2.0
"""What the modules share that write tables and draw figures: names, parts of tables, the colours of a page, and text in a figure."""
import re
import statistics
from xml.sax.saxutils import escape

from bench import ROOT

NOT_MEASURED = "Not measured in this release: there is no file for it in `bench/results/`."
NAMES = {"cudnn": "cuDNN", "fa2": "FlashAttention-2", "fa3": "FlashAttention-3", "fa4": "FlashAttention-4", "flex": "FlexAttention"}
PAGES = {"light": {"page": "#ffffff", "text": "#1f2328", "faint": "#59636e", "grid": "#d1d9e0"},
         "dark": {"page": "#0d1117", "text": "#f0f6fc", "faint": "#9198a1", "grid": "#3d444d"}}


def table(header, rows):
    first, *rest = ("| " + " | ".join(str(cell) for cell in line) + " |" for line in (header, *rows))
    return "\n".join([first, "|---|" + "---:|" * (len(header) - 1), *rest])


def source(path, report, up=""):
    file, about = path.relative_to(ROOT), report.get("metadata", report)
    commit = f", commit {about['commit']}" if about.get("commit") else ""
    return f"[`{file}`]({up}{file}){commit}, {about['date'][:10]}"


def median_range(values):
    return f"{min(values):.2f} … {max(values):.2f}, median {statistics.median(values):.2f}"


def libraries(report):
    """The GPU and the versions of what was measured on it."""
    frontend = f", its frontend {report['cudnn_frontend']}" if report.get("cudnn_frontend") else ""
    fa3 = f", FlashAttention-3 of {report['fa3']}" if report.get("fa3") else ""
    return f"{report['device']}, driver {report['driver']}, torch {report['torch']}, cuDNN {report['cudnn']}{frontend}{fa3}"


def text(x, y, content, size=12, anchor="start", kind="text", weight="normal"):
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">{escape(content)}</text>'


STYLE, BACKGROUND = re.compile(r"<style>(.*?)</style>"), re.compile(r'(<rect width="[^"]+" height="[^"]+" )fill="(#\w+)"')


def for_both_themes(light, dark):
    """One SVG of two that differ in their styles and the colour of their page: it follows the theme of the page that shows it."""
    def styles(svg):
        return STYLE.search(svg)[1] + f".page{{fill:{BACKGROUND.search(svg)[2]}}}"

    def without(svg):
        return BACKGROUND.sub(r'\1class="page"', STYLE.sub("<style></style>", svg, count=1), count=1)

    if without(light) != without(dark):
        raise ValueError("the two differ in more than their styles")
    return without(light).replace("<style></style>", f"<style>{styles(light)}@media (prefers-color-scheme:dark){{{styles(dark)}}}</style>", 1)
