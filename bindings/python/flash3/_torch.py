"""torch.ops.flash3: loads the operators (bindings/torch/ops.cpp) and gives them what torch wants of an operator besides its
kernels: fake kernels, gradients, and exceptions of the right type."""
import re

import torch
from torch.autograd import forward_ad

from ._library import CUDA_ERROR, FOLDER, INTERNAL_ERROR, INVALID_ARGUMENT, OUT_OF_MEMORY, UNSUPPORTED, exception
from .arrays import scale_or_default, window_sides

MINIMUM_TORCH = (2, 10)

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MINIMUM_TORCH:
    raise ImportError(f"torch is {torch.__version__} but flash3's operators need torch >= {'.'.join(map(str, MINIMUM_TORCH))}")
torch.ops.load_library(str(FOLDER / "libflash3_torch.so"))

_forward = torch.ops.flash3.forward.default
_backward = torch.ops.flash3.backward.default

_STATUS = {"invalid argument": INVALID_ARGUMENT, "unsupported": UNSUPPORTED, "cuda error": CUDA_ERROR,
           "out of memory": OUT_OF_MEMORY, "internal error": INTERNAL_ERROR}
# The operators can only throw RuntimeError; the sentence says what it is: "flash3: unsupported: …".
_SENTENCE = re.compile(r"flash3: ([a-z ]+): (.*)", re.S)
# What torch says of an argument that does not fit the schema.
_NOT_IN_SCHEMA = re.compile(r"Expected a value of type '(.*?)' for argument '(\w+)' but instead found type '(.*?)'")


def translated(error):
    """The exception that an operator's RuntimeError stands for."""
    text = str(error)
    if (match := _SENTENCE.match(text)) and match[1] in _STATUS:
        return exception(_STATUS[match[1]], match[2])
    if match := _NOT_IN_SCHEMA.search(text):
        return TypeError(f"{match[2]} is a {match[3]} but it must be of type {match[1]}")
    return error


@torch.library.register_fake("flash3::forward")
def _(q, k, v, *options, **named):
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    *batch, seq, heads = q.shape[:-1]
    return out, q.new_empty((*batch, heads, seq), dtype=torch.float32)


@torch.library.register_fake("flash3::backward")
def _(dout, dlse, q, k, v, out, lse, sink=None, *options, **named):
    dsink = q.new_empty((0,), dtype=torch.float32) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


@torch.library.register_fake("flash3::forward_out")
def _(*args, **named):
    return None


@torch.library.register_fake("flash3::backward_out")
def _(*args, **named):
    return None


def _save_forward(ctx, inputs, output):
    q, k, v, sink, cu_q, cu_k, used_q, used_k, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, sink, cu_q, cu_k, used_q, used_k)
    ctx.set_materialize_grads(False)


def _forward_gradient(ctx, dout, dlse):
    q, k, v, out, lse, *optional = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * (8 + len(ctx.options))
    if dout is None:
        dout = torch.zeros_like(out)
    try:
        dq, dk, dv, dsink = _run_backward(dout, dlse, q, k, v, out, lse, *optional, *ctx.options)
    except RuntimeError as error:
        raise translated(error) from None
    gradients = [g if needed else None for g, needed in zip((dq, dk, dv, dsink), ctx.needs_input_grad)]
    return (*gradients, *(None,) * (4 + len(ctx.options)))


def _run_backward(*inputs):
    if torch.compiler.is_compiling():
        return _backward(*inputs)
    if torch._C._are_functorch_transforms_active():
        return _TransformedBackward.apply(*inputs)
    if torch.is_grad_enabled():
        return _backward(*inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward(*inputs)


torch.library.register_autograd("flash3::forward", _forward_gradient, setup_context=_save_forward)


def _no_second_gradient(ctx, *gradients):
    raise NotImplementedError("flash3 has no second derivatives: the gradients of its backward are not implemented")


# Without this torch would warn once and give no gradient at all.
torch.library.register_autograd("flash3::backward", _no_second_gradient)


class _Recorded(torch.autograd.Function):
    """What the operator's own autograd kernel does, at a third of its cost: torch makes that one for any operator."""

    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            output = _forward(*inputs)
        _save_forward(ctx, inputs, output)
        return output

    backward = staticmethod(_forward_gradient)


class _Transformed(torch.autograd.Function):
    """The same for torch.func's transforms, which take no other form."""
    generate_vmap_rule = True
    forward = staticmethod(lambda *inputs: _forward(*inputs))
    setup_context = staticmethod(_save_forward)
    backward = staticmethod(_forward_gradient)


class _TransformedBackward(torch.autograd.Function):
    generate_vmap_rule = True
    forward = staticmethod(lambda *inputs: _backward(*inputs))
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(_no_second_gradient)


def _autocast(q, k, v):
    """q, k and v in autocast's dtype where autocast is on, as torch does for its own attention."""
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v


def is_differentiated(q, k, v, sink):
    """Whether autograd records a call with these inputs."""
    inputs = (q, k, v) if sink is None else (q, k, v, sink)
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise NotImplementedError("flash3 has no forward-mode derivatives, and an input has a tangent")
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def attention(q, k, v, *, causal, window, softmax_scale, softcap, chunk, sink, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
              max_seqlen_k, seqused_q, seqused_k, deterministic, return_lse):
    """flash3.attention for torch tensors."""
    left, right = (-1, -1) if window is None else window_sides(window)
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__} but it must be a torch tensor, as q is")
        if x.device != q.device:
            raise ValueError(f"{name}.device = {x.device} but q.device = {q.device}; all tensors must be on one device")
    q, k, v = _autocast(q, k, v)
    arguments = (q, k, v, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q or 0, max_seqlen_k or 0,
                 scale_or_default(softmax_scale), causal, left, right, softcap, chunk or 0, deterministic)
    if torch.compiler.is_compiling():
        out, lse = _forward(*arguments)
    else:
        try:
            if is_differentiated(q, k, v, sink):
                transformed = torch._C._are_functorch_transforms_active()
                out, lse = (_Transformed if transformed else _Recorded).apply(*arguments)
            else:
                with torch._C._AutoDispatchBelowAutograd():  # spares the operator's autograd kernel, which is Python
                    out, lse = _forward(*arguments)
        except RuntimeError as error:
            raise translated(error) from None
    return (out, lse) if return_lse else out


def attention_backward(dout, q, k, v, out, lse, dlse, *, causal, window, softmax_scale, softcap, chunk, sink, cu_seqlens_q,
                       cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, deterministic):
    """flash3.attention_backward for torch tensors."""
    left, right = (-1, -1) if window is None else window_sides(window)
    try:
        dq, dk, dv, dsink = _backward(dout, dlse, q, k, v, out, lse, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
                                      max_seqlen_q or 0, max_seqlen_k or 0, scale_or_default(softmax_scale), causal, left,
                                      right, softcap, chunk or 0, deterministic)
    except RuntimeError as error:
        raise translated(error) from None
    return dq, dk, dv, dsink if sink is not None else None
