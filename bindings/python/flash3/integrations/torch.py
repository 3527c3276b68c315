# SPDX-License-Identifier: Apache-2.0
"""flash3 as torch's own flash attention, from torch 2.11 on::

    import flash3.integrations.torch
    torch.nn.attention.activate_flash_attention_impl("FLASH3")
    ...
    torch.nn.attention.restore_flash_attention_impl()

Importing this registers the name; activating it is the caller's. From then on whatever torch runs by its flash attention runs on
flash3, in all threads: scaled_dot_product_attention where torch chooses that backend, nested tensors, varlen_attn, and their
gradients. Nothing in Python is replaced: these are kernels of ATen's operators, for CUDA, and for the CPU those for which torch has
none there, so that varlen_attn runs on a CPU too. docs/python.md has the rules.
"""
import re

import torch

from .._arguments import given
from .._dropout import draw_state
from .._options import scale_or_default
from .._torch import FP8, translated
from .._torch_kv_cache import run

NAME = "FLASH3"

# flash3's names of what the operators call otherwise.
_NAMES = {"q": "query", "k": "key", "v": "value", "k_cache": "key", "v_cache": "value", "dout": "grad_out", "lse": "logsumexp",
          "cu_seqlens_q": "cum_seq_q", "cu_seqlens_k": "cum_seq_k", "max_seqlen_q": "max_q", "max_seqlen_k": "max_k",
          "page_table": "block_table", "q_scale": "q_descale", "k_scale": "k_descale", "v_scale": "v_descale",
          "softmax_scale": "scale"}
_OURS = re.compile(rf"\b({'|'.join(_NAMES)})\b")


def _in_torchs_words(error):
    error = translated(error) if type(error) is RuntimeError else error
    return type(error)(_OURS.sub(lambda name: _NAMES[name[0]], str(error)))


def _refuse(query, return_debug_mask=False, alibi_slopes=None):
    """What torch has in these operators and flash3 has not. torch expects a RuntimeError, which a NotImplementedError is."""
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask = True but flash3 never stores the attention weights; it must be False")
    if alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes is given but flash3 does not take it in this place; it must be None")
    if query.dim() not in (3, 4):
        raise ValueError(f"query.ndim = {query.dim()} but it must be 4, or packed 3 with cum_seq_q")


def _layout_of(x, last, dtype):
    """Memory as torch's fake kernels have it: of x's order of dimensions, with another size of the last one."""
    return torch.empty_like(x if x.shape[-1] == last else x[..., :1].expand(*x.shape[:-1], last), dtype=dtype)


class _Results:
    """Results in the memory that torch expects; flash3 needs rows without gaps, and others are copied at the end, with what they hold
    in rows that no call writes."""

    def __init__(self, *wanted):
        self.wanted = wanted
        self.written = [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.clone(memory_format=torch.contiguous_format)
                        for x in wanted]

    def finish(self):
        for x, written in zip(self.wanted, self.written):
            if written is not x:
                x.copy_(written)
        return self.wanted


def _margin():
    return torch._C._get_sm_carveout_experimental() or 0


def _options(scale, is_causal, left, right, cu_q=None, cu_k=None, seqused_k=None, max_q=0, max_k=0, **others):
    """What is given of the options of flash3's operators, under their names."""
    return given(softmax_scale=scale_or_default(scale), causal=is_causal, window_left=-1 if left is None else left,
                 window_right=-1 if right is None else right, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seqused_k=seqused_k,
                 max_seqlen_q=0 if cu_q is None else max_q, max_seqlen_k=0 if cu_k is None else max_k, **others)


