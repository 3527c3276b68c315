# SPDX-License-Identifier: Apache-2.0
"""What the adapters for serving engines share: their arguments in flash3's terms, and the way into an engine's imports."""
import importlib.machinery
import importlib.util
import os
import sys

import torch

from .._attention import attention
from .._kv_cache import attention_with_kv_cache


def refuse(**arguments):
    """What flash3 does not do; name=value, where None, False and 0 ask for nothing."""
    for name, value in arguments.items():
        if value is not None and (torch.is_tensor(value) or value):
            shown = "is given" if torch.is_tensor(value) or callable(value) else f"= {value}"
            raise NotImplementedError(f"{name} {shown} but flash3 does not do this")


def fp8_scales(q, k, v, q_descale, k_descale, v_descale, names=("q", "k", "v")):
    """The scales of FP8 tensors, as options. Engines pass them with 16 bits too, where they mean nothing."""
    scales = {}
    for name, own, x, scale in zip(names, "qkv", (q, k, v), (q_descale, k_descale, v_descale)):
        if x.dtype == torch.float8_e4m3fn:
            scales[f"{own}_scale"] = scale
        elif x.dtype.itemsize == 1:
            raise NotImplementedError(f"{name}.dtype = {x.dtype} but flash3 takes an engine's tensors in float8_e4m3fn, float16, "
                                      "bfloat16 or, on a CPU, float32; let the engine keep its KV cache in one of these")
    return scales


def sides(window_size):
    """An engine's (left, right) as flash3's window; None, and a negative number on both sides, are none."""
    if window_size is None:
        return None
    if len(window_size) != 2:
        raise ValueError(f"window_size = {window_size} but it must be (left, right)")
    left, right = window_size
    return None if left < 0 and right < 0 else (left, right)


def length(n):
    """A longest length as an integer. Out of a tensor on a GPU it would cost a synchronisation: it is not needed."""
    if torch.is_tensor(n):
        return int(n) if n.device.type == "cpu" else None
    return n


def attend(q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, out=None,
           return_lse=False, **options):
    """Attention over packed keys, or over those of a cache: (out, lse) with return_lse, as flash3 has them; in out if given."""
    _check_out(out, q, v)
    if out is not None and q.dtype == torch.float8_e4m3fn:
        options["out_dtype"] = out.dtype
    options.update(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=None if cu_seqlens_q is None else length(max_seqlen_q),
                   return_lse=return_lse)
    if cu_seqlens_k is None:
        result = attention_with_kv_cache(q, k, v, page_table=page_table,
                                         max_seqlen_k=None if page_table is None else length(max_seqlen_k), **options)
    elif page_table is None:
        result = attention(q, k, v, cu_seqlens_k=cu_seqlens_k, max_seqlen_k=length(max_seqlen_k), **options)
    else:
        raise ValueError("cu_seqlens_k is given and so is a page table; packed keys have no pages")
    if out is None:
        return result
    made, *lse = result if return_lse else (result,)
    out.copy_(made)
    return (out, *lse) if return_lse else out


def _check_out(out, q, v):
    if out is None:
        return
    if tuple(out.shape) != (*q.shape[:-1], v.shape[-1]):
        raise ValueError(f"out.shape = {tuple(out.shape)} but q.shape = {tuple(q.shape)} and v.shape[{v.dim() - 1}] = "
                         f"{v.shape[-1]}; out must have q's shape with v's head dim")
    if out.dtype != q.dtype and q.dtype != torch.float8_e4m3fn:  # of that it is flash3 that says which there are
        raise TypeError(f"out.dtype = {out.dtype} but q.dtype = {q.dtype}; they must be the same")


def stand_in(module, names, exported):
    """Replaces modules of an engine by what a module exports: names, a package before its modules.

    The engine's other modules inside of these stay to be imported from where they lie. Raises RuntimeError if the engine has
    imported its own already, since those who took functions from it keep them.
    """
    for name in names:
        if name in sys.modules and getattr(sys.modules[name], "__flash3__", None) is not module:
            raise RuntimeError(f"{name} is imported already but {module}.install() puts another module in its place; call it "
                               f"before anything imports {name.partition('.')[0]}")
    for name in names:
        if name in sys.modules:
            continue
        spec = importlib.machinery.ModuleSpec(name, None, origin=module, is_package=True)
        spec.submodule_search_locations.extend(_folders(name))
        made = importlib.util.module_from_spec(spec)
        made.__dict__.update({function.__name__: function for function in exported}, __flash3__=module)
        sys.modules[name] = made


def _folders(name):
    """Where the engine's package of this name lies, by that of the engine, which is not imported for it."""
    engine, *inner = name.split(".")
    spec = importlib.util.find_spec(engine)
    folders = [os.path.join(folder, *inner) for folder in (spec and spec.submodule_search_locations) or ()]
    return [folder for folder in folders if os.path.isdir(folder)]
