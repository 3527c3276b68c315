# SPDX-License-Identifier: Apache-2.0
"""Attention of one rank of a ring with the keys of all of them: by a ring of exchanges, or by a gathering for some heads at a time.

Gradients of k and v are float32 when they go back to the rank that the keys came from, and are summed there in float32.
"""
import torch

from ._calls import KeyGradients, Sums, add_gradients, query_gradients
from ._exchange import RowsToAll, Swap

HEAD_GROUPS = 4  # of K and V, gathered one while the one before is computed


def shapes_of_keys(k, v, rows):
    return [(x.shape[0], rows, *x.shape[2:]) for x in (k, v)]


class Ring:
    """In step s each rank sends to the rank s places after it the keys that it sees, and attends to what it receives."""

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
        dq, own = query_gradients(q, [*self._own, *(call for step in self._steps for call in step.calls)]), KeyGradients(k, v)
        on_the_way = []

        def collect():
            step, swap = on_the_way.pop()
            come, = swap.wait()
            step.sent.add(own.sum(), come)

        for step, keys in self._swaps(k, v):
            if step is None:
                add_gradients(self._own, dout, dlse, q, *keys, out, lse, options, dq, own)
                continue
            theirs = KeyGradients(*keys)
            add_gradients(step.calls, dout, dlse, q, *keys, out, lse, options, dq, theirs)
            if on_the_way:
                collect()
            shape = (*k.shape[:1], step.sent.count, *own.sum().shape[2:])
            on_the_way.append((step, Swap(self._group, [theirs.sum()], step.source, [shape], step.destination)))
        if on_the_way:
            collect()
        return dq, *own.split()


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
        # A message holds k and v of a row beside each other, rows first, so that they are sorted as one tensor, and views of it.
        both = torch.cat((k, v), -1).transpose(0, 1)

        def post(heads):
            return self._exchange(self._gather.all_sent.of(both[:, :, heads], 0))
        groups = self._heads(k, q.shape[2] // k.shape[2] if k.shape[2] else 1)
        exchange = post(groups[0][0]) if groups else None
        for i, (heads_k, heads_q) in enumerate(groups):
            come = exchange.wait()
            exchange = post(groups[i + 1][0]) if i + 1 < len(groups) else None
            keys = self._gather.order.of(come, 0).transpose(0, 1)
            yield heads_k, heads_q, (keys[..., :k.shape[3]], keys[..., k.shape[3]:])

    def _exchange(self, rows, back=False):
        counts = [rows.count for rows in self._gather.sent], self._gather.received
        return RowsToAll(self._group, rows, *(reversed(counts) if back else counts))

    def forward(self, q, k, v, sink, dtype, options):
        batch, rows, heads_q, _ = q.shape
        out, lse = q.new_empty((batch, rows, heads_q, v.shape[3]), dtype=dtype), q.new_empty((batch, heads_q, rows), dtype=torch.float32)
        for _, heads, keys in self._gathered(q, k, v):
            some = q[:, :, heads]
            sums = Sums(some, v.shape[-1], dtype, self._gather.calls, None if sink is None else sink[heads], options,
                        (out[:, :, heads], lse[:, heads]))
            for call in self._gather.calls:
                sums.add(call, some, *keys)
            sums.result()
        return out, lse

    def backward(self, dout, dlse, q, k, v, out, lse, options):
        """dq, dk and dv in float32."""
        dq, own, on_the_way = query_gradients(q, self._gather.calls), KeyGradients(k, v), []

        def collect():
            heads, swap = on_the_way.pop()
            total, parts = own.sum()[:, :, heads], swap.wait().split([rows.count for rows in self._gather.sent])
            for rows, part in zip(self._gather.sent, parts):
                rows.add(total, part.transpose(0, 1))

        for heads_k, heads, keys in self._gathered(q, k, v):
            theirs = KeyGradients(*keys)
            add_gradients(self._gather.calls, dout[:, :, heads], None if dlse is None else dlse[:, heads], q[:, :, heads], *keys,
                          out[:, :, heads], lse[:, heads], options, dq[:, :, heads], theirs)
            if on_the_way:  # under these heads' kernels
                collect()
            on_the_way.append((heads_k, self._exchange(self._gather.order.undo(theirs.sum().transpose(0, 1), 0), back=True)))
        if on_the_way:
            collect()
        return dq, *own.split()


CORES = {"ring": Ring, "all_gather": AllGather}
