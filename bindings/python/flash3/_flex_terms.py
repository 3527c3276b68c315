# SPDX-License-Identifier: Apache-2.0
"""What a score_mod adds to the scores, as options of flash3.attention: slopes of ALiBi, a table by distance, and biases."""
from typing import NamedTuple

import torch

from ._flex_nodes import INDICES, PAIR, Node, aten, constant, evaluate, number_of
from ._flex_scores import Refused

_OF_BIAS = (torch.float16, torch.bfloat16, torch.float32)
_WIDE = (torch.float32, torch.float64)


class Sizes(NamedTuple):
    """What the options depend on, of a call."""
    batch: int
    heads: int
    seq_q: int
    seq_k: int
    top_left: bool  #: i' = i
    causal: bool  #: no query i sees a key after i

    def of(self, name):
        return self[INDICES.index(name)]

    def used(self, node):
        """Which of INDICES a node depends on, where they are more than one."""
        return node.deps - {name for name in ("b", "h") if self.of(name) == 1}


def _distance(node):
    """(number, signed): node is number * (kv - q), or number * |kv - q|; None: neither."""
    signed = node.packet is not aten.abs
    affine = node.affine if signed else node.args[0].affine
    if affine is None or affine[0] + affine[1] != 0 or affine[1] == 0 or affine[2] != 0:
        return None
    return (affine[1] if signed else abs(affine[1])), signed


def _slope(node):
    """(number, factors, signed): node is number * the product of factors, which know of no pair, * (kv - q) or * |kv - q|; None: it is not."""
    number, factors, found, waiting = 1.0, [], None, [node]
    while waiting:
        x = waiting.pop()
        if (own := number_of(x)) is not None:
            number *= own
        elif not x.deps & PAIR:
            factors.append(x)
        elif (distance := _distance(x)) is not None and found is None:
            found = distance
        elif x.packet is aten.mul:
            waiting += x.args
        elif x.packet is aten.neg or x.packet is aten._to_copy and x.kwargs.get("dtype") in _WIDE:
            number *= -1 if x.packet is aten.neg else 1
            waiting.append(x.args[0])
        elif x.packet is aten.div and not x.kwargs and number_of(x.args[1]):
            number /= number_of(x.args[1])
            waiting.append(x.args[0])
        else:
            return None
    return None if found is None else (number * found[0], factors, found[1])


def _as_slopes(factor, node, sizes):
    """(factor, node) of the slopes that a term is; None: it is none, or not where a call has these sizes."""
    if not (sizes.top_left or sizes.seq_q == sizes.seq_k) or (found := _slope(node)) is None:
        return None
    number, factors, signed = found
    if signed and not sizes.causal:
        return None
    while len(factors) > 1:
        factors.append(Node(aten.mul.Tensor, (factors.pop(), factors.pop())))
    return (factor * number if signed else -factor * number), (factors[0] if factors else constant(1.0))


def _places_of(node, dims):
    """[one of INDICES, a number, or None for all, of each dimension] of a captured tensor that node reads; (None, []): it is no such node."""
    levels = []
    while node.packet in (aten.clone, aten.alias, aten.index, aten.select) or \
            node.packet is aten._to_copy and node.kwargs.get("dtype") in _WIDE:
        if node.packet is aten.index:
            levels.append(node.args[1])
        if node.packet is aten.select:
            levels.append([None] * node.args[1] + [node.args[2]] if node.args[1] >= 0 else None)
        node = node.args[0]
    if node.target != "captured" or None in levels:
        return None, []
    places = [None] * dims[node.args[0]]
    for level in reversed(levels):
        free = [n for n, place in enumerate(places) if place is None]
        for n, index in zip(free, level):
            number = number_of(index) if index is not None else None
            places[n] = index.target if number is None and index is not None else number
    return node.args[0], places


def _view(node, captured, sizes):
    """A captured tensor as [1 or batch, 1 or heads, 1 or seq_q, 1 or seq_k], where that is what node reads; None: it is not."""
    which, places = _places_of(node, [x.dim() for x in captured])
    names = [x for x in places if not isinstance(x, int)]
    if which is None or captured[which].dtype not in _OF_BIAS or not set(names) <= set(INDICES) or len(names) != len(set(names)):
        return None
    x = captured[which]
    for n in reversed(range(len(places))):
        name = places[n]
        if isinstance(name, int):
            x = x.select(n, name)
            continue
        if x.shape[n] < sizes.of(name):
            raise Refused(f"score_mod reads {sizes.of(name)} places of a tensor's dimension {n}, which has {x.shape[n]}")
        x = x.narrow(n, 0, sizes.of(name))
    x = x.permute(sorted(range(len(names)), key=lambda n: INDICES.index(names[n])))
    return x[tuple(slice(None) if name in names else None for name in INDICES)]


