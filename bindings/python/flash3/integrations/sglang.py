# SPDX-License-Identifier: Apache-2.0
"""flash3 as SGLang's attention: the functions that SGLang takes from sgl_kernel.flash_attn::

    import flash3.integrations.sglang
    flash3.integrations.sglang.install()  # before sglang and sgl_kernel are imported; both stay as they are

Each has the names and defaults of SGLang's arguments. What flash3 does not do raises NotImplementedError, which names the argument,
before anything is launched. docs/engines.md says what SGLang does with it, and what is refused.
"""
import torch

from ._engine import attend, fp8_scales, refuse, sides, stand_in

MODULES = ("sgl_kernel.flash_attn",)


def install():
    """Makes SGLang's imports from sgl_kernel.flash_attn find this module's functions.

    To be called in each process that runs a model, before sglang is imported: at the top of a script, outside of its
    ``if __name__ == "__main__"``, which processes that are forked and those that are spawned both run. May be called again.

    Raises:
        RuntimeError: sgl_kernel.flash_attn is imported already.
    """
    stand_in(__name__, MODULES, (flash_attn_with_kvcache, flash_attn_varlen_func, is_fa3_supported))


def is_fa3_supported(device=None):
    """Whether this GPU, or the current one, has compute capability 9.0, for which flash3's kernels are."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) == (9, 0)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
                            max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None,
                            softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=None, softcap=0.0,
                            rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
                            return_softmax_lse=False, sinks=None, score_mod=None, aux_tensors=None, ver=3, only_qv=False, out=None):
    """Attention over a KV cache, to which k and v are appended first if given.

    Args:
        q: [batch, seq_q, heads_q, head_dim], or with cu_seqlens_q [total_q, heads_q, head_dim]; float16, bfloat16,
            float8_e4m3fn, or on the CPU float32.
        k_cache: [batch, rows, heads_k, head_dim]; with page_table [pages, page_size, heads_k, head_dim], of any page size.
        v_cache: the same with head_dim_v.
        k, v: [batch, seq_new, heads_k, dim], or with cu_seqlens_k_new [total_new, heads_k, dim]: written after the existing keys.
        cache_seqlens: [batch] int32, or one number for all: the keys in the cache, before any are appended. None: all rows.
        page_table: [batch, max_pages] int32.
        cu_seqlens_k_new: where each sequence begins in k; without k ignored, as in SGLang.
        window_size: (left, right), both sides inclusive; -1: unbounded.
        qv: as q, with head_dim_v: a second part of q, which is multiplied with v_cache, as in MLA's decoding.
        sinks: [heads_q]: one more logit per head, without a value.
        return_softmax_lse: return (out, lse); lse is [heads_q, total_q], or [batch, heads_q, seq_q], float32.
        out: the result is written there, and returned.
        scheduler_metadata, num_splits, pack_gqa: not needed, as flash3 decides by itself.
        q_descale, k_descale, v_descale: for FP8 tensors, [batch, heads_k] float32; otherwise ignored.

    The other arguments are those of flash3.attention_with_kv_cache: cache_leftpad is its leftpad_k, rotary_seqlens its
    rotary_offsets, attention_chunk its chunk.

    Returns:
        out, or with return_softmax_lse (out, lse). A query that sees no key gets 0, and lse = -inf.

    Raises:
        NotImplementedError: only_qv, score_mod, aux_tensors, ver = 4, and 8-bit tensors that are not float8_e4m3fn.
        TypeError, ValueError: an argument breaks a rule; flash3.attention_with_kv_cache says which rules there are.
    """
    _refuse(ver, only_qv=only_qv, score_mod=score_mod, aux_tensors=aux_tensors)
    scales = fp8_scales(q, k_cache, v_cache, q_descale, k_descale, v_descale, ("q", "k_cache", "v_cache"))
    if isinstance(cache_seqlens, int):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    return attend(q, k_cache, v_cache, seqused_k=cache_seqlens, page_table=page_table, cache_batch_idx=cache_batch_idx,
                  leftpad_k=cache_leftpad, k_new=k, v_new=v, cu_seqlens_k_new=None if k is None else cu_seqlens_k_new,
                  rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_offsets=rotary_seqlens,
                  rotary_interleaved=rotary_interleaved, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
                  softmax_scale=softmax_scale, causal=causal, window=sides(window_size), chunk=attention_chunk or 0,
                  softcap=softcap, sink=sinks, sm_margin=sm_margin, qv=qv, out=out, return_lse=return_softmax_lse, **scales)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None,
                           seqused_k=None, page_table=None, softmax_scale=None, causal=False, qv=None, q_descale=None,
                           k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                           pack_gqa=None, sm_margin=0, return_softmax_lse=False, sinks=None, score_mod=None, aux_tensors=None,
                           ver=3, only_qv=False, out=None):
    """Attention of packed sequences, or of [batch, seq, heads, dim] where cu_seqlens_q and cu_seqlens_k are None.

    Args:
        q: [total_q, heads_q, head_dim]; k: [total_k, heads_k, head_dim]; v: [total_k, heads_k, head_dim_v].
        cu_seqlens_q, cu_seqlens_k: [batch + 1] int32: where each sequence begins.
        max_seqlen_q, max_seqlen_k: no sequence is longer.
        seqused_q, seqused_k: [batch] int32: only the first tokens of each sequence count.
        page_table: [batch, max_pages] int32, with seqused_k and without cu_seqlens_k: k and v are pages.

    The other arguments, results and errors are those of flash_attn_with_kvcache.
    """
    _refuse(ver, only_qv=only_qv, score_mod=score_mod, aux_tensors=aux_tensors, sm_margin=sm_margin)
    scales = fp8_scales(q, k, v, q_descale, k_descale, v_descale)
    return attend(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
                  max_seqlen_k=max_seqlen_k, seqused_q=seqused_q, seqused_k=seqused_k, page_table=page_table,
                  softmax_scale=softmax_scale, causal=causal, window=sides(window_size), chunk=attention_chunk or 0,
                  softcap=softcap, sink=sinks, qv=qv, out=out, return_lse=return_softmax_lse, **scales)


def _refuse(ver, **arguments):
    if ver != 3:
        raise NotImplementedError(f"ver = {ver} but flash3 is taken for version 3 of FlashAttention")
    refuse(**arguments)
