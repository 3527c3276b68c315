# SPDX-License-Identifier: Apache-2.0
"""One call of attention on a part of a rank's queries and a part of the keys, and the float32 sums that its results join.

Tensors are [batch, rows, heads, dim] here, with batch = 1 for packed ones, and lse is [batch, heads, rows].
"""
import torch

from .._torch import operators, translated
from ._geometry import Range

_forward = operators.forward_out.default
_backward = operators.backward_out.default
_merge = operators.merge_out.default


def _run(operator, *tensors, **options):
    try:
        operator(*tensors, **options)
    except RuntimeError as error:
        raise translated(error) from None


class TokenRows:
    """Rows of a tensor: ranges of them, in order."""

    def __init__(self, ranges):
        self.ranges = [r for r in ranges if r.stop > r.start]
        self.count = sum(r.stop - r.start for r in self.ranges)
        self._index = {}
        self.first = None  # where they begin, if they are one range
        if all(a.stop == b.start for a, b in zip(self.ranges, self.ranges[1:])):
            self.first = self.ranges[0].start if self.ranges else 0

    def index(self, device):
        if device not in self._index:
            parts = [torch.arange(*r, device=device) for r in self.ranges]
            self._index[device] = torch.cat(parts) if parts else torch.arange(0, device=device)
        return self._index[device]

    def back(self, device):
        """Where each row of the tensor is among these, which must be all of them."""
        if ("back", device) not in self._index:
            self._index["back", device] = self.index(device).argsort()
        return self._index["back", device]

    def of(self, x, dim=1):
        """These rows of x: a view if they are one range, x itself if they are all."""
        if self.first is not None:
            return x if self.count == x.shape[dim] else x.narrow(dim, self.first, self.count)
        return x.index_select(dim, self.index(x.device))

    def undo(self, x, dim=1):
        """The tensor of which x has these rows, which must be all of them."""
        return x if self.first == 0 else x.index_select(dim, self.back(x.device))

    def add(self, total, x, dim=1):
        """Adds x to these rows of total; no row is among them twice."""
        if self.first is not None:
            self.of(total, dim).add_(x)
        else:
            total.index_add_(dim, self.index(total.device), x.to(total.dtype))

    def put(self, total, x, dim=1):
        """Writes x to these rows of total."""
        if self.first is not None:
            self.of(total, dim).copy_(x)
        else:
            total.index_copy_(dim, self.index(total.device), x.to(total.dtype))


