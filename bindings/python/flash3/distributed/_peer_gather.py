# SPDX-License-Identifier: Apache-2.0
"""Attention of one rank with the keys of all of them, which it reads out of the others' memory, for some heads at a time.

Each rank lays its keys where the others see them. Copies of the next heads' keys run under the kernels of these heads, and a kernel
waits for those copies alone of which it sees something. Gradients of keys go back the same way: each rank writes its float32 parts to
the rank whose keys they are, and that adds up the parts of all ranks in the order of the ranks.

Of one sequence the first heads begin with the own keys, so that the first copies run under a kernel; in the backward the last heads end
with them, so that the last gradients do. Their parts are merged; all other heads have one call for each run of queries.
"""
import math
from typing import NamedTuple

import torch

from ._calls import KeyGradients, Sums, add_gradients, covers
from ._layout import Part
from ._peers import ALIGNMENT

MOST_GROUPS = 4  # more cost the host more than they gain: each has calls and copies of its own
# Rows times heads that a group has at least, of queries in the forward and of keys in the backward, which are those that kernels have tiles
# of: four of 128 for each of about as many multiprocessors. With fewer the last tiles of a kernel leave many of them idle. More than two groups
# need twice as many: two hide the copies already.
GROUP_ROWS = 4 * 128 * 128


def group_count(rows, heads, heads_k):
    """Into how many groups of as many heads k and v are cut, where kernels have tiles of so many rows and heads."""
    counts = [n for n in range(1, min(heads_k, MOST_GROUPS) + 1) if heads_k % n == 0]
    return max((n for n in counts if n == 1 or rows * heads >= n * GROUP_ROWS * (1 if n == 2 else 2)), default=0)


class Turn(NamedTuple):
    """What the kernels do for a group of heads, one after the other."""
    before: list  # calls on the own keys
    part: Part  # the keys that the calls after them take, and these calls
    after: list  # calls on the own keys
    splits: bool  # the own keys are not in the Part, so that their gradients come by themselves


class PeerGather:
    """What AllGather does, where Peers are."""

    def __init__(self, layout, peers, rank, mask):
        self._peers, self._pulls = peers, layout.pulls(rank, mask)

    def _turns(self, count, first, last):
        """Those of so many groups; first, last: whether a group begins, or ends, with the own keys alone, where it can."""
        turns = [Turn([], self._pulls.whole, [], False)] * count
        if self._pulls.own_first and count and first:
            calls, part = self._pulls.own_first
            turns[0] = Turn(calls, part, [], True)
        if self._pulls.own_last and count and last:
            calls, part = self._pulls.own_last
            turns[-1] = Turn([], part, calls, True)
        return turns

    def forward(self, q, k, v, sink, dtype, options):
        batch, rows, heads_q, _ = q.shape
        out, lse = q.new_empty((batch, rows, heads_q, v.shape[3]), dtype=dtype), q.new_empty((batch, heads_q, rows), dtype=torch.float32)
        turns = self._turns(group_count(self._pulls.queries, heads_q, k.shape[2]), first=True, last=False)
        groups = _Groups(self._peers, self._pulls, k, v, [turn.part for turn in turns])
        for i, (before, part, _, _) in enumerate(turns):
            heads = groups.heads(i, heads_q)
            calls = list(zip(part.calls, part.needed))
            if all(call.fresh for call, _ in calls):
                calls.sort(key=lambda pair: pair[1])  # whose keys come first
            some = q[:, :, heads]
            sums = Sums(some, v.shape[3], dtype, [*before, *part.calls], None if sink is None else sink[heads], options,
                        (out[:, :, heads], lse[:, heads]))
            for call in before:
                sums.add(call, some, *groups.own(i))
            groups.lay(i)
            for call, needed in calls:
                sums.add(call, some, *groups.keys(i, needed))
            sums.result()
            groups.launched(i)
        self._peers.end()
        return out, lse

    def backward(self, dout, dlse, q, k, v, out, lse, options):
        """dq in float32, dk and dv in the dtype of k and v."""
        count = group_count(min(self._pulls.queries, max(self._pulls.held)), k.shape[2], k.shape[2])
        turns = self._turns(count, first=count > 1, last=True)
        parts = [turn.part for turn in turns]
        groups = _Groups(self._peers, self._pulls, k, v, parts, with_gradients=True)
        sums = _SharedGradients(self._peers, groups, parts, k, v)
        dq = q.new_empty(q.shape, dtype=torch.float32)
        for i, (before, part, after, splits) in enumerate(turns):
            heads = groups.heads(i, q.shape[2])
            some = dout[:, :, heads], None if dlse is None else dlse[:, heads], q[:, :, heads]
            results, own_dq = (out[:, :, heads], lse[:, heads], options), dq[:, :, heads]
            if not covers([*before, *part.calls, *after], q.shape[1]):
                own_dq.zero_()
            mine, theirs = KeyGradients(*groups.own(i)) if splits else None, None
            add_gradients(before, *some, *groups.own(i), *results, own_dq, mine)
            groups.lay(i)
            for call, needed in zip(part.calls, part.needed):
                keys = groups.keys(i, needed)
                theirs = theirs or KeyGradients(*keys, rows_first=True)
                add_gradients([call], *some, *keys, *results, own_dq, theirs)
            groups.launched(i)
            sums.give(i, theirs, mine)
            add_gradients(after, *some, *groups.own(i), *results, own_dq, mine)
        sums.end()
        self._peers.end()
        return dq, *sums.gradients


