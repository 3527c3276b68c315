# SPDX-License-Identifier: Apache-2.0
"""torch.ops.flash3: loads the operators (bindings/torch/) and gives them what torch wants of an operator besides its
kernels: fake kernels, gradients, and exceptions of the right type."""
import re

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from ._build import NAME
from ._library import CANCELLED, CUDA_ERROR, FOLDER, INTERNAL_ERROR, INVALID_ARGUMENT, OUT_OF_MEMORY, UNSUPPORTED, exception
from ._limits import WITH_GRADIENTS
from ._options import computes_fp8, number_of, number_of_word, rotation_seed, scale_or_default, scale_shape, window_sides

MINIMUM_TORCH = (2, 10)

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MINIMUM_TORCH:
    raise ImportError(f"torch is {torch.__version__} but flash3's operators need torch >= {'.'.join(map(str, MINIMUM_TORCH))}")
torch.ops.load_library(str(FOLDER / f"lib{NAME}_torch.so"))
operators = getattr(torch.ops, NAME)

try:
    # The result of a plain call, at half of what the operator costs; None: this one is for the operator.
    from ._eager import attention as eager
except ImportError:  # built without Python's headers, or not for this Python or torch: operators do all
    eager = None

_forward = operators.forward.default
_inference = operators.inference.default
# The same without a call of Python.
_forward_now, _inference_now = _forward._op, _inference._op
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
    """torch.library.register_fake for an operator of torch.ops.flash3."""
    names = [a.name for a in getattr(operators, name).default._schema.arguments]
    return lambda fake: torch.library.register_fake(f"{NAME}::{name}", on_one_device(names, fake)) and fake


@register_fake("forward")
def _fake_forward(q, k, v, softmax_scale=0.0, causal=False, heads_first=False, window_left=-1, window_right=-1, softcap=0.0, chunk=0,
                  sink=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=0, max_seqlen_k=0,
                  deterministic=False, q_scale=None, k_scale=None, v_scale=None, compute_fp8=False, rotation_seed=0,
                  sm_margin=0, fp8_sums=0, out_dtype=None, qv=None):
    *batch, rows, heads, _ = q.shape if not heads_first else q.transpose(-3, -2).shape
    out = q.new_empty((*batch, rows, heads, v.shape[-1]), dtype=out_dtype or (torch.bfloat16 if q.dtype == FP8 else q.dtype))
    lse = q.new_empty((*batch, heads, rows), dtype=torch.float32)
    return out.transpose(-3, -2) if heads_first else out, lse


@register_fake("inference")
def _(q, k, v, softmax_scale=0.0, causal=False, heads_first=False, *options, **named):
    return _fake_forward(q, k, v, heads_first=heads_first)[0]


@register_fake("backward")
def _(dout, dlse, q, k, v, out, lse, softmax_scale=0.0, causal=False, heads_first=False, window_left=-1, window_right=-1, softcap=0.0,
      chunk=0, sink=None, *options, **named):
    dsink = q.new_empty((0,), dtype=torch.float32) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


@register_fake("quantize")
def _(q=None, k=None, v=None, scale_ndim=3, heads_k=0, rotary_cos=None, rotary_sin=None, rotary_interleaved=False,
      rotary_offset_q=0, rotary_offset_k=0, rotate=False, rotation_seed=0, cu_seqlens_q=None, cu_seqlens_k=None, *options,
      **named):
    kv = v if k is None else k
    heads_k = kv.shape[-2] if kv is not None else heads_k or q.shape[-2]
    first = next(x for x in (q, k, v) if x is not None)
    given = ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))
    made = [first.new_empty((0,), dtype=torch.float32) if x is None else x.new_empty(x.shape, dtype=FP8) for x, _ in given]
    scales = [first.new_empty((0,) if x is None else scale_shape(x.shape, None if cu is None else cu.shape[0] - 1, scale_ndim,
                                                                 heads_k), dtype=torch.float32) for x, cu in given]
    return *made, *scales


for _name in ("forward_out", "backward_out", "quantize_out"):
    register_fake(_name)(lambda *args, **named: None)


# Options of forward and backward, as the schema has them behind the tensors: seven numbers, the sink and four tensors of lengths,
# two longest lengths and deterministic. Defaults at the end may be left out. inference has the first six, and forward has scales,
# compute, its seed, sm_margin, fp8_sums, out_dtype and qv behind them.
_PLAIN, _SINK, _LENGTHS, _FP8, _QV = 6, 7, 12, 15, 23


