# SPDX-License-Identifier: Apache-2.0
"""attention_with_kv_cache(), its schedules and tree masks, and merge(), for torch tensors and for arrays, without autograd."""
import importlib
import re

from . import arrays
from ._attention import _Shape, _as_computed, _contiguous_last, _dtype_of_out, _host, _is_torch, _results, _torch, _zeros
from ._options import given_options, takes_options
from ._tensors import check_has_no_mask, is_torch

if _torch is not None:
    from . import _torch_kv_cache

# The C interface's names, which says k and v of a cache too.
_NAMES = {"k": "k_cache", "v": "v_cache", "schedule->size": "schedule.data.numel()", "schedule->": "schedule.",
          "flash3_forward_schedule": "kv_cache_schedule"}
_C_NAME = re.compile(r"\b[kv]\b|schedule->size|schedule->|flash3_forward_schedule\b")


def _renamed(error):
    return type(error)(_C_NAME.sub(lambda name: _NAMES[name[0]], str(error)))


@takes_options
def attention_with_kv_cache(q, k_cache, v_cache, **options):
    """Attention over keys in a cache, after the newest have been appended: a step of decoding, or a part of a prefill.

    Arguments that are not listed are those of attention(). There are no gradients. The kernels read the index tensors when they
    run, so that a captured CUDA graph replays with other lengths and pages.

    Args:
        q: [batch, seq_q, heads_q, head_dim]; float16, bfloat16, or on the CPU float32; or packed, with cu_seqlens_q.
        k_cache: [batch, rows, heads_k, head_dim] of the same dtype, or FP8 (float8_e4m3fn) under any q; with page_table [pages,
            page_size, heads_k, head_dim].
        v_cache: the same with head_dim_v. It may be a part of k_cache's memory, such as k_cache[..., :512] in latent attention.
        seqused_k: [batch] int32: the rows of each sequence that hold keys, before any are appended. None: all.
        page_table: [batch, max_pages] int32: key j of sequence b is row j % page_size of page page_table[b, j // page_size].
            Entries after the last key may be anything.
        cache_batch_idx: [batch] int32: sequence b has the keys of element cache_batch_idx[b] of the cache.
        leftpad_k: [batch] int32: the first rows of each sequence that hold no key. seqused_k counts them.
        k_new: [batch, seq_new, heads_k, head_dim], or [total_new, heads_k, head_dim] with cu_seqlens_k_new: written to
            k_cache after the existing keys, and then read with them. seqused_k is needed, and is not changed. An FP8 cache takes
            FP8 or 16-bit keys; 16-bit keys, with their embedding, are divided by k_scale and rounded once.
        v_new: the same with head_dim_v. None where v_cache is a part of k_cache, which k_new then fills.
        cu_seqlens_k_new: [batch + 1] int32: where each sequence begins in k_new and v_new.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2], float32 or q's dtype: k_new and q get a rotary position embedding.
            Token n of k_new is at position rotary_offsets[b] + n; so is query n where causal, window or chunk is set, and
            otherwise all queries are at rotary_offsets[b].
        rotary_offsets: [batch] int32. None: seqused_k.
        rotary_interleaved: dimensions 2i and 2i + 1 belong together. False: i and i + rotary_dim / 2.
        q_scale, k_scale, v_scale: what the elements of an FP8 q, k_cache and v_cache are multiplied by, float32: [1], one for all;
            [batch, heads_k]; or for blocks of 128 rows, of k_cache [batch, heads_k, blocks], with page_table [pages, heads_k,
            ceil(page_size / 128)], with cache_batch_idx those of its elements. None: 1.
        rotate: q and k_new, with their embedding, are multiplied by the orthogonal matrix of quantize(), which spreads
            outliers before keys become FP8. All keys of the cache must be rotated, with the same rotation_seed. Not
            with an FP8 q or k_new, or with head_dim above 256; values are not rotated.
        rotation_seed: the seed of the rotation's signs, from 0 to 2**64 - 1.
        max_seqlen_k: with page_table, no sequence has more keys. Optional.
        sm_margin: on a GPU, the multiprocessors that are left to other kernels.
        schedule: a Schedule that kv_cache_schedule() has made for a call like this one, with the same lengths. None: the call makes
            its own. No result depends on it.
        tree_mask: [batch, seq_q] int64, or packed [total_q]: which drafts each query sees. A sequence has as many drafts as queries; they
            are its last keys, and bit j of a word is for draft j. All keys before the drafts are seen. At most 64 queries for each
            sequence, with cu_seqlens_q by max_seqlen_q; without causal, window, chunk and rotary tables. flash3.tree_mask() makes one.
        out_dtype: q's, or float32: the result before it is rounded, for merge(); with an FP8 q float16, bfloat16 or
            float32. None: q's, or bfloat16 with an FP8 q.
        qv: [batch, seq_q, heads_q, head_dim_v], or packed as q: a second part of q, which is multiplied with v_cache, as in attention().
            Rotary embeddings are for q and k_new alone.
        mask: as in attention(); it counts the keys of a sequence from the first one. Neither with k_new, leftpad_k, tree_mask nor qv. A
            mask that the call keeps is made again when lengths change. On a GPU no FP8 and no bias, and pages of a multiple of 16 rows.

    Returns:
        out, or with return_lse (out, lse), as attention().
    """
    if _torch is not None and (result := _torch_kv_cache.run_now(q, k_cache, v_cache, options)) is not None:
        return result
    with_lse = options.pop("return_lse", False)
    attend = _on_host if not _is_torch(q) else _torch_kv_cache.attention_with_kv_cache
    try:
        out, lse = attend(q, k_cache, v_cache, options, with_lse)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise _renamed(error) from None
    return (out, lse) if with_lse else out