class _Groups:
    """The keys of each group of heads: the own ones, and those of each Part where its calls take them."""

    def __init__(self, peers, pulls, k, v, parts, with_gradients=False):
        self._peers, self._keys, self._parts, held = peers, (k, v), parts, pulls.held
        batch, _, heads, self._dim = k.shape
        self.count = len(parts)
        row = batch, heads // max(1, self.count), self._dim + v.shape[3]
        keys_bytes = max(held) * batch * heads * row[2] * k.element_size()
        self.keys_bytes = -(-keys_bytes // ALIGNMENT) * ALIGNMENT
        self.slots_shape = (2, peers.ranks, max(held), *row)  # of two groups: while one is added up, the next one comes
        peers.reserve(self.keys_bytes + (4 * math.prod(self.slots_shape) if with_gradients else 0))
        self._shared = [peers.part(rank, 0, k.dtype, (self.count, rows, *row)) for rank, rows in enumerate(held)]
        rows = max((part.rows for part in parts), default=0)
        self._buffers = [k.new_empty((rows, *row)) for _ in range(min(2, self.count))]
        self._share(pulls.shared)
        self._done, self._come = [peers.mark()], []
        if self.count:
            self._post(0)

    def _share(self, rows):
        """Lays the own keys that others see where they see them, when all have read those of the call before."""
        self._peers.begin()
        self._peers.barrier()
        shared = self._shared[self._peers.rank]
        for x, part in zip(self._keys, (shared[..., :self._dim], shared[..., self._dim:])):
            by_group = x.transpose(0, 1).unflatten(2, (self.count, -1)).permute(2, 0, 1, 3, 4) if self.count else x
            for start, stop in rows if self.count else ():
                copy_widely(part[:, start:stop], by_group[:, start:stop])
        self._peers.barrier()

    def _post(self, group):
        """Copies the keys of a group, when the kernels of the group that had its place before are done."""
        part, buffer, marks = self._parts[group], self._buffers[group % 2], {}
        with self._peers.beside():
            self._peers.wait(self._done[max(0, group - 1)])
            for i, copy in enumerate(part.copies, 1):
                rows = self._shared[copy.source][group, copy.row:copy.row + copy.count]
                buffer[copy.place:copy.place + copy.count].copy_(rows)
                if i in part.needed:
                    marks[i] = self._peers.mark()
        self._come.append(marks)

    def lay(self, group):
        """Puts what the rank has itself into a group's Part: not beside the kernels, since a copy within a GPU takes multiprocessors."""
        part, buffer = self._parts[group], self._buffers[group % 2]
        for copy in part.own:
            into = buffer[copy.place:copy.place + copy.count].transpose(0, 1)
            for x, half in zip(self.own(group), (into[..., :self._dim], into[..., self._dim:])):
                copy_widely(half, x[:, copy.row:copy.row + copy.count])
        if part.repeats:
            if part.copies:
                self._peers.wait(self._come[group][len(part.copies)])
            for place, of, rows in part.repeats:
                copy_widely(buffer[place:place + rows], buffer[of:of + rows])

    def heads(self, group, heads):
        """Those of a tensor with so many that belong to a group."""
        return slice(group * heads // self.count, (group + 1) * heads // self.count)

    def own(self, group):
        """The own k and v of a group."""
        return [x[:, :, self.heads(group, x.shape[2])] for x in self._keys]

    def keys(self, group, needed):
        """k and v of a group's Part, when so many copies have been made."""
        if needed:
            self._peers.wait(self._come[group][needed])
        both = self._buffers[group % 2][:self._parts[group].rows].transpose(0, 1)
        return both[..., :self._dim], both[..., self._dim:]

    def launched(self, group):
        """The kernels on a group's Part are on their way: the next one's copies run under them."""
        self._done.append(self._peers.mark())
        if group + 1 < self.count:
            self._post(group + 1)


class _SharedGradients:
    """Gradients of the own keys, of the parts that each rank writes to this one's memory."""

    def __init__(self, peers, groups, parts, k, v):
        self._peers, self._parts, self._heads = peers, parts, groups.heads
        self._slots = [peers.part(rank, groups.keys_bytes, torch.float32, groups.slots_shape) for rank in range(peers.ranks)]
        covered = all(sum(rows.stop - rows.start for rows, *_ in part.sums) == k.shape[1] for part in parts)
        new = torch.empty_like if covered else torch.zeros_like
        self.gradients = [new(x, memory_format=torch.contiguous_format) for x in (k, v)]
        self._given = None

    def give(self, group, theirs, mine):
        """Sends the gradients of a Part's keys to whose keys they are, and adds up those of the group before.

        mine: the KeyGradients of the own keys, where the Part does not have them; they may still come.
        """
        part = self._parts[group]
        rows = None if theirs is None else theirs.sum().transpose(0, 1)
        for place, of, count in part.repeats:
            rows[of:of + count] += rows[place:place + count]
        before = self._arrived()
        mark = self._peers.mark()
        with self._peers.beside():
            self._peers.wait(mark)
            for copy in part.copies:
                slot = self._slots[copy.source][group % 2, self._peers.rank]
                slot[copy.row:copy.row + copy.count].copy_(rows[copy.place:copy.place + copy.count])
            self._given = group, self._peers.mark(), rows, mine
        if before is not None:
            self._add(*before)

    def _arrived(self):
        """What was given last, when all ranks' parts of it have come. None: there is nothing."""
        if self._given is not None:
            self._peers.wait(self._given[1])
            self._peers.barrier()
        return self._given

    def _add(self, group, _, theirs, mine):
        slots, dim = self._slots[self._peers.rank][group % 2], self.gradients[0].shape[3]
        heads = self._heads(group, self.gradients[0].shape[2])
        gradients = theirs if mine is None else mine.sum().transpose(0, 1)
        for rows, runs, place in self._parts[group].sums:
            own = slice(*rows)
            parts = [slots[slice(*run), own].sum(0) if run.stop - run.start > 1 else slots[run.start, own] for run in runs]
            if place is not None:
                parts.append(gradients[place:place + rows.stop - rows.start])
            total = sum(parts[1:], parts[0]).transpose(0, 1)
            for x, part in zip(self.gradients, (total[..., :dim], total[..., dim:])):
                x[:, own, heads].copy_(part)

    def end(self):
        before = self._arrived()
        if before is not None:
            self._add(*before)


def copy_widely(into, x):
    """Copies a tensor to one of its shape; 16 bytes at once, where both are made of whole ones."""
    count = 16 // x.element_size()
    if all(y.stride(-1) == 1 and not any(number % count for number in (y.shape[-1], y.storage_offset(), *y.stride()[:-1])) for y in (into, x)):
        into, x = into.view(torch.complex128), x.view(torch.complex128)
    into.copy_(x)