def save_forward(ctx, q, k, v, options, out, lse):
    """What gradients() needs; options: those of forward."""
    ctx.save_for_backward(q, k, v, out, lse, *options[_SINK:_LENGTHS])
    ctx.options = options[:_SINK], options[_LENGTHS:_FP8]
    ctx.set_materialize_grads(False)


def gradients(ctx, dout, dlse):
    """dq, dk, dv and dsink."""
    q, k, v, out, lse, *optional = ctx.saved_tensors
    if dout is None and dlse is None:
        return None, None, None, None
    if out.dtype != q.dtype:  # of a call that computed in FP8: its gradients are those of the 16-bit tensors
        out, dout = out.to(q.dtype), None if dout is None else dout.to(q.dtype)
    if dout is None:
        dout = torch.zeros_like(out)
    numbers, others = ctx.options
    try:
        dq, dk, dv, dsink = _run_backward(dout, dlse, q, k, v, out, lse, *numbers, *optional, *others)
    except RuntimeError as error:
        raise translated(error) from None
    return dq, dk, dv, dsink if optional and optional[0] is not None else None


def _run_backward(*inputs):
    if torch.compiler.is_compiling():
        return _backward(*inputs)
    if torch._C._are_functorch_transforms_active():
        return _TransformedBackward.apply(*inputs)
    if torch.is_grad_enabled():
        return _backward(*inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward(*inputs)


def _save_forward(ctx, inputs, output):
    q, k, v, *options = inputs
    if q.dtype == FP8:
        raise NotImplementedError(_NO_FP8_GRADIENTS)
    if len(options) > _QV and options[_QV] is not None:
        raise NotImplementedError(_NO_QV_GRADIENTS)
    save_forward(ctx, q, k, v, options, *output)


def _forward_gradient(ctx, dout, dlse):
    dq, dk, dv, dsink = gradients(ctx, dout, dlse)
    of_inputs = [dq, dk, dv, *(None,) * _SINK, dsink, *(None,) * (len(_forward._schema.arguments) - _SINK - 4)]
    return tuple(g if needed else None for g, needed in zip(of_inputs, ctx.needs_input_grad))


torch.library.register_autograd(f"{NAME}::forward", _forward_gradient, setup_context=_save_forward)


def _no_second_gradient(ctx, *gradients):
    raise NotImplementedError("flash3 has no second derivatives: the gradients of its backward are not implemented; torch has them, for "
                              "scaled_dot_product_attention in torch.nn.attention.sdpa_kernel(SDPBackend.MATH)")


def _no_gradient_of_codes(ctx, *gradients):
    raise NotImplementedError("flash3.quantize has no gradients")


def _no_gradient_of_inference(ctx, *gradients):
    raise NotImplementedError("torch.ops.flash3.inference has no gradients; torch.ops.flash3.forward has")


# Without these torch would warn once and give no gradient at all.
torch.library.register_autograd(f"{NAME}::backward", _no_second_gradient)
torch.library.register_autograd(f"{NAME}::quantize", _no_gradient_of_codes)
torch.library.register_autograd(f"{NAME}::inference", _no_gradient_of_inference)


class _Recorded(torch.autograd.Function):
    """What the operator's own autograd kernel does, at a third of its cost: torch makes that one for any operator."""

    @staticmethod
    def forward(ctx, q, k, v, sink, options):  # the sink is in options too, where autograd does not see it
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = _forward_now(q, k, v, *options)
        save_forward(ctx, q, k, v, options, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        return (*(g if needed else None for g, needed in zip(gradients(ctx, dout, dlse), ctx.needs_input_grad)), None)


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


def run_forward(q, k, v, options, sink=None, with_lse=True):
    """torch.ops.flash3.forward, whose options these are, sink among them, with its gradients and flash3's exceptions.

    Without with_lse the second result may be None.
    """
    if type(q) is not torch.Tensor:
        why_not_kind(type(q))
    if len(options) > _QV and options[_QV] is not None:
        _refuse_qv_gradients(q=q, k=k, v=v, sink=sink, qv=options[_QV])
    if torch.compiler.is_compiling():
        return _forward(q, k, v, *options)
    try:
        if is_differentiated(q, k, v, sink):
            _refuse_wide_gradients(q=q, v=v)
            if torch._C._are_functorch_transforms_active():
                defaults = [a.default_value for a in _forward._schema.arguments[3 + len(options):]]
                return _Transformed.apply(q, k, v, *options, *defaults)
            return _record(q, k, v, sink, options)
        with torch._C._AutoDispatchBelowAutograd():  # spares the operator's autograd kernel, which is Python
            if with_lse or len(options) > _PLAIN:
                return _forward_now(q, k, v, *options)
            return _inference_now(q, k, v, *options), None
    except RuntimeError as error:
        raise translated(error) from None


def all_options(scale, causal, left, right, softcap, chunk, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q,
                max_seqlen_k, deterministic):
    """The options of forward and backward, short where the last ones are defaults: each that is given costs time."""
    if sink is cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is None and deterministic is False and \
            not (max_seqlen_q or max_seqlen_k or chunk):
        if left == right == -1 and softcap == 0.0:
            return scale, causal
        return scale, causal, False, left, right, softcap
    return (scale, causal, False, left, right, softcap, chunk or 0, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
            max_seqlen_q or 0, max_seqlen_k or 0, deterministic)


def attention(q, k, v, causal, window, softmax_scale, softcap, chunk, sink, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
              max_seqlen_k, seqused_q, seqused_k, deterministic, q_scale, k_scale, v_scale, out_dtype, compute, seed, sm_margin,
              fp8_sums, with_lse, qv):
    """(out, lse) of flash3.attention for torch tensors; lse may be None without with_lse."""
    left, right = (-1, -1) if window is None else window_sides(window)
    if not (isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor) and k.device == q.device == v.device):
        check_companions("q", q, k=k, v=v)
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled():
        if qv is not None and isinstance(qv, torch.Tensor):
            qv = autocast(qv, k, v)[0]
        q, k, v = autocast(q, k, v)
    options = all_options(scale_or_default(softmax_scale), causal, left, right, number_of("softcap", softcap), chunk, sink,
                          cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, deterministic)
    if sm_margin or q.dtype == FP8 or seed or fp8_sums != "auto" or not (
            q_scale is k_scale is v_scale is out_dtype is compute is qv is None):
        options = _with_more(q, k, v, options, sink, q_scale, k_scale, v_scale, out_dtype, compute, seed, sm_margin, fp8_sums, qv)
    return run_forward(q, k, v, options, sink, with_lse)


_DEFAULTS = (0.0, False, False, -1, -1, 0.0, 0, None, None, None, None, None, 0, 0, False)


def with_more(options, *more):
    """options with those behind them that forward alone has: scales of q, k and v, and what comes then."""
    return (*options, *_DEFAULTS[len(options):], *more)


def _with_more(q, k, v, options, sink, q_scale, k_scale, v_scale, out_dtype, compute, seed, sm_margin, fp8_sums, qv):
    """options with all that forward alone has."""
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype is a {type(out_dtype).__name__} but it must be a torch.dtype")
    if q.dtype == FP8:
        _refuse_gradients(q=q, k=k, v=v, sink=sink, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    return with_more(options, q_scale, k_scale, v_scale, computes_fp8(compute), _signed(rotation_seed(seed)), sm_margin,
                     number_of_word("fp8_sums", fp8_sums), out_dtype, qv)


def attention_backward(dout, q, k, v, out, lse, dlse, *, causal, window, softmax_scale, softcap, chunk, sink, cu_seqlens_q,
                       cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, deterministic):
    """flash3.attention_backward for torch tensors."""
    left, right = (-1, -1) if window is None else window_sides(window)
    why_not_kind(type(q))
    try:
        dq, dk, dv, dsink = _backward(dout, dlse, q, k, v, out, lse, *all_options(
            scale_or_default(softmax_scale), causal, left, right, number_of("softcap", softcap), chunk, sink, cu_seqlens_q, cu_seqlens_k,
            seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, deterministic))
    except RuntimeError as error:
        raise translated(error) from None
    return dq, dk, dv, dsink if sink is not None else None


def _signed(seed):
    """A seed as the operators take it: torch's integers are signed."""
    return seed - 2**64 if seed >= 2**63 else seed


def quantize(tensors, scale_ndim, heads_k, rotary_cos, rotary_sin, rotary_interleaved, rotary_offset_q, rotary_offset_k,
             rotate, seed, *sequences):
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
        return _quantize(*tensors.values(), scale_ndim, heads_k, rotary_cos, rotary_sin, rotary_interleaved, rotary_offset_q,
                         rotary_offset_k, rotate, _signed(seed), *sequences)
    except RuntimeError as error:
        raise translated(error) from None
