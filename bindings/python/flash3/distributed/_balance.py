# SPDX-License-Identifier: Apache-2.0
"""Tokens dealt to ranks, as many to each, and as much work.

The batch is cut into blocks of as many tokens, a few for each rank, wherever documents end. The block of most work goes to the
rank with least so far, and no rank gets more blocks than another. For one causal document cut into two blocks a rank this is zigzag:
rank r of n has the blocks r and 2n - 1 - r.
"""
import itertools

from ._geometry import Range, joined_ranges, segments

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
