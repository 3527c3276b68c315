# SPDX-License-Identifier: Apache-2.0
"""The C interface, flash3/flash3.h, through ctypes: structures, functions, and errors as Python exceptions."""
import ctypes
import pathlib
import re

from ._build import NAME
from ._fields import (DTYPE_OF, WORDS, BackwardParams, ForwardParams, Mask, MaskParams, MergeParams, QuantizeParams, Schedule,  # noqa: F401
                      Tensor)

FOLDER = pathlib.Path(__file__).resolve().parent

OK, INVALID_ARGUMENT, UNSUPPORTED, CUDA_ERROR, OUT_OF_MEMORY, INTERNAL_ERROR, CANCELLED = range(7)
DTYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "int32": 4, "float8_e4m3fn": 5, "int64": 6, "uint8": 7}
BACKENDS = WORDS["backend"]
FP8_BLOCK = 128  # tokens that share a scale
WORKSPACE_ALIGNMENT = 256
MASK_BLOCK, MASK_MOST_RANGES = 128, 8  # queries and keys of a mask's block; ranges that it holds of a query at most
MASK_ALL_SEEN = -1  # in place of the number of a block of bits
MASK_LENGTHS = {"cu_seqlens_q": 1, "cu_seqlens_k": 2, "seqused_q": 4, "seqused_k": 8}  # what the lengths of a mask are the sum of


class DropoutMaskParams(ctypes.Structure):
    """flash3_dropout_mask_params."""
    _fields_ = [("struct_size", ctypes.c_size_t), ("kept", Tensor), ("dropout_p", ctypes.c_float), ("dropout_seed", ctypes.c_uint64),
                ("dropout_offset", ctypes.c_uint64), ("dropout_state", Tensor), ("backend", ctypes.c_int32),
                ("num_threads", ctypes.c_int32), ("stream", ctypes.c_void_p)]


def _load():
    lib = ctypes.CDLL(str(FOLDER / f"lib{NAME}.so"))
    text = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t)]
    for name, params in (("forward", ForwardParams), ("backward", BackwardParams), ("quantize", QuantizeParams),
                         ("merge", MergeParams)):
        given = ctypes.POINTER(params)
        for suffix, arguments in (("", []), ("_supported", []), ("_explain", text),
                                  ("_workspace", [ctypes.POINTER(ctypes.c_size_t)])):
            function = getattr(lib, f"flash3_{name}{suffix}")
            function.argtypes, function.restype = [given, *arguments], ctypes.c_int32
        make, run = getattr(lib, f"flash3_{name}_plan"), getattr(lib, f"flash3_{name}_run")
        make.argtypes, make.restype = [given, ctypes.POINTER(ctypes.c_void_p)], ctypes.c_int32
        run.argtypes, run.restype = [ctypes.c_void_p, given], ctypes.c_int32
    forward = ctypes.POINTER(ForwardParams)
    lib.flash3_forward_schedule.argtypes = [forward, ctypes.POINTER(Schedule)]
    lib.flash3_forward_schedule_size.argtypes = [forward, ctypes.POINTER(ctypes.c_size_t)]
    lib.flash3_mask_describe.argtypes = [ctypes.POINTER(MaskParams), ctypes.POINTER(Mask)]
    lib.flash3_plan_workspace.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)]
    lib.flash3_plan_explain.argtypes = [ctypes.c_void_p, *text]
    lib.flash3_plan_destroy.argtypes, lib.flash3_plan_destroy.restype = [ctypes.c_void_p], None
    lib.flash3_backend_available.argtypes = [ctypes.c_int32]
    lib.flash3_backend_describe.argtypes = [ctypes.c_int32, *text]
    lib.flash3_backend_head_dims.argtypes = [ctypes.c_int32, ctypes.c_int32, *[ctypes.POINTER(ctypes.c_int32)] * 2]
    lib.flash3_dropout_mask.argtypes = [ctypes.POINTER(DropoutMaskParams)]
    for function in (lib.flash3_last_error, lib.flash3_version):
        function.argtypes, function.restype = [], ctypes.c_char_p
    return lib


lib = _load()


def version():
    """The version of the library that is loaded: "MAJOR.MINOR.PATCH"."""
    return lib.flash3_version().decode()


_DTYPE_OF = {**DTYPE_OF, "kept": "uint8"}  # the last: of dropout_mask


def takes_dtype(name, dtype):
    """Whether a tensor argument may be of this dtype at all; some are of one argument alone."""
    return dtype in DTYPES and (dtype not in ("int64", "uint8") or _DTYPE_OF.get(name) == dtype)


def dtypes_of(name):
    """What the dtype of this argument may be, in words."""
    return _DTYPE_OF.get(name, "one of float16, bfloat16, float32, float8_e4m3fn")


def _word(match):
    words = list(WORDS[match[1]])
    return f"{match[1]} = {words[int(match[2])]!r}" if int(match[2]) < len(words) else match[0]


# What the C interface numbers, as Python has it: "k.dtype = 4", "1 (float16)", "compute = 1 (fp8)".
_DTYPE_NAMES = {str(number): name for name, number in DTYPES.items()}
_C_WORDS = [
    (re.compile(r"\.dtype = (\d+)\b"), lambda m: f".dtype = {_DTYPE_NAMES.get(m[1], 'unknown')}"),
    (re.compile(r"\b\d \((float16|bfloat16|float32|int32|int64|uint8|float8_e4m3)\)"), lambda m: m[1]),
    (re.compile(r"\bfloat8_e4m3\b"), lambda m: "float8_e4m3fn"),
    (re.compile(r"\b(is|are) all zero\b"), lambda m: f"{m[1]} None"),
    (re.compile(rf"\b({'|'.join(WORDS)}) = (\d+)\b(?: \([\w ]+\))?"), _word),
    (re.compile(r"\brotate = 1\b"), lambda m: "rotate = True"),
    (re.compile(r"\bmask->size\b"), lambda m: "mask.data.numel()"),
    (re.compile(r"\bmask->"), lambda m: "mask."),
    (re.compile(r"\bflash3_mask_\w+"), lambda m: "flash3.masks"),
]


def in_python(message):
    """A sentence of the C library in the words of Python's arguments."""
    for pattern, word in _C_WORDS:
        message = pattern.sub(word, message)
    return message


# A sentence about a dtype begins with the field: "k.dtype = float32 but q.dtype = float16; …".
_ABOUT_DTYPE = re.compile(r"\w+\.dtype\b")


def exception(status, message):
    """The exception that a status other than OK stands for."""
    message = in_python(message)
    if status == INVALID_ARGUMENT:
        return TypeError(message) if _ABOUT_DTYPE.match(message) else ValueError(message)
    if status == UNSUPPORTED:
        return NotImplementedError(message)
    if status == OUT_OF_MEMORY:
        return MemoryError(message)
    return RuntimeError(message)


def last_error():
    return lib.flash3_last_error().decode()


def check(status):
    if status != OK:
        raise exception(status, last_error())


def text_of(function, *arguments):
    """What a C function with the buffer rule of flash3.h writes."""
    size = ctypes.c_size_t(0)
    check(function(*arguments, None, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    check(function(*arguments, buffer, ctypes.byref(size)))
    return buffer.value.decode()


def backends():
    """{"hopper": …, "cpu": …}: what each backend runs on in words, or why it cannot run on this machine."""
    found = {}
    for name in ("hopper", "cpu"):
        status = lib.flash3_backend_available(BACKENDS[name])
        found[name] = text_of(lib.flash3_backend_describe, BACKENDS[name]) if status == OK else \
            f"not available: {last_error()}"
    return found
