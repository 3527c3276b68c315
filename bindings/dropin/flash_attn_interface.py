# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3's Python functions over flash3: the same names, arguments, defaults and results.

What flash3's kernels do not do raises NotImplementedError, which names the argument, before anything is launched. FP8 tensors
(float8_e4m3fn) give a bfloat16 result; q_descale, k_descale and v_descale are their scales, float32 [batch, heads_k]. Beyond
upstream: scales for the tensor, [1], or for blocks of tokens, as flash3.attention has them, s_aux (an attention sink, with its
gradient), gradients through the LSE and with attention_chunk, head dims that are no multiples of 8, and the CPU.
"""
import torch

from flash3._torch import eager, run_forward
from flash_attn_3 import _C  # noqa: F401  registers torch.ops.flash_attn_3
from flash_attn_3._C import _flash3, check_tensors, checked_options, is_seen, no_splits, refuse, upstreams

flash_attn_3_gpu = torch.ops.flash_attn_3


def maybe_contiguous(x):
    """x, or a copy of it if its last dimension has gaps."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def round_multiple(x, m):
    """x rounded up to a multiple of m."""
    return (x + m - 1) // m * m


def round_up_headdim(head_size):
    """The head dim of the kernel that takes this one."""
    for dim in (64, 96, 128, 192):
        if head_size <= dim:
            return dim
    return 256


def _window(window_size, left, right):
    """(left, right) from whichever spelling was used; window_size may be a tensor."""
    if window_size is not None:
        left, right = window_size
    return -1 if left is None else int(left), -1 if right is None else int(right)


def _length(n):
    """A longest length as an integer. Out of a tensor on a GPU it would cost a synchronisation: it is not needed."""
    if isinstance(n, torch.Tensor):
        return int(n) if n.device.type == "cpu" and not torch.compiler.is_compiling() else None
    return n


def _number(scale):
    return scale if scale is None else float(scale)


def _forward(q, k, v, qv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, q_descale, k_descale,
             v_descale, softmax_scale, causal, window_size, attention_chunk, softcap, num_splits, pack_gqa, sm_margin, s_aux,
             deterministic, with_lse=True, out_=None, rotary_interleaved=True, scheduler_metadata=None, **undone):
    """(out, softmax_lse) of _flash_attn_forward; without with_lse the second may be None. undone: what no kernel does."""
    left, right = _window(window_size, -1, -1)
    softmax_scale = _number(softmax_scale)
    if max_seqlen_q is not None or max_seqlen_k is not None:
        max_seqlen_q, max_seqlen_k = _length(max_seqlen_q), _length(max_seqlen_k)
    if out_ is None and type(q) is type(k) is type(v) is torch.Tensor and not is_seen():
        # Nobody asks for the operator by its name: without it, and what an operator in Python costs.
        if qv is not None or undone:
            refuse(qv=qv, **undone)
        options = checked_options(q, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, q_descale,
                                  k_descale, v_descale, softmax_scale, causal, left, right, attention_chunk, softcap, num_splits,
                                  sm_margin, s_aux, deterministic)
        try:
            return run_forward(q, k, v, options, s_aux, with_lse)
        except (ValueError, TypeError, RuntimeError) as error:
            raise upstreams(error) from None
    operator = torch.ops.flash_attn_3._flash_attn_forward if out_ is None else torch.ops.flash_attn_3.fwd
    given = undone.get
    return _flash3(operator.default, q, k, v, given("k_new"), given("v_new"), qv, out_, cu_seqlens_q, cu_seqlens_k,
                   given("cu_seqlens_k_new"), seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, given("page_table"),
                   given("kv_batch_idx"), given("leftpad_k"), given("rotary_cos"), given("rotary_sin"), given("seqlens_rotary"),
                   q_descale, k_descale, v_descale, softmax_scale, causal, left, right, attention_chunk, softcap,
                   rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin, s_aux, deterministic)[:2]


