# SPDX-License-Identifier: Apache-2.0
"""Decoding over a KV cache whose tokens are dealt to ranks in turn: decode context parallelism."""
import torch
import torch.distributed as dist

from .._kv_cache import attention_with_kv_cache as attend
from .._kv_cache import merge
from .._library import FP8_BLOCK
from .._options import lacks_options, number_of, rotation_seed as seed_of, scale_or_default
from . import _own_cache
from ._decode_checks import check
from ._exchange import AllToAll, explained, packed, unpacked
from ._layout import mask_of


@lacks_options("attention_with_kv_cache")
def attention_with_kv_cache(q, k_cache, v_cache, seqlens, group=None, *, interleave=1, heads="all", page_table=None,
                            cache_batch_idx=None, k_new=None, v_new=None, rotary_cos=None, rotary_sin=None, rotary_offsets=None,
                            rotary_interleaved=False, causal=False, window=None, softmax_scale=None, softcap=0.0, chunk=0,
                            sink=None, q_scale=None, k_scale=None, v_scale=None, rotate=False, rotation_seed=0, sm_margin=0,
                            tree_mask=None, out_dtype=None, return_lse=False, qv=None):
    """A step of decoding over a cache whose tokens are distributed to the ranks of a group; no gradients.

    Each rank attends to its own rows, and the parts are merged in float32 by their lse. Token i of a sequence is in the cache of rank
    (i // interleave) % ranks, after the earlier tokens that this rank has: local_seqlens() and cache_rows() return where. The newest
    tokens, including those of q, are already in the cache or come as k_new. Arguments that are not listed are those of
    flash3.attention_with_kv_cache.

    Args:
        q: [batch, seq_q, heads_q, head_dim]: the last seq_q tokens of each sequence, the same on all ranks, or this rank's heads.
        k_cache, v_cache: this rank's rows, [batch, rows, heads_k, dim] or pages, of KV heads that all ranks of the group have; FP8
            or not, and v_cache may be a part of k_cache's memory.
        seqlens: [batch] int32 or int64, on q's device: the tokens of each sequence, over all ranks, before any are appended.
        group: a ProcessGroup, or a DeviceMesh of one dimension. None: all ranks.
        interleave: consecutive tokens that one rank holds.
        heads: "all": q and the result have all heads on every rank, and parts are gathered. "dealt": each rank has heads_q of
            ranks * heads_q heads, in order, and gets their results: q is gathered, and each part goes to the rank of its heads.
        k_new, v_new: [batch, seq_new, heads_k, dim]: all the newest tokens, the same on all ranks. Each rank writes its own tokens after
            its rows. None: no new tokens; only v_new None: v_cache is a part of k_cache.
        rotary_cos, rotary_sin, rotary_offsets: as in flash3.attention_with_kv_cache, for k_new and q; rotary_offsets None: seqlens.
        sink: of the heads of the result.
        q_scale: of an FP8 q, for the heads that q has: [1], [batch, heads_k] or [batch, heads_q, blocks].
        k_scale, v_scale: only of this rank's rows: [1], [batch, heads_k], or for blocks of 128 rows of its pages or elements.
        tree_mask: [batch, seq_q] int64, the same on all ranks: which of a sequence's last seq_q tokens, all of them drafts, a query
            sees, on any rank.
        qv: as q, of the same heads.

    Returns:
        out, or with return_lse (out, lse), as flash3.attention_with_kv_cache.
    """
    group = dist.group.WORLD if group is None else group.get_group() if hasattr(group, "get_group") else group
    deal = _own_cache.Deal(dist.get_rank(group), dist.get_world_size(group), interleave)
    cache = _own_cache.OwnCache(k_cache, v_cache, page_table, cache_batch_idx, k_scale, v_scale)
    tensors = {"q": q, "qv": qv, "q_scale": q_scale, "k_new": k_new, "v_new": v_new, "rotary_cos": rotary_cos,
               "rotary_sin": rotary_sin, "rotary_offsets": rotary_offsets, "sink": sink, "tree_mask": tree_mask}
    mask = mask_of(causal, window, chunk)
    check(group, deal, heads, cache, tensors, seqlens, mask,
          {"softmax_scale": scale_or_default(softmax_scale) or None, "softcap": number_of("softcap", softcap), "rotate": bool(rotate),
           "rotation_seed": seed_of(rotation_seed), "rotary_interleaved": bool(rotary_interleaved), "out_dtype": out_dtype})
    batch, seq_q, own_heads, _ = q.shape
    dtype = out_dtype or (torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype)
    if heads == "dealt":
        q, qv, q_scale = _all_heads(q, qv, q_scale, k_cache.shape[2], group, deal)
    options = {"softmax_scale": softmax_scale, "softcap": softcap, "rotate": rotate, "rotation_seed": rotation_seed,
               "sm_margin": sm_margin}
    new = None
    if k_new is not None:
        tables = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_interleaved": rotary_interleaved}
        has_tables = rotary_cos is not None or rotary_sin is not None
        new = _own_cache.New(k_new, v_new, tables if has_tables else {}, seqlens if rotary_offsets is None else rotary_offsets)
        _own_cache.append(new, seqlens, deal, cache, q, qv, options)
        seqlens = seqlens + new.count
    q, of_keys = _own_cache.own_keys(q, qv, q_scale, seqlens, deal, cache, mask, tree_mask, new)
    out, lse = attend(q, k_cache, v_cache, out_dtype=torch.float32, return_lse=True, **of_keys, **options)
    parts = _exchanged(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), own_heads, heads, group, deal.ranks)
    out, lse = merge(*parts, sink=sink, out_dtype=dtype, return_lse=True)
    out = out.unflatten(0, (batch, seq_q))
    return (out, lse.unflatten(1, (batch, seq_q)).transpose(0, 1).contiguous()) if return_lse else out


