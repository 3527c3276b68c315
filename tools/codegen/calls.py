# SPDX-License-Identifier: Apache-2.0
"""What the bindings' functions take of a call's fields, and in which order: the one table that call_fields.py reads beside the C headers.

A field that the headers gain after those of LISTED has no place here: every function of its call takes it last, in the headers' order, under
its own name, and the header's comment says the rest. What a line here says is an order that callers depend on, or what a C type cannot say. "-name" in a list leaves that field out.
"""
HEADERS = ("types.h", "flash3.h", "quantize.h", "merge.h", "mask.h")
CALLS = ("forward", "backward", "quantize", "merge", "mask")

# The last field of each call whose place in the functions below is written out.
LISTED = {"forward": "fill_padding", "backward": "fill_padding", "quantize": "workspace_size", "merge": "workspace_size", "mask": "seqused_k"}

# What the shapes are called that a tensor after those may have; rows are those of lse, and packed where lse is, [heads_q, total_q]. Where a
# dimension may be 1, there is a word for each choice, of the letters of those that are not: batch, heads_q, seq_q, seq_k, the distances.
SHAPES = {"[heads_q]": "heads", "[batch, heads_q]": "batch_heads", "[batch, heads_q, seq_q]": "rows",
          "[1 or batch, 1 or heads_q, 1 or seq_q, seq_k]": "hqk bhqk qk bqk hk bhk k bk", "[1 or heads_q, 2·D + 1]": "hd d", "[2]": "state"}

# What a problem holds of a tensor with such shapes, by the first (core/tensor_view.hpp); rows may be after others.
VIEWS = {"heads": "HeadsView", "batch_heads": "HeadsView", "rows": "LseView", "hqk": "BiasView", "hd": "BiasTableView",
         "state": "StateView"}

# The others that a call writes; k and v are only written by a call with k_new.
WRITTEN = {"forward": "out lse", "backward": "dq dk dv dsink", "quantize": "q_out k_out v_out q_scale k_scale v_scale", "merge": "out lse",
           "mask": ""}

# Tensors with a row for each token and head, which torch's operators also take with the heads first.
ROWS = "q k v qv out dout dq dk dv"

# The dtype of those others that have one alone; the rest are of a floating point type.
DTYPES = {"int32": "cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k page_table cache_batch_idx leftpad_k rotary_offsets "
                   "ranges documents block_counts block_indices bit_blocks",
          "int64": "tree_mask",
          "uint8": "dense bits",
          "float32": "q_scale k_scale v_scale lse dlse lse_parts out_parts"}

# Python's words for an enum's values where they are not the C names in lower case; "": the value that None stands for.
WORDS = {"flash3_fp8_sums": ("auto", "one", "two"), "flash3_compute": ("", "fp8")}

# What is no option of the caller's: how large the struct is, and where the call runs.
CONTEXT = "struct_size stream workspace workspace_size schedule mask"

# ---- torch.ops.flash3 ----
# Arguments that are no field of the params: (type in torch's schema, its default).
TORCH_EXTRAS = {"heads_first": ("bool", "False"), "out_dtype": ("ScalarType?", "None"), "scale_ndim": ("int", "3"), "heads_k": ("SymInt", "0"),
                "schedule": ("Tensor?", "None"), "schedule_key": ("SymInt", "0"), "like": ("Tensor", ""), "mask": ("Tensor?", "None"),
                "mask_fields": ("int[]", "[]")}
# Fields that have another name there. compute_fp8 is a bool.
TORCH_NAMES = {"k_cache": "k", "v_cache": "v", "compute_fp8": "compute"}
# Options that an operator takes though its call has no such field, as forward and backward take the same ones.
TORCH_IGNORED = {"forward": ("deterministic",)}

_PLAIN = "softmax_scale causal heads_first window_left window_right softcap"
_LENGTHS = "cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k"
_OPTIONS = f"{_PLAIN} chunk sink {_LENGTHS} deterministic"
_FORWARD = "q_scale k_scale v_scale compute_fp8 rotation_seed sm_margin fp8_sums"
_CACHE = ("softmax_scale causal seqused_k page_table window_left window_right softcap chunk sink cache_batch_idx leftpad_k cu_seqlens_q "
          "seqused_q max_seqlen_q max_seqlen_k sm_margin q_scale k_scale v_scale")
