# SPDX-License-Identifier: Apache-2.0
"""Masks are made here of what flash3.masks describes, and kept for calls of the same sizes, device and stream."""
import torch

from . import _torch
from ._mask import Mask, check_mask
from ._mask_kept import kept
from ._mask_lengths import NO_LENGTHS, Lengths, with_band
from ._mask_sources import Band, MaskSource
from ._mask_traced import is_traced, traced
from ._options import int64_of

_make = _torch.operators.mask_make.default
_used = _torch.operators.mask_used.default
_BAND = ("causal", "window", "chunk", "mask_alignment")


def _run(operator, *arguments, **named):
    try:
        return operator(*arguments, **named)
    except RuntimeError as error:
        raise _torch.translated(error) from None


def needs(mask):
    """(blocks, partial blocks, documents) that a Mask needs, after waiting for the stream: with less room than that it is empty. A mask
    without room for documents has not counted them, 0."""
    check_mask(mask)
    return _run(_used, mask.data, mask.fields)


def is_capturing(device):
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def make(source, rows_q, rows_k, device, max_blocks=None, max_partial_blocks=None, lengths=NO_LENGTHS, max_documents=None):
    """The Mask of a MaskSource (MaskSource.make), for calls whose q and k have so many rows, and these lengths."""
    for name, room in (("max_partial_blocks", max_partial_blocks), ("max_documents", max_documents)):
        if max_blocks is None and room is not None:
            raise ValueError(f"{name} = {room} but max_blocks = None; without that the mask is made for what it needs")
    seq_q, seq_k = lengths.longest(rows_q, rows_k)
    source = lengths.fitted(source, rows_q, rows_k)
    device = torch.device(device or source.device or torch.empty(0).device)
    if max_blocks is None and is_capturing(device):
        raise NotImplementedError("max_blocks = None and a CUDA graph is being captured; to count blocks waits for the device: make the mask "
                                  "before, or give max_blocks")
    if source.device is not None and source.device.type != device.type and is_capturing(device):
        raise NotImplementedError(f"the source lies on {source.device} and a CUDA graph is being captured; bring it to {device} before, by "
                                  "source.to()")
    source = source.to(device)
    tensors, named = source.arguments()
    named |= lengths.tensors(device)
    batch = source.shape[0] if lengths.batch is None else lengths.batch
    sizes = {"batch": batch, "heads_q": source.shape[1], "seq_q": seq_q, "seq_k": seq_k}
    like = next((x for x in source.tensors() if x is not None), None)
    if like is None:
        like = torch.empty(0, device=device)

    def made(blocks, partial_blocks, documents):
        room = {"max_blocks": blocks, "max_partial_blocks": partial_blocks, "max_documents": documents}
        if is_traced(like):
            return traced(like, *tensors, **named, **sizes, **room)
        data, fields = _run(_make, like, *tensors, **named, **sizes, **room)
        return Mask(data, *fields)

    if max_blocks is not None or is_traced(like):
        return made(max_blocks or 0, max_partial_blocks or 0, source.most_documents if max_documents is None else max_documents)
    needed = needs(made(1, 1, 1))
    return made(*(max(n, 1) for n in needed))  # 0 stands for the most that there can be


def kept_on(device, name, mask):
    """What tells streams apart: a mask that a call keeps is read on the stream alone that made it, and there its memory is free for others
    once it is no longer kept. So no CUDA graph may hold it."""
    if is_capturing(device):
        raise NotImplementedError(f"{name} is a {type(mask).__name__} and a CUDA graph is being captured; give the call a flash3.Mask "
                                  "that you keep as long as the graph, made before (flash3.masks, make())")
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _rows_of(q, k, options):
    """Rows of q and k of a call: seq, where they are packed total, or of a cache in pages the most that a sequence can have."""
    _torch.check_companions("q", q, k=k)
    rows = []
    for name, x in (("q", q), ("k", k)):
        packed = options.get(f"cu_seqlens_{name}") is not None
        shape = f"[total_{name}, heads, dim], as cu_seqlens_{name} is given" if packed else "[batch, seq, heads, dim]"
        if x.dim() != 4 - packed:
            raise ValueError(f"{name}.ndim = {x.dim()} but it must be {4 - packed}, {shape}")
        rows.append(x.shape[0 if packed else 1])
    if isinstance(table := options.get("page_table"), torch.Tensor) and table.dim() == 2:  # of a cache; the library refuses others
        rows[1] *= table.shape[1]
        most = options.get("max_seqlen_k")
        rows[1] = min(rows[1], most) if most is not None and int64_of("max_seqlen_k", most) > 0 else rows[1]
    return rows


def _made(source, band, rows_q, rows_k, device, lengths):
    def made():
        return make(source if band.is_none() else with_band(source, band, rows_q, rows_k, lengths), rows_q, rows_k, device, lengths=lengths)
    if torch.compiler.is_compiling():  # a graph makes its masks each time that it runs
        return made()
    parts = (*source.tensors(), *lengths.given().values())
    return kept(source, parts, (band, rows_q, rows_k, device, lengths.key(), kept_on(device, "mask", source)), made)


def with_mask_made(q, k, options):
    """The options of an attention() or attention_with_kv_cache() call with a Mask in place of a MaskSource, made for the call and of the call's band too."""
    source = options.get("mask")
    if not isinstance(source, MaskSource) or not isinstance(q, torch.Tensor):
        return options
    band = Band.of(**{name: options[name] for name in _BAND if name in options})
    mask = _made(source, band, *_rows_of(q, k, options), q.device, Lengths.of(options))
    return {**{name: x for name, x in options.items() if name not in _BAND}, "mask": mask}
