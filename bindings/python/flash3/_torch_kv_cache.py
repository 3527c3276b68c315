# SPDX-License-Identifier: Apache-2.0
"""flash3.attention_with_kv_cache and flash3.merge for torch tensors, and the fake kernels of their operators."""
import torch
from torch.autograd import forward_ad

from ._build import NAME
from ._torch import _signed, check_companions, operators, register_fake, translated
from ._options import number_of, rotation_seed, scale_or_default, window_sides
from .arrays import Schedule, check_schedule

try:
    # (out, lse or None) of a call, at half of what the operator costs; None: this one is for the operator.
    from ._eager import attention_with_kv_cache as eager
except ImportError:  # as in _torch.py
    eager = None

_read = operators.attention_with_kv_cache.default
_append = operators.attention_with_kv_cache_append.default
_out = operators.attention_with_kv_cache_out.default
_schedule = operators.kv_cache_schedule.default
_schedule_out = operators.kv_cache_schedule_out.default
_merge = operators.merge.default


@register_fake("attention_with_kv_cache")
def _fake_attention(q, k_cache, v_cache, *options, **named):
    *batch, rows, heads, _ = q.shape
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    return q.new_empty((*batch, rows, heads, v_cache.shape[-1]), dtype=dtype), q.new_empty((*batch, heads, rows), dtype=torch.float32)


@register_fake("merge")
def _fake_merge(out_parts, lse_parts, sink=None, out_dtype=None):
    _, rows, heads, dim = out_parts.shape
    return out_parts.new_empty((rows, heads, dim), dtype=out_dtype), out_parts.new_empty((heads, rows), dtype=torch.float32)


register_fake("attention_with_kv_cache_append")(_fake_attention)
for _name in ("attention_with_kv_cache_out", "kv_cache_schedule_out", "merge_out"):
    register_fake(_name)(lambda *args, **named: None)


@register_fake("kv_cache_schedule")
def _(q, *args, **named):
    context = torch.library.get_ctx()  # the device and what the library plans for it decide about both
    return q.new_empty((context.new_dynamic_size(),), dtype=torch.uint8), context.new_dynamic_size()


NO_GRADIENTS = ("there are no gradients through this call; call it under torch.no_grad(), or flash3.attention on tensors without "
                "a cache")


def _no_gradients(ctx, *gradients):
    raise NotImplementedError(NO_GRADIENTS)


# Without these torch would warn once and give no gradient at all. Operators that write into their arguments can have none.
torch.library.register_autograd(f"{NAME}::attention_with_kv_cache", _no_gradients)
torch.library.register_autograd(f"{NAME}::merge", _no_gradients)


def recorded(**tensors):
    """The names of those through which autograd would record a call. The operator refuses what is no tensor."""
    given = {name: x for name, x in tensors.items() if isinstance(x, torch.Tensor)}
    if forward_ad._current_level >= 0:
        for name, x in given.items():
            if forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError(f"{name} has a tangent but flash3 has no forward-mode derivatives")
    return [name for name, x in given.items() if x.requires_grad] if torch.is_grad_enabled() else []


def _check_not_recorded(**tensors):
    for name in recorded(**tensors):
        raise NotImplementedError(f"{name}.requires_grad is True but {NO_GRADIENTS}")


def _run(operator, *arguments, **named):
    try:
        if torch.compiler.is_compiling():
            return operator(*arguments, **named)
        with torch._C._AutoDispatchBelowAutograd():  # spares the operator's autograd kernel, which is Python
            return operator(*arguments, **named)
    except RuntimeError as error:
        raise translated(error) from None


_NOTHING_NEW = (None,) * 6 + (False,)
NO_SCHEDULE = None, 0  # and its key
NO_MORE = *NO_SCHEDULE, None, None  # no qv, no tree_mask


def run_now(with_lse, q, k_cache, v_cache, new, options):
    """What run() returns, but for lse without with_lse, of a call that nobody must see; otherwise None."""
    if eager is None or torch.compiler.is_compiling():
        return None
    results = eager(with_lse, q, k_cache, v_cache, *(new or _NOTHING_NEW), *options)
    if results is not None and new is not None:
        _count_write(k_cache, v_cache)
    return results


def _count_write(*tensors):
    """As torch's own operators count what they write, for whoever saved it for a backward."""
    if torch.is_grad_enabled():
        torch.autograd.graph.increment_version(tensors)


def run(q, k_cache, v_cache, new, options, out=None, lse=None, fill_padding=False):
    """(out, lse) of the operators, in given memory or new. fill_padding: also rows of given memory that belong to no query.

    new: k_new, v_new, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_offsets and rotary_interleaved, or None of a call that
    appends nothing. options: the rest, in the order of the operators' schemas, to the tree_mask or the end: NO_MORE where it
    ends before the schedule.
    """
    if out is not None:
        _run(_out, q, k_cache, v_cache, out, lse, *(new or _NOTHING_NEW), *options, fill_padding=fill_padding)
        return out, lse
    if new is None:
        return _run(_read, q, k_cache, v_cache, *options)
    results = _run(_append, q, k_cache, v_cache, *new, *options)
    if not torch.compiler.is_compiling():
        _count_write(k_cache, v_cache)
    return results


