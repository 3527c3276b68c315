# SPDX-License-Identifier: Apache-2.0
"""The timelines of docs/images/context_profile.svg, from what context_parallel.py --profile wrote: a panel for each call, with a
lane for the host and one for each stream. draw.py writes the files."""
from xml.sax.saxutils import escape

from bench.report.parts import PAGES, text

# Red and blue as in the other figures: what flash3 computes, and what comes from elsewhere.
COLOURS = {
    "light": {"attention": "#cf222e", "merge": "#953800", "nccl": "#0969da", "peer": "#1b7c83", "barrier": "#bf8700", "copy": "#1a7f37", "memset": "#8250df", "other": "#6e7781", "host": "#d1d9e0"},
    "dark": {"attention": "#ff7b72", "merge": "#f0883e", "nccl": "#58a6ff", "peer": "#39c5cf", "barrier": "#d29922", "copy": "#3fb950", "memset": "#bc8cff", "other": "#8b949e", "host": "#3d444d"},
}
TITLES = {"attention": "attention", "merge": "merging", "nccl": "messages (NCCL)", "peer": "copies of others' memory", "barrier": "waiting for ranks", "copy": "own copies", "memset": "filling", "other": "other",
          "host": "the host, in the call"}
METHODS = {"ring": "ring", "all_gather": "all-gather"}
WIDTH, LEFT, GAP_X, GAP_Y = 900, 46, 22, 22
LANE, LANE_GAP, HEAD, FOOT = 13, 3, 20, 32
THINNEST = 0.4  # of a bar: what is shorter is still seen


def milliseconds(us):
    return f"{us / 1e3:.0f} ms" if us >= 1e6 else f"{us / 1e3:.3g} ms"


def share(part, whole):
    return f"{100 * part / whole:.0f} %" if whole else "–"


def bar(left, top, width, span, start, stop, kind):
    """A bar of a lane; what is outside of the panel's time is cut off."""
    start, stop = max(start, 0), min(stop, span)
    if stop <= start:
        return []
    return [f'<rect x="{left + width * start / span:.2f}" y="{top:g}" width="{max(THINNEST, width * (stop - start) / span):.2f}" height="{LANE}" '
            f'class="{kind}"/>']


def lane_names(call):
    """What the lanes are called: streams by what is in them."""
    names = ["host", "compute"]
    for stream in range(1, len(call["streams"])):
        kinds = {kind for _, _, of, kind, _ in call["intervals"] if of == stream}
        names.append("NCCL" if kinds == {"nccl"} else "copies" if "peer" in kinds else "other")
    return names


def panel(left, top, width, call):
    span = call["span_us"]
    title = f"{METHODS[call['method']]}, {call['pass']}, {length(call['tokens'])} tokens: {milliseconds(span)}"
    lines = [text(left, top + 12, title, 11, weight="bold")]
    place = lambda lane: top + HEAD + lane * (LANE + LANE_GAP)
    lines += [f'<rect x="{left:g}" y="{place(i):g}" width="{width:g}" height="{LANE}" class="lane"/>' for i in range(len(lane_names(call)))]
    lines += bar(left, place(0), width, span, *call["host"], "host")
    for start, stop, stream, kind, _ in call["intervals"]:
        lines += bar(left, place(1 + stream), width, span, start, stop, kind)
    below = place(len(lane_names(call))) + 9
    idle = call["idle_us"]
    lines.append(text(left, below, f"messages {milliseconds(call['messages_us'])}, {share(call['messages_under_attention_us'], call['messages_us'])} "
                                   "under attention", 10, kind="faint"))
    lines.append(text(left, below + 12, "idle: " + ", ".join(f"{name} {share(idle[name], span)}" for name in idle), 10, kind="faint"))
    return lines


def length(tokens):
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def height_of(calls):
    return HEAD + max(len(lane_names(call)) for call in calls) * (LANE + LANE_GAP) + FOOT


def legend():
    """What the colours mean, and how far down that goes."""
    lines, x, y = [], LEFT, 40
    for kind, title in TITLES.items():
        width = 40 + round(6.4 * len(title))
        if x + width > WIDTH:
            x, y = LEFT, y + LANE + 6
        lines += [f'<rect x="{x}" y="{y}" width="{LANE}" height="{LANE}" class="{kind}"/>', text(x + 18, y + 11, title)]
        x += width
    return lines, y + LANE


def draw(report, theme):
    """The figure of a report, for a page of this theme: a column for each number of tokens, a row for each method and pass."""
    calls, page = report["context_profile"], PAGES[theme]
    sizes = list(dict.fromkeys(call["tokens"] for call in calls))
    rows = list(dict.fromkeys((call["method"], call["pass"]) for call in calls))
    width = (WIDTH - 2 * LEFT - GAP_X * (len(sizes) - 1)) / len(sizes)
    colours, top = legend()
    body, top = [], top + GAP_Y
    for row in rows:
        some = [call for call in calls if (call["method"], call["pass"]) == row]
        for call in some:
            body += panel(LEFT + sizes.index(call["tokens"]) * (width + GAP_X), top, width, call)
        most = max(some, key=lambda call: len(call["streams"]))
        body += [text(LEFT - 5, top + HEAD + i * (LANE + LANE_GAP) + 10, name, 9, "end", "faint") for i, name in enumerate(lane_names(most))]
        top += height_of(some) + GAP_Y
    height = top + 4
    heading = f"Context parallelism, {report['ranks']} ranks, {calls[0]['case'].split('/')[2]}, causal, bf16: what runs when in a call"
    rules = [".text{fill:%(text)s}.faint{fill:%(faint)s}.lane{fill:none;stroke:%(grid)s;stroke-width:.5}" % page]
    rules += [f".{kind}{{fill:{colour}}}" for kind, colour in COLOURS[theme].items()]
    about = (f"rank 0 of {report['ranks']}, {report['device']}, under torch.profiler, which costs the host time; torch {report['torch']}, "
             f"{report['group']}{' ' + report['nccl'] if 'nccl' in report else ''}; commit {report['commit']}, {report['date']}")
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
                      'font-family="system-ui,-apple-system,\'Segoe UI\',\'DejaVu Sans\',sans-serif">',
                      f"<title>{escape(heading)}</title>", f"<style>{''.join(rules)}</style>",
                      f'<rect width="{WIDTH}" height="{height}" fill="{page["page"]}"/>', text(LEFT, 22, heading, 15, weight="bold"), *colours, *body,
                      text(LEFT, height - 8, about, 11, kind="faint"), "</svg>", ""])