def _attend(query, key, value, out, scale, is_causal, left=None, right=None, *, heads_first=False, cum_seq_q=None, cum_seq_k=None,
            max_q=0, max_k=0, seqused_k=None, block_table=None, descales=(None, None, None), dropout=None):
    """(out, logsumexp), in out if it is given, whose rows of no sequence then stay as they are."""
    is_packed = query.dim() == 3
    if is_packed != (cum_seq_q is not None):
        raise ValueError(f"query.ndim = {query.dim()} but cum_seq_q is {'not ' if is_packed else ''}given; it belongs to packed "
                         "queries, [total_q, heads, dim]")
    if block_table is not None and seqused_k is None:
        raise ValueError("block_table is given but seqused_k is not; it must tell how many keys of each sequence there are")
    *batch, rows, heads = (query.transpose(1, 2) if heads_first else query).shape[:-1]
    lse = torch.empty((*batch, heads, rows), dtype=torch.float32, device=query.device)
    fills = out is None
    if fills:
        out = _layout_of(query, value.shape[-1], torch.bfloat16 if query.dtype == FP8 else query.dtype)
    elif is_packed:
        lse.fill_(-torch.inf)
    results = _Results(out)
    try:
        more = dict(zip(("q_scale", "k_scale", "v_scale"), descales), sm_margin=_margin(), seqused_k=seqused_k)
        if block_table is not None or is_packed and cum_seq_k is None:  # keys that are not packed lie in a cache
            if dropout:
                raise NotImplementedError(f"dropout_p = {dropout['dropout_p']} but the keys lie in a cache, of which flash3 drops no weights")
            options = _options(scale, is_causal, left, right, cum_seq_q, None, max_q=max_q, page_table=block_table, **more)
            run(query, key, value, options, results.written[0], lse, fills)
        else:
            options = _options(scale, is_causal, left, right, cum_seq_q, cum_seq_k, max_q=max_q, max_k=max_k, heads_first=heads_first,
                               **more, **(dropout or {}))
            torch.ops.flash3.forward_out.default(query, key, value, results.written[0], lse, **options, fill_padding=fills)
    except (ValueError, TypeError, RuntimeError) as error:
        raise _in_torchs_words(error) from None
    return results.finish()[0], lse


def _drawn(query, dropout_p):
    """The options of a call's dropout; none without."""
    return {"dropout_p": dropout_p, "dropout_state": draw_state(query.device)} if dropout_p != 0.0 else {}


def _random(query, dropout):
    """rng_state, which holds seed and offset, philox_offset, and debug_attn_mask."""
    state = dropout.get("dropout_state")
    return (torch.zeros(2, dtype=torch.uint64, device=query.device) if state is None else state.view(torch.uint64),
            torch.zeros((), dtype=torch.uint64, device=query.device), torch.empty(0, dtype=query.dtype, device=query.device))


def _flash_attention_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
                             q_descale=None, k_descale=None, v_descale=None, *, scale=None, window_size_left=None,
                             window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None):
    """query is [batch, seq, heads, dim], or packed. num_splits is a hint: a sequence has the same bits in any batch."""
    _refuse(query, return_debug_mask, alibi_slopes)
    dropout = _drawn(query, dropout_p)
    out, lse = _attend(query, key, value, None, scale, is_causal, window_size_left, window_size_right, cum_seq_q=cum_seq_q,
                       cum_seq_k=cum_seq_k, max_q=max_q, max_k=max_k, seqused_k=seqused_k, block_table=block_table,
                       descales=(q_descale, k_descale, v_descale), dropout=dropout)
    return out, lse, *_random(query, dropout)


def _flash_attention_forward_out(out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                                 return_debug_mask, *, scale=None, window_size_left=None, window_size_right=None, seqused_k=None,
                                 alibi_slopes=None, block_table=None, num_splits=None):
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p = {dropout_p} but this operator returns no state of the dropout; it must be 0")
    _refuse(query, return_debug_mask, alibi_slopes)
    return _attend(query, key, value, out, scale, is_causal, window_size_left, window_size_right, cum_seq_q=cum_seq_q,
                   cum_seq_k=cum_seq_k, max_q=max_q, max_k=max_k, seqused_k=seqused_k, block_table=block_table)[1]


def _sdpa_quantized(query, key, value, q_descale, k_descale, v_descale, dropout_p=0.0, is_causal=False, return_debug_mask=False, *,
                    scale=None):
    """query is [batch, heads, seq, dim]; is_causal is aligned to the bottom right corner, as in torch's own flash kernels."""
    _refuse(query, return_debug_mask)
    if query.dim() != 4:
        raise ValueError(f"query.ndim = {query.dim()} but it must be 4, [batch, heads, seq, dim]")
    dropout = _drawn(query, dropout_p)
    out, lse = _attend(query, key, value, None, scale, is_causal, heads_first=True, descales=(q_descale, k_descale, v_descale),
                       dropout=dropout)
    return out, lse, None, None, query.shape[2], key.shape[2], *_random(query, dropout)


