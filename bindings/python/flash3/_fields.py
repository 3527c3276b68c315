# SPDX-License-Identifier: Apache-2.0
# Written by tools/codegen/call_fields.py from the C headers and tools/codegen/calls.py; not to be edited.
"""The C interface's structs for ctypes, and what Python's functions take of their fields."""
import ctypes


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("shape", ctypes.c_int64 * 4), ("stride", ctypes.c_int64 * 4)]


class Schedule(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("key", ctypes.c_uint64)]


class Mask(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("key", ctypes.c_uint64), ("batch", ctypes.c_int64),
                ("heads", ctypes.c_int64), ("seq_q", ctypes.c_int64), ("seq_k", ctypes.c_int64), ("window_left", ctypes.c_int64),
                ("window_right", ctypes.c_int64), ("chunk", ctypes.c_int64), ("mask_alignment", ctypes.c_int32), ("ranges", ctypes.c_int32),
                ("blocks", ctypes.c_int64), ("partial_blocks", ctypes.c_int64), ("granularity", ctypes.c_int32),
                ("lengths", ctypes.c_int32), ("documents", ctypes.c_int64)]


class ForwardParams(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("q", Tensor), ("k", Tensor), ("v", Tensor), ("out", Tensor), ("lse", Tensor),
                ("softmax_scale", ctypes.c_float), ("causal", ctypes.c_int32), ("window", ctypes.c_int32), ("window_left", ctypes.c_int64),
                ("window_right", ctypes.c_int64), ("backend", ctypes.c_int32), ("num_threads", ctypes.c_int32), ("stream", ctypes.c_void_p),
                ("workspace", ctypes.c_void_p), ("workspace_size", ctypes.c_size_t), ("cu_seqlens_q", Tensor), ("cu_seqlens_k", Tensor),
                ("seqused_q", Tensor), ("seqused_k", Tensor), ("max_seqlen_q", ctypes.c_int64), ("max_seqlen_k", ctypes.c_int64),
                ("sink", Tensor), ("softcap", ctypes.c_float), ("chunk", ctypes.c_int64), ("q_scale", Tensor), ("k_scale", Tensor),
                ("v_scale", Tensor), ("compute", ctypes.c_int32), ("rotation_seed", ctypes.c_uint64), ("page_table", Tensor),
                ("cache_batch_idx", Tensor), ("leftpad_k", Tensor), ("k_new", Tensor), ("v_new", Tensor), ("cu_seqlens_k_new", Tensor),
                ("rotary_cos", Tensor), ("rotary_sin", Tensor), ("rotary_offsets", Tensor), ("rotary_interleaved", ctypes.c_int32),
                ("sm_margin", ctypes.c_int32), ("schedule", ctypes.POINTER(Schedule)), ("qv", Tensor), ("fp8_sums", ctypes.c_int32),
                ("tree_mask", Tensor), ("rotate", ctypes.c_int32), ("fill_padding", ctypes.c_int32), ("mask_alignment", ctypes.c_int32),
                ("max_logits", Tensor), ("mask", ctypes.POINTER(Mask)), ("alibi_slopes", Tensor), ("bias", Tensor), ("bias_table", Tensor),
                ("dropout_p", ctypes.c_float), ("dropout_seed", ctypes.c_uint64), ("dropout_offset", ctypes.c_uint64),
                ("dropout_state", Tensor)]


class BackwardParams(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("dout", Tensor), ("dlse", Tensor), ("q", Tensor), ("k", Tensor), ("v", Tensor),
                ("out", Tensor), ("lse", Tensor), ("dq", Tensor), ("dk", Tensor), ("dv", Tensor), ("softmax_scale", ctypes.c_float),
                ("causal", ctypes.c_int32), ("window", ctypes.c_int32), ("deterministic", ctypes.c_int32), ("window_left", ctypes.c_int64),
                ("window_right", ctypes.c_int64), ("backend", ctypes.c_int32), ("num_threads", ctypes.c_int32), ("stream", ctypes.c_void_p),
                ("workspace", ctypes.c_void_p), ("workspace_size", ctypes.c_size_t), ("cu_seqlens_q", Tensor), ("cu_seqlens_k", Tensor),
                ("seqused_q", Tensor), ("seqused_k", Tensor), ("max_seqlen_q", ctypes.c_int64), ("max_seqlen_k", ctypes.c_int64),
                ("sink", Tensor), ("softcap", ctypes.c_float), ("chunk", ctypes.c_int64), ("dsink", Tensor),
                ("fill_padding", ctypes.c_int32), ("mask_alignment", ctypes.c_int32), ("mask", ctypes.POINTER(Mask)),
                ("alibi_slopes", Tensor), ("bias", Tensor), ("bias_table", Tensor), ("dbias", Tensor), ("dbias_table", Tensor),
                ("dalibi_slopes", Tensor), ("dropout_p", ctypes.c_float), ("dropout_seed", ctypes.c_uint64),
                ("dropout_offset", ctypes.c_uint64), ("dropout_state", Tensor)]


