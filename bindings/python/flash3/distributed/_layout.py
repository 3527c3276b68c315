# SPDX-License-Identifier: Apache-2.0
"""Layout: which tokens each rank holds, and from that, for each mask, what ranks send each other or copy, and which calls they make. Only
numbers: no tensors, and nothing is sent."""
import functools
import hashlib
import weakref
from typing import NamedTuple

import torch

from .._options import window_sides
from ._calls import Call, TokenRows
from ._geometry import Mask, Range, count, deal, documents_of, grouped, is_packed, joined, joined_ranges, pieces, rows_of, seen, segments


# ---- what a rank copies out of the others' memory, and to where: the lists that _peer_gather.py goes by ----


class Copy(NamedTuple):
    """Rows of k that one rank holds, and where they come in a Part."""
    source: int
    row: int  # of the source's own
    place: int  # the first row of the Part
    count: int


class Part(NamedTuple):
    """Keys that lie in one tensor, and the calls on them."""
    rows: int
    own: list  # [Copy] of those that the rank holds itself
    copies: list  # [Copy] of those that come
    repeats: list  # [(place, place of the same rows, count)] of rows that packed sequences share
    calls: list
    needed: list  # of each call: how many of the copies it waits for
    sums: list  # [(own rows as a Range, runs of other ranks that see them, the place of the own gradients or None)]; in a Part
    # of the others' keys alone it is the row itself, of another tensor


class Pulls(NamedTuple):
    """What a rank reads of the others' keys, and what others make of the gradients of its own."""
    whole: Part  # all keys that this rank's queries see, the own ones among them
    own_first: tuple  # (calls on the own keys, the Part of the others, which follow), for one sequence; otherwise None
    own_last: tuple  # (the same calls when those of the Part come before them, the Part)
    held: list  # rows of k of each rank
    queries: int  # rows of q of a rank, on average: the same on all ranks
    shared: list  # the own rows that others see, as Ranges


def copies_of(source, positions, held, everything):
    """The Copies of these positions out of the rows in which a rank holds its own, to a Part that has `everything` in order."""
    made = []
    for start, stop in positions:
        for at in held:
            first, last = max(start, at.start), min(stop, at.stop)
            if first < last:
                (row, _), (place, _) = rows_of([Range(first, last)], held)[0], rows_of([Range(first, last)], everything)[0]
                made.append(Copy(source, row, place, last - first))
    return made


def packed(members, copies):
    """(copies, repeats, members, rows) where the keys of each member follow those of the previous one. Rows that several see come once."""
    laid, made, repeats, moved, place = [], [], [], [], 0
    for p in members:
        new = [Range(p.k, p.k + p.rows_k)]
        for rows, at in laid:
            first, last = max(rows.start, p.k), min(rows.stop, p.k + p.rows_k)
            if first < last:
                repeats.append((place + first - p.k, at + first - rows.start, last - first))
                new = [part for r in new for part in (Range(r.start, min(r.stop, first)), Range(max(r.start, last), r.stop)) if part.stop > part.start]
        for rows in new:
            laid.append((rows, place + rows.start - p.k))
            for copy in copies:
                first, last = max(rows.start, copy.place), min(rows.stop, copy.place + copy.count)
                if first < last:
                    made.append(Copy(copy.source, copy.row + first - copy.place, place + first - p.k, last - first))
        moved.append(p._replace(k=place))
        place += p.rows_k
    order = {copy.source: i for i, copy in reversed(list(enumerate(copies)))}
    return _joined_copies(sorted(made, key=lambda copy: order[copy.source])), repeats, moved, place


def _joined_copies(copies):
    """Copies with neighbours on both sides made one."""
    made = []
    for copy in copies:
        last = made[-1] if made else None
        if last and (last.source, last.row + last.count, last.place + last.count) == copy[:3]:
            made[-1] = last._replace(count=last.count + copy.count)
        else:
            made.append(copy)
    return made


def needed_copies(ranges, copies):
    """How many of the copies, from the first one on, have all rows of these ranges."""
    return max((i + 1 for i, copy in enumerate(copies)
                if any(copy.place < stop and start < copy.place + copy.count for start, stop in ranges)), default=0)


def sums_of(ranges_of_each, own):
    """[(rows, runs of neighbouring ranks, place or None)]: which ranks have ranges of the rows, and where the own Copies take them."""
    copied = [Range(copy.row, copy.row + copy.count) for copy in own]
    edges = sorted({edge for ranges in (*ranges_of_each, copied) for r in ranges for edge in r})
    made = []
    for start, stop in zip(edges, edges[1:]):
        readers = [Range(rank, rank + 1) for rank, ranges in enumerate(ranges_of_each) if any(a <= start < b for a, b in ranges)]
        place = next((copy.place + start - copy.row for copy in own if copy.row <= start < copy.row + copy.count), None)
        if readers or place is not None:
            made.append((Range(start, stop), joined_ranges(readers), place))
    return made


