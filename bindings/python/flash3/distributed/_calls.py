# SPDX-License-Identifier: Apache-2.0
"""One call of attention on a part of a rank's queries and a part of the keys, and the float32 sums that its results join.

Tensors are [batch, rows, heads, dim] here, with batch = 1 for packed ones, and lse is [batch, heads, rows].
"""
import functools

import torch

from .. import arrays
from ._geometry import Range


def _run(like, call, workspace, tensors, options):
    """Runs a call of arrays; on a GPU on torch's stream, with a workspace of torch's."""
    if not like.is_cuda:
        call(*tensors, **options)
        return
    with torch.cuda.device(like.device):
        options = {**options, "stream": torch.cuda.current_stream().cuda_stream}
        size = workspace(*tensors, **options)
        memory = torch.empty(size, dtype=torch.uint8, device=like.device) if size else None
        call(*tensors, **options, workspace=memory)


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
        """These rows of x: a view if they are one range."""
        if self.first is not None:
            return x.narrow(dim, self.first, self.count)
        return x.index_select(dim, self.index(x.device))

    def add(self, total, x, dim=1):
        """Adds x to these rows of total; no row is among them twice."""
        if self.first is not None:
            total.narrow(dim, self.first, self.count).add_(x)
        else:
            total.index_add_(dim, self.index(total.device), x.to(total.dtype))

    def put(self, total, x, dim=1):
        """Writes x to these rows of total; what of() gave may be changed in place before."""
        if self.first is not None:
            total.narrow(dim, self.first, self.count).copy_(x)
        else:
            total.index_copy_(dim, self.index(total.device), x.to(total.dtype))


class Call:
    """Rectangles of the mask that one call of attention computes: a plain one, or several as packed sequences."""

    def __init__(self, members, left, right, fresh):
        """fresh: no call of the same queries before it."""
        self.q, self.k = (TokenRows([_range(p.q, p.rows_q) for p in members]), TokenRows([_range(p.k, p.rows_k) for p in members]))
        self.fresh, self.members = fresh, members
        self.mask = {"causal": right == 0, "window": None if left is None and right in (None, 0) else (left, right)}
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

    def shaped(self, x):
        """x [batch, rows, …] as the call takes it: packed, if there are several rectangles."""
        return x if len(self.members) == 1 else x.reshape(-1, *x.shape[2:])

    def shaped_lse(self, x):
        """The same of an lse, [batch, heads, rows] to [heads, batch * rows]."""
        return x if len(self.members) == 1 else x.transpose(0, 1).reshape(x.shape[1], -1)

    def lse_back(self, x, batch):
        return x if len(self.members) == 1 else x.unflatten(1, (batch, -1)).transpose(0, 1)

    def forward(self, q, k, v, dtype, options, into=None):
        """(out of this dtype, lse) of the call's queries, [batch, rows, heads, dim_v] and [batch, heads, rows].

        into: the same of all queries, where those of the call are written.
        """
        batch, single = q.shape[0], len(self.members) == 1
        q, k, v = self.shaped(self.q.of(q)), self.shaped(self.k.of(k)), self.shaped(self.k.of(v))
        if single and into is not None:
            out, lse = self.q.of(into[0]), self.q.of(into[1], 2)
        else:
            out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
            lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
        _run(q, arrays.forward, arrays.forward_workspace, (q, k, v, out, lse),
             {**options, **self.mask, **self.sequences(batch, q.device)})
        if single:
            return out, lse
        out, lse = out.unflatten(0, (batch, -1)), self.lse_back(lse, batch)
        if into is not None:
            self.q.put(into[0], out)
            self.q.put(into[1], lse, 2)
        return out, lse

    def backward(self, dout, dlse, q, k, v, out, lse, options):
        """(dq, dk, dv) of the call's rows, where out and lse are those of all keys, in float32."""
        batch = q.shape[0]
        q, dout, out = (self.shaped(self.q.of(x)) for x in (q, dout, out))
        k, v = (self.shaped(self.k.of(x)) for x in (k, v))
        lse = self.shaped_lse(self.q.of(lse, 2)).contiguous()
        dlse = None if dlse is None else self.shaped_lse(self.q.of(dlse, 2)).contiguous()
        made = [torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v)]
        _run(q, functools.partial(arrays.backward, dlse=dlse), functools.partial(arrays.backward_workspace, dlse=dlse),
             (dout, q, k, v, out, lse, *made), {**options, **self.mask, **self.sequences(batch, q.device)})
        return made if len(self.members) == 1 else [x.unflatten(0, (batch, -1)) for x in made]


def _range(first, rows):
    return Range(first, first + rows)


def _starts(lengths, device):
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32).to(device)


class Sums:
    """out and lse of a rank's queries over the keys of all calls so far."""

    def __init__(self, q, dim_v, dtype, calls, sink, options):
        """dtype: of the result. In it are the sums already, if no query has two calls; otherwise they are float32."""
        batch, rows, heads, _ = q.shape
        self.is_merged = not all(call.fresh for call in calls)
        self._dtype, self._sink, self._options = dtype, sink, options
        self.out = torch.zeros((batch, rows, heads, dim_v), dtype=torch.float32 if self.is_merged else dtype, device=q.device)
        self.lse = torch.full((batch, heads, rows), -torch.inf, dtype=torch.float32, device=q.device)
        if sink is not None and not self.is_merged:
            self._options = {**options, "sink": sink}
            self.lse.copy_(sink.float()[:, None].expand(heads, rows))

    def add(self, call, q, k, v):
        """Makes the call, and merges its results into the sums, as flash3.merge does."""
        if call.fresh:
            call.forward(q, k, v, self.out.dtype, self._options, into=(self.out, self.lse))
            return
        out, lse = call.forward(q, k, v, self.out.dtype, self._options)
        before_out, before_lse = call.q.of(self.out), call.q.of(self.lse, 2)
        both = torch.logaddexp(before_lse, lse)
        call.q.put(self.out, before_out.mul_(_share(before_lse, both)).addcmul_(out, _share(lse, both)))
        call.q.put(self.lse, both, 2)

    def result(self):
        """(out, lse), with the sink, and rounded."""
        if self.is_merged and self._sink is not None:
            both = torch.logaddexp(self.lse, self._sink.float()[:, None])
            self.out *= _share(self.lse, both)
            self.lse = both
        return self.out.to(self._dtype), self.lse


def _share(lse, of):
    """What part of all weights those behind this lse are, for out [batch, rows, heads, 1]; where there is none, 0."""
    return torch.where(lse == -torch.inf, 0., torch.exp(lse - of)).transpose(1, 2).unsqueeze(-1)


def sink_gradient(sink, dout, dlse, out, lse):
    """That of a sink [heads]: -Σ exp(sink - lse) · (rowsum(dout ∘ out) - dlse) over the rows of its head."""
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)  # [batch, heads, rows]
    if dlse is not None:
        delta = delta - dlse
    share = torch.where(lse == -torch.inf, 0., torch.exp(sink.float()[:, None] - lse))
    return -(share * delta).sum((0, 2), dtype=torch.float64).to(sink.dtype)
