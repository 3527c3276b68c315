# SPDX-License-Identifier: Apache-2.0
"""What queries here see of keys there: rectangles of the mask, each a call of attention with a window of its own.

A row is a token of a tensor, and ranges of positions say which token of the whole batch each row holds. The mask is a band around
each document's diagonal, aligned to its bottom right corner, so that a rectangle of it is a band again, aligned to the rectangle's
own corner.
"""
import bisect
import collections
import itertools
from typing import NamedTuple


class Range(NamedTuple):
    """Positions from start to just before stop."""
    start: int
    stop: int


class Document(NamedTuple):
    """The positions of a sequence's queries and keys."""
    q: Range
    k: Range

    @property
    def shift(self):
        """What takes a query's place in the document to that of the key on its diagonal."""
        return (self.k.stop - self.k.start) - (self.q.stop - self.q.start)


class Mask(NamedTuple):
    """The keys that query i sees: from i' - left to i' + right (None: unbounded) in its own chunk of so many keys (0: none)."""
    left: int | None = None
    right: int | None = None
    chunk: int = 0


class Segment(NamedTuple):
    """Consecutive rows of one document, and of one chunk of it."""
    document: int
    chunk: int
    first: int  # place in the document of the first row
    stop: int  # and of the one after the last
    row: int  # the first row


class Piece(NamedTuple):
    """A rectangle: rows of q, rows of k, and the window of that call."""
    q: int
    rows_q: int
    k: int
    rows_k: int
    left: int | None
    right: int | None


def documents_of(cu_q, cu_k):
    return [Document(Range(*q), Range(*k)) for q, k in zip(zip(cu_q, cu_q[1:]), zip(cu_k, cu_k[1:]))]


def count(ranges):
    return sum(stop - start for start, stop in ranges)


def joined_ranges(ranges):
    """Ranges that touch made one; they must be sorted."""
    made = []
    for start, stop in ranges:
        if made and made[-1].stop >= start:
            made[-1] = Range(made[-1].start, max(made[-1].stop, stop))
        elif stop > start:
            made.append(Range(start, stop))
    return made


def segments(ranges, documents, side, chunk=0):
    """Rows that hold these positions, cut where documents and chunks end. side: "q" or "k"."""
    spans = [getattr(document, side) for document in documents]
    stops = [span.stop for span in spans]
    made, row = [], 0
    for start, stop in ranges:
        d = bisect.bisect_right(stops, start)
        while d < len(spans) and spans[d].start < stop:
            begin, first = spans[d].start, max(start, spans[d].start)
            last = min(stop, spans[d].stop)
            shift = documents[d].shift if side == "q" else 0
            while first < last:
                place = first - begin
                number = (place + shift) // chunk if chunk else 0
                end = min(last, begin + (number + 1) * chunk - shift) if chunk else last
                made.append(Segment(d, number, place, end - begin, row + first - start))
                first = end
            d += 1
        row += stop - start
    return made


def _trimmed(q, k, shift, mask):
    """The rectangle of two segments without rows and keys that see nothing and are not seen; None: nothing is left."""
    a, b, c, d = q.first, q.stop, k.first, k.stop
    left, right = mask.left, mask.right
    if left is not None:
        b = min(b, d + left - shift)
    if right is not None:
        a = max(a, c - right - shift)
    if a >= b:
        return None
    if right is not None:
        d = min(d, b + shift + right)
    if left is not None:
        c = max(c, a + shift - left)
    if c >= d:
        return None
    # Neither is negative: the last query has a key at its left bound, or the last key a query at its right one.
    own_left = None if left is None else left + d - b - shift
    own_right = None if right is None else right + b + shift - d
    return Piece(q.row + a - q.first, b - a, k.row + c - k.first, d - c,
                 None if own_left is None or own_left >= d - c - 1 else own_left,
                 None if own_right is None or own_right >= b - a - 1 else own_right)


def pieces(q_segments, k_segments, documents, mask):
    """The rectangles in which these queries see these keys, in the order of the queries."""
    of_document = collections.defaultdict(list)
    for k in k_segments:
        of_document[k.document, k.chunk].append(k)
    made = []
    for q in q_segments:
        for k in of_document.get((q.document, q.chunk), ()):
            piece = _trimmed(q, k, documents[q.document].shift, mask)
            if piece is not None:
                made.append(piece)
    return made


def seen(found, k_ranges):
    """The positions, as sorted ranges, of keys in rectangles; k_ranges: what rows of k hold."""
    rows = joined_ranges(sorted(Range(p.k, p.k + p.rows_k) for p in found))
    made, row, i = [], 0, 0
    for start, stop in k_ranges:
        end = row + stop - start
        while i < len(rows) and rows[i].start < end:
            first, last = max(rows[i].start, row), min(rows[i].stop, end)
            if first < last:
                made.append(Range(start + first - row, start + last - row))
            if rows[i].stop > end:
                break
            i += 1
        row = end
    return joined_ranges(made)


def rows_of(part, ranges):
    """The rows, as ranges, at which rows of `ranges` hold the positions of `part`; both sorted."""
    starts, before = [start for start, _ in ranges], [0]
    for start, stop in ranges:
        before.append(before[-1] + stop - start)
    made = []
    for start, stop in part:
        while start < stop:
            i = bisect.bisect_right(starts, start) - 1
            end = min(stop, ranges[i].stop)
            row = before[i] + start - ranges[i].start
            made.append(Range(row, row + end - start))
            start = end
    return joined_ranges(made)


