# SPDX-License-Identifier: Apache-2.0
"""quantize(): tensors to FP8, for torch tensors and for arrays."""
import math
from typing import NamedTuple

from . import arrays
from ._attention import _check_dims, _contiguous_last, _host, _is_torch, _torch, _zeros
from ._options import seed_of, scale_shape
from ._results import scales_ndim


class Quantized(NamedTuple):
    """FP8 tensors and their scales; None for what was not given. ``attention(**quantized._asdict())`` takes them."""
    q: object  #: float8_e4m3fn, of the shape of q
    k: object  #: float8_e4m3fn, of the shape of k
    v: object  #: float8_e4m3fn, of the shape of v
    q_scale: object  #: float32, of the shape that scales= asks for
    k_scale: object  #: the same for k
    v_scale: object  #: the same for v


def quantize(q=None, k=None, v=None, *, scales="blocks", heads_k=None, rotate=False, rotation_seed=0, rotary_cos=None,
             rotary_sin=None, rotary_interleaved=False, rotary_offset_q=0, rotary_offset_k=0, cu_seqlens_q=None,
             cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None, seqused_k=None):
    """q, k and v, or those of them that are given, as FP8 (float8_e4m3fn) with their scales.

    For each head of a token, in float32: the rotary embedding (q and k), the rotation (q and k), division by the scale, which is the
    smallest power of two for which nothing exceeds 448, and rounding to nearest even.

    Args:
        q: [batch, seq_q, heads_q, head_dim]; float16, bfloat16, or on the CPU float32. Any strides.
        k: [batch, seq_k, heads_k, head_dim] of the same dtype.
        v: [batch, seq_k, heads_k, head_dim_v] of the same dtype. Packed, all of them: [total, heads, dim] with cu_seqlens.
        scales: what shares one: "tensor": all of a tensor, [1]; "heads": a KV head of a sequence, [batch, heads_k]; "blocks": 128
            tokens of a head, [batch, heads, ceil(seq / 128)], or packed [1, heads, total // 128 + batch].
        heads_k: with "heads" and q alone: the KV heads that q's are for. None: heads_q.
        rotate: q and k are multiplied by random signs and a Hadamard matrix, which spreads outliers over the head dim and leaves
            their products as they are: both must be rotated, with one seed, or none.
        rotation_seed: the seed of the signs, from 0 to 2**64 - 1.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2], float32 or the dtype of q and k: dimensions i and
            i + rotary_dim / 2 of the token at position p are rotated by the angle of row p, column i.
        rotary_interleaved: dimensions 2i and 2i + 1 instead.
        rotary_offset_q, rotary_offset_k: the position of each sequence's first token.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k: as in attention(). Tokens that do not count
            do not affect a scale.

    Returns:
        Quantized, with FP8 tensors of the shapes of q, k and v, and float32 scales. Scales of no token are 1, and rows of none 0;
        but on a GPU rows before and after all packed sequences are undefined.

    Raises:
        NotImplementedError: also for tensors that require gradients. The others are those of attention().
    """
    tensors = {"q": q, "k": k, "v": v}
    given = {name: x for name, x in tensors.items() if x is not None}
    if not given:
        raise ValueError("q, k and v are None; at least one of them must be given")
    ndim = scales_ndim(scales)
    if heads_k is not None and heads_k < 1:
        raise ValueError(f"heads_k = {heads_k} but it must be at least 1")
    seed = seed_of("rotation_seed", rotation_seed)
    options = dict(rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved, rotary_offset_q=rotary_offset_q,
                   rotary_offset_k=rotary_offset_k, rotate=rotate, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                   seqused_q=seqused_q, seqused_k=seqused_k)
    if _is_torch(next(iter(given.values()))):
        made = _torch.quantize(tensors, scale_ndim=ndim, heads_k=heads_k or 0, rotation_seed=seed, **options,
                               max_seqlen_q=max_seqlen_q or 0, max_seqlen_k=max_seqlen_k or 0)
        return Quantized(*(x if name.partition("_")[0] in given else None for name, x in zip(Quantized._fields, made)))

    given = {name: _contiguous_last(x) for name, x in given.items()}
    about = {name: _host(name, x) for name, x in given.items()}
    for name, one in about.items():
        _check_dims(name, one)
    if "k" in given or "v" in given or heads_k is None:
        heads_k = about.get("k", about.get("v", about.get("q"))).shape[-2]
    results = {}
    for name, one in about.items():
        lengths, cu_seqlens = ("cu_seqlens_q", cu_seqlens_q) if name == "q" else ("cu_seqlens_k", cu_seqlens_k)
        sequences = None if cu_seqlens is None else max(math.prod(_host(lengths, cu_seqlens).shape) - 1, 0)
        results[f"{name}_out"] = _zeros(one.shape, "float8_e4m3fn")
        results[f"{name}_scale"] = _zeros(scale_shape(one.shape, sequences, ndim, heads_k), "float32") + 1
    arrays.quantize(**given, **results, **options, rotation_seed=seed, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    return Quantized(*(results.get(f"{name}_out") for name in "qkv"), *(results.get(f"{name}_scale") for name in "qkv"))
