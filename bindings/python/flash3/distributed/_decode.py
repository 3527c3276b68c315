# SPDX-License-Identifier: Apache-2.0
"""Decoding over a KV cache whose tokens are distributed to ranks in turn: decode context parallelism."""
import torch
import torch.distributed as dist

from . import _own_cache
from .._kv_cache import attention_with_kv_cache as attend, merge
from .._library import FP8_BLOCK
from .._options import lacks_options, number_of, seed_of, scale_or_default
from .._torch_kv_cache import _check_not_recorded
from ._exchange import AllToAll, Field, compare, dtype_field, explained, number_field, packed, unpacked
from ._geometry import Mask
from ._layout import mask_of

# ---- the rules: what all ranks must have alike, and what of theirs fits together ----
#
# What is looked at here is what calls of flash3.attention_with_kv_cache on a rank's rows could not say in the caller's words, or
# would say when tokens have been appended already.

_MOST_DIMS = 4


def check(group, deal, heads, cache, tensors, seqlens, mask, options):
    """Raises on all ranks what differs between them, or breaks a rule for all, and on this one what does for its own cache.

    tensors: {name: tensor or None} of what all ranks have of the same shape. mask: a Mask. options: {name: value} of what is to be
    the same besides.
    """
    if heads not in ("all", "dealt"):
        raise ValueError(f"heads = {heads!r} but it must be 'all' or 'dealt'")
    if deal.interleave < 1:
        raise ValueError(f"interleave = {deal.interleave} but it must be at least 1")
    for name, x in {**tensors, "k_cache": cache.k, "v_cache": cache.v, "seqlens": seqlens}.items():
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__} but it must be a torch tensor")
    _check_not_recorded(k_cache=cache.k, v_cache=cache.v, **tensors)  # gathering q would lose it without a word
    about = {name: None if x is None else (tuple(x.shape), x.dtype) for name, x in tensors.items()}
    for name, x in (("k_cache", cache.k), ("v_cache", cache.v)):
        about[name] = tuple(x.shape[2:]), x.dtype
    key = "decode", heads, deal.interleave, tuple(about.items()), tuple(seqlens.shape), seqlens.dtype, mask, tuple(options.items())
    compare([group], key, lambda: _fields(deal, heads, about, mask, options), tensors["q"].device,
            lambda: _check_rules(deal, heads, cache, tensors, seqlens, mask, options["out_dtype"]))
    _check_own(cache, tensors["q"])


def _fields(deal, heads, about, mask, options):
    made = [Field("heads", int(heads == "all"), ("'dealt'", "'all'").__getitem__), Field("interleave", deal.interleave)]
    for name, what in about.items():
        first = 2 if name in ("k_cache", "v_cache") else 0  # others are own: their rows
        shape, dtype = what or ((), None)
        made += [Field(name, int(what is not None), ("None", "given").__getitem__), Field(f"{name}.ndim", first + len(shape))]
        made += [Field(f"{name}.shape[{first + i}]", shape[i] if i < len(shape) else -1) for i in range(_MOST_DIMS)]
        made.append(dtype_field(f"{name}.dtype", dtype))
    made += [Field(f"the mask's {name}", -1 if value is None else value, lambda x: None if x < 0 else x)
             for name, value in mask._asdict().items()]
    return made + [dtype_field(name, value) if name == "out_dtype" else number_field(name, value) for name, value in options.items()]


def _check_shape(name, x, sizes, what):
    """sizes: of each dimension None, or whose it must be and that one's size."""
    if x is None:
        return
    if x.dim() != len(sizes):
        raise ValueError(f"{name}.ndim = {x.dim()} but it must be {len(sizes)}, {what}")
    for i, size in enumerate(sizes):
        if size is not None and x.shape[i] != size[1]:
            raise ValueError(f"{name}.shape[{i}] = {x.shape[i]} but {size[0]} = {size[1]}; {name} must be {what}")


def _size(name, x, dim):
    return f"{name}.shape[{dim}]", x.shape[dim]


def _check_rules(deal, heads, cache, tensors, seqlens, mask, out_dtype):
    q = tensors["q"]
    _check_shape("q", q, (None,) * 4, "[batch, seq_q, heads_q, head_dim]")
    for name, x in (("k_cache", cache.k), ("v_cache", cache.v)):
        _check_shape(name, x, (None,) * 4, "[batch, rows, heads_k, dim] or [pages, page_size, heads_k, dim]")
    batch, seq_q, heads_q, heads_k = (_size("q", q, 0), _size("q", q, 1), _size("q", q, 2), _size("k_cache", cache.k, 2))
    dim, dim_v = _size("k_cache", cache.k, 3), _size("v_cache", cache.v, 3)
    all_heads = heads_q[1] * (deal.ranks if heads == "dealt" else 1)
    if heads_k[1] < 1 or all_heads % heads_k[1]:
        raise ValueError(f"q.shape[2] = {heads_q[1]} and heads = {heads!r} on {deal.ranks} ranks but {heads_k[0]} = {heads_k[1]}; "
                         f"all query heads, which are {all_heads}, must be a multiple of heads_k")
    for name, x in (("seqlens", seqlens), ("rotary_offsets", tensors["rotary_offsets"])):
        _check_shape(name, x, (batch,), "[batch]")
        if x is not None and x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}.dtype = {_name_of(x.dtype)} but it must be int32 or int64")
    _check_shape("qv", tensors["qv"], (batch, seq_q, heads_q, dim_v), "[batch, seq_q, heads_q, head_dim_v]")
    _check_shape("sink", tensors["sink"], (heads_q,), "[heads_q]")
    _check_new(tensors, batch, heads_k, dim, dim_v)
    _check_q_scale(tensors["q_scale"], q, batch, heads_q, heads_k)
    _check_tree(tensors, batch, seq_q, mask)
    _check_out_dtype(out_dtype, q)


