# SPDX-License-Identifier: Apache-2.0
"""torch.ops.flash_attn_3: FlashAttention-3's operators, with its schemas, over torch.ops.flash3.

Forwards on a KV cache go to flash3's operators for one. What flash3's kernels do not do raises NotImplementedError, which names the
argument, before anything is launched. Two arguments
are appended to the forward's: s_aux, the attention sink, and deterministic, which its gradients follow.
"""
import flash3  # noqa: F401  registers torch.ops.flash3
import torch
import torch.autograd.profiler as profiler
from flash3._torch import FP8, gradients, on_one_device, save_forward

from ._arguments import Forward, check_margin, check_tensors, flash3_call, options_of, refuse
from ._kv_cache import NO_GRADIENTS, attend, check_metadata, combine, lse_shape, scheduler_metadata

if hasattr(torch.ops.flash_attn_3, "fwd"):
    raise ImportError("torch.ops.flash_attn_3.fwd is there already: another FlashAttention-3 is loaded in this process, and "
                      "the two cannot share the name")

_library = torch.library.Library("flash_attn_3", "DEF")


_FORWARD_NAMES = ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "seqused_k", "max_seqlen_q",
                  "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary",
                  "q_descale", "k_descale", "v_descale")


def _forward_schema(name, qv, out, causal, interleaved, num_splits, mutable):
    """fwd's and _flash_attn_forward's 34 arguments, and the two of ours."""
    alias = (lambda mark: f"({mark}!)") if mutable else (lambda mark: "")
    kinds = {"max_seqlen_q": "SymInt?", "max_seqlen_k": "SymInt?"}
    middle = ", ".join(f"{kinds.get(n, 'Tensor?')} {n}=None" for n in _FORWARD_NAMES)
    return (f"{name}(Tensor q, Tensor k, Tensor v, Tensor{alias('k_new')}? k_new=None, Tensor{alias('v_new')}? v_new=None, "
            f"Tensor? {qv}=None, Tensor{alias('out')}? {out}=None, {middle}, float? softmax_scale=None, "
            f"bool {causal}=False, SymInt window_size_left=-1, SymInt window_size_right=-1, SymInt attention_chunk=0, "
            f"float softcap=0.0, bool {interleaved}, Tensor? scheduler_metadata=None, SymInt num_splits={num_splits}, "
            f"bool? pack_gqa=None, SymInt sm_margin=0, Tensor? s_aux=None, bool deterministic=False) "
            f"-> (Tensor{alias('out')}, Tensor, Tensor, Tensor)")


def _filled(name, given):
    """A Forward of an operator's arguments, with those that torch left out since they are defaults."""
    defaults = getattr(torch.ops.flash_attn_3, name).default._schema.arguments[len(given):]
    return Forward(*given, *(a.default_value for a in defaults))


def _check(f):
    check_tensors(q=f.q, k=f.k, v=f.v)
    check_metadata(f)


def _forward(f):
    _check(f)
    if f.is_on_cache():
        out, lse = attend(f)
    elif f.out is None:
        out, lse = flash3_call(torch.ops.flash3.forward.default, f.q, f.k, f.v, **f.options())
    else:
        out, lse = f.out, torch.full(lse_shape(f.q), -float("inf"), device=f.q.device, dtype=torch.float32)
        flash3_call(torch.ops.flash3.forward_out.default, f.q, f.k, f.v, out, lse, **f.options())
    return (out, lse, *no_splits(f.q))


def _fake_forward(f):
    _check(f)
    if f.appends():
        raise NotImplementedError("k_new is given but the schema of this operator, which is upstream's, does not tell a compiler "
                                  "that k and v are written; flash_attn_interface.flash_attn_with_kvcache does")
    if not f.is_on_cache():
        f.options()
    out, q = f.out, f.q
    if out is None:
        out = q.new_empty((*q.shape[:-1], f.v.shape[-1]), dtype=torch.bfloat16 if q.dtype == FP8 else q.dtype)
    return (out, q.new_empty(lse_shape(q), dtype=torch.float32), *no_splits(q))


def is_seen():
    """Whether anything watches operators, by their names or with tensors of another kind: then this one must be called."""
    return torch.compiler.is_compiling() or profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack() > 0 or \
        torch._C._are_functorch_transforms_active()


def no_splits(q):
    """The last two results of a call that splits no keys."""
    return q.new_empty((0,), dtype=torch.float32), q.new_empty((0,), dtype=torch.float32)


def _functional(f):
    refuse(out_=f.out)  # flash_attn_interface._flash_attn_forward takes one to fwd
    return f


def _save_forward(ctx, inputs, output):
    f = Forward(*inputs)
    if f.qv is not None:
        raise NotImplementedError(f"qv is given, and {NO_GRADIENTS}")
    ctx.is_on_cache = f.is_on_cache()
    if not ctx.is_on_cache:
        save_forward(ctx, f.q, f.k, f.v, f.options(), *output[:2])


def _forward_gradient(ctx, dout, dlse, *_):
    if ctx.is_on_cache:
        raise NotImplementedError(f"k and v are a cache, and {NO_GRADIENTS}")
    dq, dk, dv, dsink = flash3_call(gradients, ctx, dout, dlse)
    return dq, dk, dv, *(None,) * 31, dsink, None


