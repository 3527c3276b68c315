# SPDX-License-Identifier: Apache-2.0
"""What flash3.distributed decides, without processes: rectangles of the mask, each rank's share, what goes where, and costs."""
import itertools
import os
import random
import types

import pytest
import torch

from flash3.distributed import _attention, _cost, _geometry as geometry, _peers
from flash3.distributed._layout import Layout, make_spec, mask_of
from flash3.distributed._operators import METHODS
from flash3.distributed._plan import Plan
from oracle import visible

DRAWS = 150


def drawn(rng):
    """(documents as cu_q and cu_k, a mask's options)."""
    lengths = [(rng.choice([0, 1, 2, 7, 30]), rng.choice([0, 1, 5, 33])) for _ in range(rng.randint(1, 5))]
    if rng.random() < 0.6:
        lengths = [(a, a) for a, _ in lengths]
    cu_q, cu_k = ([0, *itertools.accumulate(x)] for x in zip(*lengths))
    options = {"causal": rng.random() < 0.5, "window": rng.choice([None, None, (3, None), (0, 0), (None, 4), (5, 2), (100, 100)]),
               "chunk": rng.choice([0, 0, 1, 4, 16])}
    return cu_q, cu_k, options


def seen_pairs(cu_q, cu_k, options):
    """[total_q, total_k] bool: the definition."""
    pairs = torch.zeros(cu_q[-1], cu_k[-1], dtype=torch.bool)
    for (a, b), (c, d) in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k)):
        pairs[a:b, c:d] = visible(b - a, d - c, **options)
    return pairs


def pairs_of(calls, rows_q, rows_k):
    """How many times calls compute each pair of a row of q and one of k."""
    pairs = torch.zeros(rows_q, rows_k, dtype=torch.int32)
    for call in calls:
        for rows in (call.q, call.k):  # or the call could not write, nor add, what belongs to each
            assert len(rows_at(rows.ranges).unique()) == rows.count, "a row twice in a call"
        for p in call.members:
            left, right = (None if side < 0 else side for side in (call.mask["window_left"], call.mask["window_right"]))
            window = None if left is right is None else (left, right)
            pairs[p.q:p.q + p.rows_q, p.k:p.k + p.rows_k] += visible(p.rows_q, p.rows_k, causal=call.mask["causal"], window=window)
    return pairs


def rows_at(ranges):
    return torch.tensor([i for a, b in ranges for i in range(a, b)], dtype=torch.long)


@pytest.mark.parametrize("seed", range(DRAWS))
def test_calls_compute_each_pair_once(seed):
    """Over all steps of a ring, and of a gathering: every pair that the mask leaves once, and no other; no key without a reader."""
    rng = random.Random(seed)
    cu_q, cu_k, options = drawn(rng)
    ranks, heads = rng.choice([(1, 1), (2, 1), (3, 1), (5, 1), (4, 2)])
    balance = rng.choice([{"causal": True, "window": None, "chunk": 0}, options])
    layout = Layout(make_spec(cu_q, cu_k, balance["causal"], balance["window"] and tuple(
        -1 if side is None else side for side in balance["window"]), balance["chunk"]), ranks)
    mask, want, rings = mask_of(**options), seen_pairs(cu_q, cu_k, options), layout.rings(heads)
    assert sorted(rows_at([r for rank in layout.ranges_q for r in rank]).tolist()) == list(range(cu_q[-1]))
    for rank, (q, k) in enumerate(rings):
        own, steps = layout.ring(heads, rank, mask)
        got = {rank: (pairs_of(own, geometry.count(q), geometry.count(k)), k)}
        for step in steps:
            sent = next(s for s in layout.ring(heads, step.source, mask)[1] if s.destination == rank).sent
            come = rows_at(rings[step.source][1])[rows_at(sent.ranges)]
            assert len(come) == step.received
            assert want[rows_at(q)][:, come].any(0).all(), "a key that no query sees"
            pairs = pairs_of(step.calls, geometry.count(q), step.received)
            got[step.source] = pairs, [geometry.Range(i, i + 1) for i in come.tolist()]
        total = torch.zeros(len(rows_at(q)), cu_k[-1], dtype=torch.int32)
        for pairs, ranges in got.values():
            total[:, rows_at(ranges)] += pairs
        assert torch.equal(total, want[rows_at(q)].int())
        check_gather(layout, heads, rank, mask, want)
        if heads == 1:
            check_pulls(layout, rank, mask, want)


def check_gather(layout, heads, rank, mask, want):
    rings = layout.rings(heads)
    q, gather = rings[rank][0], layout.gather(heads, rank, mask)
    come = torch.cat([rows_at(k)[rows_at(layout.gather(heads, other, mask).sent[rank].ranges)]
                      for other, (_, k) in enumerate(rings)])
    assert len(come) == sum(gather.received)
    come = come[rows_at(gather.order.ranges)]
    assert torch.equal(come, come.sort().values)
    total = torch.zeros(len(rows_at(q)), want.shape[1], dtype=torch.int32)
    total[:, come] = pairs_of(gather.calls, len(rows_at(q)), len(come))
    assert torch.equal(total, want[rows_at(q)].int())
    assert all(call.fresh for call in gather.calls), "a query with two parts of gathered keys"


