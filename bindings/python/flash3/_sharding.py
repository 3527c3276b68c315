# SPDX-License-Identifier: Apache-2.0
"""How torch.ops.flash3.forward, inference and backward run on DTensors: sharded by batch or by heads, and otherwise replicated.

A sharding is valid where each rank's call has whole sequences, and query heads beside the KV heads that they see.
"""
import functools
import itertools

from ._fields import ADDED
from ._torch import operators

# What becomes of a tensor along one dimension of the mesh.
_WHOLE, _BATCH, _HEADS, _QUERY_HEADS = "whole", "batch", "heads", "query heads"  # the last: of the query heads of one KV head
_OF_QUERIES = ("q", "qv", "out", "dout", "dq")
# Of tensors whose dimensions may be 1, by the first word for their shapes: which of them are of the batch and of heads.
_DIMS = {"hqk": {_BATCH: 0, _HEADS: 1}, "hd": {_HEADS: 0}}
_RESULTS = {"forward": ("out", "lse"), "inference": ("out",), "backward": ("dq", "dk", "dv", "dsink")}


class _Problem:
    """A call: its tensors, and which shardings it allows."""

    def __init__(self, kind, schema):
        arguments = getattr(operators, kind).default._schema.arguments
        values = dict(zip((a.name for a in arguments), schema.args_schema))
        self._tensors = {name: x for name, x in values.items() if hasattr(x, "strategies")}  # in the operator's order
        self._results, self._heads_first = _RESULTS[kind], values.get("heads_first", False)
        q, k = self._tensors["q"].shape, self._tensors["k"].shape
        self._is_packed = len(q) != 4 or any(name.startswith("cu_seqlens_") for name in self._tensors)
        self._batch = q[0]
        self._drops = values.get("dropout_p", 0.0) != 0.0
        heads = self._heads_dim("q", len(q), _HEADS)
        self._heads_q, self._heads_k = q[heads], k[heads]

    def kinds(self):
        if self._drops:  # weights by their places in the whole call
            return (_WHOLE,)
        return (_WHOLE, _HEADS, _QUERY_HEADS) if self._is_packed else (_WHOLE, _BATCH, _HEADS, _QUERY_HEADS)

    def is_valid(self, kinds, sizes):
        """Of one kind for each dimension of a mesh with these sizes."""
        parts = {kind: 1 for kind in (_BATCH, _HEADS, _QUERY_HEADS)}
        for kind, size in zip(kinds, sizes):
            if kind == _HEADS and parts[_QUERY_HEADS] > 1:
                return False  # a rank's query heads would not be those of its KV head
            if kind != _WHOLE:
                parts[kind] *= size
        if parts[_QUERY_HEADS] > 1 and self._heads_k != parts[_HEADS]:
            return False
        return self._batch % parts[_BATCH] == 0 and self._heads_k % parts[_HEADS] == 0 and \
            self._heads_q % (parts[_HEADS] * parts[_QUERY_HEADS]) == 0

    def placement(self, name, ndim, kind):
        """Of an argument or a result with so many dimensions."""
        from torch.distributed.tensor import Partial, Replicate, Shard
        if name == "dsink":
            if "sink" in self._tensors and kind == _BATCH:
                return Partial()
            name = "sink" if "sink" in self._tensors else "none"
        if kind == _WHOLE or name == "none":
            return Replicate()
        if name in ADDED["forward"] and ADDED["forward"][name].split()[0] in _DIMS:
            dim = _DIMS[ADDED["forward"][name].split()[0]].get(_BATCH if kind == _BATCH else _HEADS)
            return Replicate() if dim is None or self._tensors[name].shape[dim] == 1 else Shard(dim)
        if kind == _BATCH:
            return Replicate() if name in ("sink", *ADDED["forward"]) and ndim == 1 or name.endswith("_scale") and ndim == 1 else Shard(0)
        if kind == _QUERY_HEADS and name in ("dk", "dv"):
            return Partial()
        dim = self._heads_dim(name, ndim, kind)
        return Replicate() if dim is None else Shard(dim)

    def _heads_dim(self, name, ndim, kind):
        """The dimension that is sharded; None: none."""
        if name == "sink":
            return 0
        if name in ADDED["forward"]:  # [heads_q], [batch, heads_q], as lse, or a state
            if ADDED["forward"][name] == "state":
                return None
            return ndim - 2 if "rows" in ADDED["forward"][name].split() and ndim > 1 else ndim - 1
        if name in ("lse", "dlse"):
            return ndim - 2
        if name.startswith(("seqused_", "cu_seqlens_")):
            return None
        if name.endswith("_scale"):  # [1], [batch, heads_k], or [batch, heads, blocks]
            is_sharded = ndim == 3 and (kind == _HEADS or name == "q_scale") or ndim == 2 and kind == _HEADS
            return 1 if is_sharded else None
        if kind == _QUERY_HEADS and name not in _OF_QUERIES:
            return None
        return ndim - 3 if self._heads_first else ndim - 2

    def inputs(self):
        """(name, its strategies, its number of dimensions)."""
        return [(name, x, len(x.shape)) for name, x in self._tensors.items()]

    def results(self):
        """(name, its number of dimensions)."""
        ndim = len(self._tensors["q"].shape)
        return [(name, ndim - 1 if name == "lse" else ndim) for name in self._results]


def _strategy(kind, schema):
    """Every valid sharding of a call, for torch to choose the one to which its tensors come at the least cost."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
    from torch.distributed.tensor._ops.utils import generate_redistribute_costs
    mesh, problem = schema.get_mesh_from_args(), _Problem(kind, schema)
    sizes = [mesh.size(i) for i in range(mesh.ndim)]
    found = []
    for kinds in itertools.product(problem.kinds(), repeat=mesh.ndim):
        if not problem.is_valid(kinds, sizes):
            continue
        inputs = [DTensorSpec(mesh, tuple(problem.placement(name, ndim, kind) for kind in kinds), tensor_meta=x.tensor_meta)
                  for name, x, ndim in problem.inputs()]
        results = tuple(DTensorSpec(mesh, tuple(problem.placement(name, ndim, kind) for kind in kinds))
                        for name, ndim in problem.results())
        found.append(OpSpec(output_specs=results if len(results) > 1 else results[0], input_specs=inputs, redistribute_cost=[
            generate_redistribute_costs(x, spec) for (_, x, _), spec in zip(problem.inputs(), inputs)]))
    return OpStrategy(found)


@functools.cache
def register():
    """Makes the strategies known to DTensor, once. None, or why this torch does not take them."""
    try:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._dtensor_spec import DTensorSpec  # noqa: F401  what _strategy needs
        from torch.distributed.tensor._op_schema import OpSpec, OpStrategy, RuntimeSchemaInfo  # noqa: F401
        from torch.distributed.tensor._ops.utils import generate_redistribute_costs  # noqa: F401
        add = DTensor._op_dispatcher.sharding_propagator.register_op_strategy
    except (ImportError, AttributeError) as error:
        return f"this torch takes no sharding strategies as flash3 registers them: {error}"
    for kind in _RESULTS:
        operator = getattr(operators, kind).default
        # What torch keeps by a call's arguments, it keeps by all that are no tensors.
        first = [a.name for a in operator._schema.arguments].index("softmax_scale")
        add(operator, functools.partial(_strategy, kind), RuntimeSchemaInfo(first))
    return None
