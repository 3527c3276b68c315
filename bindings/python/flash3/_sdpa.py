# SPDX-License-Identifier: Apache-2.0
"""torch.nn.functional.scaled_dot_product_attention by flash3."""
import warnings

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from . import _overrides
from ._dropout import draw_state
from ._support import WITH_GRADIENTS as _MOST
from ._mask_kept import kept
from ._mask_make import kept_on
from ._mask_sources import MaskSource
from ._options import number_of
from ._torch import autocast, run_forward
from ._torch_kinds import is_sharded, why_not_kind

# ---- an attn_mask: of bool, as a mask of flash3; of floats, as its bias ----

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BIASES = (torch.float16, torch.bfloat16, torch.float32)


def why_not_mask(q, k, v, attn_mask, is_causal):
    """Why torch must do a call with this attn_mask, whatever the sizes are; None: flash3 does it.

    What records or transforms a call sees calls with torch's tensors: a mask that is made of their values would be taken for a constant.
    """
    dtype = getattr(attn_mask, "dtype", type(attn_mask).__name__)
    if dtype is not torch.bool and dtype not in _BIASES or not isinstance(attn_mask, torch.Tensor):
        return f"attn_mask is of {dtype}; flash3 takes one of bool, float16, bfloat16 and float32"
    if is_causal:
        return "attn_mask is given and is_causal"
    if dtype is not torch.bool:  # a bias: its values are not looked at
        return _why_not_bias(q, attn_mask)
    if torch.compiler.is_compiling():
        return "attn_mask is given in what torch.compile traces"
    if type(attn_mask) is not torch.Tensor or not all(type(x) in _PLAIN for x in (q, k, v)) or attn_mask.layout is not torch.strided:
        return "attn_mask is given, and not all are plain tensors"
    if torch._C._are_functorch_transforms_active() or torch.jit.is_tracing() or _get_current_dispatch_mode() is not None:
        return "attn_mask is given, and something traces or transforms the call"
    return None


def _why_not_bias(q, attn_mask):
    if (reason := why_not_kind(type(attn_mask))) is not None:
        return reason
    if attn_mask.layout is not torch.strided or attn_mask.is_nested:
        return "attn_mask is no plain tensor"
    if type(q) is not type(attn_mask) and (is_sharded(type(q)) or is_sharded(type(attn_mask))):
        return "query or attn_mask is a DTensor and the other is not"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "attn_mask is given, and torch.func transforms the call"
    return None


def _bias(attn_mask, batch, seq_k):
    """An attn_mask of floats as flash3's bias, [1 or batch, 1 or heads, 1 or seq_q, seq_k]; batch: q's dimensions before heads."""
    x = attn_mask[(None,) * (len(batch) + 3 - attn_mask.dim())]
    if x.dim() == 3:
        x = x[None]
    elif x.dim() > 4:
        front = batch if any(n != 1 for n in x.shape[:-3]) else x.shape[:-3]
        x = x.expand(*front, -1, -1, -1).flatten(0, -4)
    return x.expand(-1, -1, -1, seq_k)


def why_not_shape(q, k, attn_mask):
    if attn_mask.device != q.device:
        return "attn_mask is on another device"
    wanted = (*q.shape[:-1], k.shape[-2])
    if not 2 <= attn_mask.dim() <= len(wanted) or any(own not in (1, size) for own, size in zip(attn_mask.shape[::-1], wanted[::-1])):
        return "attn_mask does not broadcast, with at least two dimensions, to [batch, heads, seq_q, seq_k]"
    return None


def _source(attn_mask, batch, seq_q, seq_k):
    """batch: q's dimensions before heads."""
    x = attn_mask[(None,) * (len(batch) + 3 - attn_mask.dim())]
    if x.dim() == 3:
        x = x[None]
    elif x.dim() > 4:
        front = batch if any(n != 1 for n in x.shape[:-3]) else x.shape[:-3]
        x = x.expand(*front, -1, -1, -1).flatten(0, -4)
    x = x.expand(-1, -1, seq_q, seq_k)
    x = x if x.stride(3) == 1 else x.contiguous()
    return MaskSource("dense", dense=x.view(torch.uint8), seq_q=seq_q, seq_k=seq_k)


def mask_of(attn_mask, q, k, as_bool=lambda x: x):
    """The Mask of an attn_mask, kept with the tensor, or with that of which it is a view, for as long as it is unchanged.

    as_bool: makes a tensor of bool of it, always the same function for a dtype.

    It has room for all blocks, an eighth of a byte for each pair, so that nothing is waited for. While a CUDA graph is captured it is made
    anew: the graph then makes it again of what the tensor holds each time.
    """
    batch, (seq_q, seq_k) = q.shape[:-3], (q.shape[-2], k.shape[-2])

    def made():
        return _source(as_bool(attn_mask), batch, seq_q, seq_k).make(max_blocks=0)

    if attn_mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return made()
    owner = attn_mask if attn_mask._base is None else attn_mask._base
    view = attn_mask.dtype, attn_mask.storage_offset(), attn_mask.shape, attn_mask.stride()
    return kept(owner, (owner,), (view, batch, seq_q, seq_k, kept_on(attn_mask.device, "attn_mask", attn_mask)), made)