_APPEND = "cu_seqlens_k_new rotary_cos rotary_sin rotary_offsets rotary_interleaved"
_QUANTIZE = f"rotary_cos rotary_sin rotary_interleaved rotary_offset_q rotary_offset_k rotate rotation_seed {_LENGTHS}"
_NO_DROPOUT = "-dropout_p -dropout_seed -dropout_offset -dropout_state"  # of calls on a cache, which do not train
_MORE = f"qv tree_mask rotate rotation_seed {_NO_DROPOUT}"
_DATA_MASK = "mask mask_fields"

# name: (call, required arguments, options, results). "?": None may be given; "!": the operator writes it; "…": what the headers have
# gained since. The order of what is given often goes first: each argument costs time, those before it too.
TORCH = {
    "forward": ("forward", "q k v", f"{_OPTIONS} {_FORWARD} out_dtype qv {_DATA_MASK} …", "(Tensor, Tensor)"),
    "inference": ("forward", "q k v", _PLAIN, "Tensor"),
    "forward_out": ("forward", "q k v out! lse!?", f"{_OPTIONS} {_FORWARD} qv fill_padding {_DATA_MASK} …", "()"),
    "backward": ("backward", "dout dlse? q k v out lse", f"{_OPTIONS} {_DATA_MASK} …", "(Tensor, Tensor, Tensor, Tensor)"),
    "backward_out": ("backward", "dout dlse? q k v out lse dq! dk! dv! dsink!?", f"{_OPTIONS} fill_padding {_DATA_MASK} …", "()"),
    "quantize": ("quantize", "", f"q k v scale_ndim heads_k {_QUANTIZE} …", "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"),
    "quantize_out": ("quantize", "q? k? v? q_out!? k_out!? v_out!? q_scale!? k_scale!? v_scale!?", f"{_QUANTIZE} …", "()"),
    "attention_with_kv_cache": ("forward", "q k_cache v_cache", f"{_CACHE} schedule schedule_key {_MORE} {_DATA_MASK} …", "(Tensor, Tensor)"),
    "attention_with_kv_cache_append": ("forward", "q k_cache! v_cache! k_new? v_new?",
                                       f"{_APPEND} {_CACHE} schedule schedule_key {_MORE} {_DATA_MASK} …", "(Tensor, Tensor)"),
    "attention_with_kv_cache_out": ("forward", "q k_cache! v_cache! out! lse!? k_new? v_new?",
                                    f"{_APPEND} {_CACHE} schedule schedule_key {_MORE} fill_padding {_DATA_MASK} …", "()"),
    "kv_cache_schedule": ("forward", "q k_cache v_cache k_new? v_new?", f"{_APPEND} {_CACHE} out_dtype {_MORE} …", "(Tensor, SymInt)"),
    "kv_cache_schedule_out": ("forward", "q k_cache v_cache schedule! schedule_key k_new? v_new?", f"{_APPEND} {_CACHE} out_dtype {_MORE} …",
                              "()"),
    "merge": ("merge", "out_parts lse_parts", "sink out_dtype …", "(Tensor, Tensor)"),
    "merge_out": ("merge", "out_parts lse_parts out! lse!?", "sink …", "()"),
    "mask_make": ("mask", "like ranges? documents? dense? block_counts? block_indices?",
                  "batch heads_q seq_q seq_k causal window_left window_right chunk mask_alignment block_rows block_keys max_blocks "
                  "max_partial_blocks bits bit_blocks cu_seqlens_q cu_seqlens_k seqused_q seqused_k …", "(Tensor, int[])"),
}
TORCH["mask_data"] = (*TORCH["mask_make"][:3], "Tensor")

# ---- TVM-FFI ----
# All by position, which ends of calls rely on. mask is a mask's memory, mask_fields its numbers, and used what it needs: all three are tensors.
_RUN = "backend num_threads workspace"
_MASK = "softmax_scale causal window_left window_right softcap chunk sink"
_MASK_SOURCE = ("batch heads_q seq_q seq_k causal window_left window_right chunk mask_alignment ranges documents dense block_counts "
                "block_indices block_rows block_keys max_blocks max_partial_blocks backend num_threads bits bit_blocks cu_seqlens_q "
                "cu_seqlens_k seqused_q seqused_k …")