def _check_new(tensors, batch, heads_k, dim, dim_v):
    k_new, v_new = tensors["k_new"], tensors["v_new"]
    if k_new is None:
        for name, why in (("v_new", "values are appended with their keys"),
                          *((name, "q and the new keys get the embedding together")
                            for name in ("rotary_cos", "rotary_sin", "rotary_offsets"))):
            if tensors[name] is not None:
                raise ValueError(f"{name} is given but k_new is None; {why}")
        return
    _check_shape("k_new", k_new, (batch, None, heads_k, dim), "[batch, seq_new, heads_k, head_dim]")
    _check_shape("v_new", v_new, (batch, _size("k_new", k_new, 1), heads_k, dim_v), "[batch, seq_new, heads_k, head_dim_v]")


def _check_q_scale(scale, q, batch, heads_q, heads_k):
    if scale is None:
        return
    if q.dtype != torch.float8_e4m3fn:
        raise ValueError(f"q_scale is given but q.dtype = {_name_of(q.dtype)}; only FP8 tensors have scales")
    if scale.dtype != torch.float32:
        raise TypeError(f"q_scale.dtype = {_name_of(scale.dtype)} but it must be float32")
    blocks = f"q.shape[1] / {FP8_BLOCK}, rounded up,", -(-q.shape[1] // FP8_BLOCK)
    sizes = {1: (("the number of scales of a tensor", 1),), 2: (batch, heads_k)}.get(scale.dim(), (batch, heads_q, blocks))
    _check_shape("q_scale", scale, sizes, "[1], [batch, heads_k] or [batch, heads_q, blocks]")


def _check_tree(tensors, batch, seq_q, mask):
    tree = tensors["tree_mask"]
    if tree is None:
        return
    _check_shape("tree_mask", tree, (batch, seq_q), "[batch, seq_q]")
    if tree.dtype != torch.int64:
        raise TypeError(f"tree_mask.dtype = {_name_of(tree.dtype)} but it must be int64")
    if seq_q[1] > 64:
        raise ValueError(f"q.shape[1] = {seq_q[1]} but it must be at most 64 with tree_mask, which has a bit for each query")
    if mask != Mask():
        raise ValueError(f"tree_mask is given and so is causal, window or chunk ({mask}); tree_mask is the mask of the call")
    if tensors["rotary_cos"] is not None:
        raise ValueError("tree_mask is given and rotary_cos is given; drafts of one depth have one position, which the call does "
                         "not know: embed q and k_new before it")


def _check_out_dtype(out_dtype, q):
    """The calls' results are float32, and the merge, which comes last, rounds them."""
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype is a {type(out_dtype).__name__} but it must be a torch.dtype")
    fp8 = q.dtype == torch.float8_e4m3fn
    if out_dtype not in (None, torch.float32, *((torch.float16, torch.bfloat16) if fp8 else (q.dtype,))):
        raise ValueError(f"out_dtype = {_name_of(out_dtype)} but q.dtype = {_name_of(q.dtype)}; it must be "
                         f"{'float16, bfloat16' if fp8 else 'the dtype of q'} or float32")


def _check_own(cache, q):
    """What is this rank's alone."""
    batch, heads_k = _size("q", q, 0), _size("k_cache", cache.k, 2)
    _check_shape("page_table", cache.page_table, (batch, None), "[batch, max_pages]")
    _check_shape("cache_batch_idx", cache.batch_idx, (batch,), "[batch]")
    if cache.page_table is None and cache.batch_idx is None:
        _check_shape("k_cache", cache.k, (batch, None, None, None), "[batch, rows, heads_k, head_dim] without page_table and "
                     "cache_batch_idx")
    for name, scale in (("k_scale", cache.k_scale), ("v_scale", cache.v_scale)):
        if scale is not None and scale.dim() == 2:
            _check_shape(name, scale, (batch, heads_k), "[batch, heads_k], unless it is [1] or for blocks of rows")


def _name_of(dtype):
    return str(dtype).removeprefix("torch.")


# ---- the call ----


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
           "rotation_seed": seed_of("rotation_seed", rotation_seed), "rotary_interleaved": bool(rotary_interleaved), "out_dtype": out_dtype})
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
