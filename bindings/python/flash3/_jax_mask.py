# SPDX-License-Identifier: Apache-2.0
"""What the masks of flash3.jax are made from: a source of flash3/mask.h as JAX's arrays, of which each call makes its mask."""
import jax
import jax.numpy as jnp
import numpy as np

from . import _library as _c
from ._fields import MaskParams
from ._mask import described

SOURCES = ("dense", "documents", "ranges")
_BAND = ("window_left", "window_right", "mask_alignment")


def _check_shared(name, x, dim, of_call, size):
    if x.shape[dim] not in (1, size):
        raise ValueError(f"{name}.shape[{dim - x.ndim}] = {x.shape[dim]} but {of_call} = {size}; it must be 1, for all, or {of_call}")


def of_mask(mask, batch, heads_q, seq_q, seq_k):
    """{name: source} of a bool array that broadcasts to [batch, heads_q, seq_q, seq_k]."""
    mask = jnp.asarray(mask)
    if mask.dtype != np.bool_:
        raise TypeError(f"mask.dtype = {mask.dtype.name} but it must be bool, True where a query sees a key")
    if mask.ndim > 4:
        raise ValueError(f"mask.ndim = {mask.ndim} but it must be at most 4, [batch, heads_q, seq_q, seq_k]")
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    for dim, (of_call, size) in enumerate((("batch", batch), ("heads_q", heads_q), ("seq_q", seq_q), ("seq_k", seq_k))):
        _check_shared("mask", mask, dim, of_call, size)
    if mask.shape[3] == 1 != seq_k:  # a query sees all keys or none
        ends = jnp.where(jnp.broadcast_to(mask[..., 0], (*mask.shape[:2], seq_q)), np.int32(seq_k), np.int32(0))
        return {"ranges": jnp.stack((jnp.zeros_like(ends), ends), 2)}
    return {"dense": mask}


def _ids(name, ids, batch, of_call, size):
    ids = jnp.asarray(ids)
    if ids.dtype != np.int32:
        raise TypeError(f"{name}.dtype = {ids.dtype.name} but it must be int32")
    if ids.ndim not in (1, 2):
        raise ValueError(f"{name}.ndim = {ids.ndim} but it must be 2, [batch, {of_call}], or 1, [{of_call}]")
    ids = jnp.atleast_2d(ids)
    _check_shared(name, ids, 0, "batch", batch)
    if ids.shape[1] != size:
        raise ValueError(f"{name}.shape[-1] = {ids.shape[1]} but {of_call} = {size}; they must be the same")
    return ids


def of_segments(q_ids, kv_ids, lengths, batch, seq_q, seq_k):
    """{name: source} of the segments that queries and keys are of; kv_ids None, or q_ids itself: both have the same."""
    if q_ids is None:
        raise ValueError("kv_segment_ids is given but q_segment_ids is None; they belong together")
    q = _ids("q_segment_ids", q_ids, batch, "seq_q", seq_q)
    if kv_ids is not None and kv_ids is not q_ids:
        kv = _ids("kv_segment_ids", kv_ids, batch, "seq_k", seq_k)
        return {"ranges": _ranges(q, kv if lengths[1] is None else _without_padding(kv, lengths[1]))}
    if seq_q != seq_k:
        what = "None, which stands for q_segment_ids," if kv_ids is None else "q_segment_ids"
        raise ValueError(f"kv_segment_ids is {what} but seq_q = {seq_q} and seq_k = {seq_k}; they must be the same")
    if lengths[0] is not lengths[1]:  # documents counts queries from the last key
        return {"ranges": _runs(q)}
    return {"documents": q}


def _runs(ids):
    """[1 or batch, 1, 2, seq] int32: the keys of a query's run of equal ids."""
    batch, seq = ids.shape
    places = jnp.arange(seq, dtype=jnp.int32)
    is_first = jnp.ones((batch, seq), bool).at[:, 1:].set(ids[:, 1:] != ids[:, :-1])
    is_last = jnp.ones((batch, seq), bool).at[:, :-1].set(is_first[:, 1:])
    begins = jax.lax.cummax(jnp.where(is_first, places, 0), 1)
    ends = jax.lax.cummin(jnp.where(is_last, places + 1, seq), 1, reverse=True)
    return jnp.stack((begins, ends), 1)[:, None]


