# SPDX-License-Identifier: Apache-2.0
"""Any tensor as a flash3_tensor: torch tensors, numpy arrays and what else has __array_interface__, and DLPack.

Nothing is copied. What is returned keeps the memory alive that it points to.
"""
import ctypes

from ._library import DTYPES, Tensor

_NUMPY_KINDS = {"|u1": "uint8", "<f2": "float16", "<f4": "float32", "<i4": "int32"}
_DLPACK_KINDS = {(2, 16): "float16", (4, 16): "bfloat16", (2, 32): "float32", (0, 32): "int32", (1, 8): "uint8",
                 (10, 8): "float8_e4m3fn"}
_DLPACK_HOST, _DLPACK_CUDA = (1, 3), (2, 13)  # CPU and pinned; CUDA and managed


class Described:
    """A flash3_tensor, and what it was made of."""

    def __init__(self, tensor, shape, dtype, on_host, owner):
        self.tensor, self.shape, self.dtype, self.on_host, self.owner = tensor, shape, dtype, on_host, owner


class E4M3:
    """A tensor of uint8 whose bytes are float8_e4m3fn: numpy has no such dtype, and not every exporter of DLPack does."""

    def __init__(self, codes):
        self.codes = codes


def _make(name, data, dtype, shape, strides, on_host, owner):
    if dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise TypeError(f"{name}.dtype = {dtype} but it must be one of {known}")
    if len(shape) > 4:
        raise ValueError(f"{name}.ndim = {len(shape)} but a tensor has at most 4 dimensions")
    pad = [0] * (4 - len(shape))
    tensor = Tensor(data or None, DTYPES[dtype], len(shape), (ctypes.c_int64 * 4)(*shape, *pad),
                    (ctypes.c_int64 * 4)(*strides, *pad))
    return Described(tensor, tuple(shape), dtype, on_host, owner)


def is_torch(x):
    return type(x).__module__.partition(".")[0] == "torch" or hasattr(x, "data_ptr") and hasattr(x, "is_meta")


def _of_torch(name, x):
    dtype = str(x.dtype).removeprefix("torch.")
    if x.layout.__str__() != "torch.strided":
        raise TypeError(f"{name}.layout = {x.layout} but a tensor must be strided")
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{name}.device = {x.device} but it must be cpu or cuda")
    data = 0 if x.is_meta else x.data_ptr()
    return data, dtype, x.shape, x.stride(), x.device.type != "cuda", x


def _dense_strides(shape):
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def _of_array(name, x, writable):
    interface = x.__array_interface__
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
    return data, dtype, shape, strides, True, x


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes, _capsule_pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p


def _of_dlpack(name, x, stream):
    device_type = x.__dlpack_device__()[0]
    if device_type not in _DLPACK_HOST + _DLPACK_CUDA:
        raise ValueError(f"{name}: DLPack device type {int(device_type)} but it must be host or CUDA memory")
    on_host = device_type in _DLPACK_HOST
    # A capsule that nobody consumed frees its tensor when it goes: holding it is holding the memory.
    capsule = x.__dlpack__() if on_host else x.__dlpack__(stream=1 if stream is None else stream)  # 1: the default stream
    t = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    dtype = _DLPACK_KINDS.get((t.code, t.bits), f"DLPack type (code {t.code}, {t.bits} bits)")
    if t.lanes != 1:
        raise TypeError(f"{name}.dtype has {t.lanes} lanes but it must have 1")
    shape = t.shape[:t.ndim]
    strides = t.strides[:t.ndim] if t.strides else _dense_strides(shape)
    return (t.data or 0) + t.byte_offset, dtype, shape, strides, on_host, (x, capsule)


def _parts(name, x, writable, stream):
    if is_torch(x):
        return _of_torch(name, x)
    if hasattr(x, "__array_interface__"):
        return _of_array(name, x, writable)
    if hasattr(x, "__dlpack__"):
        return _of_dlpack(name, x, stream)
    raise TypeError(f"{name} is a {type(x).__name__} but it must be a torch tensor, a numpy array, or an object with "
                    "__array_interface__ or __dlpack__")


def describe(name, x, *, writable=False, stream=None):
    """x as a flash3_tensor; name is the argument's, for messages."""
    if not isinstance(x, E4M3):
        return _make(name, *_parts(name, x, writable, stream))
    data, dtype, *rest = _parts(name, x.codes, writable, stream)
    if dtype != "uint8":
        raise TypeError(f"{name}.codes.dtype = {dtype} but what E4M3 marks must be uint8")
    return _make(name, data, "float8_e4m3fn", *rest)