# ---- the call ----

_torch_sdpa = torch.nn.functional.scaled_dot_product_attention
_DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16, torch.float16)}
_said = set()


def say_once(reason, function="sdpa"):
    """One warning in the life of the process for each reason for which a function leaves a call to torch."""
    if (function, reason) not in _said:
        _said.add((function, reason))
        warnings.warn(f"flash3.{function} leaves this call to torch: {reason}", stacklevel=3)


_capabilities = {}  # torch takes microseconds for each answer


def _is_hopper(index):
    if index not in _capabilities:
        _capabilities[index] = torch.cuda.get_device_capability(index)
    return _capabilities[index] == (9, 0)


# What torch.compiler.assume_constant_result does, which would import all of the compiler.
_is_hopper._dynamo_marked_constant = True

_FLASH, _CUDNN = 1, 3  # of SDPBackend; the first of them is first in the order that torch has on its own


def _is_chosen(flash=torch._C._get_flash_sdp_enabled, efficient=torch._C._get_mem_efficient_sdp_enabled,
               math=torch._C._get_math_sdp_enabled, cudnn=torch._C._get_cudnn_sdp_enabled, order=torch._C._get_sdp_priority_order):
    """Whether torch was told which backends to use, or which first: by sdpa_kernel(), or torch.backends.cuda.enable_…_sdp().

    On a Hopper GPU torch itself puts cuDNN first at its first call.
    """
    if not (flash() and efficient() and math() and cudnn()):
        return True
    first, second, *_ = order()
    return (second if first == _CUDNN else first) != _FLASH


_is_chosen._dynamo_marked_constant = True


def _check_lengths(key, value):
    """Refuses keys and values of different lengths: some of torch's kernels read after the end of the shorter ones."""
    if isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor) and not (key.is_nested or value.is_nested) and \
            key.dim() >= 2 and value.dim() >= 2 and key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key.shape[-2] = {key.shape[-2]} but value.shape[-2] = {value.shape[-2]}; key and value must have the same "
                         "length")


_TOO_WIDE = f"a head dim is not from 1 to {_MOST}, which have gradients"
_SHAPES = "the shapes of query, key and value differ in more than lengths and head dims"


def _why_not_shapes(shape_q, shape_k, shape_v, enable_gqa):
    """What _why_not has to say of shapes that are not all the same."""
    if not 3 <= len(shape_q) == len(shape_k) == len(shape_v):
        return _SHAPES
    *batch, heads_q, _, dim = shape_q
    *batch_k, heads_k, seq_k, dim_k = shape_k
    *batch_v, heads_v, seq_v, _ = shape_v
    if batch != batch_k or batch != batch_v or heads_k != heads_v or seq_k != seq_v or dim != dim_k:
        return _SHAPES
    if heads_q != heads_k and not (enable_gqa and batch and heads_k > 0 and heads_q % heads_k == 0):
        return "query and key have different numbers of heads, without enable_gqa"
    return None


def _why_not_dropout(q, k, v, dropout_p):
    if not 0.0 < dropout_p < 1.0:
        return "dropout_p is not from 0 to below 1"
    return "dropout_p is not 0, and a tensor is a DTensor" if any(is_sharded(type(x)) for x in (q, k, v)) else None


