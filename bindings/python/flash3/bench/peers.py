# SPDX-License-Identifier: Apache-2.0
"""The libraries that are compared: each a function of (q, k, v, causal), [batch, seq, heads, dim] in and out, with autograd."""
import importlib
import importlib.metadata
import importlib.util

import torch
import torch.nn.functional as F

from .._attention import attention
from .._quantize import quantize


def _flash3(q, k, v, causal):
    return attention(q, k, v, causal=causal)


def _flash3_fp8():
    """Attention alone: the first call with tensors brings them to FP8, later ones with the same find them so."""
    last = []

    def call(q, k, v, causal):
        if not last or any(x is not y for x, y in zip(last[0], (q, k, v))):
            last[:] = (q, k, v), quantize(q, k, v, rotate=True)
        made = last[1]
        return attention(made.q, made.k, made.v, causal=causal, q_scale=made.q_scale, k_scale=made.k_scale, v_scale=made.v_scale,
                         out_dtype=q.dtype)

    return call


def _flash3_quantize_fp8(q, k, v, causal):
    return attention(q, k, v, causal=causal, compute="fp8")


def _sdpa(backend):
    from torch.nn.attention import sdpa_kernel

    def call(q, k, v, causal):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return call


def _torch(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def _flex():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    compiled, masks = torch.compile(flex_attention), {}

    def call(q, k, v, causal):
        seq = q.shape[1]
        if causal and seq not in masks:
            masks[seq] = create_block_mask(lambda b, h, i, j: i >= j, None, None, seq, seq, device=q.device)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=masks[seq] if causal else None).transpose(1, 2)

    return call


def _first(function):
    """A library's function without its other results."""
    def call(q, k, v, causal):
        out = function(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return call


def _upstream_fa3():
    """FlashAttention-3 itself; flash3's drop-in has its name."""
    if importlib.util.find_spec("flash_attn_interface") is None:
        raise ImportError("flash_attn_interface is not installed")
    module = importlib.import_module("flash_attn_interface")
    if "flash3" in (module.__doc__ or ""):
        raise ImportError("flash_attn_interface is flash3's drop-in")
    return _first(module.flash_attn_func)


def _fa4():
    return _first(importlib.import_module("flash_attn.cute").flash_attn_func)


def find(device, wanted=None, backward=False):
    """(functions by name, why the others are not there); flash3 comes first. FP8 has no backward, and on a CPU it is for accuracy."""
    from torch.nn.attention import SDPBackend
    makers = {"flash3": lambda: _flash3}
    if not backward and (device != "cpu" or wanted):
        makers |= {"flash3_fp8": _flash3_fp8, "flash3_quantize_fp8": lambda: _flash3_quantize_fp8}
    if device == "cpu":
        makers["torch"] = lambda: _torch
    else:
        makers |= {"cudnn": lambda: _sdpa(SDPBackend.CUDNN_ATTENTION), "fa2": lambda: _sdpa(SDPBackend.FLASH_ATTENTION),
                   "fa3": _upstream_fa3, "fa4": _fa4, "flex": _flex}
    for name in wanted or ():
        if name not in makers:
            raise ValueError(f"peer {name!r} but on {device} there are {', '.join(makers)}")
    found, missing = {}, {}
    for name, make in makers.items():
        if wanted and name != "flash3" and name not in wanted:
            continue
        try:
            found[name] = make()
        except (ImportError, OSError, RuntimeError) as error:
            missing[name] = str(error).splitlines()[0]
    return found, missing
