# SPDX-License-Identifier: Apache-2.0
"""Any tensor as a flash3_tensor: torch tensors, and what has __array_interface__, __dlpack__ or __cuda_array_interface__.

Nothing is copied. What is returned keeps the memory alive that it points to. A tensor whose memory is not all that it means (torch's
lazy negation, a mask, a subclass with a state of its own) is refused.
"""
import ctypes
import math
import sys

from . import _streams
from ._library import DTYPES, Tensor, dtypes_of, takes_dtype

_NUMPY_KINDS = {"|u1": "uint8", "<f2": "float16", "<f4": "float32", "<i4": "int32", "<i8": "int64"}
_DLPACK_KINDS = {(2, 16): "float16", (4, 16): "bfloat16", (2, 32): "float32", (0, 32): "int32", (0, 64): "int64", (1, 8): "uint8",
                 (10, 8): "float8_e4m3fn"}
_DLPACK_HOST, _DLPACK_CUDA = (1, 3), (2, 13)  # CPU and pinned; CUDA and managed
_DLPACK_READ_ONLY, _DLPACK_COPIED = 1, 2


class Described:
    """A flash3_tensor, and what it was made of."""

    def __init__(self, tensor, shape, dtype, device, owner):
        self.tensor, self.shape, self.dtype, self.device, self.owner = tensor, shape, dtype, device, owner
        self.on_host = device == "cpu"  # or "cuda:0"


class E4M3:
    """A tensor of uint8 whose bytes are float8_e4m3fn: numpy has no such dtype, and not every exporter of DLPack does."""

    def __init__(self, codes):
        self.codes = codes


def _make(name, data, dtype, shape, strides, device, owner):
    if not takes_dtype(name, dtype):
        raise TypeError(f"{name}.dtype = {dtype} but it must be {dtypes_of(name)}")
    if len(shape) > 4:
        raise ValueError(f"{name}.ndim = {len(shape)} but a tensor has at most 4 dimensions")
    pad = [0] * (4 - len(shape))
    tensor = Tensor(data or None, DTYPES[dtype], len(shape), (ctypes.c_int64 * 4)(*shape, *pad),
                    (ctypes.c_int64 * 4)(*strides, *pad))
    return Described(tensor, tuple(shape), dtype, device, owner)


def is_torch(x):
    return type(x).__module__.partition(".")[0] == "torch" or hasattr(x, "data_ptr") and hasattr(x, "is_meta")