def _summands(factor, node):
    """The terms of a term that is a sum; (): it is none."""
    if node.packet in (aten.add, aten.sub, aten.rsub):
        alpha = node.kwargs.get("alpha", 1)
        factors = {aten.add: (1, alpha), aten.sub: (1, -alpha), aten.rsub: (-alpha, 1)}[node.packet]
        return tuple((factor * own, x if isinstance(x, Node) else constant(x)) for own, x in zip(factors, node.args))
    if node.packet is aten.neg:
        return ((-factor, node.args[0]),)
    if node.packet in (aten.mul, aten.div) and not node.kwargs:
        x, y = node.args
        if node.packet is aten.mul and number_of(x) is not None:
            x, y = y, x
        if isinstance(x, Node) and number_of(x) is None and (number := number_of(y)):
            return ((factor * number if node.packet is aten.mul else factor / number, x),)
    return ()


def _sorted(terms, captured, sizes):
    """(slopes, table, views, others), (factor, node) each, of views (factor, tensor)."""
    slopes, table, views, others, waiting = [], [], [], [], list(reversed(terms))
    while waiting:
        factor, node = waiting.pop()
        if node.by_distance and (own := _as_slopes(factor, node, sizes)) is not None:
            slopes.append(own)
        elif node.by_distance and "b" not in sizes.used(node):
            table.append((factor, node))
        elif (view := _view(node, captured, sizes)) is not None:
            views.append((factor, view))
        elif parts := _summands(factor, node):
            waiting += reversed(parts)
        else:
            others.append((factor, node))
    return slopes, table, views, others


def _table(terms, captured, sizes, device):
    """[1 or heads, 2 * D + 1]: terms at each distance from i', of pairs that there are."""
    last = max(sizes.seq_q, sizes.seq_k) - 1 if any(node.deps & PAIR for _, node in terms) else 0
    distance = torch.arange(-last, last + 1, device=device) + (0 if sizes.top_left else sizes.seq_k - sizes.seq_q)
    distance = distance.clamp(1 - sizes.seq_q, sizes.seq_k - 1)
    heads = torch.arange(sizes.heads if any("h" in sizes.used(node) for _, node in terms) else 1, device=device)
    pairs = {"q": (-distance).clamp(min=0), "kv": distance.clamp(min=0)}
    return evaluate(terms, captured, ({"h": heads}, pairs), device).contiguous()


def _evaluated(terms, captured, sizes, device):
    """Terms that depend on the same indices, as [1 or batch, 1 or heads, 1 or seq_q, 1 or seq_k]."""
    own = sizes.used(terms[0][1])
    return evaluate(terms, captured, [{name: torch.arange(sizes.of(name) if name in own else 1, device=device)} for name in INDICES], device)


def _bias(views, others, captured, sizes, device):
    """[1 or batch, 1 or heads, 1 or seq_q, seq_k]; one view alone is not copied."""
    if len(views) == 1 and views[0][0] == 1 and not others:
        return views[0][1].expand(-1, -1, -1, sizes.seq_k)
    parts = [x.float() * factor for factor, x in views]
    alike = {}
    for term in others:
        alike.setdefault(sizes.used(term[1]), []).append(term)
    parts += [_evaluated(terms, captured, sizes, device) for terms in alike.values()]
    return sum(parts[1:], parts[0]).expand(-1, -1, -1, sizes.seq_k)


def options_of(terms, captured, sizes, device):
    """alibi_slopes, bias_table and bias, where terms, of Scores, need them; with autograd.

    Raises:
        Refused: a captured tensor is smaller than what is read of it.
    """
    if 0 in sizes[:4]:
        return {}
    slopes, table, views, others = _sorted(terms, captured, sizes)
    options = {}
    if slopes:
        per_sequence = any("b" in sizes.used(node) for _, node in slopes)
        axes = [{name: torch.arange(sizes.of(name), device=device)} for name in (("b", "h") if per_sequence else ("h",))]
        options["alibi_slopes"] = evaluate(slopes, captured, axes, device).contiguous()
    if table:
        options["bias_table"] = _table(table, captured, sizes, device)
    if views or others:
        options["bias"] = _bias(views, others, captured, sizes, device)
    return options