class QuantizeParams(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("q", Tensor), ("k", Tensor), ("v", Tensor), ("q_out", Tensor), ("k_out", Tensor),
                ("v_out", Tensor), ("q_scale", Tensor), ("k_scale", Tensor), ("v_scale", Tensor), ("rotary_cos", Tensor),
                ("rotary_sin", Tensor), ("rotary_interleaved", ctypes.c_int32), ("rotate", ctypes.c_int32),
                ("rotary_offset_q", ctypes.c_int64), ("rotary_offset_k", ctypes.c_int64), ("rotation_seed", ctypes.c_uint64),
                ("cu_seqlens_q", Tensor), ("cu_seqlens_k", Tensor), ("seqused_q", Tensor), ("seqused_k", Tensor),
                ("max_seqlen_q", ctypes.c_int64), ("max_seqlen_k", ctypes.c_int64), ("backend", ctypes.c_int32),
                ("num_threads", ctypes.c_int32), ("stream", ctypes.c_void_p), ("workspace", ctypes.c_void_p),
                ("workspace_size", ctypes.c_size_t)]


class MergeParams(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("out_parts", Tensor), ("lse_parts", Tensor), ("out", Tensor), ("lse", Tensor),
                ("sink", Tensor), ("backend", ctypes.c_int32), ("num_threads", ctypes.c_int32), ("stream", ctypes.c_void_p),
                ("workspace", ctypes.c_void_p), ("workspace_size", ctypes.c_size_t)]


class MaskParams(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("batch", ctypes.c_int64), ("heads_q", ctypes.c_int64), ("seq_q", ctypes.c_int64),
                ("seq_k", ctypes.c_int64), ("causal", ctypes.c_int32), ("window", ctypes.c_int32), ("window_left", ctypes.c_int64),
                ("window_right", ctypes.c_int64), ("chunk", ctypes.c_int64), ("mask_alignment", ctypes.c_int32), ("ranges", Tensor),
                ("documents", Tensor), ("dense", Tensor), ("block_counts", Tensor), ("block_indices", Tensor),
                ("block_rows", ctypes.c_int32), ("block_keys", ctypes.c_int32), ("max_blocks", ctypes.c_int64),
                ("max_partial_blocks", ctypes.c_int64), ("backend", ctypes.c_int32), ("num_threads", ctypes.c_int32),
                ("stream", ctypes.c_void_p), ("bits", Tensor), ("bit_blocks", Tensor), ("cu_seqlens_q", Tensor), ("cu_seqlens_k", Tensor),
                ("seqused_q", Tensor), ("seqused_k", Tensor), ("max_documents", ctypes.c_int64)]


# The words for values that the C interface numbers.
WORDS = {
    "backend": {"auto": 0, "hopper": 1, "cpu": 2},
    "compute": {None: 0, "fp8": 1},
    "fp8_sums": {"auto": 0, "one": 1, "two": 2},
    "mask_alignment": {"bottom_right": 0, "top_left": 1},
}

