# SPDX-License-Identifier: Apache-2.0
"""torch.nn.attention.flex_attention by flash3."""
import dataclasses
import math
import types

import torch
from torch.nn.attention import flex_attention as _torch_flex

from . import _attention, _mask_ranges
from ._flex_scores import Refused
from ._flex_terms import Sizes, options_of
from ._flex_trace import scores_of
from ._mask import check_mask
from ._mask_kept import kept, parts_of
from ._mask_make import is_capturing, kept_on
from ._mask_mods import from_block_mask
from ._mask_sources import Band, MaskSource
from ._sdpa import say_once
from ._torch import autocast

_NO_LISTS = 1 << 30  # the block size of torch's mask of nothing

# A function that returns its first argument and does nothing else is compiled to these bytes, whatever its names are.
_IDENTITY = (lambda score, batch, head, query, key: score).__code__.co_code


def is_identity(score_mod):
    """Whether a score_mod is none, or a plain function that returns the score as it is."""
    return score_mod is None or isinstance(score_mod, types.FunctionType) and score_mod.__code__.co_code == _IDENTITY and \
        score_mod.__code__.co_argcount >= 5


def _why_not(query, key, value, score_mod, kernel_options, return_aux):
    """Why torch must do this call; None: flash3 does it."""
    if not is_identity(score_mod) and torch.compiler.is_compiling():
        return "score_mod is given in what torch.compile traces"
    if any(getattr(x, "is_nested", False) for x in (query, key, value)):
        return "query, key or value is a nested tensor"
    if (backend := (kernel_options or {}).get("BACKEND", "AUTO")) != "AUTO":
        return f"torch was told which backend to use, kernel_options['BACKEND'] = {backend!r}"
    if return_aux is not None and return_aux.max_scores:
        return "return_aux asks for max_scores"
    return None


def _check_tensors(query, key, value, block_mask, enable_gqa):
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__} but it must be a torch tensor")
        if x.dim() != 4:
            raise ValueError(f"{name}.ndim = {x.dim()} but it must be 4, [batch, heads, seq, dim]")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"key.shape = {tuple(key.shape)} but value.shape = {tuple(value.shape)}; they must be the same but for the last size")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(f"query.shape[1] = {query.shape[1]} but key.shape[1] = {key.shape[1]}; without enable_gqa they must be the same")
    if query.shape[0] != key.shape[0] and (key.shape[0] != 1 or block_mask is None):
        raise ValueError(f"query.shape[0] = {query.shape[0]} but key.shape[0] = {key.shape[0]}; they must be the same, or with a block_mask "
                         "key's 1")


def _check_block_mask(query, key, block_mask):
    for n, (name, size) in enumerate((("query.shape[2]", query.shape[2]), ("key.shape[2]", key.shape[2]))):
        if (own := block_mask.seq_lengths[n]) != size:
            raise ValueError(f"{name} = {size} but block_mask.seq_lengths[{n}] = {own}; a BlockMask is for calls of one size")
    for n, (name, size) in enumerate((("query.shape[0]", query.shape[0]), ("query.shape[1]", query.shape[1]))):
        own = block_mask.kv_num_blocks.shape[n] if block_mask.kv_num_blocks.dim() == 3 else 1
        if own not in (1, size):
            raise ValueError(f"{name} = {size} but block_mask.kv_num_blocks.shape[{n}] = {own}; it must be 1, for all, or the same")
    if block_mask.kv_num_blocks.device != query.device:
        raise ValueError(f"block_mask's device = {block_mask.kv_num_blocks.device} but query.device = {query.device}; all must be on one device")


def _is_causal(source):
    """Whether ranges of keys let no query i see a key after i; False of other sources."""
    if source.kind != "ranges":
        return False
    begins, ends = _mask_ranges.unpack(source.ranges)
    after = torch.arange(1, source.seq_q + 1, device=ends.device)
    return not ((ends > after) & (ends > begins)).any()


