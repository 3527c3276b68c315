// SPDX-License-Identifier: Apache-2.0
// clang-format off
// Written by tools/codegen/call_fields.py from the C headers and tools/codegen/calls.py; not to be edited.
// The arguments of TVM-FFI's functions, in their order: each the field of its name.
#pragma once

#include "arguments.hpp"

namespace flash3_tvm_ffi {

inline constexpr auto kForward = arguments_of<flash3_forward_params>(
    "q k v out lse softmax_scale causal window_left window_right softcap chunk sink cu_seqlens_q cu_seqlens_k "
    "seqused_q seqused_k max_seqlen_q max_seqlen_k q_scale k_scale v_scale compute rotation_seed sm_margin "
    "backend num_threads workspace qv mask_alignment max_logits mask mask_fields alibi_slopes bias bias_table "
    "dropout_p dropout_seed dropout_offset dropout_state");

inline constexpr auto kAttentionWithKvCache = arguments_of<flash3_forward_params>(
    "q k v out lse seqused_k page_table cache_batch_idx leftpad_k k_new v_new cu_seqlens_k_new rotary_cos "
    "rotary_sin rotary_offsets rotary_interleaved softmax_scale causal window_left window_right softcap chunk "
    "sink cu_seqlens_q seqused_q max_seqlen_q max_seqlen_k sm_margin backend num_threads workspace qv q_scale "
    "k_scale v_scale rotate rotation_seed mask_alignment max_logits alibi_slopes bias bias_table");

inline constexpr auto kBackward = arguments_of<flash3_backward_params>(
    "dout q k v out lse dq dk dv dlse dsink softmax_scale causal window_left window_right softcap chunk sink "
    "cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k deterministic backend num_threads "
    "workspace mask_alignment mask mask_fields alibi_slopes bias bias_table dbias dbias_table dalibi_slopes "
    "dropout_p dropout_seed dropout_offset dropout_state");

inline constexpr auto kQuantize = arguments_of<flash3_quantize_params>(
    "q k v q_out k_out v_out q_scale k_scale v_scale rotate rotation_seed rotary_cos rotary_sin "
    "rotary_interleaved rotary_offset_q rotary_offset_k cu_seqlens_q cu_seqlens_k seqused_q seqused_k "
    "max_seqlen_q max_seqlen_k backend num_threads workspace");

inline constexpr auto kMerge = arguments_of<flash3_merge_params>(
    "out_parts lse_parts out lse sink backend num_threads workspace");

inline constexpr auto kMaskSize = arguments_of<flash3_mask_params>(
    "batch heads_q seq_q seq_k causal window_left window_right chunk mask_alignment ranges documents dense "
    "block_counts block_indices block_rows block_keys max_blocks max_partial_blocks backend num_threads bits "
    "bit_blocks cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_documents");

inline constexpr auto kMaskMake = arguments_of<flash3_mask_params>(
    "mask mask_fields batch heads_q seq_q seq_k causal window_left window_right chunk mask_alignment ranges "
    "documents dense block_counts block_indices block_rows block_keys max_blocks max_partial_blocks backend "
    "num_threads bits bit_blocks cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_documents");

inline constexpr auto kMaskUsed = arguments_of<flash3_mask_params>(
    "mask mask_fields used");

inline constexpr Function kFunctions[] = {
    {"forward", kForward},
    {"attention_with_kv_cache", kAttentionWithKvCache},
    {"backward", kBackward},
    {"quantize", kQuantize},
    {"merge", kMerge},
    {"mask_size", kMaskSize},
    {"mask_make", kMaskMake},
    {"mask_used", kMaskUsed},
};

}  // namespace flash3_tvm_ffi
