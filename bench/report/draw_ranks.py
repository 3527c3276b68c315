# SPDX-License-Identifier: Apache-2.0
"""What each method of flash3.distributed keeps of one GPU's speed, over the number of ranks, from what context_parallel.py wrote on as many
GPUs: a panel for each length, for each pass and number of heads. draw.py writes the files."""
from xml.sax.saxutils import escape

from bench.distributed.context_points import PASSES
from bench.report.parts import PAGES, text

LINES = {  # by name: title, colour on a light page and on a dark one, dashes
    "all_gather": ("all-gather", "#cf222e", "#ff7b72", ""),
    "ulysses": ("Ulysses", "#953800", "#f0883e", "7 3"),
    "ring": ("ring", "#8250df", "#bc8cff", "5 2 1 2"),
    "mesh": ("best mesh", "#6e7781", "#8b949e", "1 3"),
    "torch": ("torch, its faster rotation", "#0969da", "#58a6ff", "2 3"),
}
WIDTH, LEFT, TOP, GAP_X, GAP_Y, PANEL_WIDTH, PANEL_HEIGHT = 900, 46, 96, 22, 46, 190, 88
LOW, HIGH, STEP = 20, 110, 20  # % of one GPU's speed


def shares(point, name, what):
    """What a line has of a point; None: it has none."""
    names = {"torch": lambda n: n.startswith("torch_"), "mesh": lambda n: n.startswith("mesh_")}.get(name, lambda n: n == name)
    found = [100 * of[what] for n, of in point["of_alone"].items() if names(n)]
    return max(found, default=None)


def panels(reports):
    """{(heads, pass): {the rest of a point's name: {line: {ranks: share}}}}"""
    made = {}
    for report in sorted(reports, key=lambda report: report["ranks"]):
        for point in report["context_points"]:
            kind, tokens, heads, _ = point["case"].split("/")
            for what in PASSES:
                lines = made.setdefault((heads, what), {}).setdefault((kind, tokens), {name: {} for name in LINES})
                for name in LINES:
                    if (share := shares(point, name, what)) is not None:
                        lines[name][report["ranks"]] = share
    return made


def panel(left, top, title, lines, all_ranks):
    x = {ranks: left + PANEL_WIDTH * (i + 0.5) / len(all_ranks) for i, ranks in enumerate(all_ranks)}
    y = lambda share: top + PANEL_HEIGHT * (HIGH - min(max(share, LOW), HIGH)) / (HIGH - LOW)
    made = [text(left, top - 7, title, weight="bold")]
    for share in range(LOW, HIGH, STEP):
        made.append(f'<path d="M{left:g} {y(share):.1f}h{PANEL_WIDTH}" class="grid"/>')
        made.append(text(left - 5, y(share) + 3, str(share), 9, "end", "faint"))
    made += [text(at, top + PANEL_HEIGHT + 13, f"{ranks} ranks", 10, "middle", "faint") for ranks, at in x.items()]
    for name, values in lines.items():
        points = [(x[ranks], y(share)) for ranks, share in sorted(values.items())]
        if len(points) > 1:
            made.append(f'<path d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in points)}" class="line {name}"/>')
        made += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6" class="mark {name}"/>' for a, b in points]
    return made


def draw(reports, theme):
    """The figure of the reports, for a page of this theme."""
    page, found = PAGES[theme], panels(reports)
    all_ranks = sorted({report["ranks"] for report in reports})
    heading = "Context parallelism, bf16, head dim 128: % of one GPU's speed at the same work"
    body, top = [], TOP
    for (heads, what), some in found.items():
        for i, ((kind, tokens), lines) in enumerate(some.items()):
            title = f"{heads[1:].replace('x', '/')}, {tokens}{' packed' * (kind == 'documents')}, {what}"
            body += panel(LEFT + i * (PANEL_WIDTH + GAP_X), top, title, lines, all_ranks)
        top += PANEL_HEIGHT + GAP_Y
    rules = [".text{fill:%(text)s}.faint{fill:%(faint)s}.grid{stroke:%(grid)s;stroke-width:.5}" % page, ".line{fill:none;stroke-width:1.8}"]
    legend = []
    for i, (name, (title, light, dark, dashes)) in enumerate(LINES.items()):
        colour = light if theme == "light" else dark
        rules.append(f".line.{name}{{stroke:{colour}{f';stroke-dasharray:{dashes}' if dashes else ''}}}.mark.{name}{{fill:{colour}}}")
        at = LEFT + 150 * i
        legend += [f'<path d="M{at} 48h26" class="line {name}"/>', f'<circle cx="{at + 13}" cy="48" r="2.6" class="mark {name}"/>', text(at + 34, 52, title)]
    about = "16/8: heads and KV heads; 8k: tokens of a rank; " + "; ".join(f"{report['ranks']} {report['device']}, commit {report['commit']}, {report['date']}" for report in reports)
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}" role="img" '
                      'font-family="system-ui,-apple-system,\'Segoe UI\',\'DejaVu Sans\',sans-serif">',
                      f"<title>{escape(heading)}</title>", f"<style>{''.join(rules)}</style>",
                      f'<rect width="{WIDTH}" height="{top}" fill="{page["page"]}"/>', text(LEFT, 22, heading, 15, weight="bold"), *legend, *body,
                      text(LEFT, top - 10, about, 11, kind="faint"), "</svg>", ""])