def _sdpa(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    return _sdpa_quantized(query, key, value, None, None, None, dropout_p, is_causal, return_debug_mask, scale=scale)


def _gradients(grad_out, query, key, value, out, logsumexp, dropout_p, rng_state, scale, is_causal, left=None, right=None, *,
               heads_first=False, cum_seq_q=None, cum_seq_k=None, max_q=0, max_k=0):
    _refuse(query)
    if query.dtype == FP8:
        raise NotImplementedError("query.dtype = torch.float8_e4m3fn but FP8 has no gradients; call it under torch.no_grad()")
    if cum_seq_q is not None and cum_seq_k is None:
        raise NotImplementedError("cum_seq_q is given but cum_seq_k is not, and there are no gradients through a KV cache")
    results = _Results(*(_layout_of(x, x.shape[-1], x.dtype) for x in (query, key, value)))
    dropout = {"dropout_p": dropout_p, "dropout_state": rng_state.view(torch.int64)} if dropout_p != 0.0 else {}
    options = _options(scale, is_causal, left, right, cum_seq_q, cum_seq_k, None, max_q, max_k, heads_first=heads_first, **dropout,
                       deterministic=torch.are_deterministic_algorithms_enabled())
    try:
        torch.ops.flash3.backward_out.default(grad_out, None, query, key, value, out, logsumexp, *results.written, None, **options,
                                              fill_padding=True)
    except (ValueError, TypeError, RuntimeError) as error:
        raise _in_torchs_words(error) from None
    return results.finish()


def _flash_attention_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                              rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None):
    return _gradients(grad_out, query, key, value, out, logsumexp, dropout_p, rng_state, scale, is_causal, window_size_left, window_size_right,
                      cum_seq_q=cum_seq_q, cum_seq_k=cum_seq_k, max_q=max_q, max_k=max_k)


def _sdpa_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                   philox_seed, philox_offset, *, scale=None):
    return _gradients(grad_out, query, key, value, out, logsumexp, dropout_p, philox_seed, scale, is_causal, heads_first=True)


# ATen's operators and their kernels; a version of torch need not have the last.
KERNELS = {
    "_scaled_dot_product_flash_attention": _sdpa,
    "_scaled_dot_product_flash_attention.quantized": _sdpa_quantized,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash_attention_forward,
    "_flash_attention_forward.quantized": _flash_attention_forward,
    "_flash_attention_backward": _flash_attention_backward,
    "_flash_attention_forward_no_dropout_inplace": _flash_attention_forward_out,
}
_OPTIONAL = {"_flash_attention_forward_no_dropout_inplace"}


def _schema(name):
    """The schema of an operator of this torch; None: there is none."""
    packet = getattr(torch.ops.aten, name.partition(".")[0], None)
    overload = getattr(packet, name.partition(".")[2] or "default", None)
    return None if overload is None else overload._schema


def check_schema(name, kernel, schema):
    """Raises NotImplementedError if torch calls the operator otherwise than the kernel is written for."""
    code = kernel.__code__
    positional, named = (code.co_varnames[:code.co_argcount],
                         set(code.co_varnames[code.co_argcount:code.co_argcount + code.co_kwonlyargcount]))
    theirs = [a.name for a in schema.arguments if not a.kwarg_only]
    unknown = {a.name for a in schema.arguments if a.kwarg_only} - named
    needed = code.co_argcount - len(kernel.__defaults__ or ())
    if len(theirs) < needed or tuple(theirs) != positional[:len(theirs)] or unknown:
        raise NotImplementedError(f"torch.__version__ = {torch.__version__} and its {schema} but flash3's kernel takes "
                                  f"({', '.join(positional)}, *, {', '.join(sorted(named))}); the names must be these")


class Overrides:
    """flash3's kernels of ATen's flash operators, until remove(). keys: the dispatch keys that they are for."""

    def __init__(self, keys=("CUDA", "CPU")):
        kernels = {}
        for name, kernel in KERNELS.items():
            schema = _schema(name)
            if schema is not None:
                check_schema(name, kernel, schema)
                kernels[name] = kernel
            elif name not in _OPTIONAL:
                raise NotImplementedError(f"torch.__version__ = {torch.__version__} has no operator aten::{name}, which flash3 "
                                          f"overrides; torch.nn.attention has been tried with 2.11, 2.13 and 2.15")
        self.libraries = []
        try:
            for key in keys:
                library = torch.library.Library("aten", "IMPL", key)
                self.libraries.append(library)
                for name, kernel in kernels.items():
                    library.impl(name, kernel)
        except RuntimeError:
            self._destroy()
            raise
        torch._C._set_sdp_use_fa3(True)  # on Hopper scaled_dot_product_attention may then choose flash attention for FP8

    def _destroy(self):
        while self.libraries:
            self.libraries.pop()._destroy()

    def remove(self):
        """What torch had before is its flash attention again."""
        if self.libraries:
            torch._C._set_sdp_use_fa3(False)
        self._destroy()


def register(name=NAME):
    """Makes torch.nn.attention.activate_flash_attention_impl(name) mean flash3."""
    from torch.nn import attention
    if not hasattr(attention, "restore_flash_attention_impl"):  # 2.10 can register one, and not go back
        raise NotImplementedError(f"torch.__version__ = {torch.__version__} but torch.nn.attention can take another flash attention "
                                  "from 2.11 on; flash3.sdpa_override() works with this one")
    attention.register_flash_attention_impl(name, register_fn=Overrides)


register()
