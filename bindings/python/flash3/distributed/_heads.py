# SPDX-License-Identifier: Apache-2.0
"""Ulysses: from some tokens of all heads to all tokens of some heads, and back (arXiv:2309.14509).

With fewer KV heads than ranks several ranks get the same one, and its gradients are summed in float32 on their way back.
"""
import torch

from ._exchange import AllToAll


def heads_of(heads, ranks, rank):
    """The heads of a tensor with so many that a rank gets."""
    first = rank * heads // ranks
    return slice(first, (rank + 1) * heads // ranks if heads % ranks == 0 else first + 1)


def why_not(heads_q, heads_k, ranks):
    """Why heads cannot be dealt to ranks; None: they can."""
    if heads_q % ranks == 0 and (heads_k % ranks == 0 or heads_k and ranks % heads_k == 0):
        return None
    return (f"heads_q = {heads_q} and heads_k = {heads_k} but {ranks} ranks share the heads; heads_q must be a multiple of that, "
            "and heads_k a multiple or a divisor of it")


class HeadExchange:
    """Between ranks that share their tokens; rank: this one's, among them; first: the first one's, among all."""

    def __init__(self, layout, group, rank, ranks, first):
        self._layout, self._group, self._rank, self._ranks = layout, group, rank, ranks
        self._members = range(first, first + ranks)

    def _tokens(self, side):
        return [self._layout.tokens(side, member) for member in self._members]

    def to_heads(self, **tensors):
        """q=, k=, v= of one dtype, [batch, own tokens, heads, dim]: the same of all tokens in their order and of the own heads.

        What belongs to queries but is not q has a name that begins with q.
        """
        messages = [[x[:, :, heads_of(x.shape[2], self._ranks, other)] for x in tensors.values()]
                    for other in range(self._ranks)]
        shapes = [[] for _ in range(self._ranks)]
        for name, x in tensors.items():
            own = heads_of(x.shape[2], self._ranks, self._rank)
            for mine, tokens in zip(shapes, self._tokens(_side(name))):
                mine.append((x.shape[0], tokens, own.stop - own.start, x.shape[3]))
        come = AllToAll(self._group, messages, shapes).wait()
        return [self._layout.order_of_group(_side(name), self._members).of(torch.cat(parts, 1))
                for name, parts in zip(tensors, zip(*come))]

    def to_tokens(self, heads, **tensors):
        """The way back, of tensors that have so many heads in all."""
        parts = []
        for name, x in tensors.items():
            order = self._layout.order_of_group(_side(name), self._members)
            parts.append(order.undo(x).split(self._tokens(_side(name)), 1))
        shapes = [(x.shape[0], self._tokens(_side(name))[self._rank], *x.shape[2:]) for name, x in tensors.items()]
        come = AllToAll(self._group, list(zip(*parts)), [shapes] * self._ranks).wait()
        return [self._all_heads(x, heads) for x in zip(*come)]

    def _all_heads(self, parts, heads):
        if heads % self._ranks == 0:
            return torch.cat(parts, 2)
        return torch.stack([sum(parts[rank] for rank in range(self._ranks) if rank * heads // self._ranks == head)
                            for head in range(heads)], 2).squeeze(3)


def _side(name):
    return "q" if name.startswith("q") else "k"
