// SPDX-License-Identifier: Apache-2.0
// clang-format off
// Written by tools/codegen/call_fields.py from the C headers and tools/codegen/calls.py; not to be edited.
/// @file
/// The arguments of each call. A part of flash3.hpp, which includes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "flash3/flash3.h"
#include "flash3/mask.h"
#include "flash3/tensors.hpp"

namespace flash3 {

/// The arguments of a forward call; unset optionals take the default in flash3.h.
struct Forward {
  /// @{ @name Fields

  /// The field of this name in flash3_forward_params.
  Tensor q{};
  Tensor k{};
  Tensor v{};
  Tensor out{};
  Tensor lse{};
  std::optional<float> softmax_scale = {};
  bool causal = false;
  std::optional<int64_t> window_left = {};
  std::optional<int64_t> window_right = {};
  int64_t chunk = 0;
  float softcap = 0.f;
  Tensor sink{};
  Tensor cu_seqlens_q{};
  Tensor cu_seqlens_k{};
  Tensor seqused_q{};
  Tensor seqused_k{};
  int64_t max_seqlen_q = 0;
  int64_t max_seqlen_k = 0;
  Tensor q_scale{};
  Tensor k_scale{};
  Tensor v_scale{};
  flash3_compute compute = FLASH3_COMPUTE_AS_GIVEN;
  uint64_t rotation_seed = 0;
  Tensor page_table{};
  Tensor cache_batch_idx{};
  Tensor leftpad_k{};
  Tensor k_new{};
  Tensor v_new{};
  Tensor cu_seqlens_k_new{};
  Tensor rotary_cos{};
  Tensor rotary_sin{};
  Tensor rotary_offsets{};
  bool rotary_interleaved = false;
  int sm_margin = 0;
  const flash3_schedule* schedule = nullptr;
  flash3_fp8_sums fp8_sums = FLASH3_FP8_SUMS_AUTO;
  Tensor tree_mask{};
  bool rotate = false;
  bool fill_padding = false;
  flash3_backend backend = FLASH3_BACKEND_AUTO;
  int num_threads = 0;
  void* stream = nullptr;
  void* workspace = nullptr;
  size_t workspace_size = 0;
  Tensor qv{};
  flash3_mask_alignment mask_alignment = FLASH3_ALIGN_BOTTOM_RIGHT;
  Tensor max_logits{};
  const flash3_mask* mask = nullptr;
  Tensor alibi_slopes{};
  Tensor bias{};
  Tensor bias_table{};
  float dropout_p = 0.f;
  uint64_t dropout_seed = 0;
  uint64_t dropout_offset = 0;
  Tensor dropout_state{};
  /// @}

  /// The C struct of this call.
  flash3_forward_params params() const {
    flash3_forward_params p{};
    p.struct_size = sizeof p;
    p.window = window_left.has_value() || window_right.has_value();
    p.q = q;
    p.k = k;
    p.v = v;
    p.out = out;
    p.lse = lse;
    p.softmax_scale = softmax_scale.value_or(0.f);
    p.causal = causal;
    p.window_left = window_left.value_or(-1);
    p.window_right = window_right.value_or(-1);
    p.chunk = chunk;
    p.softcap = softcap;
    p.sink = sink;
    p.cu_seqlens_q = cu_seqlens_q;
    p.cu_seqlens_k = cu_seqlens_k;
    p.seqused_q = seqused_q;
    p.seqused_k = seqused_k;
    p.max_seqlen_q = max_seqlen_q;
    p.max_seqlen_k = max_seqlen_k;
    p.q_scale = q_scale;
    p.k_scale = k_scale;
    p.v_scale = v_scale;
    p.compute = compute;
    p.rotation_seed = rotation_seed;
    p.page_table = page_table;
    p.cache_batch_idx = cache_batch_idx;
    p.leftpad_k = leftpad_k;
    p.k_new = k_new;
    p.v_new = v_new;
    p.cu_seqlens_k_new = cu_seqlens_k_new;
    p.rotary_cos = rotary_cos;
    p.rotary_sin = rotary_sin;
    p.rotary_offsets = rotary_offsets;
    p.rotary_interleaved = rotary_interleaved;
    p.sm_margin = sm_margin;
    p.schedule = schedule;
    p.fp8_sums = fp8_sums;
    p.tree_mask = tree_mask;
    p.rotate = rotate;
    p.fill_padding = fill_padding;
    p.backend = backend;
    p.num_threads = num_threads;
    p.stream = stream;
    p.workspace = workspace;
    p.workspace_size = workspace_size;
    p.qv = qv;
    p.mask_alignment = mask_alignment;
    p.max_logits = max_logits;
    p.mask = mask;
    p.alibi_slopes = alibi_slopes;
    p.bias = bias;
    p.bias_table = bias_table;
    p.dropout_p = dropout_p;
    p.dropout_seed = dropout_seed;
    p.dropout_offset = dropout_offset;
    p.dropout_state = dropout_state;
    return p;
  }
};

/// The arguments of a backward call; unset optionals take the default in flash3.h. q, k, v, out and
/// lse, and every option of the mask, are those of the forward call.
struct Backward {
  /// @{ @name Fields

