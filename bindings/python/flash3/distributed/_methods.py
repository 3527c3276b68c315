# SPDX-License-Identifier: Apache-2.0
"""Attention of one rank of a ring with the keys of all of them: by a ring of exchanges, or by a gathering for some heads at a time.

Gradients of k and v are float32 when they go back to the rank that the keys came from, and are summed there in float32.
"""
import torch

from ._calls import Sums
from ._exchange import AllToAll, Swap, packed

HEAD_GROUPS = 4  # of K and V, gathered one while the one before is computed


def shapes_of_keys(k, v, rows):
    return [(x.shape[0], rows, *x.shape[2:]) for x in (k, v)]


class Ring:
    """In step s each rank sends to the rank s places behind it what that sees of its keys, and attends over what comes."""

    def __init__(self, layout, group, rank, heads, mask):
        self._group = group
        self._own, self._steps = layout.ring(heads, rank, mask)

    def _swaps(self, k, v):
        """Each Step with the keys that it receives; the next ones are on their way when one is given out."""
        def post(step):
            return Swap(self._group, (step.sent.of(k), step.sent.of(v)), step.destination, shapes_of_keys(k, v, step.received),
                        step.source)
        swap = post(self._steps[0]) if self._steps else None
        yield None, (k, v)
        for i, step in enumerate(self._steps):
            keys = swap.wait()
            swap = post(self._steps[i + 1]) if i + 1 < len(self._steps) else None
            yield step, keys

    def forward(self, q, k, v, sink, dtype, options):
        calls = [*self._own, *(call for step in self._steps for call in step.calls)]
        sums = Sums(q, v.shape[-1], dtype, calls, sink, options)
        for step, keys in self._swaps(k, v):
            for call in self._own if step is None else step.calls:
                sums.add(call, q, *keys)
        return sums.result()

    def backward(self, dout, dlse, q, k, v, out, lse, options):
        """dq, dk and dv in float32."""
        dq, dk, dv = (Total(x) for x in (q, k, v))
        on_the_way = []

        def collect():
            step, swap = on_the_way.pop()
            for total, come in zip((dk, dv), swap.wait()):
                step.sent.add(total.sum(), come)

        for step, keys in self._swaps(k, v):
            if step is None:
                _add_gradients(self._own, dout, dlse, q, *keys, out, lse, options, dq, dk, dv)
                continue
            theirs = [Total(x) for x in keys]
            _add_gradients(step.calls, dout, dlse, q, *keys, out, lse, options, dq, *theirs)
            if on_the_way:
                collect()
            on_the_way.append((step, Swap(self._group, [total.sum() for total in theirs], step.source,
                                          shapes_of_keys(k, v, step.sent.count), step.destination)))
        if on_the_way:
            collect()
        return tuple(total.sum() for total in (dq, dk, dv))


class AllGather:
    """Each rank sends every other one the keys that that one sees, for some heads of k and v at a time."""

    def __init__(self, layout, group, rank, heads, mask):
        self._group, self._gather = group, layout.gather(heads, rank, mask)

    def _heads(self, k, group_size):
        """Which heads of k and of q go together."""
        groups = min(HEAD_GROUPS, k.shape[2])
        edges = [i * k.shape[2] // max(groups, 1) for i in range(groups + 1)]
        return [(slice(a, b), slice(a * group_size, b * group_size)) for a, b in zip(edges, edges[1:])]

    def _gathered(self, q, k, v):
        """For each group of heads: heads of k, heads of q, and the keys, sorted; the next ones are on their way by then."""
        def post(heads):
            some_k, some_v = k[:, :, heads], v[:, :, heads]
            messages = [packed([rows.of(some_k), rows.of(some_v)]) for rows in self._gather.sent]
            return AllToAll(self._group, messages, [shapes_of_keys(some_k, some_v, rows) for rows in self._gather.received])
        groups = self._heads(k, q.shape[2] // k.shape[2] if k.shape[2] else 1)
        exchange = post(groups[0][0]) if groups else None
        for i, (heads_k, heads_q) in enumerate(groups):
            come = exchange.wait()
            exchange = post(groups[i + 1][0]) if i + 1 < len(groups) else None
            yield heads_k, heads_q, [self._gather.order.of(torch.cat(x, 1)) for x in zip(*come)]

    def forward(self, q, k, v, sink, dtype, options):
        outs, lses = [], []
        for _, heads, keys in self._gathered(q, k, v):
            sums = Sums(q[:, :, heads], v.shape[-1], dtype, self._gather.calls, None if sink is None else sink[heads], options)
            for call in self._gather.calls:
                sums.add(call, q[:, :, heads], *keys)
            out, lse = sums.result()
            outs.append(out), lses.append(lse)
        if not outs:  # no heads
            return Sums(q, v.shape[-1], dtype, [], sink, options).result()
        return torch.cat(outs, 2), torch.cat(lses, 1)

    def backward(self, dout, dlse, q, k, v, out, lse, options):
        """dq, dk and dv in float32."""
        dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
        for heads_k, heads, keys in self._gathered(q, k, v):
            own, *theirs = (Total(x) for x in (q[:, :, heads], *keys))
            _add_gradients(self._gather.calls, dout[:, :, heads], None if dlse is None else dlse[:, heads], q[:, :, heads], *keys,
                           out[:, :, heads], lse[:, heads], options, own, *theirs)
            dq[:, :, heads] = own.sum()
            self._send_back([total.sum() for total in theirs], heads_k, dk, dv)
        return dq, dk, dv

    def _send_back(self, gradients, heads, dk, dv):
        come = [x.index_select(1, self._gather.order.back(x.device)).split(self._gather.received, 1) for x in gradients]
        some = dk[:, :, heads], dv[:, :, heads]
        back = AllToAll(self._group, [packed(both) for both in zip(*come)],
                        [shapes_of_keys(*some, rows.count) for rows in self._gather.sent])
        for rows, both in zip(self._gather.sent, back.wait()):
            for total, x in zip(some, both):
                rows.add(total, x)


class Total:
    """The float32 sum of what is added to rows of a tensor like this one."""

    def __init__(self, like):
        self._like, self._sum = like, None

    def add(self, rows, x):
        """x may become the sum: nobody else has it, nor memory beside it."""
        if self._sum is None and rows.first == 0 and rows.count == self._like.shape[1]:
            self._sum = x
        else:
            rows.add(self.sum(), x)

    def sum(self):
        if self._sum is None:
            self._sum = torch.zeros(self._like.shape, dtype=torch.float32, device=self._like.device)
        return self._sum


def _add_gradients(calls, dout, dlse, q, k, v, out, lse, options, dq, dk, dv):
    for call in calls:
        of_q, of_k, of_v = call.backward(dout, dlse, q, k, v, out, lse, options)
        dq.add(call.q, of_q)
        dk.add(call.k, of_k)
        dv.add(call.k, of_v)


CORES = {"ring": Ring, "all_gather": AllGather}
