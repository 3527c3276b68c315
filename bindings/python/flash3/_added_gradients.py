# SPDX-License-Identifier: Apache-2.0
"""Gradients of the tensors that the C headers have gained: what torch.ops.flash3.backward does not return, backward_out writes."""
import torch

from ._build import NAME
from ._fields import GRADIENTS
from ._torch_kinds import is_sharded

NO_SECOND = ("flash3 has no second derivatives: the gradients of its backward are not implemented; torch has them, for "
             "scaled_dot_product_attention in torch.nn.attention.sdpa_kernel(SDPBackend.MATH)")


_NAMES = frozenset(GRADIENTS)


def differentiated(arguments):
    """The names of those of them through which autograd records a call."""
    if _NAMES.isdisjoint(arguments) or not torch.is_grad_enabled():
        return ()
    return tuple(name for name in GRADIENTS if getattr(arguments.get(name), "requires_grad", False))


def backward_into(tensors, arguments, added):
    """dq, dk, dv and dsink, or None without a sink. tensors: dout, dlse, q, k, v, out, lse. added: {a gradient: its memory}."""
    made = [None if x is None else x.new_empty(x.shape) for x in (*tensors[2:5], arguments.get("sink"))]
    getattr(torch.ops, NAME).backward_out.default(*tensors, *made, **arguments, **added, fill_padding=True)
    return made


def backward_with(wanted, tensors, arguments):
    """The same, and those of wanted, the names of tensors."""
    added = {GRADIENTS[name]: arguments[name].new_empty(arguments[name].shape) for name in wanted}
    return *backward_into(tensors, arguments, added), *added.values()


class _Recorded(torch.autograd.Function):
    """The same of a backward that is recorded itself."""

    @staticmethod
    def forward(ctx, wanted, names, *inputs):
        of_tensors = len(inputs) - len(names)
        return backward_with(wanted, inputs[:of_tensors], dict(zip(names, inputs[of_tensors:])))

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(NO_SECOND)


def run(wanted, tensors, arguments):
    """backward_with(), for autograd and torch.compile."""
    if any(type(x) is not torch.Tensor and is_sharded(type(x)) for x in tensors):
        raise NotImplementedError(f"{wanted[0]}.requires_grad = True and q is a DTensor, for which flash3 has no such gradient; give "
                                  "to_local() of each")
    if torch.compiler.is_compiling():
        return backward_with(wanted, tensors, arguments)
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"{wanted[0]}.requires_grad = True but torch.func's transforms have no gradient of it")
    if torch.is_grad_enabled():
        return _Recorded.apply(wanted, tuple(arguments), *tensors, *arguments.values())
    return backward_with(wanted, tensors, arguments)
