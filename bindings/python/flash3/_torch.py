# SPDX-License-Identifier: Apache-2.0
"""torch.ops.flash3: loads the operators (bindings/torch/) and gives them what torch wants of an operator besides its
kernels: fake kernels, gradients, and exceptions of the right type."""
import re

import torch
from torch.autograd import forward_ad

from . import _added_gradients
from ._arguments import arguments_of, refuse_added_gradients, signed, with_defaults
from ._build import NAME
from ._fields import GRADIENTS, RESULTS, TENSORS
from ._library import CANCELLED, CUDA_ERROR, FOLDER, INTERNAL_ERROR, INVALID_ARGUMENT, OUT_OF_MEMORY, UNSUPPORTED, exception
from ._support import WITH_GRADIENTS
from ._options import scale_shape
from ._torch_kinds import is_sharded, why_not_kind

MINIMUM_TORCH = (2, 10)

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MINIMUM_TORCH:
    raise ImportError(f"torch is {torch.__version__} but flash3's operators need torch >= {'.'.join(map(str, MINIMUM_TORCH))}")
torch.ops.load_library(str(FOLDER / f"lib{NAME}_torch.so"))
operators = getattr(torch.ops, NAME)

try:
    # What a call returns, at half of what the operator costs; None: this one is for the operator.
    from ._eager import attention as eager, forward as _eager_forward
except ImportError:  # built without Python's headers, or not for this Python or torch: operators do all
    eager = _eager_forward = None

_forward = operators.forward.default
_inference = operators.inference.default
# The same without a call of Python.
_forward_now, _inference_now = _forward._op, _inference._op
_forward_out = operators.forward_out.default
_backward = operators.backward.default
_quantize = operators.quantize.default
FP8 = torch.float8_e4m3fn

_STATUS = {"invalid argument": INVALID_ARGUMENT, "unsupported": UNSUPPORTED, "cuda error": CUDA_ERROR,
           "out of memory": OUT_OF_MEMORY, "internal error": INTERNAL_ERROR, "cancelled": CANCELLED}
# The operators can only throw RuntimeError; the sentence says what it is: "flash3: unsupported: …".
_SENTENCE = re.compile(r"flash3: ([a-z ]+): (.*)", re.S)
# What torch says of an argument that does not fit the schema.
_NOT_IN_SCHEMA = re.compile(r"Expected a value of type '(.*?)' for argument '(\w+)' but instead found type '(.*?)'"
                            r"(?:\.\nPosition: \d+\nValue: (.*))?")


def translated(error):
    """The exception that an operator's RuntimeError stands for."""
    text = str(error)
    if (match := _SENTENCE.match(text)) and match[1] in _STATUS:
        return exception(_STATUS[match[1]], match[2])
    if match := _NOT_IN_SCHEMA.search(text):
        # An int is one of a float's values: this one is too large for either.
        if match[3] == "int" and match[1] in ("int", "float"):
            return ValueError(f"{match[2]} = {match[4]} but it must fit into 64 bits")
        return TypeError(f"{match[2]} is a {match[3]} but it must be of type {match[1]}")
    return error


def on_one_device(names, fake):
    """fake, a fake kernel whose arguments have these names, for tensors of one device.

    torch asks a fake kernel also where one tensor alone is on "meta", and what it allocates on another device, without values,
    would then pass for the result.
    """
    def checked(*args, **named):
        tensors = {name: x for name, x in (*zip(names, args), *named.items()) if isinstance(x, torch.Tensor)}
        if tensors:
            check_companions(*next(iter(tensors.items())), **tensors)
        return fake(*args, **named)
    return checked


def register_fake(name):
    """torch.library.register_fake for an operator of torch.ops.flash3, whose fake kernel gets its arguments by name."""
    names = [a.name for a in getattr(operators, name).default._schema.arguments]

    def register(fake):
        torch.library.register_fake(f"{NAME}::{name}", on_one_device(names, lambda *args, **named: fake(**dict(zip(names, args)), **named)))
        return fake
    return register