def _without_padding(ids, lengths):
    """ids for each sequence, where padding, which no query sees, has the last key's: so an id's keys still lie together."""
    ids = jnp.broadcast_to(ids, (len(lengths), ids.shape[1]))
    last = jnp.take_along_axis(ids, jnp.clip(lengths - 1, 0)[:, None], 1, mode="clip")
    return jnp.where(jnp.arange(ids.shape[1]) < lengths[:, None], ids, last)


def _ranges(q_ids, kv_ids):
    """[1 or batch, 1, 2, seq_q] int32: the keys that have a query's id; none where they do not lie together."""
    seq_k = kv_ids.shape[1]
    batch = max(len(q_ids), len(kv_ids))
    if seq_k == 0:
        return jnp.zeros((batch, 1, 2, q_ids.shape[1]), jnp.int32)

    def of_sequence(q_ids, kv_ids):
        places = jnp.argsort(kv_ids, stable=True)  # of the keys, by their ids and then in their order
        first, end = (jnp.searchsorted(kv_ids[places], q_ids, side=side) for side in ("left", "right"))
        count = end - first
        begins, last = places[jnp.minimum(first, seq_k - 1)], places[jnp.maximum(end - 1, 0)]
        is_seen = (count > 0) & (last - begins == count - 1)
        return jnp.stack((jnp.where(is_seen, begins, 0), jnp.where(is_seen, begins + count, 0)))[None]
    q_ids, kv_ids = (jnp.broadcast_to(x, (batch, x.shape[1])) for x in (q_ids, kv_ids))
    return jax.vmap(of_sequence)(q_ids, kv_ids).astype(jnp.int32)


def source_of(mask, q_ids, kv_ids, lengths, batch, heads_q, seq_q, seq_k):
    """{name: source} of what a call is given, empty without a mask; lengths: those of queries and keys, or None."""
    given = [name for name, x in (("mask", mask), ("q_segment_ids", q_ids), ("kv_segment_ids", kv_ids)) if x is not None]
    if not given:
        return {}
    if mask is not None and len(given) > 1:
        raise NotImplementedError(f"mask is given and {given[1]} is given; a call has one mask, so let mask hide the other segments")
    if mask is not None:
        return of_mask(mask, batch, heads_q, seq_q, seq_k)
    return of_segments(q_ids, kv_ids, lengths, batch, seq_q, seq_k)


def question(source, lengths, q, k, options):
    """The mask of a call as far as it is known when the call is traced, for the library's questions. The library checks the source first.

    source, lengths: {name: ctypes' Tensor}; options: {the C interface's name: value}.
    """
    batch, seq_q, heads_q, _ = q.shape
    params = MaskParams(backend=_c.BACKENDS["cpu"], batch=batch, heads_q=heads_q, seq_q=seq_q, seq_k=k.shape[1], window=1,
                        **{name: options[name] for name in _BAND})
    for name, x in {**source, **lengths}.items():
        if name == "dense" and x.shape[2] == 1:
            x.shape[2], x.stride[2] = seq_q, 0
        setattr(params, name, x)
    return described(params)


def is_copied(name, x, is_mapped, batch):
    """Whether under vmap a source, of calls of so many sequences each, would be copied for each of them: a whole mask never is."""
    own = x.shape[1 if is_mapped else 0]
    return name == "dense" and (own != batch if is_mapped else own != 1)


def folded(x, is_mapped, size, batch):
    """A source under vmap, for the sequences of all calls as one batch."""
    if not is_mapped:
        if x.shape[0] == 1:
            return x
        x = jnp.broadcast_to(x, (size, *x.shape))
    x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
    return x.reshape(size * batch, *x.shape[2:])
