# SPDX-License-Identifier: Apache-2.0
"""The bool attn_mask of torch's scaled_dot_product_attention, as a mask of flash3."""
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ._mask_kept import kept
from ._mask_make import kept_on
from ._mask_sources import MaskSource

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def why_not_mask(q, k, v, attn_mask, is_causal):
    """Why torch must do a call with this attn_mask, whatever the sizes are; None: flash3 does it.

    What records or transforms a call sees calls with torch's tensors: a mask that is made of their values would be taken for a constant.
    """
    if not isinstance(attn_mask, torch.Tensor) or attn_mask.dtype != torch.bool:
        return f"attn_mask is of {getattr(attn_mask, 'dtype', type(attn_mask).__name__)}; flash3 takes one of bool"
    if torch.compiler.is_compiling():
        return "attn_mask is given in what torch.compile traces"
    if is_causal:
        return "attn_mask is given and is_causal"
    if type(attn_mask) is not torch.Tensor or not all(type(x) in _PLAIN for x in (q, k, v)) or attn_mask.layout is not torch.strided:
        return "attn_mask is given, and not all are plain tensors"
    if torch._C._are_functorch_transforms_active() or torch.jit.is_tracing() or _get_current_dispatch_mode() is not None:
        return "attn_mask is given, and something traces or transforms the call"
    return None


def why_not_shape(q, k, attn_mask):
    if attn_mask.device != q.device:
        return "attn_mask is on another device"
    wanted = (*q.shape[:-1], k.shape[-2])
    if not 2 <= attn_mask.dim() <= len(wanted) or any(own not in (1, size) for own, size in zip(attn_mask.shape[::-1], wanted[::-1])):
        return "attn_mask does not broadcast, with at least two dimensions, to [batch, heads, seq_q, seq_k]"
    return None


def _source(attn_mask, batch, seq_q, seq_k):
    """batch: q's dimensions before heads."""
    x = attn_mask[(None,) * (len(batch) + 3 - attn_mask.dim())]
    if x.dim() == 3:
        x = x[None]
    elif x.dim() > 4:
        front = batch if any(n != 1 for n in x.shape[:-3]) else x.shape[:-3]
        x = x.expand(*front, -1, -1, -1).flatten(0, -4)
    x = x.expand(-1, -1, seq_q, seq_k)
    x = x if x.stride(3) == 1 else x.contiguous()
    return MaskSource("dense", dense=x.view(torch.uint8), seq_q=seq_q, seq_k=seq_k)


def mask_of(attn_mask, q, k, as_bool=lambda x: x):
    """The Mask of an attn_mask, kept with the tensor, or with that of which it is a view, for as long as it is unchanged.

    as_bool: makes a tensor of bool of it, always the same function for a dtype.

    It has room for all blocks, an eighth of a byte for each pair, so that nothing is waited for. While a CUDA graph is captured it is made
    anew: the graph then makes it again of what the tensor holds each time.
    """
    batch, (seq_q, seq_k) = q.shape[:-3], (q.shape[-2], k.shape[-2])

    def made():
        return _source(as_bool(attn_mask), batch, seq_q, seq_k).make(max_blocks=0)

    if attn_mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return made()
    owner = attn_mask if attn_mask._base is None else attn_mask._base
    view = attn_mask.dtype, attn_mask.storage_offset(), attn_mask.shape, attn_mask.stride()
    return kept(owner, (owner,), (view, batch, seq_q, seq_k, kept_on(attn_mask.device, "attn_mask", attn_mask)), made)
