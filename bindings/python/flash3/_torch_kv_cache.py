# SPDX-License-Identifier: Apache-2.0
"""flash3.attention_with_kv_cache and flash3.merge for torch tensors, and the fake kernels of their operators."""
import torch
from torch.autograd import forward_ad

from ._arguments import arguments_of, schedule_parts
from ._build import NAME
from ._fields import RESULTS, SIGNATURES, TENSORS
from ._mask_make import with_mask_made
from ._torch import check_companions, empty_results, operators, register_fake, translated
from .arrays import Schedule

try:
    # What a call returns, at half of what the operator costs; None: this one is for the operator.
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
def _fake_attention(q, v_cache, **_):
    *batch, rows, heads = q.shape[:-1]
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    return q.new_empty((*batch, rows, heads, v_cache.shape[-1]), dtype=dtype), q.new_empty((*batch, heads, rows), dtype=torch.float32)


@register_fake("merge")
def _fake_merge(out_parts, out_dtype=None, **_):
    rows, heads, dim = out_parts.shape[1:]
    return out_parts.new_empty((rows, heads, dim), dtype=out_dtype), out_parts.new_empty((heads, rows), dtype=torch.float32)


register_fake("attention_with_kv_cache_append")(_fake_attention)
for _name in ("attention_with_kv_cache_out", "kv_cache_schedule_out", "merge_out"):
    register_fake(_name)(lambda **named: None)


@register_fake("kv_cache_schedule")
def _fake_schedule(q, **_):
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


# What a call appends, or rotates what it appends by.
_APPEND = frozenset(("k_new", "v_new", "cu_seqlens_k_new", "rotary_cos", "rotary_sin", "rotary_offsets"))


def _appends(options):
    return not _APPEND.isdisjoint(options) and any(options.get(name) is not None for name in _APPEND)


def run_now(q, k_cache, v_cache, options):
    """What flash3.attention_with_kv_cache returns of a call that nothing watches; otherwise None."""
    if eager is None or torch.compiler.is_compiling():
        return None
    result = eager(q, k_cache, v_cache, options)
    if result is not None and _appends(options):
        _count_write(k_cache, v_cache)
    return result


def _count_write(*tensors):
    """As torch's own operators count what they write, for what saved it for a backward."""
    if torch.is_grad_enabled():
        torch.autograd.graph.increment_version(tensors)


def run(q, k_cache, v_cache, arguments, out=None, lse=None, fill_padding=False):
    """(out, lse) of the operators, in given memory or new. fill_padding: also rows of given memory that belong to no query.

    arguments: those of the operators, by name; what is not among them is not given.
    """
    appends = _appends(arguments)
    new = {"k_new": arguments.get("k_new"), "v_new": arguments.get("v_new")}
    if not appends:
        arguments = {name: x for name, x in arguments.items() if name != "rotary_interleaved" and name not in _APPEND}
    if out is not None:
        _run(_out, q, k_cache, v_cache, out, lse, **{**new, **arguments}, fill_padding=fill_padding)
        return out, lse
    if not appends:
        return _run(_read, q, k_cache, v_cache, **arguments)
    results = _run(_append, q, k_cache, v_cache, **{**new, **arguments})
    if not torch.compiler.is_compiling():
        _count_write(k_cache, v_cache)
    return results


def attention_with_kv_cache(q, k_cache, v_cache, options, with_lse):
    """(out, lse) of flash3.attention_with_kv_cache for torch tensors; lse may be None without with_lse."""
    arguments = arguments_of("attention_with_kv_cache", with_mask_made(q, k_cache, options))
    out_dtype = arguments.pop("out_dtype", None)
    check_companions("q", q, k_cache=k_cache, v_cache=v_cache)
    _check_not_recorded(q=q, k_cache=k_cache, v_cache=v_cache, **{
        name: arguments[name] for name in TENSORS["forward"] if arguments.get(name) is not None})
    is_unrounded = out_dtype is not None and out_dtype != q.dtype  # or of an FP8 q
    takes_memory = is_unrounded or any(name in arguments for name in RESULTS["forward"])
    given = empty_results(q, v_cache, out_dtype) if takes_memory else (None, None)
    return run(q, k_cache, v_cache, arguments, *given, fill_padding=True)


_OF_SCHEDULES = set(SIGNATURES["attention_with_kv_cache"]) - {"schedule", "return_lse", "mask"}  # what walks a mask's lists has none


def kv_cache_schedule(q, k_cache, v_cache, out, options):
    """flash3.kv_cache_schedule for torch tensors. What the calls write makes no difference."""
    for unknown in sorted(set(options) - _OF_SCHEDULES):
        raise TypeError(f"unexpected argument {unknown!r}")
    check_companions("q", q, k_cache=k_cache, v_cache=v_cache)
    options = {name: x for name, x in options.items() if name not in RESULTS["forward"]}
    arguments = {"k_new": None, "v_new": None, **arguments_of("attention_with_kv_cache", options)}
    if out is None:
        return Schedule(*_run(_schedule, q, k_cache, v_cache, **arguments))
    data, key = schedule_parts(out)
    _run(_schedule_out, q, k_cache, v_cache, data, key, **arguments)
    return out


def merge(out_parts, lse_parts, sink, out_dtype):
    """(out, lse) of flash3.merge for torch tensors."""
    check_companions("out_parts", out_parts, lse_parts=lse_parts)
    _check_not_recorded(out_parts=out_parts, lse_parts=lse_parts, sink=sink)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype is a {type(out_dtype).__name__} but it must be a torch.dtype")
    return _run(_merge, out_parts, lse_parts, sink, out_dtype)
