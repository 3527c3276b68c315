# SPDX-License-Identifier: Apache-2.0
"""flash3 as vLLM's attention: the functions that vLLM takes from its module vllm.vllm_flash_attn::

    import flash3.integrations.vllm
    flash3.integrations.vllm.install()  # before vllm is imported; vllm itself stays as it is
    from vllm import LLM

Each has the names, order and defaults of vLLM's arguments. What flash3 does not do raises NotImplementedError, which names the
argument, before anything is launched. docs/engines.md says what vLLM does with it, and what is refused.
"""
import torch

from ._engine import attend, fp8_scales, refuse, sides, stand_in

MODULES = "vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"


def install():
    """Makes vLLM's imports from vllm.vllm_flash_attn find this module's functions.

    To be called in each process that runs a model, before vllm is imported: at the top of a script, outside of its
    ``if __name__ == "__main__"``, which processes that are forked and those that are spawned both run. May be called again.

    Raises:
        RuntimeError: vllm.vllm_flash_attn is imported already.
    """
    stand_in(__name__, MODULES, (flash_attn_varlen_func, get_scheduler_metadata, is_fa_version_supported,
                                 fa_version_unsupported_reason, compile_flash_attn_varlen_func_from_specs))


def flash_attn_varlen_func(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None,
                           dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None,
                           deterministic=False, return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None,
                           scheduler_metadata=None, q_descale=None, k_descale=None, v_descale=None, num_splits=0,
                           output_scale=None, fa_version=2, s_aux=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None,
                           mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_tensor_leading_dims=None,
                           dynamic_causal=None):
    """Attention of packed queries over packed keys, or over a KV cache in pages.

    Args:
        q: [total_q, heads_q, head_dim], float16, bfloat16, float8_e4m3fn, or on the CPU float32.
        k: [total_k, heads_k, head_dim] with cu_seqlens_k; with block_table [pages, page_size, heads_k, head_dim]; with seqused_k
            alone [batch, rows, heads_k, head_dim].
        v: the same with head_dim_v.
        max_seqlen_q, max_seqlen_k: no sequence is longer.
        cu_seqlens_q: [batch + 1] int32: where each sequence begins in q.
        cu_seqlens_k: [batch + 1] int32: likewise in k.
        seqused_k: [batch] int32: the keys of each sequence in the cache. Either this or cu_seqlens_k.
        window_size: (left, right), both sides inclusive; None or -1: unbounded.
        block_table: [batch, max_pages] int32: the pages of each sequence.
        return_softmax_lse: return (out, lse); lse is [heads_q, total_q] float32.
        out: [total_q, heads_q, head_dim_v] of q's dtype, or of a wider one where q is FP8, any strides: the result is written there, and returned.
        q_v: [total_q, heads_q, head_dim_v]: a second part of q, which is multiplied with v, as in MLA's decoding: k is the part of its
            cache with the position embedding, v the latent part.
        alibi_slopes: [heads_q] or [batch, heads_q] float32, as in FlashAttention-2, whose lse is larger under causal, by the slope times
            the query's place. Not over several ranks.
        s_aux: [heads_q]: one more logit per head, without a value.
        fa_version: 2 or 3, which compute the same.
        cp_world_size, cp_rank, cp_tot_seqused_k: the keys are those of one rank of several: key j is the sequence's key
            j * cp_world_size + cp_rank, of cp_tot_seqused_k [batch] int32. causal goes by these places.
        deterministic, num_splits, scheduler_metadata: not needed, as flash3 decides by itself; a call repeated has the same bits.
        q_descale, k_descale, v_descale: for FP8 tensors, [batch, heads_k] float32; otherwise ignored, as in vLLM.

    Returns:
        out, or with return_softmax_lse (out, lse). A query that sees no key gets 0, and lse = -inf.

    Raises:
        NotImplementedError: dropout_p, alibi_slopes with cp_world_size above 1, return_attn_probs, output_scale, mask_mod,
            block_sparse_tensors, aux_tensors, dynamic_causal, fa_version = 4, and 8-bit tensors that are not float8_e4m3fn.
        TypeError, ValueError: an argument breaks a rule; flash3.attention_with_kv_cache says which rules there are.
    """
    refuse(dropout_p=dropout_p, return_attn_probs=return_attn_probs, output_scale=output_scale,
           mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors, aux_tensors=aux_tensors,
           aux_tensor_leading_dims=aux_tensor_leading_dims, dynamic_causal=dynamic_causal)
    if fa_version not in (2, 3):
        raise NotImplementedError(f"fa_version = {fa_version} but flash3 is taken for versions 2 and 3")
    scales = fp8_scales(q, k, v, q_descale, k_descale, v_descale)
    if (cu_seqlens_k is None) == (seqused_k is None):
        raise ValueError(f"cu_seqlens_k is {'not ' if cu_seqlens_k is None else ''}given and seqused_k is "
                         f"{'not ' if seqused_k is None else ''}given; one of them must be")
    options = dict(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, seqused_k=seqused_k, page_table=block_table, causal=causal,
                   qv=q_v, **scales)
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    if cp_world_size != 1:
        if alibi_slopes is not None:
            raise NotImplementedError(f"alibi_slopes is given but cp_world_size = {cp_world_size}; a rank's keys are not side by side")
        options.update(_of_one_rank(q, window_size, cp_world_size, cp_rank, cp_tot_seqused_k, options))
    return attend(q, k, v, cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k, window=sides(window_size), softcap=softcap,
                  softmax_scale=softmax_scale, sink=s_aux, out=out, return_lse=return_softmax_lse, **options)


