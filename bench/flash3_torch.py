# SPDX-License-Identifier: Apache-2.0
"""flash3's C interface for torch tensors through ctypes: what the benchmark scripts of this folder call."""
import ctypes

import torch

DTYPES = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3, torch.int32: 4, torch.float8_e4m3fn: 5}
AUTO, HOPPER, CPU = 0, 1, 2
FP8_BLOCK = 128  # tokens of a block of scales


class Tensor(ctypes.Structure):
    """flash3_tensor of flash3.h."""
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("shape", ctypes.c_int64 * 4), ("stride", ctypes.c_int64 * 4)]

    @classmethod
    def of(cls, x):
        pad = [0] * (4 - x.dim())
        return cls(x.data_ptr(), DTYPES[x.dtype], x.dim(), (ctypes.c_int64 * 4)(*x.shape, *pad),
                   (ctypes.c_int64 * 4)(*x.stride(), *pad))


class ForwardParams(ctypes.Structure):
    """flash3_forward_params of flash3.h."""
    _fields_ = [("struct_size", ctypes.c_size_t), ("q", Tensor), ("k", Tensor), ("v", Tensor), ("out", Tensor),
                ("lse", Tensor), ("softmax_scale", ctypes.c_float), ("causal", ctypes.c_int32),
                ("window", ctypes.c_int32), ("window_left", ctypes.c_int64), ("window_right", ctypes.c_int64),
                ("backend", ctypes.c_int32), ("num_threads", ctypes.c_int32), ("stream", ctypes.c_void_p),
                ("workspace", ctypes.c_void_p), ("workspace_size", ctypes.c_size_t)]


class BackwardParams(ctypes.Structure):
    """flash3_backward_params of flash3.h."""
    _fields_ = [("struct_size", ctypes.c_size_t), ("dout", Tensor), ("dlse", Tensor), ("q", Tensor), ("k", Tensor),
                ("v", Tensor), ("out", Tensor), ("lse", Tensor), ("dq", Tensor), ("dk", Tensor), ("dv", Tensor),
                ("softmax_scale", ctypes.c_float), ("causal", ctypes.c_int32), ("window", ctypes.c_int32),
                ("deterministic", ctypes.c_int32), ("window_left", ctypes.c_int64), ("window_right", ctypes.c_int64),
                ("backend", ctypes.c_int32), ("num_threads", ctypes.c_int32), ("stream", ctypes.c_void_p),
                ("workspace", ctypes.c_void_p), ("workspace_size", ctypes.c_size_t)]


# Only for calls that use these fields: a library from before they were there takes the shorter ones alone.
RAGGED_FIELDS = [("cu_seqlens_q", Tensor), ("cu_seqlens_k", Tensor), ("seqused_q", Tensor), ("seqused_k", Tensor),
                 ("max_seqlen_q", ctypes.c_int64), ("max_seqlen_k", ctypes.c_int64), ("sink", Tensor),
                 ("softcap", ctypes.c_float), ("chunk", ctypes.c_int64)]


class RaggedForwardParams(ForwardParams):
    """flash3_forward_params of flash3.h, to chunk."""
    _fields_ = RAGGED_FIELDS


class Fp8ForwardParams(RaggedForwardParams):
    """flash3_forward_params of flash3.h, to its end."""
    _fields_ = [("q_scale", Tensor), ("k_scale", Tensor), ("v_scale", Tensor), ("compute", ctypes.c_int32),
                ("rotation_seed", ctypes.c_uint64)]


class QuantizeParams(ctypes.Structure):
    """flash3_quantize_params of flash3.h."""
    _fields_ = [("struct_size", ctypes.c_size_t),
                *((name, Tensor) for name in ("q", "k", "v", "q_out", "k_out", "v_out", "q_scale", "k_scale", "v_scale",
                                              "rotary_cos", "rotary_sin")),
                ("rotary_interleaved", ctypes.c_int32), ("rotate", ctypes.c_int32), ("rotary_offset_q", ctypes.c_int64),
                ("rotary_offset_k", ctypes.c_int64), ("rotation_seed", ctypes.c_uint64), ("cu_seqlens_q", Tensor),
                ("cu_seqlens_k", Tensor), ("seqused_q", Tensor), ("seqused_k", Tensor), ("max_seqlen_q", ctypes.c_int64),
                ("max_seqlen_k", ctypes.c_int64), ("backend", ctypes.c_int32), ("num_threads", ctypes.c_int32),
                ("stream", ctypes.c_void_p), ("workspace", ctypes.c_void_p), ("workspace_size", ctypes.c_size_t)]