def _why_not(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """Why torch must do this call; None: flash3 does it. What is wrong in itself goes to torch too, for its own error."""
    if not type(q) is type(k) is type(v) is torch.Tensor:
        reason = why_not_kind(type(q)) or why_not_kind(type(k)) or why_not_kind(type(v))
        if reason is not None:
            return reason
    if _is_chosen():
        return "torch was told which backends to use, by sdpa_kernel() or torch.backends.cuda"
    if attn_mask is not None and (reason := why_not_mask(q, k, v, attn_mask, is_causal)) is not None:
        return reason
    if dropout_p != 0.0 and (reason := _why_not_dropout(q, k, v, dropout_p)) is not None:
        return reason
    kind = "cuda" if q.is_cuda else "cpu" if q.is_cpu else q.device.type
    if kind not in _DTYPES:
        return f"query is on a device of type {kind}"
    device = q.device
    if k.device != device or v.device != device or q.is_nested or k.is_nested or v.is_nested or \
            not q.layout is k.layout is v.layout is torch.strided:
        return "query, key and value are not plain tensors of one device"
    dtypes = q.dtype, k.dtype, v.dtype
    if torch.is_autocast_enabled(kind):  # then they all become one
        dtypes = [torch.get_autocast_dtype(kind) if d in _DTYPES["cpu"] else d for d in dtypes]
    if dtypes[0] not in _DTYPES[kind] or dtypes[1] != dtypes[0] or dtypes[2] != dtypes[0]:
        return f"the dtypes are {', '.join(map(str, dtypes))} on {kind}"
    shape_q, shape_k, shape_v = q.shape, k.shape, v.shape
    if not shape_q == shape_k == shape_v or len(shape_q) < 3:
        reason = _why_not_shapes(shape_q, shape_k, shape_v, enable_gqa)
        if reason is not None:
            return reason
    if not (1 <= shape_q[-1] <= _MOST and 1 <= shape_v[-1] <= _MOST):
        return _TOO_WIDE
    if scale is not None and scale <= 0:
        return "scale is not greater than 0"
    if kind == "cuda" and not _is_hopper(device.index):
        return "the GPU is not of compute capability 9.0"
    return None if attn_mask is None else why_not_shape(q, k, attn_mask)


def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """torch.nn.functional.scaled_dot_product_attention, computed by flash3 where it can be.

    Arguments, shapes ([…, heads, seq, dim]) and meaning are torch's; is_causal is aligned to the top left corner. A bool attn_mask
    becomes a mask of flash3 (flash3.masks). It is kept with the tensor until torch's version counter says that the tensor, or the one that it
    is a view of, has changed; what is written through x.data or numpy is not counted. An attn_mask of float16, bfloat16 or float32 becomes
    flash3's bias, with its gradient. A query that sees no key gets 0.

    dropout_p is computed, but not of DTensors: torch's generator seeds it, but other weights are dropped than by torch.

    torch computes calls that flash3 does not support, with one warning for each reason: with an attn_mask of another dtype,
    with a bool attn_mask that torch.compile or torch.func traces, and others. torch also computes calls if it was told which backends
    to use, by torch.nn.attention.sdpa_kernel() or torch.backends.cuda.enable_flash_sdp() and its siblings, and calls with tensors of
    a class that flash3 does not support. It supports DTensor, sharded by batch and by heads.

    Raises:
        ValueError: key and value have different lengths.
        TypeError: scale is a tensor whose gradient would be lost.
        RuntimeError: torch refuses a call that is left to it.
    """
    if not (scale is None or isinstance(scale, (int, float))):
        scale = number_of("scale", scale)
    reason = _why_not(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if reason is not None:
        _check_lengths(key, value)
        if not torch.compiler.is_compiling():
            say_once(reason)
        return _torch_sdpa(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
                           enable_gqa=enable_gqa)
    shape, q, k, v = query.shape, query, key, value
    if len(shape) != 4:
        q, k, v = (x.unsqueeze(0) if len(shape) == 3 else x.flatten(0, -4) for x in (q, k, v))
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled():
        q, k, v = autocast(q, k, v)
    arguments = {"heads_first": True}
    if attn_mask is not None and attn_mask.dtype is not torch.bool:
        arguments["bias"] = _bias(attn_mask, shape[:-3], key.shape[-2])
    elif attn_mask is not None:
        mask = mask_of(attn_mask, query, key)
        arguments["mask"], arguments["mask_fields"] = mask.data, mask.fields
    if scale is not None:
        arguments["softmax_scale"] = scale
    if dropout_p != 0.0:
        arguments["dropout_p"], arguments["dropout_state"] = dropout_p, draw_state(q.device)
    if is_causal:
        arguments["causal"] = is_causal
        seq_q, seq_k = shape[-2], k.shape[2]
        if seq_q < seq_k:  # no query sees the keys after the square, and in the square both alignments are one
            k, v = k[:, :, :seq_q], v[:, :, :seq_q]
        elif seq_q > seq_k:
            del arguments["causal"]
            arguments["window_right"] = seq_q - seq_k
    out, _ = run_forward(q, k, v, arguments, with_lse=False)
    return out if len(shape) == 4 else out.reshape(*shape[:-1], value.shape[-1])


_functional = torch.nn.functional


def _router(*args, **kwargs):
    """What the name in torch.nn.functional means while any thread has an override."""
    return (_overrides.override("sdpa") or _torch_sdpa)(*args, **kwargs)


class sdpa_override(TorchFunctionMode):
    """A context manager in which every call of torch.nn.functional.scaled_dot_product_attention is flash3.sdpa.

    It applies to the thread that enters it, to names that were imported before, to torch's own modules, and to what torch.compile
    traces in it. It also applies to the threads in which autograd runs a backward() that is called in it, so that
    torch.utils.checkpoint repeats the same computation: if the forward call was inside, call backward() inside too. In those threads
    only the name in torch.nn.functional is overridden, not a name that was imported before. No other thread is affected.
    """

    # The mode sees calls by whatever name, but not those inside functions that a mode sees whole, as
    # multi_head_attention_forward and backward: they find the router. In autograd's threads no mode is on.

    _functions = {"sdpa": sdpa}  # what stands for what: a name of _overrides, and a function

    def __enter__(self):
        torch.overrides.get_overridable_functions()  # torch.compile goes by these; kept from the first call, they must not hold the router
        _overrides.push(**self._functions)
        _functional.scaled_dot_product_attention = _router
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        _overrides.pop()
        with _overrides.lock:
            if _overrides.users == 0:
                _functional.scaled_dot_product_attention = _torch_sdpa

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return (self._functions["sdpa"] if function is _torch_sdpa else function)(*args, **(kwargs or {}))
