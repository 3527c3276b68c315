# SPDX-License-Identifier: Apache-2.0
"""Ranges of keys, as masks hold them: int32 [1 or batch, 1 or heads, 2 * n, seq_q]; query i sees key j if row 2r, column i holds at most j
and row 2r + 1 holds more than j for any r. All that is here stays on the tensors' device, and all but of_rows() never waits for it."""
import torch

MOST = 8  # of a query: FLASH3_MASK_MOST_RANGES
_LAST = 2**31 - 1


def count(ranges):
    return ranges.shape[2] // 2


def pack(begins, ends):
    """Ranges of two tensors [batch, heads, n, seq_q]."""
    return torch.stack((begins, ends), 3).flatten(2, 3).to(torch.int32)


def unpack(ranges):
    return ranges[:, :, 0::2], ranges[:, :, 1::2]


def cut(ranges, n):
    """The first n ranges of each query."""
    return ranges[:, :, :2 * n]


def normalised(ranges, seq_k=None):
    """The same keys in ranges that are sorted, have gaps between them, and of which the empty ones, (0, 0), come last; seq_k: keys that
    there are."""
    begins, ends = (x.clamp(0, _LAST if seq_k is None else seq_k).long() for x in unpack(ranges))
    empty = begins >= ends
    begins, order = begins.masked_fill(empty, _LAST).sort(2)
    ends = ends.masked_fill(empty, 0).gather(2, order)
    reached = ends.cummax(2).values
    # A range that begins after the end of all before it opens a new one; the others are added to the one that is open.
    opens = begins > torch.nn.functional.pad(reached[:, :, :-1], (0, 0, 1, 0), value=-1)
    place = opens.long().cumsum(2) - 1
    begins = torch.full_like(begins, _LAST).scatter_reduce(2, place, begins, "amin")
    ends = torch.zeros_like(ends).scatter_reduce(2, place, ends, "amax")
    empty = begins >= ends
    return pack(begins.masked_fill(empty, 0), ends.masked_fill(empty, 0))


def _together(a, b):
    """Both with the same batch and heads."""
    shape = torch.broadcast_shapes(a.shape[:2], b.shape[:2])
    return (x.expand(*shape, *x.shape[2:]) for x in (a, b))


def union(a, b, seq_k=None):
    """Normalised, of as many ranges as both have together."""
    return normalised(torch.cat(tuple(_together(a, b)), 2), seq_k)


def intersection(a, b, seq_k=None):
    """Normalised, of as many ranges as both have together less one: each but the last ends where one of theirs ends."""
    a, b = (normalised(x, seq_k) for x in (a, b))
    (a_begins, a_ends), (b_begins, b_ends) = (unpack(x) for x in _together(a, b))
    begins = torch.maximum(a_begins[:, :, :, None], b_begins[:, :, None]).flatten(2, 3)
    ends = torch.minimum(a_ends[:, :, :, None], b_ends[:, :, None]).flatten(2, 3)
    return cut(normalised(pack(begins, ends)), count(a) + count(b) - 1)


def complement(ranges, seq_k):
    """Normalised, of one range more."""
    begins, ends = unpack(normalised(ranges, seq_k))
    begins = begins.masked_fill(begins >= ends, seq_k)  # the empty ones come last
    ends = ends.masked_fill(begins == seq_k, seq_k)
    first, last = torch.zeros_like(begins[:, :, :1]), torch.full_like(ends[:, :, :1], seq_k)
    return normalised(pack(torch.cat((first, ends), 2), torch.cat((begins, last), 2)), seq_k)


def sees(ranges, keys):
    """[batch, heads, seq_q, keys] bool: which of these keys each query sees."""
    seen = torch.zeros(*ranges.shape[:2], ranges.shape[3], keys.shape[0], dtype=torch.bool, device=ranges.device)
    for begins, ends in zip(*(x.unbind(2) for x in unpack(ranges))):
        seen |= (keys >= begins[..., None]) & (keys < ends[..., None])
    return seen


def runs(numbers):
    """(begin, end, which) of the run of equal numbers that each place is in, of [batch, seq]."""
    seq = numbers.shape[1]
    places = torch.arange(seq, device=numbers.device).expand_as(numbers)
    if seq == 0:
        return places, places, places
    opens = torch.ones_like(numbers, dtype=torch.bool)
    opens[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    closes = torch.ones_like(opens)
    closes[:, :-1] = opens[:, 1:]
    begins = places.masked_fill(~opens, 0).cummax(1).values
    ends = seq - places.masked_fill(~closes.flip(1), 0).cummax(1).values.flip(1)
    return begins, ends, opens.long().cumsum(1) - 1


def of_places(begins, ends, seq_q):
    """Ranges of queries from those of keys, [batch, seq_k]: query i has those of key i + seq_k - seq_q, or none where that is no key."""
    batch, seq_k = begins.shape
    if seq_k == 0:
        return torch.zeros(batch, 1, 2, seq_q, dtype=torch.int32, device=begins.device)
    own = torch.arange(seq_q, device=begins.device) + (seq_k - seq_q)
    outside = (own < 0) | (own >= seq_k)
    own = own.clamp(0, seq_k - 1)
    return pack(*(x[:, own].masked_fill(outside, 0)[:, None, None] for x in (begins, ends)))


def of_rows(visible):
    """(ranges, the most that a row takes) of rows of booleans [batch, heads, rows, keys], in ranges for MOST; None where a row takes more.
    Reads that number from the device, and then how many places there are where a range begins or ends."""
    made = torch.zeros(*visible.shape[:3], 2 * MOST, dtype=torch.int32, device=visible.device)
    if visible.numel() == 0:
        return made.transpose(2, 3), 0
    framed = torch.nn.functional.pad(visible, (1, 1))
    edges = (framed[..., 1:] ^ framed[..., :-1]).flatten(0, 2)
    counts = edges.sum(1)
    most = int(counts.max()) // 2
    if most > MOST:
        return None
    row, key = edges.nonzero(as_tuple=True)
    place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    made.view(-1, 2 * MOST)[row, place] = key.int()
    return made.transpose(2, 3), most