  /// The field of this name in flash3_backward_params.
  Tensor dout{};
  Tensor dlse{};
  Tensor q{};
  Tensor k{};
  Tensor v{};
  Tensor out{};
  Tensor lse{};
  Tensor dq{};
  Tensor dk{};
  Tensor dv{};
  Tensor dsink{};
  std::optional<float> softmax_scale = {};
  bool causal = false;
  bool deterministic = false;
  std::optional<int64_t> window_left = {};
  std::optional<int64_t> window_right = {};
  int64_t chunk = 0;
  float softcap = 0.f;
  Tensor sink{};
  Tensor cu_seqlens_q{};
  Tensor cu_seqlens_k{};
  Tensor seqused_q{};
  Tensor seqused_k{};
  int64_t max_seqlen_q = 0;
  int64_t max_seqlen_k = 0;
  bool fill_padding = false;
  flash3_backend backend = FLASH3_BACKEND_AUTO;
  int num_threads = 0;
  void* stream = nullptr;
  void* workspace = nullptr;
  size_t workspace_size = 0;
  flash3_mask_alignment mask_alignment = FLASH3_ALIGN_BOTTOM_RIGHT;
  const flash3_mask* mask = nullptr;
  Tensor alibi_slopes{};
  Tensor bias{};
  Tensor bias_table{};
  Tensor dbias{};
  Tensor dbias_table{};
  Tensor dalibi_slopes{};
  float dropout_p = 0.f;
  uint64_t dropout_seed = 0;
  uint64_t dropout_offset = 0;
  Tensor dropout_state{};
  /// @}

  /// The C struct of this call.
  flash3_backward_params params() const {
    flash3_backward_params p{};
    p.struct_size = sizeof p;
    p.window = window_left.has_value() || window_right.has_value();
    p.dout = dout;
    p.dlse = dlse;
    p.q = q;
    p.k = k;
    p.v = v;
    p.out = out;
    p.lse = lse;
    p.dq = dq;
    p.dk = dk;
    p.dv = dv;
    p.dsink = dsink;
    p.softmax_scale = softmax_scale.value_or(0.f);
    p.causal = causal;
    p.deterministic = deterministic;
    p.window_left = window_left.value_or(-1);
    p.window_right = window_right.value_or(-1);
    p.chunk = chunk;
    p.softcap = softcap;
    p.sink = sink;
    p.cu_seqlens_q = cu_seqlens_q;
    p.cu_seqlens_k = cu_seqlens_k;
    p.seqused_q = seqused_q;
    p.seqused_k = seqused_k;
    p.max_seqlen_q = max_seqlen_q;
    p.max_seqlen_k = max_seqlen_k;
    p.fill_padding = fill_padding;
    p.backend = backend;
    p.num_threads = num_threads;
    p.stream = stream;
    p.workspace = workspace;
    p.workspace_size = workspace_size;
    p.mask_alignment = mask_alignment;
    p.mask = mask;
    p.alibi_slopes = alibi_slopes;
    p.bias = bias;
    p.bias_table = bias_table;
    p.dbias = dbias;
    p.dbias_table = dbias_table;
    p.dalibi_slopes = dalibi_slopes;
    p.dropout_p = dropout_p;
    p.dropout_seed = dropout_seed;
    p.dropout_offset = dropout_offset;
    p.dropout_state = dropout_state;
    return p;
  }
};

/// The arguments of a call that brings q, k and v to FP8; of each that is set, its _out and _scale
/// are too.
struct Quantize {
  /// @{ @name Fields

  /// The field of this name in flash3_quantize_params.
  Tensor q{};
  Tensor k{};
  Tensor v{};
  Tensor q_out{};
  Tensor k_out{};
  Tensor v_out{};
  Tensor q_scale{};
  Tensor k_scale{};
  Tensor v_scale{};
  bool rotate = false;
  uint64_t rotation_seed = 0;
  Tensor rotary_cos{};
  Tensor rotary_sin{};
  bool rotary_interleaved = false;
  int64_t rotary_offset_q = 0;
  int64_t rotary_offset_k = 0;
  Tensor cu_seqlens_q{};
  Tensor cu_seqlens_k{};
  Tensor seqused_q{};
  Tensor seqused_k{};
  int64_t max_seqlen_q = 0;
  int64_t max_seqlen_k = 0;
  flash3_backend backend = FLASH3_BACKEND_AUTO;
  int num_threads = 0;
  void* stream = nullptr;
  void* workspace = nullptr;
  size_t workspace_size = 0;
  /// @}

