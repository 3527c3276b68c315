# SPDX-License-Identifier: Apache-2.0
"""Attention's dropout: the seed of a call, and dropout_mask()."""
import contextlib
import ctypes

from . import _library as _c
from ._options import int32_of, number_of, seed_of

_RULE = "seed and offset, or dropout_state, choose the weights that are dropped"


def draw_state(device):
    """A dropout_state by torch's generator of the device: graphs draw a new one each time they are replayed."""
    import torch
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def in_c_names(options):
    """Options of attention() with the names that the C interface has for seed and offset."""
    if "seed" not in options and "offset" not in options:
        return options
    options = dict(options)
    seed, offset = options.pop("seed", None), options.pop("offset", 0)
    return {**options, "dropout_seed": 0 if seed is None else seed_of("seed", seed), "dropout_offset": seed_of("offset", offset)}


def with_state(options, draw=None):
    """Options of attention() whose dropout has its seed: draw() makes a dropout_state where the caller gives neither; None: it must."""
    seed, state = options.get("seed"), options.get("dropout_state")
    if seed is not None and state is not None:
        raise ValueError(f"seed = {seed} and dropout_state is given; {_RULE}")
    if seed is None and (offset := options.get("offset", 0)) != 0:
        raise ValueError(f"offset = {offset} but seed is not given; {_RULE}")
    p = options.get("dropout_p", 0.0)
    if seed is not None or state is not None or not number_of("dropout_p", p) > 0.0:
        return options
    if draw is None:
        raise ValueError(f"dropout_p = {p} but neither seed nor dropout_state is given; {_RULE}")
    return {**options, "dropout_state": draw()}


def _torchs_device(*tensors):
    """The GPU of the first torch tensor that is on one; None: none is."""
    from ._tensors import is_torch
    return next((x.device for x in tensors if x is not None and is_torch(x) and x.is_cuda), None)


@contextlib.contextmanager
def _on_stream(stream, device):
    """The stream of a call, whose torch tensors are on this device; without one it is what the caller says."""
    if device is None:
        yield stream
        return
    import torch
    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).cuda_stream if stream is None else stream


def dropout_mask(batch, heads, seq_q, seq_k, dropout_p, *, seed=None, offset=0, dropout_state=None, kept=None, num_threads=0, stream=None):
    """Which weights attention() keeps with this dropout: for tests, and to repeat a call by other means.

    Args:
        batch: the number of sequences.
        heads: query heads.
        seq_q, seq_k: lengths. Queries and keys are counted from the first of their sequence: pass the longest lengths of a ragged batch,
            and for a KV cache the lengths of its keys.
        dropout_p: from 0, which keeps all, to below 1.
        seed, offset: as in attention(), from 0 to 2**64 - 1.
        dropout_state: [2] int64, instead of the two, on the device of kept.
        kept: [batch, heads, seq_q, seq_k] uint8, into which to write, on the host or on a Hopper GPU: a torch tensor, a numpy array or
            another array with __array_interface__, __dlpack__ or __cuda_array_interface__. None: a new numpy array.
        num_threads: on the host; 0: one per core that the process may run on.
        stream: on a GPU, a cudaStream_t as an integer. None: for torch tensors the current stream of their device, for other arrays the
            default stream.

    Returns:
        kept, or the new array. It holds 1 where the weight of a query and a key is kept, and 0 where it is dropped.

    Raises:
        ValueError, TypeError: an argument breaks a rule.
        NotImplementedError: kept is on a GPU other than Hopper, or flash3 was built without its kernels.
        RuntimeError: CUDA refused.
    """
    from ._tensors import describe
    sizes = tuple(int32_of(name, x) for name, x in (("batch", batch), ("heads", heads), ("seq_q", seq_q), ("seq_k", seq_k)))
    for name, size in zip(("batch", "heads", "seq_q", "seq_k"), sizes):
        if size < 0:
            raise ValueError(f"{name} = {size} but a size must be at least 0")
    with_state({"dropout_p": dropout_p, "seed": seed, "offset": offset, "dropout_state": dropout_state})
    if kept is None:
        import numpy
        kept = numpy.empty(sizes, numpy.uint8)
    params = _c.DropoutMaskParams(struct_size=ctypes.sizeof(_c.DropoutMaskParams), dropout_p=number_of("dropout_p", dropout_p),
                                  dropout_seed=0 if seed is None else seed_of("seed", seed), dropout_offset=seed_of("offset", offset),
                                  num_threads=int32_of("num_threads", num_threads))
    with _on_stream(stream, _torchs_device(kept, dropout_state)) as params.stream:
        described = {"kept": describe("kept", kept, writable=True, stream=params.stream)}
        if tuple(described["kept"].shape) != sizes:
            raise ValueError(f"kept.shape = {tuple(described['kept'].shape)} but it must be {sizes}, [batch, heads, seq_q, seq_k]")
        if dropout_state is not None:
            described["dropout_state"] = describe("dropout_state", dropout_state, stream=params.stream)
        for name, x in described.items():
            if x.device != described["kept"].device:
                raise ValueError(f"{name} is on {x.device} but kept is on {described['kept'].device}; they must be on one device")
            setattr(params, name, x.tensor)
        params.backend = _c.BACKENDS["cpu" if described["kept"].on_host else "hopper"]
        _c.check(_c.lib.flash3_dropout_mask(ctypes.byref(params)))
    return kept