@torch.compiler.disable
def made_of(block_mask, query, key):
    """(the Mask of a BlockMask, whether no query i is known to see a key after i); i' = i. (None, False) of one that torch makes where there is
    none."""
    if tuple(block_mask.BLOCK_SIZE) == (_NO_LISTS, _NO_LISTS) and block_mask.mask_mod is _torch_flex.noop_mask:
        return None, False
    _check_block_mask(query, key, block_mask)
    batch, heads = query.shape[:2]

    def made():
        source = from_block_mask(block_mask, batch, heads)
        return dataclasses.replace(source, band=Band(top_left=True)).make(query.shape[2], key.shape[2]), _is_causal(source)
    return kept(block_mask, parts_of(block_mask), (batch, heads, kept_on(query.device, "block_mask", block_mask)), made)


def _mask_of(block_mask, query, key):
    """(mask of flash3.attention, whether its i' = i, whether no query i is known to see a key after i)."""
    if block_mask is None:
        return None, True, False
    if isinstance(block_mask, _torch_flex.BlockMask):
        mask, causal = made_of(block_mask, query, key)
        return mask, True, causal
    if isinstance(block_mask, MaskSource):
        _, right, _, top_left = block_mask.band
    else:
        right, top_left = check_mask(block_mask).window_right, block_mask.mask_alignment == 1
    return block_mask, top_left, right == 0 and (top_left or query.shape[2] == key.shape[2])


_MOST_KEPT = 1 << 26  # bytes of what a score_mod adds that are kept with it


def _kept_options(score_mod, captured, key, make):
    """make(), or what it gave for the same function and key while all that the function uses is unchanged. More than _MOST_KEPT bytes, other
    than those of captured tensors, are made each time."""
    made, shared = None, {x.untyped_storage().data_ptr() for x in captured}

    def small():
        nonlocal made
        made = make()
        own = [x.untyped_storage() for x in made.values()]
        return made if sum(x.nbytes() for x in own if x.data_ptr() not in shared) <= _MOST_KEPT else None
    (found,) = kept(score_mod, (score_mod,), key, lambda: (small(),))
    return found if found is not None else make() if made is None else made


def _options_of(score_mod, scores, captured, sizes, device):
    """alibi_slopes, bias_table and bias of flash3.attention for what a score_mod adds."""
    def made():
        return options_of(scores.terms, captured, sizes, device)
    if not scores.terms:
        return {}
    if torch.is_grad_enabled() and any(x.requires_grad for x in captured) or is_capturing(device):
        return made()
    key = scores.terms, sizes, device, torch.is_inference_mode_enabled(), kept_on(device, "score_mod", score_mod)
    return _kept_options(score_mod, captured, key, made)


def _by_flash3(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse):
    """(why torch must do this call, None), or (None, (out, lse)) with lse = None where it is not wanted."""
    _check_tensors(query, key, value, block_mask, enable_gqa)
    changes, options = not is_identity(score_mod), {"softmax_scale": scale}
    try:
        found = scores_of(score_mod, (query, key, value)) if changes else None  # first: torch takes BlockMasks that flash3 does not
        mask, top_left, causal = _mask_of(block_mask, query, key)
        if changes:
            scores, captured = found
            (batch, heads, seq_q, dim), seq_k = query.shape, key.shape[2]
            sizes = Sizes(batch, heads, seq_q, seq_k, top_left, causal)
            options = dict(_options_of(score_mod, scores, captured, sizes, query.device))
            options["softmax_scale"] = scores.scale * (scale if scale is not None else 1 / math.sqrt(dim) if dim else 1.0)
            options["softcap"] = scores.softcap
    except Refused as refused:
        return str(refused), None
    if mask is not None:
        options["mask"] = mask
    elif changes:
        options["mask_alignment"] = "top_left"
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled():
        query, key, value = autocast(query, key, value)
    if key.shape[0] != query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    tensors = [x.transpose(1, 2) for x in (query, key, value)]
    if changes and (reason := _why_not_supported(tensors, options)) is not None:
        return reason, None
    found = _attention.attention(*tensors, return_lse=return_lse, **options)
    out, lse = found if return_lse else (found, None)
    return None, (out.transpose(1, 2), lse)