def _flash_attn_forward(q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
                        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
                        page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
                        seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
                        window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True,
                        scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0, s_aux=None, deterministic=False,
                        is_causal=None, window_size=None):
    """(out, softmax_lse, out_accum, softmax_lse_accum); the last two are empty, as of a call that splits no keys.

    is_causal and window_size are other spellings of causal and of window_size_left and window_size_right.
    """
    out, lse = _forward(
        q, k, v, qv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, q_descale, k_descale, v_descale,
        softmax_scale, causal if is_causal is None else is_causal,
        _window(window_size, window_size_left, window_size_right), attention_chunk, softcap, num_splits, pack_gqa,
        sm_margin, s_aux, deterministic, out_=out_, rotary_interleaved=rotary_interleaved, scheduler_metadata=scheduler_metadata,
        k_new=k_new, v_new=v_new, cu_seqlens_k_new=cu_seqlens_k_new, page_table=page_table, kv_batch_idx=kv_batch_idx,
        leftpad_k=leftpad_k, rotary_cos=rotary_cos, rotary_sin=rotary_sin, seqlens_rotary=seqlens_rotary)
    return out, lse, *no_splits(q)


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
                         max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
                         window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
                         seqused_q=None, seqused_k=None, causal=None, window_size=None):
    """Writes dq, dk and dv, and returns softmax_d; called with window_size, as older callers do, (dq, dk, dv, softmax_d).

    seqused_q, seqused_k and causal are other spellings of sequed_q, sequed_k and is_causal.
    """
    left, right = _window(window_size, window_size_left, window_size_right)
    dq, dk, dv, softmax_d, *_ = _flash3(
        torch.ops.flash_attn_3.bwd.default, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k,
        sequed_q if seqused_q is None else seqused_q, sequed_k if seqused_k is None else seqused_k, _length(max_seqlen_q),
        _length(max_seqlen_k), _number(softmax_scale), is_causal if causal is None else causal, left, right, softcap,
        deterministic, sm_margin)
    return softmax_d if window_size is None else (dq, dk, dv, softmax_d)


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
                    sm_margin=0, return_attn_probs=False, s_aux=None, dropout_p=0.0):
    """softmax(q k^T) v of [batch, seq, heads, dim] tensors; (out, softmax_lse) with return_attn_probs."""
    # A plain call; what a compiler traces is the operator. Without FP8 scales mean nothing.
    if eager is not None and qv is s_aux is None and deterministic is False and num_splits <= 1 and not (
            torch.compiler.is_compiling() or attention_chunk or sm_margin or return_attn_probs or dropout_p):
        out = eager(q, k, v, causal, window_size, softmax_scale, softcap)
        if out is not None:
            return out
    if dropout_p:
        refuse(dropout_p=dropout_p)
    out, lse = _forward(q, k, v, qv, None, None, None, None, None, None, q_descale, k_descale, v_descale, softmax_scale, causal,
                        window_size, attention_chunk, softcap, num_splits, pack_gqa, sm_margin, s_aux, deterministic,
                        return_attn_probs)
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
                           softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                           window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                           deterministic=False, sm_margin=0, return_attn_probs=False, s_aux=None, dropout_p=0.0):
    """The same of packed sequences, [total, heads, dim]; softmax_lse is [heads, total_q]."""
    if dropout_p:
        refuse(dropout_p=dropout_p)
    out, lse = _forward(q, k, v, qv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, q_descale,
                        k_descale, v_descale, softmax_scale, causal, window_size, attention_chunk, softcap, num_splits, pack_gqa,
                        sm_margin, s_aux, deterministic, return_attn_probs)
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None,
                              window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None,
                              sm_margin=0, return_attn_probs=False):
    """The same of qkv [batch, seq, 3, heads, dim], or [batch, seq, heads_q + 2 * heads_k, dim] with num_heads_q."""
    check_tensors(qkv=qkv)
    if qkv.dim() == 5:
        assert qkv.shape[-3] == 3, f"qkv.shape[2] = {qkv.shape[-3]} but it must be 3"
        q, k, v = qkv.unbind(-3)
    else:
        assert qkv.dim() == 4, f"qkv.ndim = {qkv.dim()} but it must be 4 or 5"
        assert num_heads_q is not None, "num_heads_q must be given for a qkv of 4 dimensions"
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        assert num_heads_q + 2 * heads_k == qkv.shape[2], (
            f"qkv.shape[2] = {qkv.shape[2]} but num_heads_q = {num_heads_q}; the rest must be an even number of heads")
        q, k, v = qkv.split([num_heads_q, heads_k, heads_k], dim=-2)
    return flash_attn_func(q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk,
                           softcap, deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs)


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """(out, lse) of parts of one softmax: out_partial [splits, batch, seq, heads, dim], lse_partial [splits, batch, seq, heads]."""
    return torch.ops.flash_attn_3.fwd_combine(out_partial, lse_partial, out, out_dtype)