def attention_with_kv_cache(q, k_cache, v_cache, seqused_k, page_table, cache_batch_idx, leftpad_k, k_new, v_new, cu_seqlens_k_new,
                            rotary_cos, rotary_sin, rotary_offsets, rotary_interleaved, causal, window, softmax_scale, softcap,
                            chunk, sink, cu_seqlens_q, max_seqlen_q, max_seqlen_k, seqused_q, sm_margin, scales, rotation, schedule,
                            tree_mask, out_dtype, with_lse, qv):
    """(out, lse) of flash3.attention_with_kv_cache for torch tensors; lse may be None without with_lse.

    scales: those of q, k_cache and v_cache, or None each. rotation: whether there is one, and its seed.
    """
    left, right = (-1, -1) if window is None else window_sides(window)
    new = None
    if not (k_new is None and v_new is None and cu_seqlens_k_new is None and rotary_cos is None and rotary_sin is None and
            rotary_offsets is None):
        new = k_new, v_new, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_offsets, rotary_interleaved
    options = (scale_or_default(softmax_scale), causal, seqused_k, page_table, left, right, number_of("softcap", softcap), chunk or 0,
               sink, cache_batch_idx, leftpad_k, cu_seqlens_q, seqused_q, max_seqlen_q or 0, max_seqlen_k or 0, sm_margin, *scales,
               *(NO_SCHEDULE if schedule is None else _parts(schedule)), qv, tree_mask)
    is_unrounded = out_dtype is not None and out_dtype != q.dtype  # or of an FP8 q
    rotate, seed = rotation
    results = None if is_unrounded or rotate else run_now(with_lse, q, k_cache, v_cache, new, options)
    if results is not None:
        return results
    if rotate:
        options += True, _signed(seed)
    check_companions("q", q, k_cache=k_cache, v_cache=v_cache)
    _check_not_recorded(q=q, k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new, sink=sink, qv=qv)
    given = _results(q, v_cache, out_dtype) if is_unrounded else (None, None)
    return run(q, k_cache, v_cache, new, options, *given, fill_padding=True)


def _parts(schedule):
    """(data, key) as the operators take them."""
    data, key = check_schedule(schedule)
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"schedule.data is a {type(data).__name__} but it must be a torch tensor, as q is")
    return data, key


_OF_SCHEDULES = {a.name for a in _schedule._schema.arguments[3:]} - {"window_left", "window_right"} | {"window"}


def kv_cache_schedule(q, k_cache, v_cache, out, options):
    """flash3.kv_cache_schedule for torch tensors."""
    for unknown in sorted(set(options) - _OF_SCHEDULES):
        raise TypeError(f"unexpected argument {unknown!r}")
    check_companions("q", q, k_cache=k_cache, v_cache=v_cache)
    named = dict(options, softmax_scale=scale_or_default(options.get("softmax_scale")),
                 softcap=number_of("softcap", options.get("softcap", 0.0)))
    named["window_left"], named["window_right"] = window_sides(named.pop("window", None)) or (-1, -1)
    for name in ("chunk", "max_seqlen_q", "max_seqlen_k"):
        named[name] = named.get(name) or 0
    named["rotation_seed"] = _signed(rotation_seed(named.get("rotation_seed", 0)))
    new = named.pop("k_new", None), named.pop("v_new", None)
    if out is None:
        return Schedule(*_run(_schedule, q, k_cache, v_cache, *new, **named))
    _run(_schedule_out, q, k_cache, v_cache, *_parts(out), *new, **named)
    return out


def _results(q, v_cache, out_dtype):
    """Memory for (out, lse)."""
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype is a {type(out_dtype).__name__} but it must be a torch.dtype")
    if q.dim() not in (3, 4):
        raise ValueError(f"q.ndim = {q.dim()} but it must be 4, [batch, seq, heads, dim], or packed 3, [total, heads, dim]")
    if v_cache.dim() != 4:
        raise ValueError(f"v_cache.ndim = {v_cache.dim()} but it must be 4, [batch, rows, heads, dim] or [pages, page_size, heads, "
                         "dim]")
    *batch, seq, heads = q.shape[:-1]
    out = torch.empty((*q.shape[:-1], v_cache.shape[-1]), dtype=out_dtype, device=q.device)
    return out, torch.empty((*batch, heads, seq), dtype=torch.float32, device=q.device)


def merge(out_parts, lse_parts, sink, out_dtype):
    """(out, lse) of flash3.merge for torch tensors."""
    check_companions("out_parts", out_parts, lse_parts=lse_parts)
    _check_not_recorded(out_parts=out_parts, lse_parts=lse_parts, sink=sink)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype is a {type(out_dtype).__name__} but it must be a torch.dtype")
    return _run(_merge, out_parts, lse_parts, sink, out_dtype)
