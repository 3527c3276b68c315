# SPDX-License-Identifier: Apache-2.0
"""attention() and what belongs to it, for torch tensors and for arrays."""
import importlib.util
from typing import NamedTuple

from . import arrays
from ._dropout import draw_state, in_c_names, with_state
from ._fields import OPTIONS, RESULTS, SIGNATURES, TENSORS
from ._options import computes_fp8, describes_added, given_options, takes_options
from ._results import check_dims as _check_dims, dtype_of_out as _dtype_of_out
from ._support import support_of
from ._tensors import E4M3, describe

if importlib.util.find_spec("torch"):
    import torch

    try:
        from . import _torch
        _why_no_torch = None
    except (ImportError, OSError) as error:  # too old a torch: arrays still work
        _torch, _why_no_torch = None, str(error)
else:
    torch = _torch = None
_eager = getattr(_torch, "eager", None)
if _torch is None:
    _overrides = _mask_make = None
else:
    from . import _mask_make, _overrides


def _is_torch(x):
    if torch is None or not isinstance(x, torch.Tensor):
        return False
    if _torch is None:
        raise RuntimeError(f"flash3 cannot take torch tensors: {_why_no_torch}")
    return True


class Gradients(NamedTuple):
    """The gradients of one attention() call."""
    dq: object  #: of q's shape and dtype
    dk: object  #: of k's shape and dtype
    dv: object  #: of v's shape and dtype
    dsink: object  #: of the sink's shape and dtype; None if there was no sink


@takes_options
@describes_added
def attention(q, k, v, **options):
    """Exact attention: softmax(softmax_scale * q @ k^T + mask) @ v, without ever storing the scores.

    Computed tile by tile with an online softmax (FlashAttention-3, arXiv:2407.08608).

    Tensors are torch tensors, on the CPU or a Hopper GPU, and then this is differentiable in q, k, v, sink, and through lse
    too; or they are numpy arrays or other host tensors with __array_interface__ or __dlpack__, and then results are numpy
    arrays.

    Args:
        q: [batch, seq_q, heads_q, head_dim]; float16, bfloat16, on the CPU float32, or FP8 (float8_e4m3fn). Any strides.
        k: [batch, seq_k, heads_k, head_dim] of the same dtype; heads_q is a multiple of heads_k (GQA, MQA).
        v: [batch, seq_k, heads_k, head_dim_v] of the same dtype. Both head dims are from
            1 to 256, and on the CPU, without gradients and FP8, head_dim to 576 and head_dim_v to 512.
        causal: query i sees keys up to i' = i + seq_k - seq_q: the mask is aligned to the bottom right corner, unless
            mask_alignment says otherwise.
        window: (left, right): query i sees keys from i' - left to i' + right. None or a negative number: unbounded on that
            side.
        softmax_scale: from 1e-18 to 1e18; None: 1/sqrt(head_dim).
        softcap: from 1e-18 to 1e18 (on a GPU from 1e-6 to 1e6): scores become softcap * tanh(score / softcap) before the mask. 0: none.
        chunk: > 0: query i sees keys of its own chunk alone, floor(j / chunk) = floor(i' / chunk). 0: none.
        sink: [heads_q], float32 or of q's dtype: one more logit per head in the softmax, without a value.
        cu_seqlens_q: [batch + 1] int32: q and the result are packed, [total_q, heads_q, dim], and sequence b has the rows
            from cu_seqlens_q[b] to just before cu_seqlens_q[b + 1]; lse is [heads_q, total_q]. Rows before the first sequence and
            after the last are 0 in the result and in gradients, and -inf in lse.
        cu_seqlens_k: [batch + 1] int32: likewise k and v.
        max_seqlen_q, max_seqlen_k: with cu_seqlens, no sequence is longer. Optional; they help to choose the kernel.
        seqused_q, seqused_k: [batch] int32: only the first tokens of each sequence count.
        deterministic: gradients have the same bits each time.
        q_scale, k_scale, v_scale: float32, with FP8 tensors: an element's value is multiplied by its scale. [1], one for
            the tensor; [batch, heads_k], one for each sequence and KV head (q's too: that of the KV head that it reads); or
            [batch, heads, blocks], one for each 128 tokens of each head, with blocks = ceil(seq / 128); for packed tensors
            [1, heads, total // 128 + batch], where block j of sequence b is number cu_seqlens[b] // 128 + b + j. None: 1.
            flash3.quantize makes such tensors.
        out_dtype: the result's dtype, with FP8 tensors or compute: float16, bfloat16 or float32; with 16-bit tensors float32,
            which is not rounded. None: bfloat16 for FP8 tensors, otherwise q's.
        compute: "fp8": 16-bit q, k and v (CPU: float32 too) are converted to FP8 in the call, with scales for blocks and a rotation.
            Gradients are then computed in q's dtype, from q, k and v as they are. None: in q's dtype.
        rotation_seed: with compute: the seed of the rotation's signs, from 0 to 2**64 - 1.
        sm_margin: on a GPU, the multiprocessors that the forward's kernels leave to others, such as a collective's; those for gradients
            leave none. No result depends on it.
        fp8_sums: with FP8 tensors or compute, how a GPU adds up weights times v: "one" level, in the tensor cores, whose long sums
            shrink; "two", with float32 sums above, which takes longer; "auto": "two" where a query may see more than 2048 keys.
        return_lse: return (out, lse); lse is [batch, heads_q, seq_q] float32, the natural logarithm of the softmax's sum.
        qv: [batch, seq_q, heads_q, head_dim_v], or packed as q: a second part of q, which is multiplied with v. Scores are then
            softmax_scale * (q @ k^T + qv @ v^T), and the default softmax_scale is 1/sqrt(head_dim + head_dim_v). No gradients, no FP8.
        mask: a source of flash3.masks: query i sees the keys that both the source and the band (causal, window, chunk) allow. The mask
            is made once for this call's sizes and device, and kept. Or a Mask that was made for this call's sizes; the band must then
            be none, or the one of the mask. Arrays other than torch tensors take only a Mask. Not with qv or
            compute, or, on a GPU, with FP8 tensors and a softcap.
        dropout_p: from 0, none, to below 1, rounded to a multiple of 2**-16: a weight is dropped with this probability, and the others
            are divided by 1 - dropout_p. lse includes all weights. Not with FP8, compute or qv.
        seed, offset: from 0 to 2**64 - 1: they alone choose the weights that are dropped, as flash3.dropout_mask shows. seed=None:
            torch's generator of the tensors' device, which torch.manual_seed seeds, draws a dropout_state; DTensors and arrays other
            than torch tensors need a seed.
        mask_alignment: "bottom_right"; "top_left": i' = i for causal, window and chunk, for each sequence, as
            torch's scaled_dot_product_attention and JAX mean them.

    Returns:
        out [batch, seq_q, heads_q, head_dim_v] of q's dtype or out_dtype; with return_lse, (out, lse). A query that sees no key
        gets 0, and lse = -inf.

    Raises:
        TypeError: a dtype, or what an argument is, breaks a rule.
        ValueError: any other argument breaks a rule. The message names it, both values and the rule.
        NotImplementedError: a valid call that cannot run here; the message says what could.
        RuntimeError: CUDA refused.
        MemoryError: host memory ran out.
    """
    if _overrides is not None and _overrides.users and (other := _overrides.override("attention")) is not None:
        return other(q, k, v, **given_options("attention", options))
    if "dropout_p" in options or "seed" in options or "offset" in options:
        options = with_state(options, _state_of(q))
    if _eager is not None and not torch.compiler.is_compiling():  # what a compiler traces is the operator
        result = _eager(q, k, v, options)
        if result is not None:
            return result
    with_lse = options.pop("return_lse", False)
    if _is_torch(q):
        options = _mask_make.with_mask_made(q, k, options)
        out, lse = _torch.attention(q, k, v, options, with_lse)
        return (out, lse) if with_lse else out
    options = in_c_names(given_options("attention", options))
    options.pop("deterministic", None)
    q, k, v, qv = (_contiguous_last(x) for x in (q, k, v, options.pop("qv", None)))
    out, lse = _results(_host("q", q), _host("v", v), options.pop("out_dtype", None), with_lse)
    arrays.forward(q, k, v, out, lse, qv=qv, **options)
    return (out, lse) if with_lse else out


