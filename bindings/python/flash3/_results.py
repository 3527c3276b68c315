# SPDX-License-Identifier: Apache-2.0
"""Results that the caller's library makes: what like= of flash3.arrays may be, and the results of each call."""
import contextlib
import sys
import types

from . import _library as _c
from ._options import scale_shape
from ._tensors import E4M3, describe, is_jax, is_torch, memory_of

SCALES = {"tensor": 1, "heads": 2, "blocks": 3}


def _namespace(like):
    """The module whose functions make arrays as like is, or as like itself makes."""
    if is_torch(like):
        import torch
        return torch
    if hasattr(like, "__array_namespace__"):
        return like.__array_namespace__()
    if hasattr(like, "shape") and (home := type(like).__module__.partition(".")[0]) in ("numpy", "cupy"):  # those without the method
        return sys.modules[home]
    if isinstance(like, types.ModuleType) and hasattr(like, "empty") and hasattr(like, "full"):
        return like
    raise TypeError(f"like is a {type(like).__name__} but it must be an array with __array_namespace__, a module as numpy, cupy or "
                    "torch, or a function of (shape, dtype, device) that returns an array")


def _ml_dtypes(name):
    try:
        import ml_dtypes
    except ImportError:
        raise RuntimeError(f"a {name} result takes the package ml_dtypes, since the library of like has no {name}; give memory "
                           "for it instead") from None
    return getattr(ml_dtypes, name)


class _Library:
    """Arrays of one library; a call is like the functions that a caller may give."""

    def __init__(self, like):
        self.module = _namespace(like)
        self.name = self.module.__name__
        self.root = self.name.partition(".")[0]
        if self.root == "jax" or is_jax(like):
            raise TypeError("like is of jax, whose arrays must not be written to; take numpy or cupy for results, and jax.dlpack for "
                            "an array of what comes back")
        # Of the standard, and of libraries that take one: numpy has the host alone, CuPy the device that is current.
        self.device = None if isinstance(like, types.ModuleType) or self.root in ("numpy", "cupy", "torch") else \
            getattr(like, "device", None)

    def _empty(self, shape, dtype, device, fill):
        options = {"device": device} if self.root == "torch" else {} if self.device is None else {"device": self.device}
        on_device = contextlib.nullcontext()
        if self.root != "torch" and device.startswith("cuda:") and hasattr(getattr(self.module, "cuda", None), "Device"):
            on_device = self.module.cuda.Device(int(device.partition(":")[2]))
        with on_device:
            if not fill:
                make = self.module.empty if fill is None else self.module.zeros
                return make(tuple(shape), dtype=dtype, **options)
            return self.module.full(tuple(shape), fill, dtype=dtype, **options)

    def __call__(self, shape, dtype, device, fill=None):
        """fill: what its elements are; None: anything."""
        found = getattr(self.module, dtype, None)
        if found is None and dtype == "float8_e4m3fn" and self.root != "numpy":
            return E4M3(self._empty(shape, self.module.uint8, device, fill))
        return self._empty(shape, _ml_dtypes(dtype) if found is None else found, device, fill)