@register_fake("forward")
def _fake_forward(q, v, heads_first=False, out_dtype=None, **_):
    *batch, rows, heads = (q.transpose(-3, -2) if heads_first else q).shape[:-1]
    out = q.new_empty((*batch, rows, heads, v.shape[-1]), dtype=out_dtype or (torch.bfloat16 if q.dtype == FP8 else q.dtype))
    lse = q.new_empty((*batch, heads, rows), dtype=torch.float32)
    return out.transpose(-3, -2) if heads_first else out, lse


@register_fake("inference")
def _fake_inference(**named):
    return _fake_forward(**named)[0]


@register_fake("backward")
def _fake_backward(q, k, v, sink=None, **_):
    dsink = q.new_empty((0,), dtype=torch.float32) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


@register_fake("quantize")
def _fake_quantize(q=None, k=None, v=None, scale_ndim=3, heads_k=0, cu_seqlens_q=None, cu_seqlens_k=None, **_):
    kv = v if k is None else k
    heads_k = kv.shape[-2] if kv is not None else heads_k or q.shape[-2]
    first = next(x for x in (q, k, v) if x is not None)
    given = ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))
    made = [first.new_empty((0,), dtype=torch.float32) if x is None else x.new_empty(x.shape, dtype=FP8) for x, _ in given]
    scales = [first.new_empty((0,) if x is None else scale_shape(x.shape, None if cu is None else cu.shape[0] - 1, scale_ndim,
                                                                 heads_k), dtype=torch.float32) for x, cu in given]
    return *made, *scales


for _name in ("forward_out", "backward_out", "quantize_out"):
    register_fake(_name)(lambda **named: None)


def _names(operator):
    return tuple(a.name for a in operator._schema.arguments)


_TENSORS = frozenset((*TENSORS["forward"], "mask"))
_OF_FORWARD, _OF_INFERENCE, _OF_BACKWARD = _names(_forward), frozenset(_names(_inference)), frozenset(_names(_backward))


def save_forward(ctx, q, k, v, arguments, out, lse):
    """What gradients() needs; arguments: those of forward other than the tensors, by name."""
    if _TENSORS.isdisjoint(arguments):
        ctx.names, ctx.others = (), arguments
        ctx.save_for_backward(q, k, v, out, lse)
    else:
        names = ctx.names = [name for name in arguments if name in _TENSORS and arguments[name] is not None]
        ctx.others = {name: x for name, x in arguments.items() if name not in _TENSORS}
        ctx.save_for_backward(q, k, v, out, lse, *map(arguments.__getitem__, names))
    ctx.set_materialize_grads(False)


def gradients(ctx, dout, dlse, wanted=()):
    """dq, dk, dv and dsink, and those of wanted, of GRADIENTS."""
    q, k, v, out, lse, *optional = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * (4 + len(wanted))
    if out.dtype != q.dtype:  # of a call that computed in FP8: its gradients are those of the 16-bit tensors
        out, dout = out.to(q.dtype), None if dout is None else dout.to(q.dtype)
    if dout is None:
        dout = torch.zeros_like(out)
    arguments = {name: x for name, x in (*ctx.others.items(), *zip(ctx.names, optional)) if name in _OF_BACKWARD}
    try:
        dq, dk, dv, dsink, *added = _run_backward((dout, dlse, q, k, v, out, lse), arguments, wanted)
    except RuntimeError as error:
        raise translated(error) from None
    return dq, dk, dv, dsink if "sink" in ctx.names else None, *added


