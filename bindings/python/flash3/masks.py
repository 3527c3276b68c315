# SPDX-License-Identifier: Apache-2.0
"""Masks as data: which keys each query sees. For example::

    source = flash3.masks.documents(lengths=[300, 500, 224], causal=True)
    for layer in layers:
        out = flash3.attention(q, k, v, mask=source)

Each function describes a mask: it returns a MaskSource, which combines with others by ``&``, ``|`` and ``~``. At the first use a call
makes a Mask from it, the lists that kernels read, and keeps that for calls of the same sizes; ``source.make()`` makes one that the caller
keeps. A query sees a key if both the source and the band allow it. The band is causal, window, chunk and mask_alignment, as in
attention(). A leading dimension that is left out, or of size 1, means that all sequences or all query heads share the mask.
"""
from ._mask_kinds import band, bits, blocks, dense, documents, prefix, ranges, window_with_sinks
from ._mask_make import needs
from ._mask_mods import from_block_mask, from_mask_mod
from ._mask_shapes import neighborhood, tile_order, tiles
from ._mask_sources import MaskSource

__all__ = ["ranges", "documents", "dense", "bits", "blocks", "band", "prefix", "window_with_sinks", "neighborhood", "tiles", "tile_order",
           "from_mask_mod", "from_block_mask", "MaskSource", "needs"]