  /// The C struct of this call.
  flash3_quantize_params params() const {
    flash3_quantize_params p{};
    p.struct_size = sizeof p;
    p.q = q;
    p.k = k;
    p.v = v;
    p.q_out = q_out;
    p.k_out = k_out;
    p.v_out = v_out;
    p.q_scale = q_scale;
    p.k_scale = k_scale;
    p.v_scale = v_scale;
    p.rotate = rotate;
    p.rotation_seed = rotation_seed;
    p.rotary_cos = rotary_cos;
    p.rotary_sin = rotary_sin;
    p.rotary_interleaved = rotary_interleaved;
    p.rotary_offset_q = rotary_offset_q;
    p.rotary_offset_k = rotary_offset_k;
    p.cu_seqlens_q = cu_seqlens_q;
    p.cu_seqlens_k = cu_seqlens_k;
    p.seqused_q = seqused_q;
    p.seqused_k = seqused_k;
    p.max_seqlen_q = max_seqlen_q;
    p.max_seqlen_k = max_seqlen_k;
    p.backend = backend;
    p.num_threads = num_threads;
    p.stream = stream;
    p.workspace = workspace;
    p.workspace_size = workspace_size;
    return p;
  }
};

/// The arguments of a merge of parts.
struct Merge {
  /// @{ @name Fields

  /// The field of this name in flash3_merge_params.
  Tensor out_parts{};
  Tensor lse_parts{};
  Tensor out{};
  Tensor lse{};
  Tensor sink{};
  flash3_backend backend = FLASH3_BACKEND_AUTO;
  int num_threads = 0;
  void* stream = nullptr;
  void* workspace = nullptr;
  size_t workspace_size = 0;
  /// @}

  /// The C struct of this call.
  flash3_merge_params params() const {
    flash3_merge_params p{};
    p.struct_size = sizeof p;
    p.out_parts = out_parts;
    p.lse_parts = lse_parts;
    p.out = out;
    p.lse = lse;
    p.sink = sink;
    p.backend = backend;
    p.num_threads = num_threads;
    p.stream = stream;
    p.workspace = workspace;
    p.workspace_size = workspace_size;
    return p;
  }
};

/// What a mask is made from; unset optionals take the default in mask.h.
struct MaskArguments {
  /// @{ @name Fields

  /// The field of this name in flash3_mask_params.
  int64_t batch = 0;
  int64_t heads_q = 0;
  int64_t seq_q = 0;
  int64_t seq_k = 0;
  bool causal = false;
  std::optional<int64_t> window_left = {};
  std::optional<int64_t> window_right = {};
  int64_t chunk = 0;
  flash3_mask_alignment mask_alignment = FLASH3_ALIGN_BOTTOM_RIGHT;
  Tensor ranges{};
  Tensor documents{};
  Tensor dense{};
  Tensor block_counts{};
  Tensor block_indices{};
  int block_rows = 0;
  int block_keys = 0;
  int64_t max_blocks = 0;
  int64_t max_partial_blocks = 0;
  flash3_backend backend = FLASH3_BACKEND_AUTO;
  int num_threads = 0;
  void* stream = nullptr;
  Tensor bits{};
  Tensor bit_blocks{};
  Tensor cu_seqlens_q{};
  Tensor cu_seqlens_k{};
  Tensor seqused_q{};
  Tensor seqused_k{};
  int64_t max_documents = 0;
  /// @}

  /// The C struct of this call.
  flash3_mask_params params() const {
    flash3_mask_params p{};
    p.struct_size = sizeof p;
    p.window = window_left.has_value() || window_right.has_value();
    p.batch = batch;
    p.heads_q = heads_q;
    p.seq_q = seq_q;
    p.seq_k = seq_k;
    p.causal = causal;
    p.window_left = window_left.value_or(-1);
    p.window_right = window_right.value_or(-1);
    p.chunk = chunk;
    p.mask_alignment = mask_alignment;
    p.ranges = ranges;
    p.documents = documents;
    p.dense = dense;
    p.block_counts = block_counts;
    p.block_indices = block_indices;
    p.block_rows = block_rows;
    p.block_keys = block_keys;
    p.max_blocks = max_blocks;
    p.max_partial_blocks = max_partial_blocks;
    p.backend = backend;
    p.num_threads = num_threads;
    p.stream = stream;
    p.bits = bits;
    p.bit_blocks = bit_blocks;
    p.cu_seqlens_q = cu_seqlens_q;
    p.cu_seqlens_k = cu_seqlens_k;
    p.seqused_q = seqused_q;
    p.seqused_k = seqused_k;
    p.max_documents = max_documents;
    return p;
  }
};

}  // namespace flash3