def _either(name, value, legacy_name, legacy):
    if value is not None and legacy is not None:
        raise TypeError(f"{legacy_name} and {name} are both given; they are two names of one argument")
    return value if legacy is None else legacy


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None,
                            cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None,
                            v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,
                            softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None,
                            sm_margin=0, return_softmax_lse=False, s_aux=None, gqa_parallel=None, max_seqlen_k_hint=None,
                            descale_q=None, descale_k=None, descale_v=None, block_table=None):
    """Attention to a cache [batch, seq, heads_k, dim] of which the first cache_seqlens tokens count.

    With return_softmax_lse (out, softmax_lse, out_accum, softmax_lse_accum). Nothing is appended to the cache, and it is not
    paged: k, v, rotary_*, page_table, cache_batch_idx and cache_leftpad raise NotImplementedError.

    The last six are names of FlashAttention-3's first releases: gqa_parallel and max_seqlen_k_hint are hints, which nothing
    depends on, descale_q, descale_k and descale_v, of shape [1], are q_descale, k_descale and v_descale, and block_table is
    page_table. With one of them return_softmax_lse returns (out, softmax_lse), as then.
    """
    check_tensors(k_cache=k_cache, v_cache=v_cache)
    assert k_cache.stride(-1) == 1, "k_cache must have contiguous last dimension"
    assert v_cache.stride(-1) == 1, "v_cache must have contiguous last dimension"
    is_legacy = not (gqa_parallel is max_seqlen_k_hint is descale_q is descale_k is descale_v is block_table is None)
    refuse(k=k, v=v, rotary_seqlens=rotary_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
           block_table=block_table)
    if cache_seqlens is not None and not torch.is_tensor(cache_seqlens):
        cache_seqlens = torch.full((k_cache.shape[0],), cache_seqlens, dtype=torch.int32, device=k_cache.device)
    with torch.no_grad():
        out, lse = _forward(
            q, k_cache, v_cache, qv, cu_seqlens_q, None, None, maybe_contiguous(cache_seqlens), max_seqlen_q, None,
            _either("q_descale", q_descale, "descale_q", descale_q), _either("k_descale", k_descale, "descale_k", descale_k),
            _either("v_descale", v_descale, "descale_v", descale_v), softmax_scale, causal, window_size, attention_chunk, softcap,
            num_splits, pack_gqa, sm_margin, s_aux, False, return_softmax_lse, rotary_interleaved=rotary_interleaved,
            scheduler_metadata=scheduler_metadata, cu_seqlens_k_new=cu_seqlens_k_new, page_table=page_table,
            rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    if not return_softmax_lse:
        return out
    return (out, lse) if is_legacy else (out, lse, *no_splits(q))


def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
                           qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
                           cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1),
                           attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0):
    """A tensor for scheduler_metadata, which fits every call: flash3 schedules nothing ahead."""
    left, right = _window(window_size, -1, -1)
    return torch.ops.flash_attn_3.get_scheduler_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, headdim if headdim_v is None else headdim_v,
        qkv_dtype,
        cache_seqlens, cu_seqlens_q, None, cu_seqlens_k_new, None, cache_leftpad, page_size, max_seqlen_k_new, causal, left,
        right, attention_chunk, has_softcap, num_splits, pack_gqa, sm_margin)


class FlashAttnFunc:
    """For callers of FlashAttnFunc.apply: the arguments are flash_attn_func's."""
    apply = staticmethod(flash_attn_func)


class FlashAttnVarlenFunc:
    """The same with flash_attn_varlen_func's arguments."""
    apply = staticmethod(flash_attn_varlen_func)


class FlashAttnQKVPackedFunc:
    """The same with flash_attn_qkvpacked_func's arguments."""
    apply = staticmethod(flash_attn_qkvpacked_func)
