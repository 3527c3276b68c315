# SPDX-License-Identifier: Apache-2.0
"""README.md's figure: how flash3's speed compares with each library's, for each pass and card. A row is a pass on a card; in it each library has a
bar from the least to the most ratio over the points, with a mark at the median. Left of the line at 1 the library is faster. draw.py writes
the files."""
import statistics
from xml.sax.saxutils import escape

from bench.report.parts import PAGES, text
from bench.report.summary_tables import NAMES, PEERS, passes_of_cards, ratio

COLOURS = {"light": {"cudnn": "#1a7f37", "fa2": "#6e7781", "fa3": "#0969da", "fa4": "#8250df"},
           "dark": {"cudnn": "#3fb950", "fa2": "#8b949e", "fa3": "#58a6ff", "fa4": "#bc8cff"}}
WIDTH, LEFT, RIGHT, TOP, LINE, GAP, BOTTOM = 720, 172, 120, 88, 17, 16, 54
LOW, HIGH, STEP = 0.7, 1.7, 0.1


def place(value):
    return LEFT + (WIDTH - LEFT - RIGHT) * (min(max(value, LOW), HIGH) - LOW) / (HIGH - LOW)


def rows(reports):
    """[(what, {peer: its ratios}, points where flash3 leads, points)] of what bench/gpu/peers.py wrote."""
    items = [(None, report) for report in reports]
    kinds = {"fp8": [], "backward": [], "forward": []}
    for item in items:
        kinds["fp8" if "fp8_points" in item[1] else item[1].get("pass", "forward")].append(item)
    made = []
    for what, points, suffix in passes_of_cards(kinds["forward"], kinds["backward"], kinds["fp8"]):
        ratios = {peer: found for peer in PEERS if (found := [r for p in points if (r := ratio(p, peer + suffix))])}
        best = [min(at) for p in points if (at := [r for peer in ratios if (r := ratio(p, peer + suffix))])]
        made.append((what, ratios, sum(r >= 1 for r in best), len(best)))
    return made


def bar(y, peer, ratios):
    low, middle, high = (place(f(ratios)) for f in (min, statistics.median, max))
    return [f'<path d="M{low:.1f} {y:.1f}H{high:.1f}" class="bar {peer}"/>', f'<circle cx="{middle:.1f}" cy="{y:.1f}" r="4.2" class="mark {peer}"/>',
            text(WIDTH - RIGHT + 12, y + 4, f"{statistics.median(ratios):.2f}", 11, kind="faint")]


def draw(reports, theme):
    """The figure of the reports, for a page of this theme."""
    page, shown = PAGES[theme], rows(reports)
    peers = [peer for peer in PEERS if any(peer in ratios for _, ratios, _, _ in shown)]
    heading = "flash3's speed divided by each library's"
    body, top = [], TOP
    for what, ratios, leads, points in shown:
        height = LINE * len(ratios)
        body += [text(LEFT - 14, top + height / 2 - 2, what, 13, "end", weight="bold"),
                 text(LEFT - 14, top + height / 2 + 13, f"fastest at {leads} of {points}", 11, "end", "faint")]
        for i, (peer, found) in enumerate(ratios.items()):
            body += bar(top + LINE * (i + 0.5), peer, found)
        top += height + GAP
    bottom = top - GAP + 8
    grid = []
    for i in range(round((HIGH - LOW) / STEP) + 1):
        value = LOW + i * STEP
        one = abs(value - 1) < STEP / 2
        grid += [f'<path d="M{place(value):.1f} {TOP - 8}V{bottom}" class="{"one" if one else "grid"}"/>',
                 text(place(value), bottom + 15, f"{value:.1f}", 11, "middle", "text" if one else "faint")]
    grid += [text(place(1) - 8, TOP - 16, "← slower", 12, "end"), text(place(1) + 8, TOP - 16, "faster →", 12),
             text(WIDTH - RIGHT + 12, TOP - 16, "median", 11, kind="faint")]
    legend = []
    for i, peer in enumerate(peers):
        x = LEFT + 140 * i
        legend += [f'<path d="M{x} 46h28" class="bar {peer}"/>', f'<circle cx="{x + 14}" cy="46" r="4.2" class="mark {peer}"/>', text(x + 36, 50, NAMES[peer])]
    rules = [".text{fill:%(text)s}.faint{fill:%(faint)s}.grid{stroke:%(grid)s;stroke-width:.6}.one{stroke:%(text)s;stroke-width:1.4}" % page,
             ".bar{fill:none;stroke-width:5;stroke-linecap:round;stroke-opacity:.45}"]
    rules += [f".bar.{peer}{{stroke:{COLOURS[theme][peer]}}}.mark.{peer}{{fill:{COLOURS[theme][peer]}}}" for peer in peers]
    about = "Bars: least to most over all points; dots: medians. bf16 and FP8 (e4m3), 512 to 16k tokens, head dims 64 to 256."
    height = bottom + BOTTOM
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
                      'font-family="system-ui,-apple-system,\'Segoe UI\',\'DejaVu Sans\',sans-serif">',
                      f"<title>{escape(heading)}</title>", f"<style>{''.join(rules)}</style>",
                      f'<rect width="{WIDTH}" height="{height}" fill="{page["page"]}"/>', text(24, 22, heading, 15, weight="bold"), *grid, *body, *legend,
                      text(24, height - 12, about, 11, kind="faint"), "</svg>", ""])
