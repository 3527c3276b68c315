# SPDX-License-Identifier: Apache-2.0
"""What a rank copies out of the others' memory, and to where: the lists that _peer_gather.py goes by. Layout.pulls() makes them. Only numbers: no
tensors, and nothing is sent."""
from typing import NamedTuple

from ._geometry import Range, joined_ranges, rows_of


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