class RaggedBackwardParams(BackwardParams):
    """flash3_backward_params of flash3.h, to its end."""
    _fields_ = [*RAGGED_FIELDS, ("dsink", Tensor)]


class Flash3:
    """A libflash3.so."""

    COMPUTE_FP8 = 1  # FLASH3_COMPUTE_FP8

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.flash3_last_error.restype = ctypes.c_char_p
        self.lib.flash3_version.restype = ctypes.c_char_p

    def check(self, status):
        if status:
            raise RuntimeError(self.lib.flash3_last_error().decode())

    def version(self):
        return self.lib.flash3_version().decode()

    def describe(self, backend):
        size = ctypes.c_size_t(256)
        text = ctypes.create_string_buffer(size.value)
        self.check(self.lib.flash3_backend_describe(backend, text, ctypes.byref(size)))
        return text.value.decode()

    def prepared(self, function, params, tensors, **options):
        """A callable without arguments: one call of this C function, on the current stream if the tensors are on a GPU.

        tensors: a dict by field; options: other fields of the params.
        """
        q = tensors["q"]
        stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else None
        p = params(struct_size=ctypes.sizeof(params), stream=stream, **{name: Tensor.of(x) for name, x in tensors.items()},
                   **options)
        size = ctypes.c_size_t()
        self.check(getattr(self.lib, f"{function}_workspace")(ctypes.byref(p), ctypes.byref(size)))
        workspace = torch.empty(size.value + 256, dtype=torch.uint8, device=q.device)
        p.workspace = (workspace.data_ptr() + 255) // 256 * 256
        p.workspace_size = size.value
        run = getattr(self.lib, function)

        def call(keep=(tensors, workspace)):
            self.check(run(ctypes.byref(p)))

        call.workspace_bytes = size.value
        return call

    def forward(self, q, k, v, out, causal, backend=AUTO, threads=0, lse=None):
        """A callable that runs one forward call. Tensors are [batch, seq, heads, dim]; any strides whose last is 1."""
        tensors = {"q": q, "k": k, "v": v, "out": out} | ({} if lse is None else {"lse": lse})
        return self.prepared("flash3_forward", ForwardParams, tensors, causal=int(causal), backend=backend, num_threads=threads)

    def backward(self, tensors, causal, deterministic=False, backend=AUTO, threads=0):
        """A callable that runs one backward call; tensors: q, k, v, out, lse, dout, dq, dk and dv by name."""
        return self.prepared("flash3_backward", BackwardParams, tensors, causal=int(causal),
                             deterministic=int(deterministic), backend=backend, num_threads=threads)

    def ragged_forward(self, tensors, **options):
        """As forward, with tensors and options by the names of flash3_forward_params: cu_seqlens_q, sink, softcap …"""
        return self.prepared("flash3_forward", RaggedForwardParams, tensors, **options)

    def fp8_forward(self, tensors, **options):
        """As ragged_forward, with q_scale, k_scale and v_scale, or compute."""
        return self.prepared("flash3_forward", Fp8ForwardParams, tensors, **options)

    def quantize(self, tensors, **options):
        """A callable that runs flash3_quantize; tensors and options by the names of flash3_quantize_params."""
        return self.prepared("flash3_quantize", QuantizeParams, tensors, **options)

    def to_fp8(self, q, k, v, *, scales="blocks", backend=AUTO):
        """(a callable that makes FP8 of [batch, seq, heads, dim] tensors, rotated; what fp8_forward takes of it, by name).

        scales: what shares one: 128 tokens of a head, "blocks", or a KV head of a sequence, "heads".
        """
        given = {"q": q, "k": k, "v": v}
        made = {name: torch.empty_like(x, dtype=torch.float8_e4m3fn) for name, x in given.items()}
        for name, x in given.items():
            shape = (x.shape[0], k.shape[2]) if scales == "heads" else (x.shape[0], x.shape[2], -(-x.shape[1] // FP8_BLOCK))
            made[f"{name}_scale"] = torch.empty(shape, device=x.device)
        results = {name if name.endswith("_scale") else f"{name}_out": x for name, x in made.items()}
        return self.quantize(given | results, rotate=1, backend=backend), made

    def ragged_backward(self, tensors, **options):
        """As backward, likewise."""
        return self.prepared("flash3_backward", RaggedBackwardParams, tensors, **options)