def _why_not_supported(tensors, options):
    """Why flash3 does not compute a call with a score_mod, which torch may; None: it does."""
    recorded = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (*tensors, *options.values()))
    for backward in (False, True)[:1 + recorded]:
        if not (answer := _attention.supported(*tensors, backward=backward, **options)):
            return answer.reason
    return None


def flex_attention(query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False, kernel_options=None, *,
                   return_aux=None):
    """torch.nn.attention.flex_attention.flex_attention, computed by flash3 where it can be.

    Args:
        query: [batch, heads, seq_q, dim], of a dtype that flash3.attention takes; so are the others.
        key: [batch, heads_k, seq_k, dim]; with a block_mask its batch may be 1, for all.
        value: [batch, heads_k, seq_k, dim_v].
        score_mod: None, or a function that multiplies the score by a positive number, caps it, c * tanh(score / c), adds to it what does
            not depend on the score, and hides pairs, torch.where(condition, score, -inf); not all of it need be there. It is traced, with
            its gradients; functions of the same code, constants, and dtypes, shapes and devices of tensors share a trace, one that uses an
            object of your own is traced at each call. What it adds becomes alibi_slopes, bias_table, or bias of flash3.attention: slopes
            times the distance, what depends on kv_idx - q_idx and the head alone, a captured tensor that is read in place, or what is
            evaluated, once for each pair if it depends on both q_idx and kv_idx. A call with another function goes to torch's own
            flex_attention, with one warning that says why, and so does one that torch.compile traces.
        block_mask: None; torch's BlockMask; or a mask of flash3.masks, made or not. The mask that flash3 makes from a BlockMask
            (flash3.masks.from_block_mask) is kept with it. It is made again if the BlockMask's tensors, its mask_mod or tensors that
            the mask_mod uses have changed, and at each call if the mask_mod uses objects whose changes are not visible, such as an
            instance of a class. torch.compile does so outside of its graph: with fullgraph=True pass a mask of flash3.masks.
        scale: what scores are multiplied by; None: 1/sqrt(dim).
        enable_gqa: query may have a multiple of key's heads.
        return_lse: return (out, lse); torch prefers return_aux.
        kernel_options: for torch's kernels, ignored by flash3's; they change no result. With a "BACKEND" other than "AUTO" the call
            goes to torch, with one warning.
        return_aux: an AuxRequest; return (out, AuxOutput). With max_scores the call goes to torch, with one warning.

    Returns:
        out, [batch, heads, seq_q, dim_v] of query's dtype; lse is [batch, heads, seq_q] float32, the natural logarithm of the softmax's
        sum. A query that sees no key gets 0, and lse = -inf. Unlike torch's, it is differentiable on a CPU too.

    Raises:
        TypeError, ValueError, NotImplementedError: as flash3.attention; also if block_mask is for other sizes or on another device.
        RuntimeError: torch refuses a call that is left to it.
    """
    if return_lse and return_aux is not None:
        raise ValueError("return_lse = True and return_aux is given; they are two ways to say one thing")
    reason = _why_not(query, key, value, score_mod, kernel_options, return_aux)
    if reason is None:
        with_lse = return_lse or return_aux is not None and return_aux.lse
        reason, results = _by_flash3(query, key, value, score_mod, block_mask, scale, enable_gqa, with_lse)
    if reason is not None:
        if block_mask is not None and not isinstance(block_mask, _torch_flex.BlockMask):
            raise NotImplementedError(f"block_mask is a {type(block_mask).__name__}, which torch does not take, but this call is torch's: {reason}")
        if not torch.compiler.is_compiling():
            say_once(reason, "flex_attention")
        named = {} if return_aux is None else {"return_aux": return_aux}
        return _torch_flex.flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, **named)
    out, lse = results
    if return_aux is not None:
        return out, _torch_flex.AuxOutput(lse=lse)
    return (out, lse) if return_lse else out
