# SPDX-License-Identifier: Apache-2.0
"""What a score_mod of torch's FlexAttention computes from the places of a query and a key: operators of torch, each with what it depends on."""
import itertools

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
INDICES = ("b", "h", "q", "kv")  # batch, query head, query and key, as a score_mod has them
PAIR = frozenset(("q", "kv"))
_created = itertools.count()
_EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)  # dtypes that hold a place
_SAME = (aten.clone, aten.alias, aten.lift_fresh_copy)
_COMPARISONS = (aten.lt, aten.le, aten.gt, aten.ge, aten.eq, aten.ne)


def _is_number(affine):
    return affine[:2] == (0, 0)


def _scaled(affine, number):
    return (0, 0, affine[2] * number) if _is_number(affine) else tuple(x * number for x in affine)  # 0 * inf is no 0


def _sum(x, y, alpha=1):
    return tuple(a + b for a, b in zip(x, _scaled(y, alpha)))


def _product(x, y):
    return _scaled(x, y[2]) if _is_number(y) else _scaled(y, x[2]) if _is_number(x) else None


def _quotient(x, y, rounding_mode=None):
    return None if rounding_mode or not _is_number(y) or y[2] == 0 else (*(n / y[2] if n else n for n in x[:2]), x[2] / y[2])


_LINEAR = {aten.neg: lambda x: _scaled(x, -1), aten.add: _sum, aten.sub: lambda x, y, alpha=1: _sum(x, y, -alpha),
           aten.rsub: lambda x, y, alpha=1: _sum(y, x, -alpha), aten.mul: _product, aten.div: _quotient}


class Node:
    """An operator and its arguments, nodes among them; or with a word as its target one of INDICES, "captured" with the number of a tensor
    that the function uses, or "literal" with a tensor that it makes of numbers."""

    def __init__(self, target, args=(), kwargs=None):
        self.target, self.args, self.kwargs, self.place = target, args, kwargs or {}, next(_created)
        self.packet = getattr(target, "overloadpacket", None)
        self.children = [x for x in tree_leaves((args, self.kwargs)) if isinstance(x, Node)]
        #: which of INDICES it depends on
        self.deps = frozenset((target,)) if target in INDICES else frozenset().union(*(x.deps for x in self.children))
        #: (q's, kv's, the other part): it is q's * q + kv's * kv + the other part; None: it is not known to be
        self.affine = self._affine()
        #: the Python number that it always is; None: it is not known to be one
        self.number = self.affine[2] if self.affine is not None and _is_number(self.affine) else None
        #: whether of q and kv it depends on kv - q alone
        self.by_distance = self._by_distance()

    def _affine(self):
        target, packet = self.target, self.packet
        if target in INDICES:
            return {"q": (1, 0, 0), "kv": (0, 1, 0)}.get(target)
        if target == "literal":
            return (0, 0, self.args[0].item()) if self.args[0].dim() == 0 else None
        if packet is aten.scalar_tensor or packet is aten.full and not self.args[0]:
            return 0, 0, self.args[-1]
        if packet in _SAME or packet is aten._to_copy:
            return self._converted(_affine(self.args[0]))
        if packet not in _LINEAR or None in (parts := [_affine(x) for x in self.args]):
            return None
        return _LINEAR[packet](*parts, **self.kwargs)

    def _converted(self, affine):
        dtype = self.kwargs.get("dtype", torch.float64)
        cut = not dtype.is_floating_point and affine is not None and any(isinstance(x, float) for x in affine)
        return affine if dtype in _EXACT and not cut else None

    def _by_distance(self):
        if self.target in INDICES:
            return self.target not in PAIR
        if self.affine is not None:
            return self.affine[0] + self.affine[1] == 0
        if self.packet in _COMPARISONS and None not in (sides := [_affine(x) for x in self.args]):
            return sides[0][0] + sides[0][1] == sides[1][0] + sides[1][1]
        return all(x.by_distance for x in self.children)


def _affine(x):
    return x.affine if isinstance(x, Node) else (0, 0, x) if isinstance(x, (bool, int, float)) else None


def number_of(x):
    """The number that an argument is; None: it is none."""
    return x.number if isinstance(x, Node) else x if isinstance(x, (bool, int, float)) else None


def constant(number):
    """A node of a number."""
    return Node("literal", (torch.tensor(number, dtype=torch.float32),))


def total(terms):
    """One node of terms, (factor, node) each."""
    nodes = [x if factor == 1 else Node(aten.mul.Tensor, (x, factor)) for factor, x in terms] or [constant(0.0)]
    first, *others = nodes
    for x in others:
        first = Node(aten.add.Tensor, (first, x))
    return first


def _needed(nodes):
    found, waiting = {}, list(nodes)
    while waiting:
        x = waiting.pop()
        if x.place not in found:
            found[x.place] = x
            waiting += x.children
    return [found[place] for place in sorted(found)]  # arguments are created before what takes them


def _value(node, leaves, captured, device, values):
    if node.target in INDICES:
        return leaves[node.target]
    if node.target == "captured":
        return captured[node.args[0]]
    if node.target == "literal":
        return node.args[0].to(device)
    args, kwargs = tree_map_only(Node, lambda x: values[x.place], (node.args, node.kwargs))
    return node.target(*args, **kwargs)


def evaluate(terms, captured, axes, device):
    """The sum of terms, (factor, node) each, in float32, with autograd: a dimension for each of axes, {one of INDICES: int64 [n]}, whose indices
    go together. Indices of no axis are 0."""
    needed = _needed(node for _, node in terms)

    def summed(*indices):
        values = {}
        for node in needed:
            values[node.place] = _value(node, dict(zip(INDICES, indices)), captured, device, values)
        parts = [values[node.place].to(torch.float32) * factor if factor != 1 else values[node.place].to(torch.float32)
                 for factor, node in terms]
        return sum(parts[1:], parts[0])

    places, call = dict.fromkeys(INDICES, torch.zeros((), dtype=torch.int64, device=device)), summed
    for axis in reversed(axes):
        places |= axis
        call = torch.vmap(call, in_dims=tuple(0 if name in axis else None for name in INDICES))
    with torch.autocast(device.type, enabled=False):
        return call(*places.values())