def _join_keys(a, b):
    """Both as one, if the same queries see all of a's keys and then b's, directly after them."""
    if (a.q, a.rows_q, a.left, a.right) == (b.q, b.rows_q, None, None) and a.k + a.rows_k == b.k and b.left is None and \
            (b.right is None or b.rows_k - b.rows_q + b.right >= -1):
        return Piece(a.q, a.rows_q, a.k, a.rows_k + b.rows_k, None, b.right)
    return None


def _join_queries(a, b):
    """Both as one, if b's queries come directly after a's, and see the same keys, or on one diagonal some more."""
    if a.q + a.rows_q != b.q or a.k != b.k or a.left is not None or b.left is not None:
        return None
    full = a.right is None and b.right is None and a.rows_k == b.rows_k
    diagonal = a.right == 0 and b.right == 0 and b.rows_k == a.rows_k + b.rows_q
    return Piece(a.q, a.rows_q + b.rows_q, a.k, b.rows_k, None, b.right) if full or diagonal else None


def joined(found):
    """Rectangles with neighbours made one where one call computes them: under zigzag a rank's own keys are a causal call."""
    for key, join in ((lambda p: (p.q, p.rows_q, p.k), _join_keys), (lambda p: (p.k, p.q), _join_queries)):
        made = []
        for piece in sorted(found, key=key):
            one = join(made[-1], piece) if made else None
            if one is None:
                made.append(piece)
            else:
                made[-1] = one
        found = made
    return sorted(found, key=lambda p: (p.q, p.k))


def is_packed(found):
    """Whether one call computes these rectangles, in the order of their queries, as packed sequences that are causal at their corners, and are
    more than two."""
    corners = all(p.left is None and (p.right == 0 or p.right is None and p.rows_q == 1) for p in found)
    return len(found) > 2 and corners and all(a.q + a.rows_q <= b.q for a, b in zip(found, found[1:]))


def grouped(found):
    """[(left, right, rectangles)]: those of a group have one window, share no rows, and come in the order of both sides' rows."""
    groups = []
    for p in found:
        for left, right, members in groups:
            last = members[-1]
            if (left, right) == (p.left, p.right) and last.q + last.rows_q <= p.q and last.k + last.rows_k <= p.k:
                members.append(p)
                break
        else:
            groups.append((p.left, p.right, [p]))
    return groups


# Tokens dealt to ranks, as many to each, and as much work.
#
# The batch is cut into blocks of as many tokens, a few for each rank, wherever documents end. The block of most work goes to the
# rank with least so far, and no rank gets more blocks than another. For one causal document cut into two blocks a rank this is zigzag:
# rank r of n has the blocks r and 2n - 1 - r.

BLOCKS = (1, 2, 4, 8, 16, 32)  # for each rank: more blocks balance better, but cut more
GOOD_ENOUGH = 1.02  # the most work of a rank over the mean, at which no more cuts are tried


def _sum_of_clipped(first, stop, low, high):
    """The sum of min(max(x, low), high) over x from first to stop - 1."""
    def below(n):  # over x from low to n - 1, where nothing is clipped yet, and then at high
        inside = min(max(n, low), high)
        return (low + inside - 1) * (inside - low) // 2 + (max(n, high) - high) * high
    return low * (min(stop, low) - min(first, low)) + below(stop) - below(first)


def work_of(found, documents, mask):
    """The pairs of a query and a key that it sees, of segments of queries."""
    total = 0
    for s in found:
        document = documents[s.document]
        keys = document.k.stop - document.k.start
        low, high = (s.chunk * mask.chunk, min(keys, (s.chunk + 1) * mask.chunk)) if mask.chunk else (0, keys)
        if low < 0 or low >= high:
            continue
        first, stop = s.first + document.shift, s.stop + document.shift
        total += (stop - first) * (high - low)
        if mask.right is not None:
            total -= (stop - first) * high - _sum_of_clipped(first + mask.right + 1, stop + mask.right + 1, low, high)
        if mask.left is not None:
            total -= _sum_of_clipped(first - mask.left, stop - mask.left, low, high) - (stop - first) * low
    return total


def _dealt(total, ranks, blocks, documents, mask):
    """(ranges of each rank, work of each rank) for so many blocks a rank."""
    edges = [i * total // (ranks * blocks) for i in range(ranks * blocks + 1)]
    cut = [Range(*edge) for edge in itertools.pairwise(edges)]
    work = [work_of(segments([block], documents, "q", mask.chunk), documents, mask) for block in cut]
    if blocks == 1:
        return [joined_ranges([block]) for block in cut], work
    own, load = [[] for _ in range(ranks)], [0] * ranks
    for i in sorted(range(len(cut)), key=lambda i: (-work[i], -i)):
        rank = min((r for r in range(ranks) if len(own[r]) < blocks), key=lambda r: (load[r], len(own[r]), r))
        own[rank].append(cut[i])
        load[rank] += work[i]
    return [joined_ranges(sorted(ranges)) for ranges in own], load


def deal(total, ranks, documents, mask):
    """(ranges of each rank, sorted; work of each rank): the fewest blocks at which the ranks' work is good enough, or the best."""
    best = None
    for blocks in BLOCKS:
        ranges, load = _dealt(total, ranks, blocks, documents, mask)
        if best is None or max(load) < max(best[1]):
            best = ranges, load
        if max(load) * ranks <= GOOD_ENOUGH * sum(load) or blocks * ranks >= total:
            break
    return best
