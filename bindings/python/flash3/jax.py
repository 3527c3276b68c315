# SPDX-License-Identifier: Apache-2.0
"""flash3.jax: flash3 as the attention of JAX programs, on CPUs and Hopper GPUs.

It holds::

    dot_product_attention   jax.nn.dot_product_attention; differentiable, under jit, vmap and shard_map
"""
import operator

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError("flash3.jax needs jax, which is not installed: pip install jax, or jax[cuda13] for GPUs") from error
import numpy as np

from . import _jax, _jax_mask
from ._dropout import in_c_names, with_state
from ._fields import ABOUT, ADDED, GRADIENTS
from ._options import int64_of, number_of, number_of_word, refuse_unknown, seed_of, shows_options

__all__ = ["dot_product_attention"]

_ADDED = [name for name in ADDED["forward"] if name != "bias"]  # which JAX's own function has


def _refuse(implementation):
    if implementation not in (None, "flash3"):
        raise ValueError(f"implementation = {implementation!r} but it must be None or 'flash3'")


def _batched(name, x):
    x = jnp.asarray(x)
    if x.ndim not in (3, 4):
        raise ValueError(f"{name}.ndim = {x.ndim} but it must be 4, [batch, seq, heads, dim], or 3, [seq, heads, dim]")
    if x.dtype.name not in _jax.DTYPES:
        raise TypeError(f"{name}.dtype = {x.dtype.name} but it must be one of {', '.join(_jax.DTYPES)}")
    return x if x.ndim == 4 else x[None]


def _bias(x, seq_k):
    """A bias as the C interface has it, where the last dimension has all keys."""
    x = jnp.asarray(x)
    if x.ndim > 4:
        raise ValueError(f"bias.ndim = {x.ndim} but it must be at most 4, and broadcast to [batch, heads_q, seq_q, seq_k]")
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    return jnp.broadcast_to(x, (*x.shape[:3], seq_k)) if x.shape[3] == 1 else x


def _scale(scale):
    """scale as the C interface has it, where 0 asks for the default."""
    if scale is not None and number_of("scale", scale) == 0.0:
        raise ValueError("scale = 0 but it must be greater than 0 (None: 1/sqrt(head_dim))")
    return 0.0 if scale is None else float(scale)


def _lengths(name, x, batch):
    if x is None:
        return None
    x = jnp.asarray(x)
    if x.dtype != np.int32 or x.shape != (batch,):
        raise ValueError(f"{name} is {x.dtype.name}{list(x.shape)} but it must be int32[{batch}], one for each sequence")
    return x


def _sides(is_causal, local_window_size):
    """(left, right) of the band that both leave, counted from the diagonal j = i; -1: unbounded."""
    if local_window_size is None:
        return -1, 0 if is_causal else -1
    try:
        left, right = local_window_size if isinstance(local_window_size, (tuple, list)) else [operator.index(local_window_size)] * 2
    except (TypeError, ValueError):
        raise ValueError(f"local_window_size = {local_window_size!r} but it must be an integer, a pair (left, right), or None") from None
    left, right = (int64_of(f"local_window_size[{i}]", side) for i, side in enumerate((left, right)))
    if min(left, right) < 0:
        raise ValueError(f"local_window_size = {local_window_size!r} but its sides must be 0 or more")
    return left, 0 if is_causal else right


def _dropout(dropout_p, seed, offset, added):
    """The options of dropout that say more than their defaults."""
    options = {"dropout_p": dropout_p, "seed": seed, "offset": offset, "dropout_state": added.get("dropout_state")}
    with_state(options)
    del options["dropout_state"]
    return {**in_c_names(options), "dropout_p": float(number_of("dropout_p", dropout_p))} if dropout_p else {}


