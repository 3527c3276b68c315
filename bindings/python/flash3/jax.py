# SPDX-License-Identifier: Apache-2.0
"""flash3.jax: flash3 as the attention of JAX programs, on CPUs and Hopper GPUs.

It holds::

    dot_product_attention   jax.nn.dot_product_attention without bias and mask; differentiable, under jit, vmap and shard_map
"""
import operator

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError("flash3.jax needs jax, which is not installed: pip install jax, or jax[cuda13] for GPUs") from error
import numpy as np

from . import _jax
from ._library import FP8_BLOCK
from ._options import int64_of, number_of, number_of_word, rotation_seed as seed_of

__all__ = ["dot_product_attention"]


def _refuse(bias, mask, implementation):
    for name, given in (("bias", bias), ("mask", mask)):
        if given is not None:
            raise NotImplementedError(f"{name} is given but flash3 takes none; is_causal, local_window_size and lengths are what it "
                                      "masks by, and jax.nn.dot_product_attention does the rest")
    if implementation not in (None, "flash3"):
        raise ValueError(f"implementation = {implementation!r} but it must be None or 'flash3'")


def _batched(name, x):
    x = jnp.asarray(x)
    if x.ndim not in (3, 4):
        raise ValueError(f"{name}.ndim = {x.ndim} but it must be 4, [batch, seq, heads, dim], or 3, [seq, heads, dim]")
    if x.dtype.name not in _jax.DTYPES:
        raise TypeError(f"{name}.dtype = {x.dtype.name} but it must be one of {', '.join(_jax.DTYPES)}")
    return x if x.ndim == 4 else x[None]


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


def _equal(a, b):
    """Whether these lengths are known to be the same: one array, or values that are there when the call is traced."""
    if a is b:
        return True
    if a is None or b is None or isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        return False
    return bool(np.array_equal(a, b))


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


def _one_length(right, rows, keys, query_lengths, key_lengths):
    """The lengths with which flash3's diagonal, which ends in a sequence's last query and last key, is jax's, j = i."""
    if _equal(query_lengths, key_lengths):
        return query_lengths
    if key_lengths is None and right == 0 and rows <= keys:
        return query_lengths  # the keys behind a sequence's last query are not seen
    raise NotImplementedError(
        f"is_causal or local_window_size with {'no ' if query_lengths is None else ''}query_seq_lengths and "
        f"{'no' if key_lengths is None else 'other'} key_value_seq_lengths, but flash3 aligns a mask to the end of each sequence: both "
        "must be one array, or only query_seq_lengths be given under is_causal with no more queries than keys")


def _to_the_end(tensors, left, right):
    """The tensors, and (left, right) as counted from the diagonal of flash3, which ends in the last query and the last key.

    Keys and queries that see nothing of each other are cut off where the distance between the two diagonals could not be told by
    a window.
    """
    rows, keys, values = (tensors[name].shape[1] for name in ("q", "k", "v"))
    if keys != values:
        raise ValueError(f"value has {values} tokens but key has {keys}; they must have as many")
    keys = keys if right < 0 else min(keys, rows + right)
    rows = rows if left < 0 else min(rows, keys + left)
    kept = {"q": rows, "k": keys, "v": keys}
    cut = {name: x[:, :kept[name]] if name in kept else x for name, x in tensors.items()}
    for name in kept:
        scale = cut.get(f"{name}_scale")
        if scale is not None and scale.ndim == 3:
            cut[f"{name}_scale"] = scale[:, :, :-(-kept[name] // FP8_BLOCK)]
    shift = keys - rows
    return cut, left + shift if left >= 0 else -1, right - shift if right >= 0 else -1


def _padded(out, lse, rows):
    """Results of so many queries, of which the last ones were cut off."""
    missing = rows - out.shape[1]
    if missing:
        out = jnp.pad(out, ((0, 0), (0, missing), (0, 0), (0, 0)))
        lse = None if lse is None else jnp.pad(lse, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)
    return out, lse


def dot_product_attention(query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, query_seq_lengths=None,
                          key_value_seq_lengths=None, local_window_size=None, implementation=None, return_residual=False,
                          softcap=0.0, sink=None, deterministic=False, q_scale=None, k_scale=None, v_scale=None, compute=None,
                          rotation_seed=0):
    """jax.nn.dot_product_attention by flash3: softmax(scale * query key^T) value.

    query is [batch, seq_q, heads_q, head_dim], key [batch, seq_k, heads_k, head_dim] and value [batch, seq_k, heads_k, head_dim_v], or
    all without batch; float16, bfloat16, float8_e4m3fn, or on a CPU float32. heads_q is a multiple of heads_k.

    is_causal and local_window_size have JAX's meaning: query i sees keys j <= i, and i - left <= j <= i + right. With lengths they
    need one array for query_seq_lengths and key_value_seq_lengths. return_residual adds the LSE, [batch, seq_q, heads_q]
    float32, which has gradients. A query that sees no key, or is behind its sequence's length, gets 0 and an LSE of -inf.

    flash3's own: softcap, sink ([heads_q] float32, one more logit for each head) and deterministic gradients. For FP8, as in
    flash3.attention: q_scale, k_scale and v_scale of float8_e4m3fn tensors, whose result is bfloat16 and has no gradients;
    compute="fp8" and rotation_seed of other tensors, whose gradients are computed in their own dtype.

    bias and mask raise NotImplementedError. Shapes and dtypes are checked when the call is traced; what only the machine or the
    lengths can tell comes as XLA's error from the run.
    """
    _refuse(bias, mask, implementation)
    q, k, v = (_batched(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    batch, rows = q.shape[:2]
    left, right = _sides(is_causal, local_window_size)
    same = query_seq_lengths is key_value_seq_lengths
    seqused_q = _lengths("query_seq_lengths", query_seq_lengths, batch)
    seqused_k = seqused_q if same else _lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    more = {"sink": sink, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    tensors = {"q": q, "k": k, "v": v, **{name: jnp.asarray(x) for name, x in more.items() if x is not None}}
    if left >= 0 or right >= 0:
        if seqused_q is None and seqused_k is None:
            tensors, left, right = _to_the_end(tensors, left, right)
        else:
            seqused_q = seqused_k = _one_length(right, rows, k.shape[1], seqused_q, seqused_k)
    tensors.update(_jax.given(seqused_q=seqused_q, seqused_k=seqused_k))
    options = _jax.Options(softmax_scale=_scale(scale), window_left=left, window_right=right, softcap=number_of("softcap", softcap),
                           deterministic=bool(deterministic), with_lse=bool(return_residual), compute=number_of_word("compute", compute),
                           rotation_seed=seed_of(rotation_seed))
    _jax.check(tensors, options)
    out, lse = _padded(*_jax.attention(options, _jax.one_vma(tensors)), rows)
    if jnp.ndim(query) == 3:
        out, lse = out[0], None if lse is None else lse[0]
    return (out, jnp.swapaxes(lse, -1, -2)) if return_residual else out
