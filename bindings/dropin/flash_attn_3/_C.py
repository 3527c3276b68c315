# SPDX-License-Identifier: Apache-2.0
"""torch.ops.flash_attn_3: FlashAttention-3's operators, with its schemas, over torch.ops.flash3.

What flash3's kernels do not do raises NotImplementedError, which names the argument, before anything is launched. Two arguments
are appended to the forward's: s_aux, the attention sink, and deterministic, which its gradients follow.
"""
import re

import flash3  # noqa: F401  registers torch.ops.flash3
import torch
import torch.autograd.profiler as profiler
from flash3._torch import FP8, all_options, gradients, save_forward, translated, with_scales

if hasattr(torch.ops.flash_attn_3, "fwd"):
    raise ImportError("torch.ops.flash_attn_3.fwd is there already: another FlashAttention-3 is loaded in this process, and "
                      "the two cannot share the name")

_library = torch.library.Library("flash_attn_3", "DEF")


def refuse(**arguments):
    """What no kernel of flash3 does; name=value, where None, False and 0 ask for nothing."""
    for name, value in arguments.items():
        if value is not None and (torch.is_tensor(value) or value):
            shown = "is given" if torch.is_tensor(value) else f"= {value}"
            raise NotImplementedError(f"{name} {shown} but flash3's kernels do not do this yet")


def check_tensors(**arguments):
    """torch lets None through where an operator's schema says Tensor."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__name__} but it must be a torch tensor")


def _refuse_options(num_splits, sm_margin):
    if num_splits > 1:
        raise NotImplementedError(f"num_splits = {num_splits} but flash3 does not split keys yet; 0 and 1 work")
    refuse(sm_margin=sm_margin)


_SCALE = re.compile(r"\b([qkv])_scale\b")


def _renamed(error):
    """An exception whose text has flash3's names of the scales, with upstream's."""
    return type(error)(_SCALE.sub(r"\1_descale", str(error)))


def upstreams(error):
    """An exception of flash3's, or of its operators, as one with upstream's names."""
    return _renamed(translated(error) if type(error) is RuntimeError else error)


def _flash3(operator, *arguments, **named):
    try:
        return operator(*arguments, **named)
    except (ValueError, TypeError, RuntimeError) as error:
        raise upstreams(error) from None


def _options(s_aux, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
             window_size_left, window_size_right, softcap, attention_chunk, deterministic):
    """The options of torch.ops.flash3. Without cu_seqlens lengths need no bound."""
    if softmax_scale is not None and softmax_scale == 0:
        raise NotImplementedError("softmax_scale = 0 but flash3 takes a scale greater than 0")
    return all_options(softmax_scale or 0.0, causal, window_size_left, window_size_right, softcap, attention_chunk, s_aux,
                       cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, None if cu_seqlens_q is None else max_seqlen_q,
                       None if cu_seqlens_k is None else max_seqlen_k, deterministic)


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


def checked_options(q, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, q_descale, k_descale,
                    v_descale, softmax_scale, causal, window_size_left, window_size_right, attention_chunk, softcap, num_splits,
                    sm_margin, s_aux, deterministic):
    """flash3's options for a forward's, or NotImplementedError."""
    if num_splits > 1 or sm_margin:
        _refuse_options(num_splits, sm_margin)
    options = _options(s_aux, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale,
                       causal, window_size_left, window_size_right, softcap, attention_chunk, deterministic)
    if q.dtype == FP8:  # upstream ignores the scales of 16-bit tensors, and callers count on it
        return with_scales(options, q_descale, k_descale, v_descale)
    return options


def _options_of_schema(q, k_new, v_new, qv, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q,
                       max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale,
                       k_descale, v_descale, softmax_scale, causal, window_size_left, window_size_right, attention_chunk,
                       softcap, rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin, s_aux, deterministic):
    """The same for all of a forward's arguments. scheduler_metadata and pack_gqa are hints of how to run."""
    refuse(k_new=k_new, v_new=v_new, qv=qv, cu_seqlens_k_new=cu_seqlens_k_new, page_table=page_table,
           kv_batch_idx=kv_batch_idx, leftpad_k=leftpad_k, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
           seqlens_rotary=seqlens_rotary)
    return checked_options(q, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, q_descale, k_descale,
                           v_descale, softmax_scale, causal, window_size_left, window_size_right, attention_chunk, softcap,
                           num_splits, sm_margin, s_aux, deterministic)


def _filled(arguments, num_splits=1):
    """A forward's arguments after q, k and v, with those that torch left out since they are defaults."""
    defaults = (None,) * 20 + (None, False, -1, -1, 0, 0.0, True, None, num_splits, None, 0, None, False)
    return (*arguments, *defaults[len(arguments):])


def _lse_shape(q):
    *batch, seq, heads = q.shape[:-1]
    return (*batch, heads, seq)


def _forward(q, k, v, *rest, num_splits=1):
    check_tensors(q=q, k=k, v=v)
    k_new, v_new, qv, out, *others = _filled(rest, num_splits)
    options = _options_of_schema(q, k_new, v_new, qv, *others)
    if out is None:
        out, lse = _flash3(torch.ops.flash3.forward.default, q, k, v, *options)
    else:
        lse = torch.full(_lse_shape(q), -float("inf"), device=q.device, dtype=torch.float32)
        _flash3(torch.ops.flash3.forward_out.default, q, k, v, out, lse, *options)
    return (out, lse, *no_splits(q))


