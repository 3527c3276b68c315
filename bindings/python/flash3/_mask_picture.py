# SPDX-License-Identifier: Apache-2.0
"""A mask as a picture: MaskSource.draw()."""
from . import _mask_rows
from ._options import int64_of

_MOST_SQUARES = 64  # a side, unless the caller says how large a block is
_SIDE = 384  # units of the picture's square
_STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24292f }
.frame { fill: #ffffff; stroke: #8c959f }
.full { fill: #0969da }
.partial { fill: #80ccff }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.frame { fill: #0d1117; stroke: #6e7681 }
.full { fill: #58a6ff }
.partial { fill: #1f4b80 }
}
</style>"""


def _block_of(block, seq_q, seq_k):
    if block is None:
        return max(1, -(-max(seq_q, seq_k) // _MOST_SQUARES))
    block = int64_of("block", block)
    if block < 1:
        raise ValueError(f"block = {block} but it must be at least 1")
    return block


def _squares(source, b, h, block):
    """For each block of queries, how many pairs of each block of keys are seen."""
    seq_q, seq_k = source.seq_q, source.seq_k
    lines, strip = [], max(1, _mask_rows.AT_ONCE // max(1, seq_k * block)) * block
    for begin in range(0, seq_q, strip):
        seen = source._rows(slice(b, b + 1), slice(h, h + 1), slice(begin, min(begin + strip, seq_q)))[0, 0].long()
        for keys in seen.split(block):
            lines.append([int(x.sum()) for x in keys.split(block, 1)] if seq_k else [])
    return lines


def _runs(line):
    """(first, just after the last, kind) of neighbours of one kind; the hidden ones are left out."""
    begin = 0
    for end in range(1, len(line) + 1):
        if end == len(line) or line[end] != line[begin]:
            if line[begin]:
                yield begin, end, line[begin]
            begin = end


def _kind(seen, pairs):
    return "full" if seen == pairs else "partial" if seen else ""


def _paths(source, b, h, block):
    """The squares of each kind, neighbours in one rectangle, in queries and keys."""
    paths = {"full": [], "partial": []}
    for row, line in enumerate(_squares(source, b, h, block)):
        rows = min(block, source.seq_q - row * block)
        kinds = [_kind(seen, rows * min(block, source.seq_k - column * block)) for column, seen in enumerate(line)]
        for begin, end, kind in _runs(kinds):
            width = min(end * block, source.seq_k) - begin * block
            paths[kind].append(f"M{begin * block} {row * block}h{width}v{rows}h-{width}z")
    return [f'<path class="{kind}" d="{"".join(path)}"/>' for kind, path in paths.items()]


def picture(source, b, h, block):
    """The text of the SVG; source knows its sizes."""
    for name, index, size in zip(("batch", "head"), (b, h), source.shape):
        if size != 1 and not 0 <= index < size:
            raise ValueError(f"{name} = {index} but the mask has {size}; it must be from 0 to {size - 1}")
    b, h = (0 if size == 1 else index for index, size in zip((b, h), source.shape))
    seq_q, seq_k = source.seq_q, source.seq_k
    block = _block_of(block, seq_q, seq_k)
    unit = _SIDE / max(1, seq_q, seq_k)
    width, height = max(seq_k * unit, 180), seq_q * unit
    pairs = f"{block} × {block} pairs a square" if block > 1 else "a square is a pair"
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 32:.0f} {height + 72:.0f}" width="{width + 32:.0f}" '
        f'height="{height + 72:.0f}" role="img">',
        f"<title>{seq_q} queries by {seq_k} keys</title>", _STYLE,
        f'<text x="24" y="16">{seq_k} keys →</text>',
        f'<text x="16" y="{24 + height / 2:.0f}" transform="rotate(-90 16 {24 + height / 2:.0f})" text-anchor="middle">← {seq_q} queries</text>',
        f'<rect class="frame" x="24" y="24" width="{seq_k * unit:.2f}" height="{height:.2f}"/>',
        f'<g transform="translate(24 24) scale({unit:.6g})" shape-rendering="crispEdges">', *_paths(source, b, h, block), "</g>",
        f'<g transform="translate(24 {height + 34:.0f})"><rect class="full" width="12" height="12"/><text x="18" y="10">all seen</text>'
        '<rect class="partial" x="84" width="12" height="12"/><text x="102" y="10">some seen</text>'
        f'<text x="0" y="30">{pairs}</text></g>',
        "</svg>\n"))