def _check_is_memory(name, x):
    """That the numbers of a torch tensor are those of its memory."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return
    if x.is_neg() or x.is_conj():
        bit, resolve = ("negative", "resolve_neg") if x.is_neg() else ("conjugate", "resolve_conj")
        raise ValueError(f"{name} has torch's {bit} bit, which its memory does not show; {name}.{resolve}() is a tensor without it")
    if x.is_nested:
        raise TypeError(f"{name} is a nested tensor but a tensor must have one shape; see cu_seqlens for sequences of different lengths")
    own = type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if x._is_zerotensor() or not x.is_meta and (own or torch._C._functorch.is_functorch_wrapped_tensor(x)):
        kind = "zero tensor" if x._is_zerotensor() else type(x).__name__ if own else "tensor inside of a transform"
        raise TypeError(f"{name} is a {kind}, which has more or less than memory; it must be a plain tensor")


def _of_torch(name, x):
    _check_is_memory(name, x)
    dtype = str(x.dtype).removeprefix("torch.")
    if x.layout.__str__() != "torch.strided":
        raise TypeError(f"{name}.layout = {x.layout} but a tensor must be strided")
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{name}.device = {x.device} but it must be cpu or cuda")
    data = 0 if x.is_meta else x.data_ptr()
    return data, dtype, x.shape, x.stride(), str(x.device) if x.device.type == "cuda" else "cpu", x


def _dense_strides(shape):
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def check_has_no_mask(name, x, mask=None):
    """mask: what the array's interface says; numpy's masked arrays do not put theirs into it."""
    if mask is not None or hasattr(x, "mask") and hasattr(x, "filled"):
        raise TypeError(f"{name} has a mask, which its memory does not show; {name}.filled(value) is an array without one")


def _of_interface(name, x, interface, writable):
    """What __array_interface__ and __cuda_array_interface__ have in common."""
    check_has_no_mask(name, x, interface.get("mask"))
    if not isinstance(interface.get("data"), tuple):
        raise TypeError(f"{name} has an array interface without an address but it must have one: data = (address, is read-only)")
    typestr, shape = interface["typestr"], interface["shape"]
    dtype = _NUMPY_KINDS.get(typestr)
    if dtype is None:  # ml_dtypes' types are opaque bytes to numpy
        dtype = str(getattr(x, "dtype", typestr))
    data, read_only = interface["data"]
    if writable and read_only:
        raise ValueError(f"{name} is read-only memory, which an output cannot be")
    strides = interface.get("strides")
    if strides is None:
        strides = _dense_strides(shape)
    else:
        size = int(typestr[2:])
        if any(stride % size for stride in strides):
            raise ValueError(f"{name}.strides = {tuple(strides)} bytes but they must be multiples of {size}, the size of a {dtype}")
        strides = [stride // size for stride in strides]
    return data, dtype, shape, strides


def _of_array(name, x, writable):
    return *_of_interface(name, x, x.__array_interface__, writable), "cpu", x


def _of_cuda_array(name, x, writable, stream):
    interface = x.__cuda_array_interface__
    parts = _of_interface(name, x, interface, writable)
    device = _streams.device_of(parts[0]) if parts[0] else 0  # an empty one has no address
    # Version 3 names the stream on which the memory becomes what it is; None: there is nothing to wait for.
    other, mine = interface.get("stream"), stream or _streams.LEGACY_DEFAULT
    if other == 0:
        raise ValueError(f"{name}.__cuda_array_interface__['stream'] = 0 but it must be None, 1, 2 or a cudaStream_t")
    if other is not None and other != mine and parts[0]:
        _streams.wait(mine, other, device)
    return *parts, f"cuda:{device}", x


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


class _DLTensorVersioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
                ("flags", ctypes.c_uint64), ("tensor", _DLTensor)]


_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.argtypes, _capsule_name.restype = [ctypes.py_object], ctypes.c_char_p
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes, _capsule_pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p


def _dlpack_capsule(x, **stream):
    try:
        return x.__dlpack__(max_version=(1, 0), **stream)
    except TypeError:  # as the array API standard tells who knows no versions from who does
        return x.__dlpack__(**stream)


def _of_dlpack(name, x, writable, stream):
    device_type, device = x.__dlpack_device__()
    if device_type not in _DLPACK_HOST + _DLPACK_CUDA:
        raise ValueError(f"{name}: DLPack device type {int(device_type)} but it must be host or CUDA memory")
    on_host = device_type in _DLPACK_HOST
    # A capsule that was not consumed frees its tensor when it goes: holding it is holding the memory.
    capsule = _dlpack_capsule(x) if on_host else _dlpack_capsule(x, stream=stream or _streams.LEGACY_DEFAULT)
    kind = _capsule_name(capsule)
    address, flags = _capsule_pointer(capsule, kind), 0
    if kind == b"dltensor_versioned":
        versioned = _DLTensorVersioned.from_address(address)
        if versioned.major != 1:
            raise TypeError(f"{name}: DLPack of version {versioned.major} but it must be 1")
        t, flags = versioned.tensor, versioned.flags
    else:
        t = _DLTensor.from_address(address)
    if writable and flags & (_DLPACK_READ_ONLY | _DLPACK_COPIED):
        what = "read-only memory" if flags & _DLPACK_READ_ONLY else "a copy that DLPack has made"
        raise ValueError(f"{name} is {what}, which an output cannot be")
    dtype = _DLPACK_KINDS.get((t.code, t.bits), f"DLPack type (code {t.code}, {t.bits} bits)")
    if t.lanes != 1:
        raise TypeError(f"{name}.dtype has {t.lanes} lanes but it must have 1")
    shape = t.shape[:t.ndim]
    strides = t.strides[:t.ndim] if t.strides else _dense_strides(shape)
    return (t.data or 0) + t.byte_offset, dtype, shape, strides, "cpu" if on_host else f"cuda:{device}", (x, capsule)


def is_jax(x):
    return type(x).__module__.partition(".")[0] in ("jax", "jaxlib")


def _parts(name, x, writable, stream):
    if is_torch(x):
        return _of_torch(name, x)
    if writable and is_jax(x):
        raise ValueError(f"{name} is an array of jax, which must not be written to, and an output is written")
    if hasattr(x, "__array_interface__"):
        return _of_array(name, x, writable)
    if hasattr(x, "__dlpack__"):
        return _of_dlpack(name, x, writable, stream)
    if hasattr(x, "__cuda_array_interface__"):
        return _of_cuda_array(name, x, writable, stream)
    raise TypeError(f"{name} is a {type(x).__name__} but it must be a torch tensor, a numpy array, or an object with "
                    "__array_interface__, __dlpack__ or __cuda_array_interface__")


def describe(name, x, *, writable=False, stream=None):
    """x as a flash3_tensor; name is the argument's, for messages."""
    if not isinstance(x, E4M3):
        return _make(name, *_parts(name, x, writable, stream))
    data, dtype, *rest = _parts(name, x.codes, writable, stream)
    if dtype != "uint8":
        raise TypeError(f"{name}.codes.dtype = {dtype} but what E4M3 marks must be uint8")
    return _make(name, data, "float8_e4m3fn", *rest)


_BYTES = {"uint8": 1, "float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "int64": 8}


def memory_of(name, given, stream=None):
    """(address, bytes) of memory that a call writes: given as such, or as a tensor without gaps."""
    if isinstance(given, tuple):
        return given
    if is_torch(given):
        if not given.is_contiguous():
            raise ValueError(f"{name}.stride() = {tuple(given.stride())} but it must have no gaps: "
                             f"{tuple(_dense_strides(given.shape))}")
        _check_is_memory(name, given)
        return given.data_ptr(), given.numel() * given.element_size()
    try:
        data, dtype, shape, strides, _, _ = _parts(name, given, True, stream)
    except TypeError:
        raise TypeError(f"{name} is a {type(given).__name__} but it must be a tensor or (address, bytes)") from None
    if dtype not in _BYTES:
        raise TypeError(f"{name}.dtype = {dtype} but it must be one of {', '.join(_BYTES)}")
    if any(size > 1 and stride != dense for size, stride, dense in zip(shape, strides, _dense_strides(shape))):
        raise ValueError(f"{name}.strides = {tuple(strides)} but it must have no gaps: {tuple(_dense_strides(shape))}")
    return data, math.prod(shape) * _BYTES[dtype]