def check_pulls(layout, rank, mask, want):
    """Whatever comes first: each pair once, of keys that have been copied by then; and each row's readers are known."""
    rings, pulls = layout.rings(1), layout.pulls(rank, mask)
    q, k = (rows_at(ranges) for ranges in rings[rank])

    def of_part(part):
        places = torch.full((part.rows,), -1)
        copied = []  # the positions in the tensor after so many copies
        for copy in (*part.own, *part.copies):
            assert (places[copy.place:copy.place + copy.count] == -1).all(), "two copies to one place"
            places[copy.place:copy.place + copy.count] = rows_at(rings[copy.source][1])[copy.row:copy.row + copy.count]
            copied.append(places.clone())
        copied = [copied[len(part.own) - 1] if part.own else torch.full((part.rows,), -1), *copied[len(part.own):]]
        for place, of, count in part.repeats:
            places[place:place + count] = places[of:of + count]
        copied[-1] = places
        assert max(part.needed, default=0) == len(part.copies), "a copy that nothing waits for"
        assert all(copy.source == rank for copy in part.own) and all(copy.source != rank for copy in part.copies)
        total = torch.zeros_like(want[q], dtype=torch.int32)
        for call, needed in zip(part.calls, part.needed):
            pairs, at = pairs_of([call], len(q), part.rows), copied[needed]
            assert not pairs[:, at == -1].any(), "a key that has not come"
            total.index_add_(1, at.clamp_min(0), pairs)
        sums = {row: ([r for run in runs for r in range(*run)], place) for rows, runs, place in part.sums for row in range(*rows)}
        readers = {i: [r for r, (ranges, _) in enumerate(rings) if r != rank and want[rows_at(ranges)][:, position].any()]
                   for i, position in enumerate(k.tolist())}
        assert {row: ranks for row, (ranks, _) in sums.items() if ranks} == {row: ranks for row, ranks in readers.items() if ranks}
        if part.own:
            assert all(places[place] == k[rows.start] for rows, _, place in part.sums if place is not None)
        return total
    assert torch.equal(of_part(pulls.whole), want[q].int()) and all(call.fresh for call in pulls.whole.calls)
    assert (pulls.own_first is None) == (pulls.own_last is None)
    for own, part in filter(None, (pulls.own_first, pulls.own_last)):
        total = of_part(part)
        assert not part.own
        total[:, k] += pairs_of(own, len(q), len(k))
        assert torch.equal(total, want[q].int())
    assert rows_at(pulls.shared).tolist() == [i for i, position in enumerate(k.tolist()) if any(
        want[rows_at(ranges)][:, position].any() for r, (ranges, _) in enumerate(rings) if r != rank)]