class Results:
    """What makes the results of one call, beside the tensor `first` and with its device."""

    def __init__(self, like, first, x, options):
        self.about = describe(first, x, stream=options.get("stream"))
        self._first, self._stream = first, options.get("stream")
        self._make = like if callable(like) else _Library(like)
        # Rows of no token are not written: a library's are what flash3.attention has there, and a function's what it made.
        self._ragged = not callable(like) and any(options.get(name) is not None for name in
                                                  ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"))

    def __call__(self, name, given, shape, dtype, fill=0):
        """given, or if that is None a new array; fill: what rows of no token hold."""
        if given is not None:
            return given
        made = self._make(tuple(shape), dtype, self.about.device, **({"fill": fill} if self._ragged else {}))
        device = describe(name, made, writable=True, stream=self._stream).device
        if device != self.about.device:
            raise ValueError(f"like made {name} on {device} but {self._first} is on {self.about.device}; results must be made there")
        return made

    def workspace(self, needed):
        """(address, bytes) of that many bytes, and what keeps them."""
        size = needed + _c.WORKSPACE_ALIGNMENT
        made = self._make((size,), "uint8", self.about.device)
        address, _ = memory_of("workspace", made, self._stream)
        return (-(-address // _c.WORKSPACE_ALIGNMENT) * _c.WORKSPACE_ALIGNMENT, needed), made

    def forward(self, v, out, lse, out_dtype):
        q, v = self.about, describe("v", v, stream=self._stream)
        for name, about in (("q", q), ("v", v)):
            check_dims(name, about)
        *batch, seq, heads = q.shape[:-1]
        return (self("out", out, (*q.shape[:-1], v.shape[-1]), dtype_of_out(q.dtype, out_dtype)),
                self("lse", lse, (*batch, heads, seq), "float32", -float("inf")))

    def merged(self, out, lse, out_dtype):
        if len(self.about.shape) != 4:
            raise ValueError(f"out_parts.ndim = {len(self.about.shape)} but it must be 4, [parts, rows, heads, head_dim_v]")
        _, rows, heads, dim = self.about.shape
        return (self("out", out, (rows, heads, dim), dtype_of_out("float32", out_dtype)),
                self("lse", lse, (heads, rows), "float32"))

    def gradients(self, **of):
        """Of each argument, (the gradient that is given or None, the tensor that it is of or None)."""
        for name, (given, x) in of.items():
            about = None if x is None else describe(name[1:], x, stream=self._stream)
            yield given if about is None else self(name, given, about.shape, about.dtype)

    def codes(self, tensors, results, scales, heads_k, cu_seqlens):
        """results with what is missing; tensors: q, k and v, or None, by name; cu_seqlens: of each."""
        ndim = scales_ndim(scales)
        about = {name: describe(name, x, stream=self._stream) for name, x in tensors.items() if x is not None}
        for name, one in about.items():
            check_dims(name, one)
        if heads_k is None or "k" in about or "v" in about:
            heads_k = about.get("k", about.get("v", about.get("q"))).shape[-2]
        for name, one in about.items():
            lengths = cu_seqlens[name]
            sequences = None if lengths is None else max(describe("cu_seqlens", lengths, stream=self._stream).shape[0] - 1, 0)
            results[f"{name}_out"] = self(f"{name}_out", results[f"{name}_out"], one.shape, "float8_e4m3fn")
            results[f"{name}_scale"] = self(f"{name}_scale", results[f"{name}_scale"],
                                            scale_shape(one.shape, sequences, ndim, heads_k), "float32", 1)
        return results


def check_given(like, **results):
    """Without like every result must be given."""
    for name, x in results.items():
        if like is None and x is None:
            raise TypeError(f"{name} is None and so is like; give memory for it, or what makes it")


def scales_ndim(scales):
    """The dimensions of scales of this kind."""
    if not isinstance(scales, str) or scales not in SCALES:
        raise ValueError(f"scales = {scales!r} but it must be one of {', '.join(map(repr, SCALES))}")
    return SCALES[scales]


def dtype_of_out(dtype, asked):
    """The name of the result's dtype; asked: out_dtype, as a name, or as torch or numpy have it."""
    if asked is None:
        return "bfloat16" if dtype == "float8_e4m3fn" else dtype
    name = getattr(asked, "__name__", None) or str(asked).removeprefix("torch.")  # a class, as numpy.float16; or a dtype
    if name not in ("float16", "bfloat16", "float32"):
        raise TypeError(f"out_dtype = {asked} but it must be float16, bfloat16 or float32")
    return name


def check_dims(name, about):
    if len(about.shape) not in (3, 4):
        raise ValueError(f"{name}.ndim = {len(about.shape)} but it must be 4, [batch, seq, heads, dim], or packed 3, "
                         "[total, heads, dim]")