def _on_host(q, k_cache, v_cache, options, with_lse):
    """(out, lse) of attention_with_kv_cache for arrays: the C call."""
    q, qv = _contiguous_last(q), _contiguous_last(options.pop("qv", None))
    options = given_options("attention_with_kv_cache", options)
    out, lse = _results(*_checked(q, v_cache), options.pop("out_dtype", None), with_lse)
    arrays.forward(q, k_cache, v_cache, out, lse, qv=qv, **options)
    return out, lse


def _checked(q, v_cache):
    """What of q and v_cache tells the result's shape."""
    about_q, about_v = _host("q", q), _host("v_cache", v_cache)
    if len(about_q.shape) not in (3, 4):
        raise ValueError(f"q.ndim = {len(about_q.shape)} but it must be 4, [batch, seq, heads, dim], or packed 3, [total, heads, "
                         "dim]")
    if len(about_v.shape) != 4:
        raise ValueError(f"v_cache.ndim = {len(about_v.shape)} but it must be 4, [batch, rows, heads, dim] or [pages, page_size, "
                         "heads, dim]")
    return about_q, about_v


def kv_cache_schedule(q, k_cache, v_cache, *, out=None, **options):
    """A schedule for attention_with_kv_cache() calls with the same lengths, such as those of a model's layers.

    On a GPU each call first lists, from the lengths, which block computes what. With schedule= the list is made only once
    a step. On a CPU there is nothing to list, and the same calls work.

    Calls on one device can share a schedule if they have the same sizes, dtypes, mask and sm_margin, and are given the same arguments;
    other calls raise ValueError. If the tensors of lengths (seqused_k, cu_seqlens_q, seqused_q, leftpad_k, cu_seqlens_k_new) have
    other values than when the schedule was made, the results are undefined: make it again, by out= or inside the CUDA graph that
    uses it. Pages, other contents and strides may differ.

    Args:
        q, k_cache, v_cache: those of one of the calls.
        options: the other arguments of that call, except schedule, return_lse and mask. Only the tensors of lengths are read.
        out: a Schedule of calls like this one, in whose memory the new one is made. ValueError if it is for other calls.

    Returns:
        A Schedule, for schedule=; with out, that one.
    """
    if out is not None and not isinstance(out, arrays.Schedule):
        raise TypeError(f"out is a {type(out).__name__} but it must be a flash3.Schedule")
    make = _schedule_on_host if not _is_torch(q) else _torch_kv_cache.kv_cache_schedule
    try:
        return make(q, k_cache, v_cache, out, options)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise _renamed(error) from None


def _schedule_on_host(q, k_cache, v_cache, out, options):
    about_q, about_v = _checked(q, v_cache)
    options = dict(options)
    dtype = _dtype_of_out(about_q.dtype, options.pop("out_dtype", None))
    result = _Shape((*about_q.shape[:-1], about_v.shape[-1]), dtype)
    return arrays.forward_schedule(_as_computed(q), k_cache, v_cache, result, key=0 if out is None else out.key, **options)


