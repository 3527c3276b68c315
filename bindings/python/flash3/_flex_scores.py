# SPDX-License-Identifier: Apache-2.0
"""What a score_mod makes of a score, read from its graph: a number times the score, its softcap, and what is added to it."""
import math
import operator
from typing import NamedTuple

import torch

from ._flex_nodes import INDICES, Node, aten, constant, number_of, total

_WIDE = (torch.float32, torch.float64)
_MINUS_INFINITY = -math.inf


class Refused(Exception):
    """Why flash3 does not compute a score_mod."""


class Scores(NamedTuple):
    """What flash3 computes for a score_mod."""
    scale: float  #: times softmax_scale
    softcap: float  #: 0 for none
    terms: tuple  #: what is then added: (factor, node) each


class _Form(NamedTuple):
    """factor * score + terms + offset, or factor * tanh(inner * score) + terms + offset."""
    factor: float
    inner: object = None  #: None: there is no tanh
    terms: tuple = ()  #: (factor, node) each
    offset: float = 0.0

    def times(self, number):
        terms = tuple((factor * number, x) for factor, x in self.terms)
        return self._replace(factor=self.factor * number, terms=terms, offset=self.offset * number if self.offset else 0.0)

    def plus(self, other):
        """other: a form, or what does not depend on the score."""
        if not isinstance(other, _Form):
            number = number_of(other)
            return self._replace(terms=(*self.terms, (1.0, other))) if number is None else self._replace(offset=self.offset + number)
        if self.inner != other.inner:
            raise Refused("adds scores that are capped in different ways")
        return _Form(self.factor + other.factor, self.inner, self.terms + other.terms, self.offset + other.offset)

    def added(self):
        """One node of what is added."""
        return total(self.terms if self.offset == 0 and self.terms else (*self.terms, (1.0, constant(self.offset))))


def _opposite(x):
    if isinstance(x, _Form):
        return x.times(-1)
    return -x if not isinstance(x, Node) else Node(aten.neg.default, (x,))


def _scaled_by(x, alpha):
    if alpha == 1:
        return x
    if isinstance(x, _Form):
        return x.times(alpha)
    return Node(aten.mul.Tensor, (x, alpha)) if isinstance(x, Node) else x * alpha


def _add(x, y, alpha=1):
    y = _scaled_by(y, alpha)
    return x.plus(y) if isinstance(x, _Form) else y.plus(x)


def _product(x, y):
    form, other = (x, y) if isinstance(x, _Form) else (y, x)
    if (number := number_of(other)) is None:
        raise Refused("multiplies the score by what is no number")
    return form.times(number)


def _quotient(x, y, rounding_mode=None):
    if isinstance(y, _Form):
        raise Refused("divides by the score")
    if rounding_mode is not None:
        raise Refused("rounds the score")
    if not (number := number_of(y)):
        raise Refused("divides the score by 0" if number == 0 else "divides the score by what is no number")
    return x.times(1 / number)


def _tanh(x):
    if x.inner is not None:
        raise Refused("takes the tanh of a tanh")
    if x.terms or x.offset:
        raise Refused("adds to the score before the softcap; flash3 adds after it")
    return _Form(1.0, x.factor)


def _same(x, memory_format=None):
    return x


def _copy(x, dtype=None, **others):
    if dtype not in (None, *_WIDE):
        raise Refused(f"rounds the score to {str(dtype).removeprefix('torch.')}")
    return x


def _where(condition, x, y):
    if isinstance(condition, _Form):
        raise Refused("compares scores")
    if not (isinstance(x, _Form) and isinstance(y, _Form)):
        form, other, shown = (x, y, True) if isinstance(x, _Form) else (y, x, False)
        if number_of(other) != _MINUS_INFINITY:
            raise Refused("puts something else in place of some scores; flash3 takes -inf there")
        sides = constant(0.0), constant(_MINUS_INFINITY)
        return form.plus(Node(aten.where.self, (condition, *(sides if shown else sides[::-1]))))
    if x[:2] != y[:2]:
        raise Refused("multiplies or caps some scores in another way than others")
    return _Form(*x[:2]).plus(Node(aten.where.self, (condition, x.added(), y.added())))


_RULES = {aten.neg: _opposite, aten.add: _add, aten.sub: lambda x, y, alpha=1: _add(x, _scaled_by(_opposite(y), alpha)),
          aten.rsub: lambda x, y, alpha=1: _add(y, _scaled_by(_opposite(x), alpha)), aten.mul: _product, aten.div: _quotient, aten.tanh: _tanh,
          aten.clone: _same, aten.alias: _same, aten._to_copy: _copy, aten.where: _where,
          aten.masked_fill: lambda x, mask, value: _where(mask, value, x)}


def _called(target, args, kwargs):
    packet = getattr(target, "overloadpacket", None)
    if not any(isinstance(x, _Form) for x in _flat((args, kwargs))):
        if packet is None and target is not operator.getitem or packet is not None and target.namespace != "aten":
            raise Refused(f"calls {target}, which is no operator of torch")
        return Node(target, args, kwargs)
    if packet not in _RULES:
        raise Refused(f"computes {target} of the score")
    return _RULES[packet](*args, **kwargs)


def _flat(x):
    if isinstance(x, (list, dict)) or type(x) is tuple:
        for part in x.values() if isinstance(x, dict) else x:
            yield from _flat(part)
    else:
        yield x


def _scores(form):
    if not isinstance(form, _Form):
        raise Refused("returns what does not depend on the score")
    scale, softcap = (form.factor, 0.0) if form.inner is None else (form.inner * form.factor, abs(form.factor))
    if not (0 < scale < math.inf and softcap < math.inf):
        raise Refused(f"multiplies the score by {scale}; flash3 takes positive numbers")
    if not form.offset < math.inf:  # NaN too
        raise Refused(f"adds {form.offset} to the score")
    return Scores(scale, softcap, (*form.terms, (1.0, constant(form.offset))) if form.offset else form.terms)


def recognised(graph, literals, captured):
    """The Scores of a graph of torch.fx, in which literals are {name: tensor}, and captured {name: number} of others.

    Raises:
        Refused: flash3 does not compute it.
    """
    values, indices = {}, iter((_Form(1.0), *map(Node, INDICES)))
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(indices)
        elif node.op == "get_attr":
            values[node] = Node("literal", (literals[node.target],)) if node.target in literals else Node("captured", (captured[node.target],))
        elif node.op == "call_function":
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = _called(node.target, args, dict(kwargs))
        else:
            (result,) = node.args
            return _scores(values.get(result, result))
    raise Refused("returns nothing")
