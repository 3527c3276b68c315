# SPDX-License-Identifier: Apache-2.0
"""What the modules share that write tables and draw figures: names, parts of tables, the colours of a page, and text in a figure."""
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