class Call:
    """Rectangles of the mask that one call of attention computes: a plain one, or several as packed sequences."""

    def __init__(self, members, left, right, fresh):
        """fresh: no call of the same queries before it."""
        self.q, self.k = (TokenRows([_range(p.q, p.rows_q) for p in members]), TokenRows([_range(p.k, p.rows_k) for p in members]))
        self.fresh, self.members = fresh, members
        without_right = right is None or right == 0 and left is None
        self.mask = {"causal": right == 0, "window_left": -1 if left is None else left,
                     "window_right": -1 if without_right else right}
        self._sequences = {}

    @property
    def pairs(self):
        """The pairs of a query and a key in its rectangles: what it costs at most."""
        return sum(p.rows_q * p.rows_k for p in self.members)

    def sequences(self, batch, device):
        """The options that say where each rectangle lies; none for a single one."""
        if len(self.members) == 1:
            return {}
        key = batch, device
        if key not in self._sequences:
            self._sequences[key] = {
                "cu_seqlens_q": _starts([p.rows_q for p in self.members] * batch, device),
                "cu_seqlens_k": _starts([p.rows_k for p in self.members] * batch, device),
                "max_seqlen_q": max(p.rows_q for p in self.members), "max_seqlen_k": max(p.rows_k for p in self.members)}
        return self._sequences[key]

    @staticmethod
    def _is_in_place(batch, rows):
        """Whether a packed call may write to a tensor's own rows."""
        return batch == 1 and rows.first is not None

    def shaped(self, x):
        """x [batch, rows, …] as the call takes it: packed, if there are several rectangles."""
        return x if len(self.members) == 1 else x.reshape(-1, *x.shape[2:])

    def shaped_lse(self, x):
        """The same of an lse, [batch, heads, rows] to [heads, batch * rows]."""
        return x if len(self.members) == 1 else x.transpose(0, 1).reshape(x.shape[1], -1)

    def forward(self, q, k, v, options, into):
        """Writes out and lse of the call's queries where those of all queries lie: into [batch, rows, heads, dim_v] and
        [batch, heads, rows]."""
        batch = q.shape[0]
        q, k, v = self.shaped(self.q.of(q)), self.shaped(self.k.of(k)), self.shaped(self.k.of(v))
        if len(self.members) == 1 or self._is_in_place(batch, self.q):
            out, lse = self.q.of(into[0]), self.q.of(into[1], 2)
            if len(self.members) > 1:
                out, lse = out[0], lse[0]
            _run(_forward, q, k, v, out, lse, **options, **self.mask, **self.sequences(batch, q.device))
            return
        out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=into[0].dtype)
        lse = q.new_empty((q.shape[-2], q.shape[-3]), dtype=torch.float32)
        _run(_forward, q, k, v, out, lse, **options, **self.mask, **self.sequences(batch, q.device))
        self.q.put(into[0], out.unflatten(0, (batch, -1)))
        self.q.put(into[1], lse.unflatten(1, (batch, -1)).transpose(0, 1), 2)

    def backward(self, dout, dlse, q, k, v, out, lse, options, dq, keys):
        """Adds the gradients of the call's rows, where out and lse are those of all keys, to the float32 dq [batch, rows, heads, dim] and
        to the KeyGradients. What is the first of its queries takes the place of what dq holds."""
        batch, is_one = q.shape[0], len(self.members) == 1
        begins = keys.begins_with(self.k) and (is_one or batch == 1)
        writes = self.fresh and (is_one or self._is_in_place(batch, self.q))
        q, dout, out = (self.shaped(self.q.of(x)) for x in (q, dout, out))
        k, v = (self.shaped(self.k.of(x)) for x in (k, v))
        lse = self.shaped_lse(self.q.of(lse, 2)).contiguous()
        dlse = None if dlse is None else self.shaped_lse(self.q.of(dlse, 2)).contiguous()
        made = [self.shaped(self.q.of(dq)) if writes else q.new_empty(q.shape, dtype=torch.float32)]
        made += map(self.shaped, keys.begin()) if begins else (x.new_empty(x.shape, dtype=torch.float32) for x in (k, v))
        _run(_backward, dout, dlse, q, k, v, out, lse, *made, None, **options, **self.mask, **self.sequences(batch, q.device))
        if not is_one:
            made = [x.unflatten(0, (batch, -1)) for x in made]
        if not self.fresh:
            self.q.add(dq, made[0])
        elif not writes:
            self.q.put(dq, made[0])
        if not begins:
            keys.add(self.k, made[1:])


def _range(first, rows):
    return Range(first, first + rows)


def _starts(lengths, device):
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32).to(device)


class KeyGradients:
    """The float32 sums of the gradients of some k and v, beside each other, [batch, rows, heads_k, head_dim + head_dim_v]: one message."""

    def __init__(self, k, v, rows_first=False):
        """rows_first: neighbouring rows of all of the batch lie together."""
        self._like, self._dim, self._sum, self._rows_first = k, k.shape[-1], None, rows_first
        self._shape = (*k.shape[:-1], k.shape[-1] + v.shape[-1])

    def begins_with(self, rows):
        """Whether what comes now, of these rows, may be written to begin()."""
        return self._sum is None and rows.first == 0 and rows.count == self._shape[1]

    def begin(self):
        """Where gradients of all rows go: those of k, and those of v."""
        self._sum = self._made(self._like.new_empty)
        return self.split()

    def _made(self, new):
        if not self._rows_first:
            return new(self._shape, dtype=torch.float32)
        batch, rows, *rest = self._shape
        return new((rows, batch, *rest), dtype=torch.float32).transpose(0, 1)

    def split(self):
        """The sums of k, and those of v."""
        both = self.sum()
        return both[..., :self._dim], both[..., self._dim:]

    def add(self, rows, gradients):
        for total, x in zip(self.split(), gradients):
            rows.add(total, x)

    def sum(self):
        if self._sum is None:
            self._sum = self._made(self._like.new_zeros)
        return self._sum


def add_gradients(calls, dout, dlse, q, k, v, out, lse, options, dq, keys):
    for call in calls:
        call.backward(dout, dlse, q, k, v, out, lse, options, dq, keys)


def query_gradients(q, calls):
    """The dq that calls add to, float32: zeros where they do not write all of it first."""
    return (q.new_empty if covers(calls, q.shape[1]) else q.new_zeros)(q.shape, dtype=torch.float32)