def merge(out_parts, lse_parts, *, sink=None, out_dtype=None, return_lse=False):
    """Merges attention over parts of the keys to attention over all of them; no gradients.

    Args:
        out_parts: [parts, rows, heads, head_dim_v] float32. Rows may be those of a batch or of packed sequences.
        lse_parts: [parts, heads, rows] float32, natural logarithms; -inf: the part saw no key, and its out is ignored.
        sink: [heads], float32 or the result's dtype: one more logit per head, which no part has yet.
        out_dtype: float16, bfloat16 or float32. None: float32.
        return_lse: return (out, lse); lse is [heads, rows] float32.

    Returns:
        out [rows, heads, head_dim_v]; with return_lse, (out, lse). A row that no part saw is 0, and its lse -inf or the sink.
    """
    if _is_torch(out_parts):
        out, lse = _torch_kv_cache.merge(out_parts, lse_parts, sink, out_dtype)
        return (out, lse) if return_lse else out
    out_parts, lse_parts = _contiguous_last(out_parts), _contiguous_last(lse_parts)
    about = _host("out_parts", out_parts)
    if len(about.shape) != 4:
        raise ValueError(f"out_parts.ndim = {len(about.shape)} but it must be 4, [parts, rows, heads, head_dim_v]")
    _, rows, heads, dim = about.shape
    out = _zeros((rows, heads, dim), _dtype_of_out(about.dtype, out_dtype))
    lse = _zeros((heads, rows), "float32") if return_lse else None
    arrays.merge(out_parts, lse_parts, out, lse, sink=sink)
    return (out, lse) if return_lse else out


# tree_mask(): the words of attention_with_kv_cache(tree_mask=), of a tree's parents or of a mask of booleans.

MOST_DRAFTS = 64  # that a word has bits for


def _check(name, array, dims):
    shape = tuple(array.shape)
    if len(shape) < dims:
        raise ValueError(f"{name}.ndim = {len(shape)} but it must be at least {dims}")
    if shape[-1] > MOST_DRAFTS:
        raise ValueError(f"{name}.shape[-1] = {shape[-1]} but it must be at most {MOST_DRAFTS}: a word has a bit for each draft")
    if shape[-dims] != shape[-1]:
        raise ValueError(f"{name}.shape[-2] = {shape[-2]} but {name}.shape[-1] = {shape[-1]}; each draft sees or does not see each")


def tree_mask(parents=None, *, seen=None):
    """Which drafts each draft sees, for attention_with_kv_cache(tree_mask=). Give exactly one of the arguments.

    Args:
        parents: [..., seq_q] integers: the index of each draft's parent among the drafts of its sequence; negative: it has none,
            and follows the existing keys. A draft sees itself and its ancestors. Parents need not come before their children.
            The result of a cycle is undefined.
        seen: [..., seq_q, seq_q] booleans, or numbers of which all but 0 are true: seen[..., i, j] says whether draft i sees
            draft j.

    Returns:
        Words of int64, [..., seq_q], in a tensor on the argument's device if that is a torch tensor, otherwise in a numpy array.
    """
    if (parents is None) == (seen is None):
        raise TypeError("tree_mask() takes parents or seen, and one of them")
    given = parents if seen is None else seen
    check_has_no_mask("parents" if seen is None else "seen", given)
    library = importlib.import_module("torch" if is_torch(given) else "numpy")
    given = library.asarray(given)
    if seen is None:
        _check("parents", given, 1)
        return _of_parents(library, given)
    _check("seen", given, 2)
    return library.where(given != 0, _bits(library, given), 0).sum(-1)


def _bits(library, like):
    """Bit j at each place j of the last dimension."""
    ones = library.ones_like(like, dtype=library.int64)
    return ones << (ones.cumsum(-1) - 1)


def _of_parents(library, parents):
    bits, count = _bits(library, parents), parents.shape[-1]
    # One more draft, which is the forefather of all and has no bit.
    root = library.ones_like(bits[..., :1])
    above = library.concatenate([library.where(parents < 0, count, parents + 0 * bits), count * root], -1)
    words = library.concatenate([bits, 0 * root], -1)
    take = library.take_along_dim if library.__name__ == "torch" else library.take_along_axis
    for _ in range((count - 1).bit_length() if count > 0 else 0):  # each doubles how far a draft looks up
        words = words | take(words, above, -1)
        above = take(above, above, -1)
    return words[..., :count]