# What each option is, and which tensors there are; those that a call writes apart.
OPTIONS = {
    "forward": {"softmax_scale": "number", "causal": "flag", "window_left": "int64", "window_right": "int64", "backend": "enumeration",
                "num_threads": "int32", "max_seqlen_q": "int64", "max_seqlen_k": "int64", "softcap": "number", "chunk": "int64",
                "compute": "enumeration", "rotation_seed": "uint64", "rotary_interleaved": "flag", "sm_margin": "int32",
                "fp8_sums": "enumeration", "rotate": "flag", "fill_padding": "flag", "mask_alignment": "enumeration", "dropout_p": "number",
                "dropout_seed": "uint64", "dropout_offset": "uint64"},
    "backward": {"softmax_scale": "number", "causal": "flag", "deterministic": "flag", "window_left": "int64", "window_right": "int64",
                 "backend": "enumeration", "num_threads": "int32", "max_seqlen_q": "int64", "max_seqlen_k": "int64", "softcap": "number",
                 "chunk": "int64", "fill_padding": "flag", "mask_alignment": "enumeration", "dropout_p": "number", "dropout_seed": "uint64",
                 "dropout_offset": "uint64"},
    "quantize": {"rotary_interleaved": "flag", "rotate": "flag", "rotary_offset_q": "int64", "rotary_offset_k": "int64",
                 "rotation_seed": "uint64", "max_seqlen_q": "int64", "max_seqlen_k": "int64", "backend": "enumeration",
                 "num_threads": "int32"},
    "merge": {"backend": "enumeration", "num_threads": "int32"},
    "mask": {"batch": "int64", "heads_q": "int64", "seq_q": "int64", "seq_k": "int64", "causal": "flag", "window_left": "int64",
             "window_right": "int64", "chunk": "int64", "mask_alignment": "enumeration", "block_rows": "int32", "block_keys": "int32",
             "max_blocks": "int64", "max_partial_blocks": "int64", "backend": "enumeration", "num_threads": "int32",
             "max_documents": "int64"},
}
TENSORS = {
    "forward": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "sink", "q_scale", "k_scale", "v_scale",
                "page_table", "cache_batch_idx", "leftpad_k", "k_new", "v_new", "cu_seqlens_k_new", "rotary_cos", "rotary_sin",
                "rotary_offsets", "qv", "tree_mask", "alibi_slopes", "bias", "bias_table", "dropout_state"),
    "backward": ("dout", "dlse", "q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "sink",
                 "alibi_slopes", "bias", "bias_table", "dropout_state"),
    "quantize": ("q", "k", "v", "rotary_cos", "rotary_sin", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"),
    "merge": ("out_parts", "lse_parts", "sink"),
    "mask": ("ranges", "documents", "dense", "block_counts", "block_indices", "bits", "bit_blocks", "cu_seqlens_q", "cu_seqlens_k",
             "seqused_q", "seqused_k"),
}
RESULTS = {
    "forward": ("out", "lse", "max_logits"),
    "backward": ("dq", "dk", "dv", "dsink", "dbias", "dbias_table", "dalibi_slopes"),
    "quantize": ("q_out", "k_out", "v_out", "q_scale", "k_scale", "v_scale"),
    "merge": ("out", "lse"),
    "mask": (),
}

# Of each call the tensors after those that calls.py places, which it reads, and the shapes that they may have.
ADDED = {
    "forward": {"alibi_slopes": "heads batch_heads", "bias": "hqk bhqk qk bqk hk bhk k bk", "bias_table": "hd d", "dropout_state": "state"},
    "backward": {"alibi_slopes": "heads batch_heads", "bias": "hqk bhqk qk bqk hk bhk k bk", "bias_table": "hd d",
                 "dropout_state": "state"},
    "quantize": {},
    "merge": {},
    "mask": {},
}

# Their gradients, where they have one.
GRADIENTS = {
    "bias": "dbias",
    "bias_table": "dbias_table",
    "alibi_slopes": "dalibi_slopes",
}

# What the docstrings say of such tensors, written or not.
ABOUT = {
    "max_logits":
        "[heads_q] or [batch, heads_q, seq_q] float32: the call writes the largest score that each head saw, or each row, laid out "
        "as lse: scaled, capped, with bias, bias_table and alibi_slopes; -inf where none was seen. The sink is no score. Where a "
        "score is NaN, that of its row and of its head is undefined. On a GPU k and v are neither FP8 nor become it, and out and "
        "lse may differ in their last bits from those of a call without. Has no gradient. None: not wanted.",
    "alibi_slopes":
        "[heads_q] or [batch, heads_q] float32: slopes of ALiBi, finite. The slope times the distance of i' and j is subtracted "
        "from the scaled and capped score of query i and key j, with i' as in Mask. Not with tree_mask. None: none.",
    "bias":
        "[1 or batch, 1 or heads_q, 1 or seq_q, seq_k] float16, bfloat16 or float32: what is added to the scaled and capped score "
        "of query i and key j; finite, or -inf, which hides the pair, on a GPU not its NaNs. Any strides. For packed queries the "
        "first dimension is 1 and the third 1 or total_q. Column j is key j of its sequence; with cu_seqlens_k or page_table there "
        "are as many as a sequence may have keys, or more; not all is read. Not with tree_mask. None: none.",
    "bias_table":
        "[1 or heads_q, 2*D + 1] float32: a bias by distance, finite or -inf, which hides the pair. Entry clamp(j - i', -D, D) + D "
        "is added to the scaled and capped score of query i and key j, with i' as in Mask. Not with tree_mask. None: none.",
    "dropout_state":
        "[2] int64: the seed and the offset in the tensors' kind of memory, read when the kernels run: a captured graph replays "
        "with other ones. Not with qv, tree_mask. Has no gradient. None: the two numbers instead.",
    "dbias":
        "[1 or batch, 1 or heads_q, 1 or seq_q, seq_k] float32 or the dtype of bias: the call writes its gradient, summed in "
        "float32 over the dimensions that bias has one element of; 0 where no query sees the key. Any strides. The shape of bias, "
        "which must be given. None: not wanted.",
    "dbias_table":
        "[1 or heads_q, 2*D + 1] float32: the call writes the gradient of bias_table. The shape of bias_table, which must be "
        "given. None: not wanted.",
    "dalibi_slopes":
        "[heads_q] or [batch, heads_q] float32: the call writes the gradient of alibi_slopes. The shape of alibi_slopes, which "
        "must be given. None: not wanted.",
}

