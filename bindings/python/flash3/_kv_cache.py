# SPDX-License-Identifier: Apache-2.0
"""attention_with_kv_cache() and merge(), for torch tensors and for arrays: no autograd, as nobody trains through a cache."""
from . import arrays
from ._attention import _contiguous_last, _dtype_of_out, _host, _infinity, _is_torch, _zeros

try:
    import torch
except ImportError:
    torch = None


def _made(like, shape, dtype, fill=0.0):
    """A result: of torch where `like` is torch's, on its device, else of numpy."""
    if _is_torch(like):
        return torch.full(shape, fill, dtype=getattr(torch, dtype), device=like.device)
    _host("q", like)
    made = _zeros(shape, dtype)
    return made - _infinity() if fill else made


def _shape_and_dtype(name, x):
    if _is_torch(x):
        return tuple(x.shape), str(x.dtype).removeprefix("torch.")
    about = _host(name, x)
    return about.shape, about.dtype


def _run(like, call, workspace, tensors, options):
    """Runs a call of arrays; of torch tensors on a GPU on torch's stream, with a workspace of torch's."""
    if not (_is_torch(like) and like.is_cuda):
        return call(*tensors, **options)
    with torch.cuda.device(like.device):
        options = {**options, "stream": torch.cuda.current_stream().cuda_stream}
        size = workspace(*tensors, **options)
        memory = torch.empty(size, dtype=torch.uint8, device=like.device) if size else None
        return call(*tensors, **options, workspace=memory)


def _check_no_gradients(**tensors):
    for name, x in tensors.items():
        if _is_torch(x) and x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name}.requires_grad is True but there are no gradients through this call; call it under "
                                      "torch.no_grad(), or flash3.attention on tensors without a cache")


def attention_with_kv_cache(q, k_cache, v_cache, *, seqused_k=None, page_table=None, cache_batch_idx=None, leftpad_k=None,
                            k_new=None, v_new=None, cu_seqlens_k_new=None, rotary_cos=None, rotary_sin=None,
                            rotary_offsets=None, rotary_interleaved=False, causal=False, window=None, softmax_scale=None,
                            softcap=0.0, chunk=0, sink=None, cu_seqlens_q=None, max_seqlen_q=None, max_seqlen_k=None,
                            seqused_q=None, sm_margin=0, return_lse=False):
    """Attention over keys in a cache, to which the newest may be appended first: a step of decoding, or a part of a prefill.

    Arguments that are not listed are those of attention(), which this is otherwise; there are no gradients. What the index
    tensors hold is read when the kernels run, so that a captured CUDA graph replays with other lengths and pages.

    Args:
        q: [batch, seq_q, heads_q, head_dim]; float16, bfloat16, or on the CPU float32; or packed, with cu_seqlens_q.
        k_cache: [batch, rows, heads_k, head_dim] of the same dtype; with page_table [pages, page_size, heads_k, head_dim].
        v_cache: the same with head_dim_v.
        seqused_k: [batch] int32: the rows of each sequence that hold keys, before any are appended. None: all.
        page_table: [batch, max_pages] int32: key j of sequence b is row j % page_size of page page_table[b, j // page_size].
            Entries behind the last key may be anything.
        cache_batch_idx: [batch] int32: sequence b has the keys of element cache_batch_idx[b] of the cache.
        leftpad_k: [batch] int32: the first rows of each sequence that hold no key. seqused_k counts them.
        k_new: [batch, seq_new, heads_k, head_dim], or [total_new, heads_k, head_dim] with cu_seqlens_k_new: written into
            k_cache behind the keys that are there, and then keys like them. seqused_k is needed, and stays as it is.
        v_new: the same with head_dim_v.
        cu_seqlens_k_new: [batch + 1] int32: where each sequence begins in k_new and v_new.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2], float32 or q's dtype: k_new and q get a rotary position embedding.
            Token n of k_new is at position rotary_offsets[b] + n; so is query n where causal, window or chunk is set, and
            otherwise all queries are at rotary_offsets[b].
        rotary_offsets: [batch] int32. None: seqused_k.
        rotary_interleaved: dimensions 2i and 2i + 1 belong together. False: i and i + rotary_dim / 2.
        max_seqlen_k: with page_table, no sequence has more keys. Not needed.
        sm_margin: on a GPU, the multiprocessors that are left to other kernels.

    Returns:
        out, or with return_lse (out, lse), as attention().
    """
    _check_no_gradients(q=q, k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new)
    q = _contiguous_last(q)
    (shape, dtype), (shape_v, _) = _shape_and_dtype("q", q), _shape_and_dtype("v_cache", v_cache)
    if len(shape) not in (3, 4):
        raise ValueError(f"q.ndim = {len(shape)} but it must be 4, [batch, seq, heads, dim], or packed 3, [total, heads, dim]")
    if len(shape_v) != 4:
        raise ValueError(f"v_cache.ndim = {len(shape_v)} but it must be 4, [batch, rows, heads, dim] or [pages, page_size, heads, "
                         "dim]")
    *batch, seq, heads = shape[:-1]
    out = _made(q, (*shape[:-1], shape_v[-1]), dtype)
    lse = _made(q, (*batch, heads, seq), "float32", -float("inf")) if return_lse else None
    options = dict(seqused_k=seqused_k, page_table=page_table, cache_batch_idx=cache_batch_idx, leftpad_k=leftpad_k, k_new=k_new,
                   v_new=v_new, cu_seqlens_k_new=cu_seqlens_k_new, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
                   rotary_offsets=rotary_offsets, rotary_interleaved=rotary_interleaved, causal=causal, window=window,
                   softmax_scale=softmax_scale, softcap=softcap, chunk=chunk, sink=sink, cu_seqlens_q=cu_seqlens_q,
                   max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_q=seqused_q, sm_margin=sm_margin)
    _run(q, arrays.forward, arrays.forward_workspace, (q, k_cache, v_cache, out, lse), options)
    return (out, lse) if return_lse else out


def merge(out_parts, lse_parts, *, sink=None, out_dtype=None, return_lse=False):
    """Attention over all keys, of attention over parts of them; no gradients.

    Args:
        out_parts: [parts, rows, heads, head_dim_v] float32. Rows may be those of a batch or of packed sequences.
        lse_parts: [parts, heads, rows] float32, natural logarithms; -inf: the part saw no key, and its out is not looked at.
        sink: [heads], float32 or the result's dtype: one more logit per head, which no part has yet.
        out_dtype: float16, bfloat16 or float32. None: float32.
        return_lse: return (out, lse); lse is [heads, rows] float32.

    Returns:
        out [rows, heads, head_dim_v]; with return_lse, (out, lse). A row that no part saw is 0, and its lse -inf or the sink.
    """
    _check_no_gradients(out_parts=out_parts, lse_parts=lse_parts, sink=sink)
    out_parts, lse_parts = _contiguous_last(out_parts), _contiguous_last(lse_parts)
    shape, dtype = _shape_and_dtype("out_parts", out_parts)
    if len(shape) != 4:
        raise ValueError(f"out_parts.ndim = {len(shape)} but it must be 4, [parts, rows, heads, head_dim_v]")
    out = _made(out_parts, shape[1:], _dtype_of_out(dtype, out_dtype))
    lse = _made(out_parts, (shape[2], shape[1]), "float32") if return_lse else None
    _run(out_parts, arrays.merge, arrays.merge_workspace, (out_parts, lse_parts, out, lse), dict(sink=sink))
    return (out, lse) if return_lse else out