def _of_one_rank(q, window_size, world_size, rank, total, options):
    """The options of a call on the keys of one rank.

    A causal query sees the keys up to its own place, of which this rank has about one in world_size: no band of a mask, but a
    number of keys for each query, which is then a sequence of its own.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"cp_rank = {rank} but cp_world_size = {world_size}; ranks are from 0 to cp_world_size - 1")
    if sides(window_size) is not None:
        raise NotImplementedError(f"window_size = {window_size} with cp_world_size = {world_size} but flash3 does not do this")
    if not options["causal"]:
        return {}
    starts, keys, pages = options["cu_seqlens_q"], options["seqused_k"], options["page_table"]
    if pages is None:
        raise NotImplementedError(f"causal = True and cp_world_size = {world_size} without a block_table, which flash3 does not do")
    if total is None:
        raise ValueError(f"cp_world_size = {world_size} but cp_tot_seqused_k is not given; causal goes by the keys of all ranks")
    rows = torch.arange(q.shape[0], dtype=starts.dtype, device=starts.device)
    sequence = torch.searchsorted(starts, rows, right=True) - 1
    is_one = (sequence >= 0) & (sequence < keys.shape[0])  # others are rows before the first sequence or after the last
    sequence = sequence.clamp(0, keys.shape[0] - 1)
    place = total[sequence] - starts[sequence + 1] + rows  # the last query of a sequence has the place of its last key
    seen = torch.div(place - rank, world_size, rounding_mode="floor") + 1
    seen = seen.minimum(keys[sequence]).clamp(min=0).where(is_one, 0)
    scales = {name: options[name][sequence] for name in ("q_scale", "k_scale", "v_scale")
              if options.get(name) is not None and options[name].dim() == 2}  # of the sequences
    return dict(scales, cu_seqlens_q=torch.arange(q.shape[0] + 1, dtype=torch.int32, device=starts.device), max_seqlen_q=1,
                seqused_k=seen.int(), page_table=pages[sequence], causal=False)


def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
                           qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None,
                           page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), has_softcap=False, num_splits=0,
                           pack_gqa=None, sm_margin=0):
    """None: flash3's kernels need no plan of the batch in advance, and vLLM then hands none to them."""
    return None


def is_fa_version_supported(fa_version, device=None):
    """Whether vLLM may take flash3 for this version of FlashAttention: for 2 and 3, on compute capability 9.0."""
    return fa_version_unsupported_reason(fa_version, device) is None


def fa_version_unsupported_reason(fa_version, device=None):
    """Why it may not, or None. vLLM's platform tells the device: asking CUDA here would initialise it before vLLM forks."""
    if fa_version not in (2, 3, 4):
        raise ValueError(f"fa_version = {fa_version} but it must be 2, 3 or 4")
    if fa_version == 4:
        return "flash3 is taken for versions 2 and 3 of FlashAttention"
    from vllm.platforms import current_platform
    capability = current_platform.get_device_capability()
    if capability is None:
        return "flash3 needs a GPU of compute capability 9.0, and vLLM's platform has none"
    if tuple(capability) != (9, 0):
        return f"flash3 needs a GPU of compute capability 9.0, and this one has {'.'.join(map(str, capability))}"
    return None


def compile_flash_attn_varlen_func_from_specs(*specs, **options):
    """vLLM calls it for version 4 alone."""
    raise NotImplementedError("compile_flash_attn_varlen_func_from_specs compiles FlashAttention-4, which flash3 is not")