def _state_of(q):
    """What draws the state of a call's dropout; None: the caller has to say it."""
    if not _is_torch(q) or _torch.is_sharded(type(q)):
        return None
    return lambda: draw_state(q.device)


def _results(about_q, about_v, out_dtype, with_lse):
    """Memory for out and lse. Rows that belong to no token are not written: they get what a query without keys gets."""
    _check_dims("q", about_q), _check_dims("v", about_v)
    out = _zeros((*about_q.shape[:-1], about_v.shape[-1]), _dtype_of_out(about_q.dtype, out_dtype))
    *batch, seq, heads = about_q.shape[:-1]
    return out, _zeros((*batch, heads, seq), "float32") - _infinity() if with_lse else None


@takes_options
def attention_backward(dout, q, k, v, out, lse, **options):
    """The gradients of an attention() call, without autograd (FlashAttention-2, arXiv:2307.08691, algorithm 2).

    Arguments that are not listed are those of the attention() call, and it raises what attention() raises.

    Args:
        dout: the gradient of out, of its shape and dtype.
        q, k, v: the inputs of the attention() call.
        out, lse: its results.
        dlse: the gradient of lse; None: 0.
        deterministic: the gradients have the same bits each time.

    Returns:
        Gradients with the shapes and dtypes of q, k, v and sink.
    """
    options = with_state(options)
    if _is_torch(q):
        options = _mask_make.with_mask_made(q, k, options)
        return Gradients(*_torch.attention_backward(dout, q, k, v, out, lse, options))
    options = in_c_names(given_options("attention_backward", options))
    dout, q, k, v, out = (_contiguous_last(x) for x in (dout, q, k, v, out))
    made = [_zeros(about.shape, about.dtype) for about in (_host("q", q), _host("k", k), _host("v", v))]
    dsink = None
    if "sink" in options:
        about = _host("sink", options["sink"])
        dsink = _zeros(about.shape, about.dtype)
    arrays.backward(dout, q, k, v, out, lse, *made, dsink=dsink, **options)
    return Gradients(*made, dsink)


