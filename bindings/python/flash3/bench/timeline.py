# SPDX-License-Identifier: Apache-2.0
"""The timeline of a kernel's block, as `flash3 trace` has recorded it, as SVG: a lane for each role, all of it and some key tiles larger.

Like chart.py it needs neither torch nor the library.
"""
from dataclasses import dataclass
from xml.sax.saxutils import escape

from .chart import THEMES, text, ticks

WIDTH, LEFT, RIGHT = 960, 104, 16  # of the picture; where lanes begin, and what is left free after them
LANE, LANE_GAP, UNDER_WAY = 22, 10, 4  # a lane's height, the room below it, and the bar in that room
TOP, LEGEND_ROW, PANEL_GAP, AXIS, BOTTOM = 52, 20, 58, 18, 30
MOST_SHOWN = 4  # key tiles of the larger part


@dataclass(frozen=True)
class Kind:
    """What phases have in common, and how they are drawn."""
    title: str
    colour: str
    phases: dict  # {name in the trace: what stands in its box, if there is room}


KINDS = {
    "issue": Kind("starts products", "violet", {"issue products": "QK, PV"}),
    "products": Kind("waits for its products", "blue", {"wait for scores": "S", "wait for output": "O", "last product": "O"}),
    "softmax": Kind("softmax", "brown", {"softmax: maxima": "max", "softmax: exponentials": "exp"}),
    "turn": Kind("waits for its turn (ping-pong)", "grey", {"wait for turn": "turn"}),
    "moves": Kind("loads, transposes, stores, finds work", "green",
                  {"load": "", "transpose": "V", "store": "store", "begin work tile": "", "find work tile": ""}),
}
KIND_OF = {phase: name for name, kind in KINDS.items() for phase in kind.phases}
UNDER_WAY_TITLE = "its products under way"


@dataclass(frozen=True)
class Span:
    phase: str
    begin: float  # microseconds
    end: float
    key_tile: int  # -1: of none


@dataclass(frozen=True)
class Timeline:
    heading: str
    about: str
    lanes: dict  # {role: spans in order}


