# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3's Python functions over flash3: the same names, arguments, defaults and results.

What flash3's kernels do not do raises NotImplementedError, which names the argument, before anything is launched. FP8 tensors
(float8_e4m3fn) give a bfloat16 result; q_descale, k_descale and v_descale are their scales, float32 [batch, heads_k]. num_splits,
pack_gqa and sm_margin are hints, on which no result depends. Beyond upstream: scales for the tensor, [1], or for blocks of tokens,
as flash3.attention has them, dropout_p, which torch's generator seeds, s_aux (an attention sink, with its gradient), gradients
through the LSE and with attention_chunk, page tables in flash_attn_varlen_func, head dims that are no multiples of 8, and the CPU. qv
has no gradients.
"""
import functools
import operator

import torch

from flash3._dropout import draw_state
from flash3._options import number_of
from flash3._torch import eager, run_forward
from flash3._torch_kv_cache import run_now
from flash_attn_3 import _C  # noqa: F401  registers torch.ops.flash_attn_3
from flash_attn_3._arguments import FP8, Forward, NAMES, check_tensors, flash3_call, forward_options, refuse, upstreams
from flash_attn_3._C import is_seen, no_splits
from flash_attn_3._kv_cache import attend_without_gradients, check_metadata, combine

flash_attn_3_gpu = flash_attn_3_cuda = torch.ops.flash_attn_3  # the second is 2.8's name


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
    return scale if scale is None else number_of("softmax_scale", scale)


def _takes_window_at(position):
    """For functions with window_size_left and window_size_right where 2.8 has window_size, a pair, which may be given by position."""
    def decorate(function):
        names = function.__code__.co_varnames[position + 2:]  # of what follows window_size

        @functools.wraps(function)
        def called(*args, **named):
            if len(args) > position and isinstance(args[position], (tuple, list)):
                named = dict(zip(("window_size", *names), args[position:]), **named)
                args = args[:position]
            return function(*args, **named)
        return called
    return decorate


def _forward(q, k, v, qv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, q_descale, k_descale,
             v_descale, softmax_scale, causal, window_size, attention_chunk, softcap, sm_margin, s_aux, deterministic,
             with_lse=True, out_=None, dropout_p=0.0):
    """(out, softmax_lse) of a call without a cache; without with_lse the second may be None."""
    left, right = _window(window_size, -1, -1)
    softmax_scale, softcap = _number(softmax_scale), number_of("softcap", softcap)
    if max_seqlen_q is not None or max_seqlen_k is not None:
        max_seqlen_q, max_seqlen_k = _length(max_seqlen_q), _length(max_seqlen_k)
    if dropout_p or out_ is None and type(q) is type(k) is type(v) is torch.Tensor and not is_seen():
        # The operator has no dropout. Or nobody asks for the operator by its name: without it, and what an operator in Python costs.
        options = forward_options(q, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, q_descale,
                                  k_descale, v_descale, softmax_scale, causal, left, right, attention_chunk, softcap, sm_margin,
                                  s_aux, deterministic, qv)
        if dropout_p:
            options["dropout_p"], options["dropout_state"] = number_of("dropout_p", dropout_p), draw_state(q.device)
        try:
            return run_forward(q, k, v, options, with_lse)
        except (ValueError, TypeError, RuntimeError) as error:
            raise upstreams(error) from None
    operator = torch.ops.flash_attn_3._flash_attn_forward if out_ is None else torch.ops.flash_attn_3.fwd
    return flash3_call(operator.default, *Forward(
        q, k, v, qv=qv, out=out_, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        softmax_scale=softmax_scale, causal=causal, window_size_left=left, window_size_right=right, attention_chunk=attention_chunk,
        softcap=softcap, sm_margin=sm_margin, s_aux=s_aux, deterministic=deterministic))[:2]


@_takes_window_at(25)
def _flash_attn_forward(q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
                        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
                        page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
                        seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
                        window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True,
                        scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0, s_aux=None, deterministic=False,
                        is_causal=None, window_size=None, out=None):
    """(out, softmax_lse, out_accum, softmax_lse_accum); the last two are empty, as of a call that splits no keys.

    is_causal, window_size, by position too, and out are other spellings of causal, of window_size_left and window_size_right, and
    of out_.
    """
    causal = causal if is_causal is None else is_causal
    out_ = _either("out_", out_, "out", out)
    left, right = _window(window_size, window_size_left, window_size_right)
    f = Forward(q, k, v, k_new, v_new, qv, out_, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
                _length(max_seqlen_q), _length(max_seqlen_k), page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin,
                seqlens_rotary, q_descale, k_descale, v_descale, _number(softmax_scale), causal, left, right, attention_chunk,
                number_of("softcap", softcap), rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin, s_aux,
                deterministic)
    check_metadata(f)
    if f.is_on_cache():
        check_tensors(q=q, k=k, v=v)
        made, lse = attend_without_gradients(f)
    else:
        made, lse = _forward(q, k, v, qv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, q_descale,
                             k_descale, v_descale, softmax_scale, causal, (left, right), attention_chunk, softcap, sm_margin, s_aux,
                             deterministic, out_=out_)
    return made, lse, *no_splits(q)


@_takes_window_at(17)
def _flash_attn_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
                         max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
                         window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
                         seqused_q=None, seqused_k=None, causal=None, window_size=None):
    """Writes dq, dk and dv, and returns softmax_d; called with window_size, as older callers do, (dq, dk, dv, softmax_d).

    seqused_q, seqused_k and causal are other spellings of sequed_q, sequed_k and is_causal.
    """
    left, right = _window(window_size, window_size_left, window_size_right)
    dq, dk, dv, softmax_d, *_ = flash3_call(
        torch.ops.flash_attn_3.bwd.default, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k,
        sequed_q if seqused_q is None else seqused_q, sequed_k if seqused_k is None else seqused_k, _length(max_seqlen_q),
        _length(max_seqlen_k), _number(softmax_scale), is_causal if causal is None else causal, left, right,
        number_of("softcap", softcap), deterministic, sm_margin)
    return softmax_d if window_size is None else (dq, dk, dv, softmax_d)


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
                    sm_margin=0, return_attn_probs=False, s_aux=None, dropout_p=0.0):
    """softmax(q k^T) v of [batch, seq, heads, dim] tensors; (out, softmax_lse) with return_attn_probs."""
    # A plain call; what a compiler traces is the operator. Without FP8 scales mean nothing.
    if eager is not None and qv is s_aux is None and deterministic is False and not (
            torch.compiler.is_compiling() or attention_chunk or return_attn_probs or dropout_p):
        options = {"causal": causal, "window": window_size, "softcap": softcap}
        if softmax_scale is not None:
            options["softmax_scale"] = softmax_scale
        if sm_margin:
            options["sm_margin"] = sm_margin
        out = eager(q, k, v, options)
        if out is not None:
            return out
    out, lse = _forward(q, k, v, qv, None, None, None, None, None, None, q_descale, k_descale, v_descale, softmax_scale, causal,
                        window_size, attention_chunk, softcap, sm_margin, s_aux, deterministic, return_attn_probs, dropout_p=dropout_p)
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
                           softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                           window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                           deterministic=False, sm_margin=0, return_attn_probs=False, s_aux=None, dropout_p=0.0, page_table=None,
                           block_table=None):
    """The same of packed sequences, [total, heads, dim]; softmax_lse is [heads, total_q].

    With page_table, or block_table, which is the same, k and v are pages, [pages, page_size, heads_k, dim], and the keys that count
    are seqused_k's or, without it, as many as lie between the elements of cu_seqlens_k.
    """
    page_table = _either("page_table", page_table, "block_table", block_table)
    if dropout_p and page_table is not None:
        refuse(dropout_p=dropout_p)
    if page_table is None:
        out, lse = _forward(q, k, v, qv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, q_descale,
                            k_descale, v_descale, softmax_scale, causal, window_size, attention_chunk, softcap, sm_margin, s_aux,
                            deterministic, return_attn_probs, dropout_p=dropout_p)
    else:
        if seqused_k is None and cu_seqlens_k is not None:
            seqused_k = cu_seqlens_k.diff()
        out, lse, *_ = _flash_attn_forward(
            q, k, v, qv=qv, cu_seqlens_q=cu_seqlens_q, seqused_q=seqused_q, seqused_k=seqused_k, max_seqlen_q=max_seqlen_q,
            page_table=page_table, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
            attention_chunk=attention_chunk, softcap=softcap, sm_margin=sm_margin, s_aux=s_aux)
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
    return combine(out_partial, lse_partial, out, out_dtype)


def _either(name, value, legacy_name, legacy):
    if value is not None and legacy is not None:
        raise TypeError(f"{legacy_name} and {name} are both given; they are two names of one argument")
    return value if legacy is None else legacy


# flash3's and its operators' names of what flash_attn_with_kvcache calls otherwise.
_KVCACHE_NAMES = {**NAMES, "k": "k_cache", "v": "v_cache", "k_cache": "k_cache", "v_cache": "v_cache", "k_new": "k", "v_new": "v",
                  "seqused_k": "cache_seqlens", "cache_batch_idx": "cache_batch_idx", "leftpad_k": "cache_leftpad",
                  "rotary_offsets": "rotary_seqlens"}


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None,
                            cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None,
                            v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,
                            softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None,
                            sm_margin=0, return_softmax_lse=False, s_aux=None, gqa_parallel=None, max_seqlen_k_hint=None,
                            descale_q=None, descale_k=None, descale_v=None, block_table=None):
    """Attention to a cache [batch, seq, heads_k, dim] of which the first cache_seqlens keys count, or to pages, with page_table.

    k and v are first written to it after these keys, and then count as well; rotary_cos and rotary_sin give k and q a rotary
    embedding. flash3.attention_with_kv_cache tells more of each argument: there k is k_new, cache_seqlens is seqused_k,
    cache_leftpad is leftpad_k, and rotary_seqlens is rotary_offsets. FP8 caches, with k_descale and v_descale, take
    q, k and v in FP8 or in 16 bits. With return_softmax_lse (out, softmax_lse, out_accum, softmax_lse_accum), of which the last two
    are empty. There are no gradients: a backward raises.

    The last six are names of FlashAttention-3's first releases: gqa_parallel and max_seqlen_k_hint are hints, which nothing
    depends on, descale_q, descale_k and descale_v, of shape [1], are q_descale, k_descale and v_descale, and block_table is
    page_table. With one of them return_softmax_lse returns (out, softmax_lse), as then.
    """
    if not type(q) is type(k_cache) is type(v_cache) is torch.Tensor:
        check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    assert k_cache.stride(-1) == 1, "k_cache must have contiguous last dimension"
    assert v_cache.stride(-1) == 1, "v_cache must have contiguous last dimension"
    is_legacy = not (gqa_parallel is max_seqlen_k_hint is descale_q is descale_k is descale_v is block_table is None)
    if is_legacy:
        q_descale = _either("q_descale", q_descale, "descale_q", descale_q)
        k_descale = _either("k_descale", k_descale, "descale_k", descale_k)
        v_descale = _either("v_descale", v_descale, "descale_v", descale_v)
        page_table = _either("page_table", page_table, "block_table", block_table)
    elif scheduler_metadata is None and k is v is rotary_cos is rotary_sin is cu_seqlens_q is cache_leftpad is qv is None and (
            page_table is None or cache_batch_idx is None):
        # A plain step; the long way takes what is refused, and what else FP8 tensors have.
        options = {"causal": causal, "window": window_size, "softcap": softcap, "seqused_k": cache_seqlens}
        for name, x in (("softmax_scale", softmax_scale), ("page_table", page_table), ("cache_batch_idx", cache_batch_idx),
                        ("sink", s_aux)):
            if x is not None:
                options[name] = x
        for name, x in (("chunk", attention_chunk), ("sm_margin", sm_margin), ("return_lse", return_softmax_lse)):
            if x:
                options[name] = x
        if (result := run_now(q, k_cache, v_cache, options)) is not None:
            return (*result, *no_splits(q)) if return_softmax_lse else result
    left, right = _window(window_size, -1, -1)
    f = Forward(q, k_cache, v_cache, k, v, qv, None, cu_seqlens_q, None, cu_seqlens_k_new, None, cache_seqlens,
                _length(max_seqlen_q), None,
                page_table, cache_batch_idx, cache_leftpad, rotary_cos, rotary_sin, rotary_seqlens, q_descale, k_descale, v_descale,
                _number(softmax_scale), causal, left, right, attention_chunk, number_of("softcap", softcap), rotary_interleaved,
                scheduler_metadata, num_splits, pack_gqa, sm_margin, s_aux)
    check_metadata(f)
    if cache_seqlens is not None and not torch.is_tensor(cache_seqlens):
        f = f._replace(seqused_k=torch.full((f.batch(),), operator.index(cache_seqlens), dtype=torch.int32, device=q.device))
    if q.dtype == FP8 and not f.is_on_cache():
        with torch.no_grad():
            out, lse = _forward(q, k_cache, v_cache, qv, cu_seqlens_q, None, None, f.seqused_k, f.max_seqlen_q, None, f.q_descale,
                                f.k_descale, f.v_descale, softmax_scale, causal, window_size, attention_chunk, softcap, sm_margin,
                                s_aux, False, return_softmax_lse)
    else:
        out, lse = attend_without_gradients(f, _KVCACHE_NAMES, return_softmax_lse)
    if not return_softmax_lse:
        return out
    return (out, lse) if is_legacy else (out, lse, *no_splits(q))


def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
                           qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
                           cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1),
                           attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0):
    """A tensor for scheduler_metadata: int32, of upstream's size. It fits each call of its batch size, with any lengths, and changes
    no result: flash3's kernels make their schedule from the lengths.
    """
    check_tensors(cache_seqlens=cache_seqlens)
    left, right = _window(window_size, -1, -1)
    return torch.ops.flash_attn_3.get_scheduler_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, headdim if headdim_v is None else headdim_v,
        qkv_dtype,
        cache_seqlens, cu_seqlens_q, None, cu_seqlens_k_new, None, cache_leftpad, page_size, max_seqlen_k_new, causal, left,
        right, attention_chunk, has_softcap, num_splits or 0, pack_gqa, sm_margin)


class FlashAttnFunc:
    """For callers of FlashAttnFunc.apply: the arguments are flash_attn_func's."""
    apply = staticmethod(flash_attn_func)


class FlashAttnVarlenFunc:
    """The same with flash_attn_varlen_func's arguments."""
    apply = staticmethod(flash_attn_varlen_func)


class FlashAttnQKVPackedFunc:
    """The same with flash_attn_qkvpacked_func's arguments."""
    apply = staticmethod(flash_attn_qkvpacked_func)
