# SPDX-License-Identifier: Apache-2.0
"""Which classes of tensors torch's operators take."""
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

# Kinds of tensors, and whether the operators take them: None, or why not. Subclasses of Tensor may do anything with an operator.
_kinds = dict.fromkeys((torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor))


def why_not_kind(kind):
    """None, or why tensors of this class are not for the operators; of DTensor it makes known how they are sharded."""
    if kind not in _kinds:
        name = f"{kind.__module__}.{kind.__qualname__}"
        _kinds[kind] = f"a tensor is a {name}, which flash3 does not know"
        if name == "torch.distributed._functional_collectives.AsyncCollectiveTensor":  # waits, and is a plain one then
            _kinds[kind] = None
        if name == "torch.distributed.tensor.DTensor":
            from ._sharding import register
            _kinds[kind] = register()
    return _kinds[kind]


why_not_kind._dynamo_marked_constant = True  # what torch.compiler.assume_constant_result does, which would import all of the compiler


def is_sharded(kind):
    return f"{kind.__module__}.{kind.__qualname__}" == "torch.distributed.tensor.DTensor"


is_sharded._dynamo_marked_constant = True
