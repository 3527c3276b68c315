# SPDX-License-Identifier: Apache-2.0
"""Forwards on a KV cache, scheduler metadata, and the merging of parts."""
import torch
from flash3._arguments import arguments_of
from flash3._torch_kv_cache import NO_GRADIENTS, recorded, run, run_now

from ._arguments import FP8, NAMES, check_margin, check_tensors, checked_scale, checked_softcap, flash3_call, upstreams


def _pages(f, names):
    """(page_table, kv_batch_idx) as flash3 takes them, which is one or the other.

    Upstream takes both: sequence b has row kv_batch_idx[b] of the table. On a GPU, where numbers are not looked at before the launch,
    one that is outside of the table stands for its nearest row.
    """
    table, rows = f.page_table, f.kv_batch_idx
    if table is None or rows is None:
        return table, rows
    check_tensors(page_table=table, **{names["cache_batch_idx"]: rows})
    if table.dim() != 2 or table.shape[0] == 0:
        raise ValueError(f"page_table.shape = {tuple(table.shape)} but {names['cache_batch_idx']} is given; it must be [rows, max_pages], "
                         "of a row at least")
    if rows.dtype != torch.int32:
        raise TypeError(f"{names['cache_batch_idx']}.dtype = {rows.dtype} but it must be torch.int32")
    if rows.shape != (f.batch(),):
        raise ValueError(f"{names['cache_batch_idx']}.shape = {tuple(rows.shape)} but the batch size is {f.batch()}; it must be [batch]")
    if rows.device != table.device:
        raise ValueError(f"{names['cache_batch_idx']}.device = {rows.device} but page_table.device = {table.device}; all tensors must be "
                         "on one device")
    last = table.shape[0] - 1
    if rows.device.type == "cpu" and bool(((rows < 0) | (rows > last)).any()):
        raise ValueError(f"{names['cache_batch_idx']} = {rows.tolist()} but page_table.shape[0] = {last + 1}; its rows are 0 to {last}")
    return table.index_select(0, rows.clamp(0, last)), None


def _flash3s(f, names):
    """flash3's options of a Forward on a cache."""
    check_margin(f.sm_margin)
    if f.cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k is given but k and v are a cache, which is not packed; seqused_k tells how many keys count")
    page_table, kv_batch_idx = _pages(f, names)
    # max_seqlen_k is not looked at, as upstream does not: keys count by seqused_k, or all that the cache has room for.
    # What is not given is left out: each option takes time.
    options = {name: x for name, x in (
        ("softmax_scale", checked_scale(f.softmax_scale) or None), ("seqused_k", f.seqused_k), ("page_table", page_table),
        ("sink", f.s_aux), ("cache_batch_idx", kv_batch_idx), ("leftpad_k", f.leftpad_k), ("cu_seqlens_q", f.cu_seqlens_q),
        ("seqused_q", f.seqused_q), ("qv", f.qv)) if x is not None}
    options["causal"] = f.causal
    if f.window_size_left != -1 or f.window_size_right != -1:
        options["window"] = f.window_size_left, f.window_size_right
    if (softcap := checked_softcap(f.softcap)) != 0:
        options["softcap"] = softcap
    if f.attention_chunk:
        options["chunk"] = f.attention_chunk
    if f.cu_seqlens_q is not None:
        options["max_seqlen_q"] = f.max_seqlen_q
    if f.sm_margin:
        options["sm_margin"] = f.sm_margin
    if f.appends():  # what comes without these is ignored, as upstream does
        options.update(k_new=f.k_new, v_new=f.v_new, cu_seqlens_k_new=None if f.k_new is None else f.cu_seqlens_k_new,
                       rotary_cos=f.rotary_cos, rotary_sin=f.rotary_sin,
                       rotary_offsets=None if f.rotary_cos is None else f.seqlens_rotary, rotary_interleaved=f.rotary_interleaved)
    # Upstream ignores the scales of 16-bit tensors.
    if f.q.dtype == FP8:
        options["q_scale"] = f.q_descale
    if f.k.dtype == FP8:
        options.update(k_scale=f.k_descale, v_scale=f.v_descale)
    return options


def _run(f, names, options):
    lse = None
    if f.out is not None:
        lse = torch.full(lse_shape(f.q), -float("inf"), device=f.q.device, dtype=torch.float32)
    try:
        return run(f.q, f.k, f.v, arguments_of("attention_with_kv_cache", options), f.out, lse)
    except (ValueError, TypeError, RuntimeError) as error:
        raise upstreams(error, names) from None


def attend(f):
    """(out, softmax_lse) of a Forward on a cache, which is written where it appends."""
    return _run(f, NAMES, _flash3s(f, NAMES))