def timeline_of(report):
    """The timeline in a trace of flash3; None if it is another's."""
    about = report.get("otherData") or {}
    if "kernel" not in about or "case" not in about:
        return None
    events = report["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    lanes = {name: [] for _, name in sorted(names.items())}
    for e in events:
        if e["ph"] == "X":
            lanes[names[e["tid"]]].append(Span(e["name"], e["ts"], e["ts"] + e["dur"], e.get("args", {}).get("key_tile", -1)))
    facts = [about.get("device"), f"block {about['block']} of {about['blocks']}, {about['clock_mhz']:.0f} MHz",
             f"a call takes {about['ms']:.3f} ms, with stamps {about['ms_traced']:.3f} ms", f"commit {about.get('commit')}",
             about.get("date", "")[:10]]
    return Timeline(f"{about['kernel']}, one block: {about['case']}", "; ".join(fact for fact in facts if fact),
                    {name: spans for name, spans in lanes.items() if spans})


def under_way(spans):
    """[(begin, end)] of a consumer's products, as it sees them: from where it starts them until it has waited for the last of them."""
    found, begin, end = [], None, None
    for span in [*spans, Span("", 0, 0, -1)]:
        starts = span.phase in ("issue products", "last product", "")
        if starts and begin is not None:
            found.append((begin, end))
        if starts:
            begin, end = span.begin, span.end
        elif span.phase in ("wait for scores", "wait for output"):
            end = span.end
    return found


def share_under_way(lanes, begin, end):
    """The share of this time in which products of one consumer or another are under way."""
    bars = sorted((max(b, begin), min(e, end)) for name, spans in lanes.items() if name.startswith("consumer") for b, e in under_way(spans))
    covered, reached = 0.0, begin
    for b, e in bars:
        covered += max(0.0, e - max(b, reached))
        reached = max(reached, e)
    return covered / (end - begin)


def shown_part(lanes):
    """(begin, end) of up to MOST_SHOWN key tiles in a row, in the middle of what the first consumer does; None where it has no two in a row.

    Without a work tile's first key tile if that leaves any: nothing runs beside it.
    """
    issues = [span for span in next((s for name, s in lanes.items() if name.startswith("consumer")), ()) if span.phase == "issue products"]
    follows = [False, *(b.key_tile == a.key_tile - 1 for a, b in zip(issues, issues[1:]))]
    for before, count in [*((1, n) for n in range(MOST_SHOWN, 0, -1)), (0, 1)]:
        starts = [i for i in range(before, len(issues) - count) if all(follows[i + 1 - before:i + count + 1])]
        if starts:
            first = min(starts, key=lambda i: (abs(i + count / 2 - len(issues) / 2), i))
            return issues[first].begin, issues[first + count].begin
    return None


def _box(x, y, width, height):
    return f"M{x:.1f} {y:.1f}h{max(width, 0.3):.1f}v{height}h-{max(width, 0.3):.1f}z"


def _lane(name, spans, y, place, inside, labels):
    """A role's boxes between the ends of the part: a path for each kind, and what stands in them."""
    paths, words = {}, []
    for span in spans:
        kind = KIND_OF.get(span.phase)
        begin, end = max(span.begin, inside[0]), min(span.end, inside[1])
        if kind is None or begin >= end:
            continue
        x, width = place(begin), place(end) - place(begin)
        paths.setdefault(kind, []).append(_box(x, y, width, LANE))
        word = KINDS[kind].phases[span.phase]
        if labels and word and width > 6.2 * len(word) + 3:
            words.append(text(round(x + width / 2, 1), y + LANE / 2 + 3.5, word, 10, "middle", "inside"))
    parts = [text(LEFT - 8, y + LANE / 2 + 4, name, 12, "end"), f'<path d="M{LEFT} {y + LANE / 2:g}H{WIDTH - RIGHT}" class="grid"/>']
    parts += [f'<path d="{"".join(boxes)}" class="{kind}"/>' for kind, boxes in paths.items()]
    if name.startswith("consumer"):
        bars = [(max(b, inside[0]), min(e, inside[1])) for b, e in under_way(spans)]
        bars = "".join(_box(place(b), y + LANE + 2, place(e) - place(b), UNDER_WAY) for b, e in bars if b < e)
        parts.append(f'<path d="{bars}" class="products"/>')
    return parts + words


def _panel(timeline, y, title, inside, labels, marked=None):
    """(parts, height) of the lanes between two times, without those that do nothing then; marked: where the larger part lies."""
    begin, end = inside
    place = lambda us: LEFT + (WIDTH - RIGHT - LEFT) * (us - begin) / (end - begin)
    lanes = {name: spans for name, spans in timeline.lanes.items() if any(s.phase in KIND_OF and s.begin < end and s.end > begin for s in spans)}
    height = len(lanes) * (LANE + LANE_GAP)
    share = share_under_way(timeline.lanes, begin, end)
    parts = [text(LEFT, y - 8, f"{title}: products are under way for {100 * share:.0f} % of the time", 12, weight="bold")]
    for tick in ticks([end - begin], "linear"):
        if tick <= end - begin:
            x = round(place(begin + tick), 1)
            parts += [f'<path d="M{x} {y}v{height}" class="grid"/>', text(x, y + height + 13, f"{tick:g}", 11, "middle", "faint")]
    parts.append(text(WIDTH - RIGHT, y - 8, "microseconds", 11, "end", "faint"))
    for i, (name, spans) in enumerate(lanes.items()):
        parts += _lane(name, spans, y + i * (LANE + LANE_GAP), place, inside, labels)
    if marked:
        parts.append(f'<path d="M{place(marked[0]):.1f} {y - 3}V{y + height}M{place(marked[1]):.1f} {y - 3}V{y + height}" class="mark"/>')
    return parts, height + AXIS


def _legend():
    """(parts, height)"""
    parts, x, y = [], LEFT, TOP - 8
    for name, title in [*((name, kind.title) for name, kind in KINDS.items()), ("products", UNDER_WAY_TITLE)]:
        wide = 34 + 6.6 * len(title)
        if x > LEFT and x + wide > WIDTH - RIGHT:
            x, y = LEFT, y + LEGEND_ROW
        bar = title == UNDER_WAY_TITLE
        parts += [f'<path d="{_box(x, y - 2 if bar else y - 7, 20, UNDER_WAY if bar else 12)}" class="{name}"/>', text(x + 26, y + 4, title)]
        x = round(x + wide, 1)
    return parts, y - TOP + LEGEND_ROW


def _style(theme):
    rules = [".text{fill:%(text)s}.faint{fill:%(faint)s}.inside{fill:%(page)s}.grid{stroke:%(grid)s;stroke-width:1}" % theme,
             ".mark{fill:none;stroke:%s;stroke-width:1.5}" % theme["text"]]
    rules += [f".{name}{{fill:{theme['lines'][kind.colour]}}}" for name, kind in KINDS.items()]
    return f"<style>{''.join(rules)}</style>"


def draw(timeline, theme):
    """The timeline for a page of this theme, "light" or "dark"."""
    theme = THEMES[theme]
    spans = [span for lane in timeline.lanes.values() for span in lane]
    all_of_it, part = (min(s.begin for s in spans), max(s.end for s in spans)), shown_part(timeline.lanes)
    legend, lower = _legend()
    y = TOP + lower + 28
    parts, height = _panel(timeline, y, "All of it", all_of_it, False, part)
    y += height
    if part:
        y += PANEL_GAP - AXIS
        larger, height = _panel(timeline, y, "The part between the two marks", part, True)
        parts, y = parts + larger, y + height
    y += BOTTOM
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" role="img" '
            'font-family="system-ui,-apple-system,\'Segoe UI\',\'DejaVu Sans\',sans-serif">',
            f"<title>{escape(timeline.heading)}</title>", _style(theme), f'<rect width="{WIDTH}" height="{y}" fill="{theme["page"]}"/>',
            text(16, 24, timeline.heading, 15, weight="bold")]
    return "\n".join([*head, *legend, *parts, text(16, y - 9, timeline.about, 11, kind="faint"), "</svg>", ""])