# Tensors of one dtype alone.
DTYPE_OF = {
    "lse": "float32", "q_scale": "float32", "k_scale": "float32", "v_scale": "float32", "max_logits": "float32", "alibi_slopes": "float32",
    "bias_table": "float32", "dlse": "float32", "dbias_table": "float32", "dalibi_slopes": "float32", "out_parts": "float32",
    "lse_parts": "float32",
    "cu_seqlens_q": "int32", "cu_seqlens_k": "int32", "seqused_q": "int32", "seqused_k": "int32", "page_table": "int32",
    "cache_batch_idx": "int32", "leftpad_k": "int32", "cu_seqlens_k_new": "int32", "rotary_offsets": "int32", "ranges": "int32",
    "documents": "int32", "block_counts": "int32", "block_indices": "int32", "bit_blocks": "int32",
    "tree_mask": "int64", "dropout_state": "int64",
    "dense": "uint8", "bits": "uint8",
}

# The options of Python's functions, in their order, with their defaults.
SIGNATURES = {
    "attention": {"causal": False, "window": None, "softmax_scale": None, "softcap": 0.0, "chunk": 0, "sink": None, "cu_seqlens_q": None,
                  "cu_seqlens_k": None, "max_seqlen_q": None, "max_seqlen_k": None, "seqused_q": None, "seqused_k": None,
                  "deterministic": False, "q_scale": None, "k_scale": None, "v_scale": None, "out_dtype": None, "compute": None,
                  "rotation_seed": 0, "sm_margin": 0, "fp8_sums": "auto", "return_lse": False, "qv": None, "mask_alignment": "bottom_right",
                  "max_logits": None, "alibi_slopes": None, "bias": None, "bias_table": None, "dropout_state": None, "dropout_p": 0.0,
                  "seed": None, "offset": 0, "mask": None},
    "attention_backward": {"dlse": None, "causal": False, "window": None, "softmax_scale": None, "softcap": 0.0, "chunk": 0, "sink": None,
                           "cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": None, "max_seqlen_k": None, "seqused_q": None,
                           "seqused_k": None, "deterministic": False, "mask_alignment": "bottom_right", "alibi_slopes": None, "bias": None,
                           "bias_table": None, "dbias": None, "dbias_table": None, "dalibi_slopes": None, "dropout_state": None,
                           "dropout_p": 0.0, "seed": None, "offset": 0, "mask": None},
    "attention_with_kv_cache": {"seqused_k": None, "page_table": None, "cache_batch_idx": None, "leftpad_k": None, "k_new": None,
                                "v_new": None, "cu_seqlens_k_new": None, "rotary_cos": None, "rotary_sin": None, "rotary_offsets": None,
                                "rotary_interleaved": False, "causal": False, "window": None, "softmax_scale": None, "softcap": 0.0,
                                "chunk": 0, "sink": None, "cu_seqlens_q": None, "max_seqlen_q": None, "max_seqlen_k": None,
                                "seqused_q": None, "q_scale": None, "k_scale": None, "v_scale": None, "rotate": False, "rotation_seed": 0,
                                "sm_margin": 0, "schedule": None, "tree_mask": None, "out_dtype": None, "return_lse": False, "qv": None,
                                "mask_alignment": "bottom_right", "max_logits": None, "alibi_slopes": None, "bias": None,
                                "bias_table": None, "mask": None},
}