# bwd returned dq, dk and dv first in all releases, and callers unpack eight.
_BACKWARD = ("{name}(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, {gradients_first}"
             "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? {used}_q=None, Tensor? {used}_k=None, "
             "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, {gradients_last}float? softmax_scale=None, "
             "bool is_causal=False, SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0.0, "
             "bool deterministic=False, SymInt sm_margin=0) -> {returns}")
_GRADIENTS = "Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, "


def _gradients(dout, q, k, v, out, lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q,
               max_seqlen_k, softmax_scale, is_causal, window_size_left, window_size_right, softcap, deterministic, sm_margin):
    """dq, dk, dv, in given memory or new, and softmax_d."""
    check_tensors(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse)
    check_margin(sm_margin)
    fills = dq is dk is dv is None  # rows of no sequence; those of given memory stay as they are
    make = torch.empty_like if fills else torch.zeros_like
    dq, dk, dv = (make(x) if given is None else given for x, given in ((q, dq), (k, dk), (v, dv)))
    options = options_of(None, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale,
                       is_causal, window_size_left, window_size_right, softcap, 0, deterministic)
    flash3_call(torch.ops.flash3.backward_out.default, dout, None, q, k, v, out, lse, dq, dk, dv, None, **options,
                fill_padding=fills)
    softmax_d = (dout.float() * out.float()).sum(-1).transpose(-1, -2).contiguous()
    return dq, dk, dv, softmax_d


_BACKWARD_DEFAULTS = (None,) * 3 + (None,) * 6 + (None, False, -1, -1, 0.0, False, 0)


def _bwd(dout, q, k, v, out, softmax_lse, *rest):
    rest = (*rest, *_BACKWARD_DEFAULTS[len(rest):])
    dq, dk, dv, softmax_d = _gradients(dout, q, k, v, out, softmax_lse, *rest)
    return dq, dk, dv, softmax_d, *(q.new_empty((0,), dtype=torch.float32) for _ in range(4))


def _fake_bwd(dout, q, k, v, out, softmax_lse, *rest):
    rest = (*rest, *_BACKWARD_DEFAULTS[len(rest):])
    check_margin(rest[-1])
    made = (q.new_empty(x.shape) if given is None else given for x, given in zip((q, k, v), rest[:3]))
    return *made, q.new_empty(lse_shape(q), dtype=torch.float32), *(q.new_empty((0,), dtype=torch.float32) for _ in range(4))


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
                         max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, *rest):
    rest = (*rest, *_BACKWARD_DEFAULTS[9 + len(rest):])
    return _gradients(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k,
                      max_seqlen_q, max_seqlen_k, *rest)[3]


def _fake_flash_attn_backward(dout, q, *rest):
    return q.new_empty(lse_shape(q), dtype=torch.float32)


_METADATA = ("get_scheduler_metadata(SymInt batch_size, SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt num_heads, "
             "SymInt num_heads_k, SymInt headdim, SymInt headdim_v, ScalarType qkv_dtype, Tensor seqused_k, "
             "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
             "Tensor? leftpad_k=None, SymInt? page_size=None, SymInt max_seqlen_k_new=0, bool is_causal=False, "
             "SymInt window_size_left=-1, SymInt window_size_right=-1, SymInt attention_chunk=0, bool has_softcap=False, "
             "SymInt num_splits=0, bool? pack_gqa=None, SymInt sm_margin=0) -> Tensor")


def _operator(schema, kernel, fake):
    _library.define(schema)
    name = schema.partition("(")[0]
    for key in ("CPU", "CUDA"):
        _library.impl(name, kernel, key)
    names = [a.name for a in getattr(torch.ops.flash_attn_3, name).default._schema.arguments]
    torch.library.register_fake(f"flash_attn_3::{name}", on_one_device(names, fake), lib=_library)


_operator(_forward_schema("fwd", "q_v", "out", "is_causal", "is_rotary_interleaved=False", 0, mutable=True),
          lambda *given: _forward(_filled("fwd", given)), lambda *given: _fake_forward(_filled("fwd", given)))
_operator(_BACKWARD.format(name="bwd", gradients_first=_GRADIENTS, gradients_last="", used="seqused",
                           returns="(Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"),
          _bwd, _fake_bwd)
_operator("fwd_combine(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, ScalarType? out_dtype=None) "
          "-> (Tensor(out!), Tensor)", combine, combine)
_operator(_METADATA, scheduler_metadata, scheduler_metadata)
_operator(_forward_schema("_flash_attn_forward", "qv", "out_", "causal", "rotary_interleaved=True", 1, mutable=False),
          lambda *given: _forward(_functional(_filled("_flash_attn_forward", given))),
          lambda *given: _fake_forward(_functional(_filled("_flash_attn_forward", given))))
_operator(_BACKWARD.format(name="_flash_attn_backward", gradients_first="", gradients_last=_GRADIENTS, used="sequed",
                           returns="Tensor"), _flash_attn_backward, _fake_flash_attn_backward)
torch.library.register_autograd("flash_attn_3::_flash_attn_forward", _forward_gradient, setup_context=_save_forward,
                                lib=_library)
