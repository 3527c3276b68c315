# SPDX-License-Identifier: Apache-2.0
"""What the figures of bench/draw.py share: the colours of a page, and text."""
from xml.sax.saxutils import escape

PAGES = {"light": {"page": "#ffffff", "text": "#1f2328", "faint": "#59636e", "grid": "#d1d9e0"},
         "dark": {"page": "#0d1117", "text": "#f0f6fc", "faint": "#9198a1", "grid": "#3d444d"}}


def text(x, y, content, size=12, anchor="start", kind="text", weight="normal"):
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">{escape(content)}</text>'