class _Shape:
    """A tensor without memory, of which only questions are asked."""

    def __init__(self, shape, dtype):
        self.__array_interface__ = {"version": 3, "shape": tuple(shape), "typestr": "", "data": (0, False)}
        self.dtype = dtype


def _as_computed(x):
    """A tensor as attention() hands it on: one that it copies, since its last dimension has gaps, is a new one without values."""
    if torch is not None and isinstance(x, torch.Tensor):
        gaps = x.dim() > 0 and x.layout is torch.strided and x.shape[-1] > 1 and x.stride(-1) != 1
        return torch.empty_like(x, memory_format=torch.contiguous_format) if gaps else x
    return _contiguous_last(x, copy=lambda x: x.__class__(x.shape, x.dtype))


def _question(ask_forward, ask_backward, q, k, v, backward, options):
    """Puts an attention() call, or that of its gradients, to a function of arrays."""
    q, k, v = (_as_computed(x) for x in (q, k, v))
    about_q, about_k, about_v = describe("q", q), describe("k", k), describe("v", v)
    _check_dims("q", about_q), _check_dims("v", about_v)
    options = in_c_names(dict(options) if _mask_make is None else dict(_mask_make.with_mask_made(q, k, options)))
    deterministic = options.pop("deterministic", False)
    options.pop("return_lse", None)
    dtype = _dtype_of_out(about_q.dtype, options.pop("out_dtype", None))
    *batch, seq, heads = about_q.shape[:-1]
    out, lse = _Shape((*about_q.shape[:-1], about_v.shape[-1]), dtype), _Shape((*batch, heads, seq), "float32")
    if not backward:
        return ask_forward(q, k, v, out, lse, **options)
    _check_gradients_of(options)
    gradients = (_Shape(about.shape, about.dtype) for about in (about_q, about_k, about_v))
    return ask_backward(out, q, k, v, out, lse, *gradients, deterministic=deterministic, **options)


# What attention() takes and its gradients do not depend on, and what it has no gradients of.
_FORWARD_ALONE = {*OPTIONS["forward"], *RESULTS["forward"]} - {*OPTIONS["backward"]}
_WITHOUT_GRADIENTS = [name for name in TENSORS["forward"] if name in SIGNATURES["attention"] and name not in TENSORS["backward"]]


def _check_gradients_of(options):
    """Takes from attention()'s options what its gradients do not have."""
    computes_fp8(options.get("compute"))
    for name in _FORWARD_ALONE:
        options.pop(name, None)
    for name in _WITHOUT_GRADIENTS:
        if options.pop(name, None) is not None:
            raise NotImplementedError(f"{name} is given, and a call with it has no gradients")


def supported(q, k, v, *, backward=False, **options):
    """Whether ``attention(q, k, v, **options)``, or with backward the call for its gradients, would run here.

    A Support: true; or false with the reason, the message of the TypeError, ValueError or NotImplementedError that the call would
    raise. Reads no data. Options of flash3.arrays, such as backend, may be among the others; an option of an unknown name
    raises TypeError.
    """
    return support_of(lambda: _question(
        lambda *tensors, **others: arrays._forward(*tensors, others).check_supported(),
        lambda *tensors, **others: arrays._backward(*tensors, None, None, others).check_supported(), q, k, v, backward, options))


def explain(q, k, v, *, backward=False, **options):
    """Which kernel ``attention(q, k, v, **options)``, or with backward its gradients, runs and why, as lines of "name: value"."""
    return _question(arrays.forward_explain, arrays.backward_explain, q, k, v, backward, options)


def _host(name, x):
    about = describe(name, x)
    if not about.on_host:
        raise ValueError(f"{name} is on a GPU, and results are made there for torch tensors alone; flash3.arrays takes memory "
                         "for them, or makes them by like=")
    return about


def _contiguous_last(x, copy=lambda x: x.copy(order="C")):
    """A numpy array whose last dimension has gaps is copied; any other stride that is not negative is passed on."""
    if isinstance(x, E4M3):
        return E4M3(_contiguous_last(x.codes, copy))
    strides = getattr(x, "strides", None)
    if type(x).__module__.partition(".")[0] != "numpy" or not strides:
        return x
    if x.shape[-1] > 1 and strides[-1] != x.itemsize or min(strides) < 0:
        return copy(x)
    return x


def _zeros(shape, dtype):
    try:
        import numpy
    except ImportError:
        raise RuntimeError("results are made with numpy, which is not installed; flash3.arrays takes memory for them") from None
    if dtype not in ("bfloat16", "float8_e4m3fn"):
        return numpy.zeros(shape, dtype)
    try:
        import ml_dtypes
    except ImportError:
        raise RuntimeError(f"a {dtype} result takes the package ml_dtypes, since numpy has no {dtype}; flash3.arrays takes "
                           "memory for results instead") from None
    return numpy.zeros(shape, getattr(ml_dtypes, dtype))


def _infinity():
    import numpy
    return numpy.float32(numpy.inf)