def _run_backward(tensors, arguments, wanted=()):
    if wanted:
        return _added_gradients.run(wanted, tensors, arguments)
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        return _TransformedBackward.apply(*tensors, *with_defaults(_backward, arguments, len(tensors)))
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return _backward(*tensors, **arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward(*tensors, **arguments)


def _save_forward(ctx, inputs, output):
    q, k, v, *_ = inputs
    arguments = dict(zip(_OF_FORWARD[3:], inputs[3:]))
    if q.dtype == FP8:
        raise NotImplementedError(_NO_FP8_GRADIENTS)
    if arguments.get("qv") is not None:
        raise NotImplementedError(_NO_QV_GRADIENTS)
    refuse_added_gradients(arguments)
    save_forward(ctx, q, k, v, arguments, *output)


def _forward_gradient(ctx, dout, dlse):
    needed = dict(zip(_OF_FORWARD, ctx.needs_input_grad))
    wanted = tuple(name for name in GRADIENTS if needed.get(name))
    of_inputs = dict(zip(("q", "k", "v", "sink", *wanted), gradients(ctx, dout, dlse, wanted)))
    return tuple(of_inputs.get(name) if needed else None for name, needed in zip(_OF_FORWARD, ctx.needs_input_grad))


torch.library.register_autograd(f"{NAME}::forward", _forward_gradient, setup_context=_save_forward)


def _no_second_gradient(ctx, *gradients):
    raise NotImplementedError(_added_gradients.NO_SECOND)


def _no_gradient_of_codes(ctx, *gradients):
    raise NotImplementedError("flash3.quantize has no gradients")


def _no_gradient_of_inference(ctx, *gradients):
    raise NotImplementedError("torch.ops.flash3.inference has no gradients; torch.ops.flash3.forward has")


# Without these torch would warn once and give no gradient at all.
torch.library.register_autograd(f"{NAME}::backward", _no_second_gradient)
torch.library.register_autograd(f"{NAME}::quantize", _no_gradient_of_codes)
torch.library.register_autograd(f"{NAME}::inference", _no_gradient_of_inference)


def _attend_now(q, k, v, arguments, with_lse=True):
    """(out, lse) of a call that only autograd would see, which does not see it; without with_lse the second may be None."""
    if _eager_forward is not None:
        results = _eager_forward(q, k, v, arguments, with_lse)
        if results is not None:
            return results
    with torch._C._AutoDispatchBelowAutograd():  # spares the operator's autograd kernel, which is Python
        if with_lse or not _OF_INFERENCE.issuperset(arguments):
            return _attend_by_operator(q, k, v, arguments, _forward_now)
        return _inference_now(q, k, v, **arguments), None


_WRITTEN = frozenset(RESULTS["forward"])


def _attend_by_operator(q, k, v, arguments, forward):
    """(out, lse) of an operator: forward, or of a call that writes more, which is into the caller's memory, forward_out."""
    if _WRITTEN.isdisjoint(arguments):
        return forward(q, k, v, **arguments)
    arguments = dict(arguments)
    out, lse = empty_results(q, v, arguments.pop("out_dtype", None))
    _forward_out(q, k, v, out, lse, **arguments, fill_padding=True)
    return out, lse


def empty_results(q, v, out_dtype):
    """Memory for (out, lse)."""
    for name, x in (("q", q), ("v", v)):
        if x.dim() not in (3, 4):
            raise ValueError(f"{name}.ndim = {x.dim()} but it must be 4, [batch, seq, heads, dim], or packed 3, [total, heads, dim]")
    *batch, seq, heads = q.shape[:-1]
    dtype = out_dtype or (torch.bfloat16 if q.dtype == FP8 else q.dtype)
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype), q.new_empty((*batch, heads, seq), dtype=torch.float32)


class _Recorded(torch.autograd.Function):
    """What the operator's own autograd kernel does, at a third of its cost: torch makes that one for any operator."""

    @staticmethod
    def forward(ctx, q, k, v, sink, arguments, wanted=(), *added):  # sink and added are in arguments too, where autograd does not see them
        out, lse = _attend_now(q, k, v, arguments)
        if not _WRITTEN.isdisjoint(arguments):
            arguments = {name: x for name, x in arguments.items() if name not in _WRITTEN}
        save_forward(ctx, q, k, v, arguments, out, lse)
        ctx.wanted = wanted
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        made = gradients(ctx, dout, dlse, ctx.wanted)
        return (*(g if needed else None for g, needed in zip(made[:4], ctx.needs_input_grad)), None, None, *made[4:])