# ---- the layout ----


def mask_of(causal, window, chunk):
    """A Mask of attention()'s options."""
    left, right = (None if side < 0 else side for side in window_sides(window) or (-1, -1))
    return Mask(left, 0 if causal else right, chunk or 0)


class Step(NamedTuple):
    """An exchange with one other rank, and the calls on what has come."""
    source: int
    destination: int
    received: int  # rows of k
    sent: object  # TokenRows of k; what the destination receives
    calls: list


class Gather(NamedTuple):
    """An exchange of all ranks at once, and the calls on what has come, in the order of its positions."""
    received: list  # rows of k, of each rank
    sent: list  # TokenRows of k, for each rank
    all_sent: object  # TokenRows: those of one rank after those of the other
    order: object  # TokenRows: which of the received rows, rank after rank, comes where
    calls: list


class Layout:
    """How the tokens of one batch are distributed to ranks. All ranks derive the same from a spec and the number of ranks."""

    def __init__(self, spec, ranks):
        """spec: as make_spec() has it."""
        self.spec, self.ranks = spec, ranks
        self.key = hashlib.sha256(spec.numpy().tobytes()).digest()  # one for each spec
        causal, left, right, chunk, length, *cu = spec.tolist()
        self.cu_q, self.cu_k = tuple(cu[:length]), tuple(cu[length:])
        self.documents = documents_of(self.cu_q, self.cu_k)
        mask = mask_of(causal, (left, right), chunk)
        self.ranges_q, self.work = deal(self.cu_q[-1], ranks, self.documents, mask)
        self.ranges_k = self.ranges_q if self.cu_k == self.cu_q else deal(
            self.cu_k[-1], ranks, [], Mask())[0]
        self._kept = {}

    def ranges(self, side):
        """The positions of each rank, as sorted ranges. side: "q" or "k"."""
        return self.ranges_q if side == "q" else self.ranges_k

    def total(self, side):
        """The tokens of the whole batch."""
        return (self.cu_q if side == "q" else self.cu_k)[-1]

    def tokens(self, side, rank):
        """How many rows a rank holds of q and attention's result, or of k and v."""
        return count(self.ranges(side)[rank])

    def positions(self, side, rank, device="cpu"):
        """The places of a rank's tokens in the whole batch, [tokens] int64."""
        return TokenRows(self.ranges(side)[rank]).index(torch.device(device))

    def of_group(self, side, ranks):
        """The positions that these ranks hold together, as sorted ranges."""
        return joined_ranges(sorted(r for rank in ranks for r in self.ranges(side)[rank]))

    def rows_of_group(self, side, ranks):
        return count(self.of_group(side, ranks))

    def _keep(self, key, make):
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def order_of_group(self, side, ranks):
        """TokenRows: where the rows of these ranks, one rank after the other, come when they are sorted by their positions."""
        def make():
            return _order([self.ranges(side)[rank] for rank in ranks])
        return self._keep(("order", side, tuple(ranks)), make)

    def rings(self, heads):
        """[(q's ranges, k's ranges)] of each rank of the ring, where so many ranks share their tokens."""
        def make():
            groups = [range(first, first + heads) for first in range(0, self.ranks, heads)]
            return [(self.of_group("q", group), self.of_group("k", group)) for group in groups]
        return self._keep(("rings", heads), make)

    def _pieces(self, q_ranges, k_ranges, mask):
        return pieces(segments(q_ranges, self.documents, "q", mask.chunk), segments(k_ranges, self.documents, "k", mask.chunk),
                      self.documents, mask)

    def _needed(self, q_ranges, k_ranges, mask):
        """The positions among k_ranges that these queries see."""
        return seen(self._pieces(q_ranges, k_ranges, mask), k_ranges)

    def _calls(self, q_ranges, k_ranges, mask, touched):
        """The calls of these queries on these keys. touched: ranges of q's rows that had calls before; those here are added."""
        made = []
        # Most keys first: gradients of all keys begin their sum.
        found = sorted(grouped(joined(self._pieces(q_ranges, k_ranges, mask))), key=lambda group: -sum(p.rows_k for p in group[2]))
        for left, right, members in found:
            rows = joined_ranges([Range(p.q, p.q + p.rows_q) for p in members])
            fresh = not any(a.start < b.stop and b.start < a.stop for a in rows for b in touched)
            touched.extend(rows)
            made.append(Call(members, left, right, fresh))
        return made

    def ring(self, heads, rank, mask):
        """(the calls on a rank's own keys, the Steps that follow), of this rank of the ring."""
        return self._keep(("ring", heads, rank, mask), lambda: self._make_ring(self.rings(heads), rank, mask))

    def _make_ring(self, rings, rank, mask):
        (q, k), touched, steps = rings[rank], [], []
        own = self._calls(q, k, mask, touched)
        for distance in range(1, len(rings)):
            source, destination = (rank - distance) % len(rings), (rank + distance) % len(rings)
            come = self._needed(q, rings[source][1], mask)
            go = self._needed(rings[destination][0], k, mask)
            steps.append(Step(source, destination, count(come), TokenRows(rows_of(go, k)), self._calls(q, come, mask, touched)))
        return own, steps

    def gather(self, heads, rank, mask):
        """The Gather of this rank of the ring."""
        return self._keep(("gather", heads, rank, mask), lambda: self._make_gather(self.rings(heads), rank, mask))

    def _make_gather(self, rings, rank, mask):
        q, k = rings[rank]
        come = [self._needed(q, other, mask) for _, other in rings]
        go = [self._needed(other, k, mask) for other, _ in rings]
        everything = joined_ranges(sorted(r for ranges in come for r in ranges))
        sent = [TokenRows(rows_of(ranges, k)) for ranges in go]
        return Gather([count(ranges) for ranges in come], sent, TokenRows([r for rows in sent for r in rows.ranges]), _order(come),
                      self._calls(q, everything, mask, []))

    def pulls(self, rank, mask):
        """The Pulls of this rank, where no ranks share heads."""
        return self._keep(("pulls", rank, mask), lambda: self._make_pulls(self.rings(1), rank, mask))

    def _make_pulls(self, rings, rank, mask):
        q, k = rings[rank]
        come = [self._needed(q, other, mask) for _, other in rings]
        go = [rows_of(self._needed(other, k, mask), k) if reader != rank else [] for reader, (other, _) in enumerate(rings)]
        whole = self._part(rings, rank, mask, come, go, [])
        own_first = own_last = None
        if all(len(call.members) == 1 for call in whole.calls) and len(whole.calls) <= 2 and len(rings) > 1:
            others = [ranges if source != rank else [] for source, ranges in enumerate(come)]
            touched = []
            own_first = self._calls(q, k, mask, touched), self._part(rings, rank, mask, others, go, touched, is_rest=True)
            touched = []
            rest = self._part(rings, rank, mask, others, go, touched, is_rest=True)
            own_last = self._calls(q, k, mask, touched), rest
        shared = joined_ranges(sorted(r for ranges in go for r in ranges))
        return Pulls(whole, own_first, own_last, [count(other) for _, other in rings], self.total("q") // len(rings), shared)

    def _part(self, rings, rank, mask, come, go, touched, is_rest=False):
        """The Part of these positions, for each rank that holds some.

        go: the own rows that each rank sees; is_rest: the own keys are not in it, and have gradients of their own.
        """
        q, everything = rings[rank][0], joined_ranges(sorted(r for ranges in come for r in ranges))
        copies = []
        for distance in range(len(rings)):
            source = (rank - distance) % len(rings)
            copies += copies_of(source, come[source], rings[source][1], everything)
        members = joined(self._pieces(q, everything, mask))
        if not touched and is_packed(members):
            copies, repeats, members, rows = packed(members, copies)
            calls = [Call(members, None, 0, True)]
        else:
            repeats, calls, rows = [], self._calls(q, everything, mask, touched), count(everything)
        own, copies = [copy for copy in copies if copy.source == rank], [copy for copy in copies if copy.source != rank]
        needed = [len(copies) if repeats else needed_copies(call.k.ranges, copies) for call in calls]
        return Part(rows, own, copies, repeats, calls, needed, sums_of(go, [Copy(rank, 0, 0, count(rings[rank][1]))] if is_rest else own))

    def sent_rows(self, method, heads, rank, mask):
        """The rows of k that this rank of the ring sends in all."""
        if method == "ring":
            return sum(step.sent.count for step in self.ring(heads, rank, mask)[1])
        return sum(rows.count for i, rows in enumerate(self.gather(heads, rank, mask).sent) if i != rank)


def _order(ranges_of_each):
    """Rows that sort the rows of several holders, one holder after the other, by their positions."""
    first, found = 0, []
    for ranges in ranges_of_each:
        for start, stop in ranges:
            found.append((start, first, first + stop - start))
            first += stop - start
    return TokenRows([Range(a, b) for _, a, b in sorted(found)])


def make_spec(cu_q, cu_k, causal, window, chunk):
    """What a layout follows from, as a tensor on the host, which torch.compile need not look into."""
    left, right = (-1, -1) if window is None else window
    return torch.tensor([int(causal), left, right, chunk, len(cu_q), *cu_q, *cu_k], dtype=torch.int64, device="cpu")


_alive = weakref.WeakValueDictionary()


@functools.lru_cache(maxsize=16)
def _recent(key, ranks):
    layout = Layout(torch.frombuffer(bytearray(key), dtype=torch.int64), ranks)
    _alive[key, ranks] = layout
    return layout


def layout_of(spec, ranks):
    """The layout of a spec: the one that exists, or a new one, of which the last few are kept."""
    key = spec.numpy().tobytes()
    return _alive.get((key, ranks)) or _recent(key, ranks)