@pytest.mark.parametrize("seed", range(60))
def test_work_is_counted(seed):
    cu_q, cu_k, options = drawn(random.Random(1000 + seed))
    documents, mask, want = geometry.documents_of(cu_q, cu_k), mask_of(**options), seen_pairs(cu_q, cu_k, options)
    for cut in (1, 3):
        edges = [i * cu_q[-1] // cut for i in range(cut + 1)]
        for a, b in itertools.pairwise(edges):
            found = geometry.segments([geometry.Range(a, b)], documents, "q", mask.chunk)
            assert geometry.work_of(found, documents, mask) == want[a:b].sum()


def test_one_causal_sequence_is_zigzag():
    for ranks in (2, 3, 8):
        layout = Layout(make_spec((0, 40 * ranks), (0, 40 * ranks), True, None, 0), ranks)
        last = 2 * ranks - 1
        assert layout.ranges_q == [geometry.joined_ranges([geometry.Range(20 * r, 20 * r + 20), geometry.Range(
            20 * (last - r), 20 * (last - r) + 20)]) for r in range(ranks)]
        own, steps = layout.ring(1, 0, mask_of(True, None, 0))
        without_window = {"window_left": -1, "window_right": -1}
        assert [call.mask for call in own] == [{"causal": True, **without_window}] and len(own[0].members) == 1
        assert all(len(step.calls) == 1 and step.calls[0].mask == {"causal": False, **without_window} for step in steps)


def test_packed_documents_are_balanced():
    """Documents of log-normal lengths: as many tokens on each rank, and within two hundredths as much work."""
    rng = random.Random(3)
    lengths = [max(1, int(rng.lognormvariate(7.8, 1.0))) for _ in range(60)]
    cu = [0, *itertools.accumulate(lengths)]
    for ranks in (2, 4, 8):
        layout = Layout(make_spec(cu, cu, True, None, 0), ranks)
        tokens = [layout.tokens("q", rank) for rank in range(ranks)]
        assert max(tokens) - min(tokens) <= len(geometry.BLOCKS) * 8
        assert max(layout.work) * ranks <= 1.02 * sum(layout.work)


def test_auto_goes_by_cost():
    def chosen(sizes, gradients=False, **changed):
        shape = _cost.Shape(**{"batch": 1, "tokens": 8192, "heads_q": 64, "heads_k": 8, "dims": 256, "size": 2, "part": 0.5,
                               **changed})
        found = _cost.times(shape, sizes, "cuda", gradients)
        assert set(found) <= set(METHODS)
        return _cost.cheapest(found), found
    assert chosen((4,), heads_q=1, heads_k=1)[0] in ("ring", "all_gather")
    assert "heads_q = 1" in chosen((4,), heads_q=1, heads_k=1)[1]["ulysses"][0]
    assert chosen((2, 4))[0] == "ulysses_ring"
    long, short = chosen((8,), tokens=131072)[1], chosen((8,))[1]
    assert all(long[method][0] > short[method][0] for method in long)
    for sizes in ((2,), (8,), (16,), (2, 4)):  # a backward has more work, and sends as much again at least
        one, both = chosen(sizes)[1], chosen(sizes, gradients=True)[1]
        assert all(both[method][0] > 3 * one[method][0] and both[method][1] >= 2 * one[method][1] for method in one)
    assert chosen((4,), heads_q=16, heads_k=16)[0] == "all_gather" != chosen((4,), gradients=True, heads_q=16, heads_k=16)[0]
    assert "heads_q = 1" in chosen((4,), gradients=True, heads_q=1, heads_k=1)[1]["ulysses"][0]


def test_auto_counts_the_backward_where_it_comes(monkeypatch):
    asked = []
    monkeypatch.setattr(_cost, "times", lambda shape, sizes, device, gradients: asked.append(gradients) or {"ring": (1.0, 0)})
    q, k, v = (torch.zeros(1, 8, 4, 16) for _ in range(3))
    trained = q.clone().requires_grad_()
    sink = torch.zeros(4, requires_grad=True)
    groups = types.SimpleNamespace(ranks=2, rank=0, sizes=(2,))
    one, documents = (Plan(groups, make_spec(cu, cu, True, None, 0)) for cu in ((0, 16), (0, 4, 16)))

    def counts(group=None, q=q, sink=None, window=None, chunk=0):
        assert _attention._chosen("auto", (2,), group, q, k, v, sink, True, window, chunk) == "ring"
        return asked.pop()
    assert not counts() and not counts(one)
    assert counts(q=trained) and counts(one, trained) and counts(sink=sink) and counts(q=trained, window=(None, None))
    assert not any((counts(documents, trained), counts(q=trained, window=(4, 0)), counts(q=trained, chunk=4)))
    with torch.no_grad():
        assert not counts(q=trained)


class FakeGroup:
    """A group of two, seen by its first rank."""
    group_name = "fake"

    def rank(self):
        return 0

    def size(self):
        return 2


def reason_of(monkeypatch, *tables):
    """What peers_of() says where the ranks' numbers are these, one table for each time that they are asked."""
    answers = iter(tables)
    monkeypatch.setattr(_peers, "gather_numbers", lambda numbers, groups, device: next(answers))
    monkeypatch.setattr(_peers, "_made", {})
    monkeypatch.setattr(_peers.HostPeers, "barrier", lambda self: None)
    group = FakeGroup()
    assert _peers.known(group, "cpu") is None
    found = _peers.peers_of(group, "cpu")
    assert _peers.known(group, "cpu") is found and _peers.known(FakeGroup(), "cpu") is None
    return found


def test_why_memory_is_not_shared(monkeypatch):
    here = [[7, 0, 11], [7, 0, 12]]
    assert reason_of(monkeypatch, [[7, 0, 11], [8, 0, 11]]) == "rank 1 is on another host than rank 0"
    assert reason_of(monkeypatch, [[7, 0, 11], [7, 1, 12]]) == "rank 1 has no os.memfd_create"
    assert reason_of(monkeypatch, [[7, 0, 11], [7, 0, 11]]) == "rank 1 has the GPU of a rank before it"
    # Rank 1's memory cannot be opened, or is another process's; or rank 1 fails where this one does not.
    with open(os.devnull, "r+b") as other:
        assert "No such file" in reason_of(monkeypatch, here, [[os.getpid(), 10**6, 5]] * 2, [[1], [0]])
        assert "is not the memory of another rank" in reason_of(monkeypatch, here, [[os.getpid(), other.fileno(), 5]] * 2, [[1], [0]])
    assert reason_of(monkeypatch, here, [], [[0], [1]]) == "rank 1 does not reach the others' memory"
    assert isinstance(reason_of(monkeypatch, here, [], [[0], [0]]), _peers.HostPeers)


def test_memory_that_cannot_grow(monkeypatch):
    """A call that fails to make it leaves nothing behind that the next one takes for memory."""
    made = []

    def make(self, size):
        made.append(size)
        if len(made) == 2:
            raise RuntimeError("no memory")
        return [torch.zeros(size, dtype=torch.uint8)] * 2
    monkeypatch.setattr(_peers.HostPeers, "_make", make)
    peers = _peers.HostPeers(FakeGroup(), torch.device("cpu"))
    peers.reserve(10)
    with pytest.raises(RuntimeError, match="no memory"):
        peers.reserve(10**6)
    peers.reserve(10)
    assert peers.part(1, 0, torch.float32, (2, 1)).shape == (2, 1) and len(made) == 3