# Function.apply without its Python part, which is for torch.func's transforms.
_record = super(torch.autograd.Function, _Recorded).apply


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


_AUTOCAST = (torch.float16, torch.bfloat16, torch.float32)


def autocast(q, k, v):
    """q, k and v in autocast's dtype where autocast is on for their device, as torch does for its own attention."""
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x.to(dtype) if x.dtype in _AUTOCAST else x for x in (q, k, v))
    return q, k, v


_NO_FP8_GRADIENTS = ("FP8 has no gradients; compute=\"fp8\" takes 16-bit tensors and has theirs, and flash3.attention_backward "
                     "takes the tensors that became FP8")
_NO_QV_GRADIENTS = ("there are no gradients of a call with qv; call it under torch.no_grad(), or give k and v with their rows side "
                    f"by side as k, up to {WITH_GRADIENTS} wide")


def _refuse_qv_gradients(**tensors):
    if is_differentiated(*tensors.values()):
        names = [name for name, x in tensors.items() if getattr(x, "requires_grad", False)]
        raise NotImplementedError(f"{names[0]}.requires_grad = True but qv is given; {_NO_QV_GRADIENTS}")


def _refuse_gradients(**tensors):
    if torch.is_grad_enabled():
        for name, x in tensors.items():
            if isinstance(x, torch.Tensor) and x.requires_grad:
                raise NotImplementedError(f"{name}.requires_grad = True but q.dtype = float8_e4m3fn; {_NO_FP8_GRADIENTS}")


def is_differentiated(q, k, v, sink, qv=None):
    """Whether autograd records a call with these inputs."""
    if forward_ad._current_level >= 0:
        for x in (q, k, v, sink, qv):
            if x is not None and forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError("flash3 has no forward-mode derivatives, and an input has a tangent")
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or
                                        getattr(sink, "requires_grad", False) or getattr(qv, "requires_grad", False))


def _refuse_wide_gradients(**tensors):
    for name, x in tensors.items():
        if x.dim() and x.shape[-1] > WITH_GRADIENTS:
            raise NotImplementedError(f"{name}.shape[{x.dim() - 1}] = {x.shape[-1]} but with gradients a head dim must be at most "
                                      f"{WITH_GRADIENTS}; call it under torch.no_grad() if none is wanted")


def check_companions(name, first, **others):
    """The others are torch tensors too, and of the device of the first one."""
    device = first.device
    for other, x in others.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{other} is a {type(x).__name__} but it must be a torch tensor, as {name} is")
        if x.device != device:
            raise ValueError(f"{other}.device = {x.device} but {name}.device = {device}; all tensors must be on one device")


def _refuse_shards(**tensors):
    """Of a call that writes memory of the caller's."""
    written = next(name for name in RESULTS["forward"] if name in tensors)
    for name, x in tensors.items():
        if is_sharded(type(x)):
            raise NotImplementedError(f"{name} is a DTensor but {written} is given; calls with {written} are for plain tensors: give "
                                      "to_local() of each")


def _refuse_sharded_mask(q, arguments):
    if arguments.get("mask") is not None and is_sharded(type(q)):
        raise NotImplementedError("mask is given and q is a DTensor; a mask is of whole tensors: give it the local parts, and each a mask of "
                                  "its own sizes")