class _Refusal(torch.autograd.Function):
    """Results that have a gradient for autograd, so that asking for it raises instead of giving none."""

    @staticmethod
    def forward(ctx, name, out, lse, *recorded):
        ctx.name = name
        ctx.mark_dirty(out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(f"{ctx.name}.requires_grad is True but {NO_GRADIENTS}")


def attend_without_gradients(f, names=NAMES, with_lse=True):
    """attend() for who may be seen by autograd: the forward runs, as upstream's does, and a backward raises.

    names: of flash3's arguments, for errors. Without with_lse the second result may be None.
    """
    options = _flash3s(f, names)
    if f.out is None:
        if with_lse:
            options["return_lse"] = True
        if (result := run_now(f.q, f.k, f.v, options)) is not None:
            return result if with_lse else (result, None)
        options.pop("return_lse", None)
    tensors = {"q": f.q, names["k_cache"]: f.k, names["v_cache"]: f.v, names.get("k_new", "k_new"): f.k_new,
               names.get("v_new", "v_new"): f.v_new, "s_aux": f.s_aux, "qv": f.qv}
    found = recorded(**tensors)
    if found and torch.compiler.is_compiling():  # a compiler would ask for the gradient itself
        raise NotImplementedError(f"{found[0]}.requires_grad is True but {NO_GRADIENTS}")
    out, lse = _run(f, names, options)
    return _Refusal.apply(found[0], out, lse, *(tensors[name] for name in found)) if found else (out, lse)


def lse_shape(q):
    *batch, seq, heads = q.shape[:-1]
    return (*batch, heads, seq)


def _is_causal_and_local(max_seqlen_q, max_seqlen_k, headdim, page_size, causal, left, right, chunk):
    """What upstream makes of the masks before it sizes its schedule."""
    left, right = -1 if left >= max_seqlen_k - 1 else left, -1 if right >= max_seqlen_q - 1 else right
    if max_seqlen_q == 1 and left == right == -1 and chunk == 0 and (page_size is None or not 64 < headdim <= 128):
        causal = False
    right = 0 if causal else right
    is_causal = left < 0 and right == 0 and chunk == 0
    return is_causal, not is_causal and (left >= 0 or right >= 0 or chunk >= 1)


def _metadata_size(batch_size, vectors):
    return vectors * ((batch_size + 3) // 4 * 4) + 1


def scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, qkv_dtype, seqused_k,
                       cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, leftpad_k=None, page_size=None,
                       max_seqlen_k_new=0, is_causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0,
                       has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0):
    """A tensor of the size that upstream's has. flash3's kernels make their schedule from the lengths: nothing lies in it."""
    check_tensors(cache_seqlens=seqused_k)
    if batch_size < 0:
        raise ValueError(f"batch_size = {batch_size} but it must be at least 0")
    if num_heads_k < 1 or num_heads % num_heads_k:
        raise ValueError(f"num_heads = {num_heads} but num_heads_k = {num_heads_k}; num_heads must be a multiple of num_heads_k")
    if seqused_k.dtype != torch.int32:
        raise TypeError(f"cache_seqlens.dtype = {seqused_k.dtype} but it must be torch.int32")
    causal, local = _is_causal_and_local(max_seqlen_q, max_seqlen_k, headdim, page_size, is_causal, window_size_left,
                                         window_size_right, attention_chunk)
    size = _metadata_size(batch_size, 2 + (not local) + (causal or local))
    return torch.zeros((size,), dtype=torch.int32, device=seqused_k.device)


def check_metadata(f):
    """That a Forward's is such a tensor, of its batch size with any lengths and masks: upstream's size depends on no more."""
    metadata = f.scheduler_metadata
    if metadata is None:
        return
    check_tensors(q=f.q, scheduler_metadata=metadata)
    sizes = [_metadata_size(f.batch(), vectors) for vectors in (3, 4)]
    if metadata.dtype != torch.int32:
        raise TypeError(f"scheduler_metadata.dtype = {metadata.dtype} but it must be torch.int32")
    if metadata.device != f.q.device:
        raise ValueError(f"scheduler_metadata.device = {metadata.device} but q.device = {f.q.device}; all tensors must be on one "
                         "device")
    if metadata.dim() != 1 or metadata.shape[0] not in sizes or not metadata.is_contiguous():
        raise ValueError(f"scheduler_metadata.shape = {tuple(metadata.shape)} but the batch size is {f.batch()}; it must be as "
                         f"get_scheduler_metadata gives it, contiguous and [{sizes[0]}] or [{sizes[1]}]")


_PARTS = {"out_parts": "out_partial", "lse_parts": "lse_partial"}


def combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Parts of one softmax, [splits, batch, seq, heads, dim] and [splits, batch, seq, heads], as one."""
    check_tensors(out_partial=out_partial, lse_partial=lse_partial)
    if out_partial.dim() != 5:
        raise ValueError(f"out_partial.ndim = {out_partial.dim()} but it must be 5, [splits, batch, seq, heads, dim]")
    splits, batch, seq, heads, dim = out_partial.shape
    if lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(f"lse_partial.shape = {tuple(lse_partial.shape)} but out_partial.shape = {tuple(out_partial.shape)}; it "
                         "must be [splits, batch, seq, heads]")
    if out is not None and out.shape != out_partial.shape[1:]:
        raise ValueError(f"out.shape = {tuple(out.shape)} but out_partial.shape = {tuple(out_partial.shape)}; it must be [batch, "
                         "seq, heads, dim]")
    rows = batch * seq
    made, lse = flash3_call(torch.ops.flash3.merge.default, out_partial.reshape(splits, rows, heads, dim),
                            lse_partial.reshape(splits, rows, heads).transpose(1, 2), None,
                            out_dtype if out is None else out.dtype, names=_PARTS)
    made, lse = made.view(batch, seq, heads, dim), lse.view(heads, batch, seq).permute(1, 2, 0)
    return made if out is None else out.copy_(made), lse