def _all_heads(q, qv, q_scale, heads_k, group, deal):
    """q, qv and q_scale of all ranks' heads, in one message. Scales of a tensor, or of KV heads, become those of own heads' blocks."""
    if q_scale is not None and q_scale.dim() < 3:
        own = deal.rank * q.shape[2] + torch.arange(q.shape[2], device=q.device)
        scales = q_scale[:, own * heads_k // (q.shape[2] * deal.ranks), None] if q_scale.dim() == 2 else q_scale
        q_scale = scales.expand(q.shape[0], q.shape[2], -(-q.shape[1] // FP8_BLOCK))
    given = [x for x in (q_scale, q, qv) if x is not None]  # the largest elements first, so that each tensor's are in place
    own = [x.clone(memory_format=torch.contiguous_format).view(torch.uint8) for x in given]
    message = packed(own)
    come = [torch.empty_like(message) for _ in range(deal.ranks)]
    with explained("gathering q", group):
        dist.all_gather(come, message, group=group)
    parts = zip(*(unpacked(part, [x.shape for x in own]) for part in come))
    made = iter([torch.cat([part.view(x.dtype) for part in of_ranks], 1 if x is q_scale else 2) for x, of_ranks in zip(given, parts)])
    of_scale = None if q_scale is None else next(made)
    return next(made), None if qv is None else next(made), of_scale


def _exchanged(out, lse, own_heads, heads, group, ranks):
    """(out_parts, lse_parts) for merge(), of this rank's out [rows, heads, dim] and lse [heads, rows]."""
    shapes = [(out.shape[0], own_heads, out.shape[2]), (own_heads, out.shape[0])]
    if heads == "dealt":
        messages = [[x, y] for x, y in zip(out.split(own_heads, 1), lse.split(own_heads, 0))]
        come = AllToAll(group, messages, [shapes] * ranks).wait()
    else:
        message = packed([out, lse])
        parts = [torch.empty_like(message) for _ in range(ranks)]
        with explained("gathering the parts", group):
            dist.all_gather(parts, message, group=group)
        come = [unpacked(part, shapes) for part in parts]
    return [torch.stack(x) for x in zip(*come)]