TVM_FFI = {
    "forward": ("forward", f"q k v out lse {_MASK} {_LENGTHS} q_scale k_scale v_scale compute rotation_seed sm_margin {_RUN} qv "
                f"mask_alignment max_logits {_DATA_MASK} …"),
    "attention_with_kv_cache": ("forward", "q k v out lse seqused_k page_table cache_batch_idx leftpad_k k_new v_new cu_seqlens_k_new "
                                f"rotary_cos rotary_sin rotary_offsets rotary_interleaved {_MASK} cu_seqlens_q seqused_q max_seqlen_q "
                                f"max_seqlen_k sm_margin {_RUN} qv q_scale k_scale v_scale rotate rotation_seed {_NO_DROPOUT} …"),
    "backward": ("backward", f"dout q k v out lse dq dk dv dlse dsink {_MASK} {_LENGTHS} deterministic {_RUN} mask_alignment {_DATA_MASK} …"),
    "quantize": ("quantize", "q k v q_out k_out v_out q_scale k_scale v_scale rotate rotation_seed rotary_cos rotary_sin rotary_interleaved "
                 f"rotary_offset_q rotary_offset_k {_LENGTHS} {_RUN} …"),
    "merge": ("merge", f"out_parts lse_parts out lse sink {_RUN} …"),
    "mask_size": ("mask", _MASK_SOURCE),
    "mask_make": ("mask", f"{_DATA_MASK} {_MASK_SOURCE}"),
    "mask_used": ("mask", f"{_DATA_MASK} used"),
}

# ---- C++ (flash3.hpp) ----
# The order of designated initialisers; window is what its sides say.
_CPP_MASK = "softmax_scale causal window_left window_right chunk softcap sink"
_CPP_RUN = "backend num_threads stream workspace workspace_size"
CPP = {
    "forward": f"q k v out lse {_CPP_MASK} {_LENGTHS} q_scale k_scale v_scale compute rotation_seed page_table cache_batch_idx leftpad_k "
               "k_new v_new cu_seqlens_k_new rotary_cos rotary_sin rotary_offsets rotary_interleaved sm_margin schedule fp8_sums tree_mask "
               f"rotate fill_padding {_CPP_RUN} qv …",
    "backward": "dout dlse q k v out lse dq dk dv dsink softmax_scale causal deterministic window_left window_right chunk softcap sink "
                f"{_LENGTHS} fill_padding {_CPP_RUN} …",
    "quantize": "q k v q_out k_out v_out q_scale k_scale v_scale rotate rotation_seed rotary_cos rotary_sin rotary_interleaved "
                f"rotary_offset_q rotary_offset_k {_LENGTHS} {_CPP_RUN} …",
    "merge": f"out_parts lse_parts out lse sink {_CPP_RUN} …",
    "mask": "batch heads_q seq_q seq_k causal window_left window_right chunk mask_alignment ranges documents dense block_counts "
            "block_indices block_rows block_keys max_blocks max_partial_blocks backend num_threads stream bits "
            "bit_blocks cu_seqlens_q cu_seqlens_k seqused_q seqused_k …",
}

# ---- Python ----
# Options of Python's functions as their signatures show them.
_PYTHON_LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k"
_PYTHON_DROPOUT = "dropout_p seed -dropout_seed offset -dropout_offset"  # seed and offset are dropout's there
PYTHON = {
    "attention": ("forward", f"causal window softmax_scale softcap chunk sink {_PYTHON_LENGTHS} deterministic q_scale k_scale v_scale out_dtype "
                  f"compute rotation_seed sm_margin fp8_sums return_lse qv … {_PYTHON_DROPOUT} mask"),
    "attention_backward": ("backward", f"dlse causal window softmax_scale softcap chunk sink {_PYTHON_LENGTHS} deterministic … {_PYTHON_DROPOUT} mask"),
    "attention_with_kv_cache": ("forward", "seqused_k page_table cache_batch_idx leftpad_k k_new v_new cu_seqlens_k_new rotary_cos rotary_sin "
                                "rotary_offsets rotary_interleaved causal window softmax_scale softcap chunk sink cu_seqlens_q max_seqlen_q "
                                "max_seqlen_k seqused_q q_scale k_scale v_scale rotate rotation_seed sm_margin schedule tree_mask out_dtype "
                                f"return_lse qv {_NO_DROPOUT} … mask"),
}
# Those that are no field, with their defaults.
PYTHON_EXTRAS = {"seed": None, "offset": 0, "window": None, "out_dtype": None, "return_lse": False, "deterministic": False, "schedule": None, "mask": None}