def dot_product_attention(query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, query_seq_lengths=None,
                          key_value_seq_lengths=None, local_window_size=None, implementation=None, return_residual=False,
                          softcap=0.0, sink=None, deterministic=False, q_scale=None, k_scale=None, v_scale=None, compute=None,
                          rotation_seed=0, dropout_p=0.0, seed=None, offset=0, q_segment_ids=None, kv_segment_ids=None, **added):
    """jax.nn.dot_product_attention by flash3: softmax(scale * query key^T) value.

    query is [batch, seq_q, heads_q, head_dim], key [batch, seq_k, heads_k, head_dim] and value [batch, seq_k, heads_k, head_dim_v], or
    all without batch; float16, bfloat16, float8_e4m3fn, or on a CPU float32. heads_q is a multiple of heads_k.

    is_causal and local_window_size have JAX's meaning: query i sees keys j <= i, and i - left <= j <= i + right. return_residual
    adds the LSE, [batch, seq_q, heads_q] float32, which has gradients. A query that sees no key, or comes after its sequence's
    length, gets 0 and an LSE of -inf, and gradients of 0.

    mask is bool and broadcasts to [batch, heads_q, seq_q, seq_k], with dimensions added in front: True where a query sees a key.
    q_segment_ids and kv_segment_ids, [batch or 1, seq_q] and [batch or 1, seq_k] int32 or without batch, let a query see the keys of
    its own segment. With kv_segment_ids None, or the same array, a segment is a run of equal ids: the same id further on is
    another segment. With two arrays, a query sees the keys that have its id; these must be contiguous, or it sees none. Both combine
    with is_causal, local_window_size and lengths, but not with each other, with compute or, on a GPU, with FP8. Each call makes its
    mask on the device, in memory that it gives back: 16 bytes for each block of 128 x 128 pairs, and with `mask` 2 KiB more, for each
    sequence and head with a mask of its own; with lengths, for each sequence.

    flash3's own: softcap, sink ([heads_q] float32, one more logit for each head) and deterministic gradients. For FP8, as in
    flash3.attention: q_scale, k_scale and v_scale of float8_e4m3fn tensors, whose result is bfloat16 and has no gradients;
    compute="fp8" and rotation_seed for other tensors, whose gradients are computed in their own dtype.

    dropout_p, seed and offset are those of flash3.attention. They are not arrays, so that jit compiles a call for each seed; under vmap
    the mapped axis joins the batch.

    bias is float16, bfloat16 or float32 and broadcasts to [batch, heads_q, seq_q, seq_k], with dimensions added in front. It is added to
    the scaled and capped scores; -inf hides a pair. Its gradient is a sum over the dimensions of size 1.

    Shapes and dtypes are checked when the call is traced. Errors that depend on the machine or the lengths are XLA's, at run time.
    """
    _refuse(implementation)
    q, k, v = (_batched(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    batch = q.shape[0]
    left, right = _sides(is_causal, local_window_size)
    same = query_seq_lengths is key_value_seq_lengths
    seqused_q = _lengths("query_seq_lengths", query_seq_lengths, batch)
    seqused_k = seqused_q if same else _lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    for name in added.keys() - set(_ADDED):
        refuse_unknown("dot_product_attention", name)
    more = {"sink": sink, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, **added,
            "bias": None if bias is None else _bias(bias, k.shape[1])}
    tensors = {"q": q, "k": k, "v": v, **{name: jnp.asarray(x) for name, x in more.items() if x is not None}}
    tensors.update(_jax.given(seqused_q=seqused_q, seqused_k=seqused_k))
    lengths = seqused_q, seqused_k
    tensors.update(_jax_mask.source_of(mask, q_segment_ids, kv_segment_ids, lengths, batch, q.shape[2], q.shape[1], k.shape[1]))
    options = _jax.Options(softmax_scale=_scale(scale), window_left=left, window_right=right, softcap=number_of("softcap", softcap),
                           mask_alignment=number_of_word("mask_alignment", "top_left"), deterministic=bool(deterministic),
                           with_lse=bool(return_residual), compute=number_of_word("compute", compute),
                           rotation_seed=seed_of("rotation_seed", rotation_seed), **_dropout(dropout_p, seed, offset, added))
    _jax.check(tensors, options)
    out, lse = _jax.attention(options, _jax.one_vma(tensors))
    if jnp.ndim(query) == 3:
        out, lse = out[0], None if lse is None else lse[0]
    return (out, jnp.swapaxes(lse, -1, -2)) if return_residual else out


shows_options(dot_product_attention, dict.fromkeys(_ADDED))
if dot_product_attention.__doc__:
    dot_product_attention.__doc__ += "".join(
        f"\n    {name}, {ABOUT[name]}{'' if name in GRADIENTS else ' JAX takes a gradient of it to be 0.'}\n" for name in _ADDED)