def covers(calls, rows):
    """Whether calls write each of so many queries' dq before they add to it."""
    return sum(call.q.count for call in calls if call.fresh) == rows


class Sums:
    """out and lse of a rank's queries over the keys of all calls so far."""

    def __init__(self, q, dim_v, dtype, calls, sink, options, into=None):
        """dtype: of the result, which is written to `into`, (out, lse), if it is given. Calls write it, if no query has two of them.
        Otherwise their results are float32: part 0 is a call's, and one of the other two the sums before it, which both are merged
        into the third."""
        batch, rows, heads, _ = self._shape = (*q.shape[:3], dim_v)
        self._dtype, self._sink, self._options, self._into = dtype, sink, options, into
        merged = sum(not call.fresh for call in calls)
        self.is_merged = merged > 0
        if self.is_merged:
            # As flash3.merge takes them: [part, rows of all sequences, heads, dim_v], and lse [part, heads, rows of all sequences].
            parts = min(3, 1 + merged)
            self._outs = q.new_empty((parts, batch * rows, heads, dim_v), dtype=torch.float32)
            # A row that saw no key, or that no call has, does not count: its out may hold anything.
            self._lses = q.new_full((parts, heads, batch * rows), -torch.inf, dtype=torch.float32)
            # The same as calls take them: [batch, rows, heads, dim_v], and lse [batch, heads, rows].
            self._parts = list(zip(self._outs.view(parts, *self._shape).unbind(),
                                   self._lses.view(parts, heads, batch, rows).transpose(1, 2).unbind()))
            self._sums, self._pending = 1, []
            return
        covered = sum(call.q.count for call in calls) == rows
        self.out, self.lse = into or (q.new_empty(self._shape, dtype=dtype), q.new_empty((batch, heads, rows), dtype=torch.float32))
        if sink is not None:
            self._options = {**options, "sink": sink}
        if not covered:
            self.out.zero_()
            self.lse.fill_(-torch.inf) if sink is None else self.lse.copy_(sink.float()[:, None])

    def add(self, call, q, k, v):
        """Makes the call. What is the first of its queries joins the sums as it is."""
        if not self.is_merged:
            call.forward(q, k, v, self._options, (self.out, self.lse))
            return
        part = self._sums
        if not call.fresh:
            if any(a.start < b.stop and b.start < a.stop for a in call.q.ranges for b in self._pending):
                third = 3 - self._sums
                self._merge_to(self._outs[third], self._lses[third], None)
                self._sums, self._pending = third, []
                self._lses[0].fill_(-torch.inf)
            part = 0
            self._pending += call.q.ranges
        call.forward(q, k, v, self._options, self._parts[part])

    def _merge_to(self, out, lse, sink):
        """Merges part 0 and the sums, as flash3.merge, into out [rows, heads, dim_v] and lse [heads, rows]."""
        outs, lses = self._outs, self._lses
        if len(outs) > 2:
            both = slice(0, self._sums + 1, self._sums)
            outs, lses = outs[both], lses[both]
        _run(_merge, outs, lses, out, lse, sink)

    def result(self):
        """(out, lse), with the sink, and rounded once."""
        if not self.is_merged:
            return self.out, self.lse
        if self._into is not None and self._shape[0] == 1:
            self._merge_to(self._into[0][0], self._into[1][0], self._sink)
            return self._into
        out = self._outs.new_empty(self._outs.shape[1:], dtype=self._dtype)
        lse = self._lses.new_empty(self._lses.shape[1:])
        self._merge_to(out, lse, self._sink)
        batch, rows, heads, _ = self._shape
        out, lse = out.view(self._shape), lse.view(heads, batch, rows).transpose(0, 1)
        if self._into is None:
            return out, lse.contiguous()
        return self._into[0].copy_(out), self._into[1].copy_(lse)


def sink_gradient(sink, dout, dlse, out, lse):
    """That of a sink [heads]: -Σ exp(sink - lse) · (rowsum(dout ∘ out) - dlse) over the rows of its head."""
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)  # [batch, heads, rows]
    if dlse is not None:
        delta = delta - dlse
    share = torch.where(lse == -torch.inf, 0., torch.exp(sink.float()[:, None] - lse))
    return -(share * delta).sum((0, 2), dtype=torch.float64).to(sink.dtype)