def run_forward(q, k, v, arguments, with_lse=True):
    """torch.ops.flash3.forward, with its gradients and flash3's exceptions; arguments: what is given other than the tensors, by name.

    Without with_lse the second result may be None.
    """
    if type(q) is not torch.Tensor:
        _refuse_sharded_mask(q, arguments)
        why_not_kind(type(q))
    sink, qv = arguments.get("sink"), arguments.get("qv")
    if qv is not None:
        _refuse_qv_gradients(q=q, k=k, v=v, sink=sink, qv=qv)
    refuse_added_gradients(arguments)
    added = _added_gradients.differentiated(arguments)
    if added and q.dtype == FP8:
        raise NotImplementedError(f"{added[0]}.requires_grad = True but q.dtype = float8_e4m3fn; {_NO_FP8_GRADIENTS}")
    if added and qv is not None:
        raise NotImplementedError(f"{added[0]}.requires_grad = True but qv is given; {_NO_QV_GRADIENTS}")
    writes = [] if _WRITTEN.isdisjoint(arguments) else [name for name in RESULTS["forward"] if name in arguments]
    if writes:
        _refuse_shards(q=q, k=k, v=v, **arguments)
    if torch.compiler.is_compiling():
        if writes and torch.is_grad_enabled() and (added or any(x is not None and x.requires_grad for x in (q, k, v, sink))):
            raise NotImplementedError(f"{writes[0]} is given but a graph of torch.compile has no gradients of a call that writes it; "
                                      "without fullgraph the call runs outside of the graph")
        return _attend_by_operator(q, k, v, arguments, _forward)
    try:
        if added or is_differentiated(q, k, v, sink):
            _refuse_wide_gradients(q=q, v=v)
            if torch._C._are_functorch_transforms_active():
                if writes:
                    raise NotImplementedError(f"{writes[0]} is given but torch.func's transforms have no gradients of a call that writes it")
                return _Transformed.apply(q, k, v, *with_defaults(_forward, arguments, 3))
            return _record(q, k, v, sink, arguments, added, *map(arguments.__getitem__, added))
        return _attend_now(q, k, v, arguments, with_lse)
    except RuntimeError as error:
        if writes and "Batching rule not implemented" in str(error):
            raise NotImplementedError(f"{writes[0]} is given but torch.vmap cannot batch a call that writes it") from None
        raise translated(error) from None


def attention(q, k, v, options, with_lse):
    """(out, lse) of flash3.attention for torch tensors; lse may be None without with_lse."""
    arguments = arguments_of("attention", options)
    if not (isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor) and k.device == q.device == v.device):
        check_companions("q", q, k=k, v=v)
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled():
        if isinstance(arguments.get("qv"), torch.Tensor):
            arguments["qv"] = autocast(arguments["qv"], k, v)[0]
        q, k, v = autocast(q, k, v)
    if q.dtype == FP8:
        _refuse_gradients(q=q, k=k, v=v, **{name: arguments.get(name) for name in ("sink", "q_scale", "k_scale", "v_scale")})
    return run_forward(q, k, v, arguments, with_lse)


def attention_backward(dout, q, k, v, out, lse, options):
    """flash3.attention_backward for torch tensors."""
    arguments = arguments_of("attention_backward", options)
    _refuse_sharded_mask(q, arguments)
    why_not_kind(type(q))
    tensors = dout, arguments.pop("dlse", None), q, k, v, out, lse
    added = {name: arguments.pop(name) for name in GRADIENTS.values() if name in arguments}
    try:
        dq, dk, dv, dsink = _added_gradients.backward_into(tensors, arguments, added) if added else _backward(*tensors, **arguments)
    except RuntimeError as error:
        raise translated(error) from None
    return dq, dk, dv, dsink if "sink" in arguments else None


def quantize(tensors, rotation_seed, **options):
    """flash3.quantize for torch tensors: six of them, of which those for what is not given are empty."""
    given = {name: x for name, x in tensors.items() if x is not None}
    name, first = next(iter(given.items()))
    check_companions(name, first, **given)
    if torch.is_grad_enabled():
        for name, x in given.items():
            if x.requires_grad:
                raise NotImplementedError(f"{name}.requires_grad = True but flash3.quantize has no gradients; give it "
                                          f"{name}.detach(), or call it under torch.no_grad()")
    try:
        return _quantize(**tensors, rotation_seed=signed(rotation_seed), **options)
    except RuntimeError as error:
        raise translated(error) from None