def _fake_forward(q, k, v, *rest, num_splits=1):
    check_tensors(q=q, k=k, v=v)
    k_new, v_new, qv, out, *others = _filled(rest, num_splits)
    _options_of_schema(q, k_new, v_new, qv, *others)
    if out is None:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=torch.bfloat16 if q.dtype == FP8 else q.dtype)
    return (out, q.new_empty(_lse_shape(q), dtype=torch.float32), *no_splits(q))


def is_seen():
    """Whether somebody looks at operators, by their names or with tensors of another kind: then this one must be called."""
    return torch.compiler.is_compiling() or profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack() > 0 or \
        torch._C._are_functorch_transforms_active()


def no_splits(q):
    """The last two results of a call that splits no keys."""
    return q.new_empty((0,), dtype=torch.float32), q.new_empty((0,), dtype=torch.float32)


def _functional_forward(q, k, v, *rest):
    refuse(out_=_filled(rest)[3])  # flash_attn_interface._flash_attn_forward takes one to fwd
    return _forward(q, k, v, *rest)


def _save_forward(ctx, inputs, output):
    q, k, v, k_new, v_new, qv, _, *others = inputs
    save_forward(ctx, q, k, v, _options_of_schema(q, k_new, v_new, qv, *others), *output[:2])


def _forward_gradient(ctx, dout, dlse, *_):
    try:
        dq, dk, dv, dsink = gradients(ctx, dout, dlse)
    except NotImplementedError as error:
        raise _renamed(error) from None
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
    refuse(sm_margin=sm_margin)
    dq, dk, dv = (torch.empty_like(x) if given is None else given for x, given in ((q, dq), (k, dk), (v, dv)))
    options = _options(None, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale,
                       is_causal, window_size_left, window_size_right, softcap, 0, deterministic)
    _flash3(torch.ops.flash3.backward_out.default, dout, None, q, k, v, out, lse, dq, dk, dv, None, *options)
    softmax_d = (dout.float() * out.float()).sum(-1).transpose(-1, -2).contiguous()
    return dq, dk, dv, softmax_d


_BACKWARD_DEFAULTS = (None,) * 3 + (None,) * 6 + (None, False, -1, -1, 0.0, False, 0)


def _bwd(dout, q, k, v, out, softmax_lse, *rest):
    rest = (*rest, *_BACKWARD_DEFAULTS[len(rest):])
    dq, dk, dv, softmax_d = _gradients(dout, q, k, v, out, softmax_lse, *rest)
    return dq, dk, dv, softmax_d, *(q.new_empty((0,), dtype=torch.float32) for _ in range(4))


def _fake_bwd(dout, q, k, v, out, softmax_lse, *rest):
    rest = (*rest, *_BACKWARD_DEFAULTS[len(rest):])
    refuse(sm_margin=rest[-1])
    made = (q.new_empty(x.shape) if given is None else given for x, given in zip((q, k, v), rest[:3]))
    return *made, q.new_empty(_lse_shape(q), dtype=torch.float32), *(q.new_empty((0,), dtype=torch.float32) for _ in range(4))


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
                         max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, *rest):
    rest = (*rest, *_BACKWARD_DEFAULTS[9 + len(rest):])
    return _gradients(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k,
                      max_seqlen_q, max_seqlen_k, *rest)[3]


def _fake_flash_attn_backward(dout, q, *rest):
    return q.new_empty(_lse_shape(q), dtype=torch.float32)


def _combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Parts of one softmax, [splits, batch, seq, heads, dim] and [splits, batch, seq, heads], as one."""
    check_tensors(out_partial=out_partial, lse_partial=lse_partial)
    lse = torch.logsumexp(lse_partial, 0)
    weights = torch.exp(lse_partial - torch.where(lse == -float("inf"), 0.0, lse))
    combined = (out_partial * weights[..., None]).sum(0)
    if out is not None:
        out.copy_(combined)
    else:
        out = combined.to(out_dtype or out_partial.dtype)
    return out, lse


def _scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, qkv_dtype,
                        seqused_k, *rest):
    check_tensors(cache_seqlens=seqused_k)
    # Nothing is scheduled ahead: any such tensor fits any call.
    return torch.zeros((1,), dtype=torch.int32, device=seqused_k.device)


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
    torch.library.register_fake(f"flash_attn_3::{name}", fake, lib=_library)


_operator(_forward_schema("fwd", "q_v", "out", "is_causal", "is_rotary_interleaved=False", 0, mutable=True),
          lambda *a: _forward(*a, num_splits=0), lambda *a: _fake_forward(*a, num_splits=0))
_operator(_BACKWARD.format(name="bwd", gradients_first=_GRADIENTS, gradients_last="", used="seqused",
                           returns="(Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"),
          _bwd, _fake_bwd)
_operator("fwd_combine(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, ScalarType? out_dtype=None) "
          "-> (Tensor(out!), Tensor)", _combine, _combine)
_operator(_METADATA, _scheduler_metadata, _scheduler_metadata)
_operator(_forward_schema("_flash_attn_forward", "qv", "out_", "causal", "rotary_interleaved=True", 1, mutable=False),
          _functional_forward, _fake_forward)
_operator(_BACKWARD.format(name="_flash_attn_backward", gradients_first="", gradients_last=_GRADIENTS, used="sequed",
                           returns="Tensor"), _flash_attn_backward, _fake_flash_attn_backward)
torch.library.register_autograd("flash_attn_3::_flash_attn_forward", _forward_gradient, setup_context=_save_forward,
                                lib=_library)
