# SPDX-License-Identifier: Apache-2.0
"""Decoding over a KV cache whose tokens are dealt to ranks in turn: decode context parallelism."""
import torch
import torch.distributed as dist

from .._kv_cache import attention_with_kv_cache as attend
from .._kv_cache import merge
from .._options import window_sides
from ._exchange import AllToAll, Field, compare, explained, packed, unpacked


def local_seqlens(seqlens, rank, ranks, interleave=1):
    """How many of a sequence's first `seqlens` tokens a rank holds, where each in turn gets `interleave` tokens.

    seqlens: an integer, or a tensor of them; token i is rank (i // interleave) % ranks's.
    """
    whole, rest = seqlens // (ranks * interleave), seqlens % (ranks * interleave) - rank * interleave
    return whole * interleave + (rest.clamp(0, interleave) if torch.is_tensor(rest) else min(max(rest, 0), interleave))


def cache_rows(positions, ranks, interleave=1):
    """(rank, row): whose cache holds the tokens at these places of their sequences, and in which of its rows."""
    round_tokens = ranks * interleave
    return positions // interleave % ranks, positions // round_tokens * interleave + positions % interleave


def _visible(seqlens, seq_q, causal, window, chunk):
    """(low, high) [batch, seq_q]: from which key of its sequence a query sees up to before which."""
    left, right = window_sides(window) or (-1, -1)
    place = seqlens[:, None] - seq_q + torch.arange(seq_q, device=seqlens.device)
    low, high = torch.zeros_like(place), seqlens[:, None].expand_as(place)
    if causal or right >= 0:
        high = torch.minimum(high, place + 1 + (0 if causal else right))
    if left >= 0:
        low = torch.maximum(low, place - left)
    if chunk:
        first = torch.div(place, chunk, rounding_mode="floor") * chunk
        low, high = torch.maximum(low, first), torch.minimum(high, first + chunk)
    high = high.clamp(min=0)
    return torch.minimum(low, high), high


def _own_keys(q, seqlens, rank, ranks, interleave, causal, window, chunk, page_table, cache_batch_idx):
    """(q, options) of a call on this rank's cache: where a sequence's queries see different keys, each is one of its own."""
    batch, seq_q = q.shape[:2]

    def own(x):
        return local_seqlens(x, rank, ranks, interleave).to(torch.int32).flatten().contiguous()
    if not causal and window is None and not chunk:
        return q, {"seqused_k": own(seqlens), "page_table": page_table, "cache_batch_idx": cache_batch_idx}
    low, high = _visible(seqlens, seq_q, causal, window, chunk)
    if page_table is not None:
        page_table = page_table.repeat_interleave(seq_q, 0)
    elif seq_q > 1 or cache_batch_idx is not None:
        cache_batch_idx = torch.arange(batch, dtype=torch.int32, device=q.device) if cache_batch_idx is None else cache_batch_idx
        cache_batch_idx = cache_batch_idx.repeat_interleave(seq_q)
    options = {"seqused_k": own(high), "page_table": page_table, "cache_batch_idx": cache_batch_idx}
    if window is not None or chunk:
        options["leftpad_k"] = own(low)
    return q.reshape(batch * seq_q, 1, *q.shape[2:]), options


def attention_with_kv_cache(q, k_cache, v_cache, seqlens, group=None, *, interleave=1, heads="all", page_table=None,
                            cache_batch_idx=None, causal=False, window=None, softmax_scale=None, softcap=0.0, chunk=0, sink=None,
                            sm_margin=0, return_lse=False):
    """A step of decoding over a cache whose tokens are dealt to the ranks of a group; no gradients.

    Each rank attends over its own rows, and the parts are merged in float32 by their lse. Token i of a sequence lies in rank
    (i // interleave) % ranks's cache, behind those of its tokens before it: local_seqlens() and cache_rows() say where. The newest
    tokens, those of q among them, must be there already. Arguments that are not listed are those of flash3.attention_with_kv_cache.

    Args:
        q: [batch, seq_q, heads_q, head_dim]: the last seq_q tokens of each sequence, the same on all ranks, or own heads.
        k_cache, v_cache: this rank's rows, [batch, rows, heads_k, dim] or pages, of KV heads that all ranks of the group have.
        seqlens: [batch] int32 or int64, on q's device: the tokens of each sequence, over all ranks.
        group: a ProcessGroup, or a DeviceMesh of one dimension. None: all ranks.
        interleave: consecutive tokens that one rank holds.
        heads: "all": q has all heads on every rank, and so has the result, for which parts are gathered. "dealt": each rank has
            heads_q of ranks * heads_q heads, in order, and gets their results: q is gathered, and parts go to whose heads they are.
        sink: of the heads of the result.

    Returns:
        out, or with return_lse (out, lse), as flash3.attention_with_kv_cache.
    """
    if heads not in ("all", "dealt"):
        raise ValueError(f"heads = {heads!r} but it must be 'all' or 'dealt'")
    if interleave < 1:
        raise ValueError(f"interleave = {interleave} but it must be at least 1")
    if q.dim() != 4 or seqlens.shape != q.shape[:1]:
        raise ValueError(f"q.shape = {tuple(q.shape)} and seqlens.shape = {tuple(seqlens.shape)} but they must be [batch, seq_q, "
                         "heads_q, head_dim] and [batch]")
    group = dist.group.WORLD if group is None else group.get_group() if hasattr(group, "get_group") else group
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    _check(q, k_cache, v_cache, heads, interleave, group)
    batch, seq_q, own_heads, _ = q.shape
    if heads == "dealt":
        come = [torch.empty_like(q, memory_format=torch.contiguous_format) for _ in range(ranks)]
        with explained("gathering q", group):
            dist.all_gather(come, q.contiguous(), group=group)
        q = torch.cat(come, 2)
    q, options = _own_keys(q, seqlens, rank, ranks, interleave, causal, window, chunk, page_table, cache_batch_idx)
    out, lse = attend(q, k_cache, v_cache, softmax_scale=softmax_scale, softcap=softcap, sm_margin=sm_margin,
                      out_dtype=torch.float32, return_lse=True, **options)
    parts = _exchanged(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), own_heads, heads, group, ranks)
    out, lse = merge(*parts, sink=sink, out_dtype=q.dtype, return_lse=True)
    out = out.unflatten(0, (batch, seq_q))
    return (out, lse.unflatten(1, (batch, seq_q)).transpose(0, 1).contiguous()) if return_lse else out


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


def _check(q, k_cache, v_cache, heads, interleave, group):
    """Raises on all ranks what differs between them."""
    def fields():
        made = [Field(f"q.shape[{i}]", size) for i, size in enumerate(q.shape)]
        made += [Field(f"{name}.shape[{i}]", x.shape[i])
                 for name, x in (("k_cache", k_cache), ("v_cache", v_cache)) for i in (2, 3)]
        return made + [Field("heads", int(heads == "all"), ("'dealt'", "'all'").__getitem__), Field("interleave", interleave),
                       Field("q.dtype.itemsize", q.dtype.itemsize)]
    compare([group], ("decode", q.shape, q.dtype, k_cache.shape[2:], v_cache.shape[2:], heads, interleave), fields, q.device)
