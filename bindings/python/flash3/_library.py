# SPDX-License-Identifier: Apache-2.0
"""The C interface, flash3/flash3.h, through ctypes: structures, functions, and errors as Python exceptions."""
import ctypes
import pathlib
import re

from ._build import NAME

FOLDER = pathlib.Path(__file__).resolve().parent

OK, INVALID_ARGUMENT, UNSUPPORTED, CUDA_ERROR, OUT_OF_MEMORY, INTERNAL_ERROR, CANCELLED = range(7)
BACKENDS = {"auto": 0, "hopper": 1, "cpu": 2}
DTYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "int32": 4, "float8_e4m3fn": 5, "int64": 6}
COMPUTE_FP8 = 1
FP8_SUMS = {"auto": 0, "one": 1, "two": 2}  # levels
FP8_BLOCK = 128  # tokens that share a scale
WORKSPACE_ALIGNMENT = 256


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("shape", ctypes.c_int64 * 4), ("stride", ctypes.c_int64 * 4)]


class Schedule(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("key", ctypes.c_uint64)]


_SEQUENCES = [("cu_seqlens_q", Tensor), ("cu_seqlens_k", Tensor), ("seqused_q", Tensor), ("seqused_k", Tensor),
              ("max_seqlen_q", ctypes.c_int64), ("max_seqlen_k", ctypes.c_int64)]
_MODEL = [("sink", Tensor), ("softcap", ctypes.c_float), ("chunk", ctypes.c_int64)]
_SCALES = [("q_scale", Tensor), ("k_scale", Tensor), ("v_scale", Tensor)]
_CACHE = [("page_table", Tensor), ("cache_batch_idx", Tensor), ("leftpad_k", Tensor), ("k_new", Tensor), ("v_new", Tensor),
          ("cu_seqlens_k_new", Tensor), ("rotary_cos", Tensor), ("rotary_sin", Tensor), ("rotary_offsets", Tensor),
          ("rotary_interleaved", ctypes.c_int32), ("sm_margin", ctypes.c_int32), ("schedule", ctypes.POINTER(Schedule)),
          ("qv", Tensor)]
_RUN = [("backend", ctypes.c_int32), ("num_threads", ctypes.c_int32), ("stream", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p), ("workspace_size", ctypes.c_size_t)]


class ForwardParams(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("q", Tensor), ("k", Tensor), ("v", Tensor), ("out", Tensor),
                ("lse", Tensor), ("softmax_scale", ctypes.c_float), ("causal", ctypes.c_int32),
                ("window", ctypes.c_int32), ("window_left", ctypes.c_int64), ("window_right", ctypes.c_int64),
                *_RUN, *_SEQUENCES, *_MODEL, *_SCALES, ("compute", ctypes.c_int32), ("rotation_seed", ctypes.c_uint64),
                *_CACHE, ("fp8_sums", ctypes.c_int32), ("tree_mask", Tensor), ("rotate", ctypes.c_int32),
                ("fill_padding", ctypes.c_int32)]


class BackwardParams(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("dout", Tensor), ("dlse", Tensor), ("q", Tensor), ("k", Tensor),
                ("v", Tensor), ("out", Tensor), ("lse", Tensor), ("dq", Tensor), ("dk", Tensor), ("dv", Tensor),
                ("softmax_scale", ctypes.c_float), ("causal", ctypes.c_int32), ("window", ctypes.c_int32),
                ("deterministic", ctypes.c_int32), ("window_left", ctypes.c_int64), ("window_right", ctypes.c_int64),
                *_RUN, *_SEQUENCES, *_MODEL, ("dsink", Tensor), ("fill_padding", ctypes.c_int32)]


class QuantizeParams(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("q", Tensor), ("k", Tensor), ("v", Tensor), ("q_out", Tensor),
                ("k_out", Tensor), ("v_out", Tensor), *_SCALES, ("rotary_cos", Tensor), ("rotary_sin", Tensor),
                ("rotary_interleaved", ctypes.c_int32), ("rotate", ctypes.c_int32), ("rotary_offset_q", ctypes.c_int64),
                ("rotary_offset_k", ctypes.c_int64), ("rotation_seed", ctypes.c_uint64), *_SEQUENCES, *_RUN]


class MergeParams(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("out_parts", Tensor), ("lse_parts", Tensor), ("out", Tensor),
                ("lse", Tensor), ("sink", Tensor), *_RUN]


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
    lib.flash3_plan_workspace.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)]
    lib.flash3_plan_explain.argtypes = [ctypes.c_void_p, *text]
    lib.flash3_plan_destroy.argtypes, lib.flash3_plan_destroy.restype = [ctypes.c_void_p], None
    lib.flash3_backend_available.argtypes = [ctypes.c_int32]
    lib.flash3_backend_describe.argtypes = [ctypes.c_int32, *text]
    lib.flash3_backend_head_dims.argtypes = [ctypes.c_int32, ctypes.c_int32, *[ctypes.POINTER(ctypes.c_int32)] * 2]
    for function in (lib.flash3_last_error, lib.flash3_version):
        function.argtypes, function.restype = [], ctypes.c_char_p
    return lib


lib = _load()


def version():
    """The version of the library that is loaded, as "0.1.0"."""
    return lib.flash3_version().decode()


_INT32 = ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "seqused_k", "page_table", "cache_batch_idx", "leftpad_k",
          "rotary_offsets")
_FLOAT32 = ("q_scale", "k_scale", "v_scale", "lse", "dlse", "lse_parts", "out_parts")


def dtypes_of(name):
    """What the dtype of this argument may be, in words."""
    fixed = {"tree_mask": "int64", **dict.fromkeys(_INT32, "int32"), **dict.fromkeys(_FLOAT32, "float32")}
    return fixed.get(name, "one of float16, bfloat16, float32, float8_e4m3fn")


# What the C interface numbers, as Python has it: "k.dtype = 4", "1 (float16)", "compute = 1 (fp8)".
_DTYPE_NAMES = {str(number): name for name, number in DTYPES.items()}
_C_WORDS = [
    (re.compile(r"\.dtype = (\d+)\b"), lambda m: f".dtype = {_DTYPE_NAMES.get(m[1], 'unknown')}"),
    (re.compile(r"\b\d \((float16|bfloat16|float32|int32|int64|float8_e4m3)\)"), lambda m: m[1]),
    (re.compile(r"\bfloat8_e4m3\b"), lambda m: "float8_e4m3fn"),
    (re.compile(r"\b(is|are) all zero\b"), lambda m: f"{m[1]} None"),
    (re.compile(r"\bcompute = (?:0|1 \(fp8\))"), lambda m: f"compute = {'None' if m[0].endswith('0') else repr('fp8')}"),
    (re.compile(r"\bfp8_sums = ([012])\b"), lambda m: f"fp8_sums = {['auto', 'one', 'two'][int(m[1])]!r}"),
    (re.compile(r"\brotate = 1\b"), lambda m: "rotate = True"),
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


def backend_id(name):
    if name not in BACKENDS:
        raise ValueError(f"backend = {name!r} but it must be one of {', '.join(map(repr, BACKENDS))}")
    return BACKENDS[name]


def backends():
    """{"hopper": …, "cpu": …}: what each backend runs on in words, or why it cannot run on this machine."""
    found = {}
    for name in ("hopper", "cpu"):
        status = lib.flash3_backend_available(BACKENDS[name])
        found[name] = text_of(lib.flash3_backend_describe, BACKENDS[name]) if status == OK else \
            f"not available: {last_error()}"
    return found
