# SPDX-License-Identifier: Apache-2.0
"""Tables of biases by distance, for bias_table of attention."""
import math

import torch

from ._options import int64_of


def t5_table(embedding, *, bidirectional=True, num_buckets=32, max_distance=128, D=None):
    """The bias_table of T5's relative position buckets: one gather, through which gradients reach the embedding.

    Args:
        embedding: [num_buckets, heads], the weight of a model's relative_attention_bias; of any floating point dtype and device.
        bidirectional: True, as in encoders: half of the buckets are for keys after the query; False, as in decoders: those have bucket 0.
        num_buckets: even, at least 2; with bidirectional a multiple of 4.
        max_distance: distances from here on share the last bucket; more than half of the buckets of one side.
        D: the table's last distance; None: max_distance, from which on all entries are the same.

    Returns:
        [heads, 2 * D + 1] float32; entry j - i' + D is that of query i and key j, with T5's distances counted from i'.

    Raises:
        TypeError: embedding is no tensor of floats.
        ValueError: a size breaks a rule; the message names it.
    """
    if not isinstance(embedding, torch.Tensor) or not embedding.is_floating_point():
        raise TypeError(f"embedding is {getattr(embedding, 'dtype', type(embedding).__name__)} but it must be a torch tensor of floats")
    buckets, most = int64_of("num_buckets", num_buckets), int64_of("max_distance", max_distance)
    last = most if D is None else int64_of("D", D)
    unit = 4 if bidirectional else 2
    if buckets < unit or buckets % unit:
        raise ValueError(f"num_buckets = {buckets} but with bidirectional = {bool(bidirectional)} it must be a multiple of {unit}")
    if embedding.dim() != 2 or embedding.shape[0] != buckets:
        raise ValueError(f"embedding.shape = {list(embedding.shape)} but num_buckets = {buckets}; it must be [num_buckets, heads]")
    if most <= buckets // unit:
        raise ValueError(f"max_distance = {most} but it must be more than {buckets // unit}, the distances that have a bucket of their own")
    if not 0 <= last < 2**30:
        raise ValueError(f"D = {last} but it must be from 0 to 2**30 - 1")
    distance = torch.arange(-last, last + 1, device=embedding.device)
    bucket = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        bucket, distance = buckets * (distance > 0), distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    # In float32, as the models compute it: a bucket's edge may depend on it.
    far = exact + (torch.log(distance.float() / exact) / math.log(most / exact) * (buckets - exact)).clamp(max=buckets).nan_to_num(
        neginf=0.0).long()
    bucket = bucket + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))
    return embedding.index_select(0, bucket).T.float()
