// SPDX-License-Identifier: Apache-2.0
// clang-format off
// Written by tools/codegen/call_fields.py from the C headers and tools/codegen/calls.py; not to be edited.
// The params of each call as a table, so that what treats all fields alike is one loop.
#pragma once

#include "core/field.hpp"

namespace flash3 {

template <>
struct FieldsOf<flash3_forward_params> {
  using Params = flash3_forward_params;
  static constexpr ParamField kFields[] = {
    FLASH3_FIELD(struct_size, .is_context = true),
    FLASH3_FIELD(q, .is_rows = true),
    FLASH3_FIELD(k, .is_rows = true),
    FLASH3_FIELD(v, .is_rows = true),
    FLASH3_FIELD(out, .is_written = true, .is_rows = true),
    FLASH3_FIELD(lse, .is_written = true, .dtype = FLASH3_FLOAT32),
    FLASH3_FIELD(softmax_scale),
    FLASH3_FIELD(causal, .is_flag = true),
    FLASH3_FIELD(window, .is_flag = true),
    FLASH3_FIELD(window_left),
    FLASH3_FIELD(window_right),
    FLASH3_FIELD(backend, .words = "auto hopper cpu"),
    FLASH3_FIELD(num_threads),
    FLASH3_FIELD(stream, .is_context = true),
    FLASH3_FIELD(workspace, .is_context = true),
    FLASH3_FIELD(workspace_size, .is_context = true),
    FLASH3_FIELD(cu_seqlens_q, .dtype = FLASH3_INT32),
    FLASH3_FIELD(cu_seqlens_k, .dtype = FLASH3_INT32),
    FLASH3_FIELD(seqused_q, .dtype = FLASH3_INT32),
    FLASH3_FIELD(seqused_k, .dtype = FLASH3_INT32),
    FLASH3_FIELD(max_seqlen_q),
    FLASH3_FIELD(max_seqlen_k),
    FLASH3_FIELD(sink),
    FLASH3_FIELD(softcap),
    FLASH3_FIELD(chunk),
    FLASH3_FIELD(q_scale, .dtype = FLASH3_FLOAT32),
    FLASH3_FIELD(k_scale, .dtype = FLASH3_FLOAT32),
    FLASH3_FIELD(v_scale, .dtype = FLASH3_FLOAT32),
    FLASH3_FIELD(compute, .words = "- fp8"),
    FLASH3_FIELD(rotation_seed),
    FLASH3_FIELD(page_table, .dtype = FLASH3_INT32),
    FLASH3_FIELD(cache_batch_idx, .dtype = FLASH3_INT32),
    FLASH3_FIELD(leftpad_k, .dtype = FLASH3_INT32),
    FLASH3_FIELD(k_new),
    FLASH3_FIELD(v_new),
    FLASH3_FIELD(cu_seqlens_k_new, .dtype = FLASH3_INT32),
    FLASH3_FIELD(rotary_cos),
    FLASH3_FIELD(rotary_sin),
    FLASH3_FIELD(rotary_offsets, .dtype = FLASH3_INT32),
    FLASH3_FIELD(rotary_interleaved, .is_flag = true),
    FLASH3_FIELD(sm_margin),
    FLASH3_FIELD(schedule, .is_context = true),
    FLASH3_FIELD(qv, .is_rows = true),
    FLASH3_FIELD(fp8_sums, .words = "auto one two"),
    FLASH3_FIELD(tree_mask, .dtype = FLASH3_INT64),
    FLASH3_FIELD(rotate, .is_flag = true),
    FLASH3_FIELD(fill_padding, .is_flag = true),
    FLASH3_FIELD(mask_alignment, .words = "bottom_right top_left"),
    FLASH3_FIELD(max_logits, .is_written = true, .dtype = FLASH3_FLOAT32, .shapes = "heads rows"),
    FLASH3_FIELD(mask, .is_context = true),
    FLASH3_FIELD(alibi_slopes, .dtype = FLASH3_FLOAT32, .shapes = "heads batch_heads", .without = "tree_mask"),
    FLASH3_FIELD(bias, .shapes = "hqk bhqk qk bqk hk bhk k bk", .without = "tree_mask", .any_strides = true),
    FLASH3_FIELD(bias_table, .dtype = FLASH3_FLOAT32, .shapes = "hd d", .without = "tree_mask"),
    FLASH3_FIELD(dropout_p),
    FLASH3_FIELD(dropout_seed),
    FLASH3_FIELD(dropout_offset),
    FLASH3_FIELD(dropout_state, .dtype = FLASH3_INT64, .shapes = "state", .without = "qv tree_mask"),
  };
  static constexpr size_t kListed = 47;  // those that calls.py places
  // Calls visit(field, member, view) for each tensor after those, until one returns false; a problem's view of it is the
  // member of the same name (core/added_views.hpp).
  template <class Problem, class Visit>
  static bool visit_added_tensors(Problem& problem, const Visit& visit) {
    return visit(kFields[48], &Params::max_logits, problem.max_logits) &&
           visit(kFields[50], &Params::alibi_slopes, problem.alibi_slopes) &&
           visit(kFields[51], &Params::bias, problem.bias) &&
           visit(kFields[52], &Params::bias_table, problem.bias_table) &&
           visit(kFields[56], &Params::dropout_state, problem.dropout_state);
  }
};

template <>
struct FieldsOf<flash3_backward_params> {
  using Params = flash3_backward_params;
  static constexpr ParamField kFields[] = {
    FLASH3_FIELD(struct_size, .is_context = true),
    FLASH3_FIELD(dout, .is_rows = true),
    FLASH3_FIELD(dlse, .dtype = FLASH3_FLOAT32),
    FLASH3_FIELD(q, .is_rows = true),
    FLASH3_FIELD(k, .is_rows = true),
    FLASH3_FIELD(v, .is_rows = true),
    FLASH3_FIELD(out, .is_rows = true),
    FLASH3_FIELD(lse, .dtype = FLASH3_FLOAT32),
    FLASH3_FIELD(dq, .is_written = true, .is_rows = true),
    FLASH3_FIELD(dk, .is_written = true, .is_rows = true),
    FLASH3_FIELD(dv, .is_written = true, .is_rows = true),
    FLASH3_FIELD(softmax_scale),
    FLASH3_FIELD(causal, .is_flag = true),
    FLASH3_FIELD(window, .is_flag = true),
    FLASH3_FIELD(deterministic, .is_flag = true),
    FLASH3_FIELD(window_left),
    FLASH3_FIELD(window_right),
    FLASH3_FIELD(backend, .words = "auto hopper cpu"),
    FLASH3_FIELD(num_threads),
    FLASH3_FIELD(stream, .is_context = true),
    FLASH3_FIELD(workspace, .is_context = true),
    FLASH3_FIELD(workspace_size, .is_context = true),
    FLASH3_FIELD(cu_seqlens_q, .dtype = FLASH3_INT32),
    FLASH3_FIELD(cu_seqlens_k, .dtype = FLASH3_INT32),
    FLASH3_FIELD(seqused_q, .dtype = FLASH3_INT32),
    FLASH3_FIELD(seqused_k, .dtype = FLASH3_INT32),
    FLASH3_FIELD(max_seqlen_q),
    FLASH3_FIELD(max_seqlen_k),
    FLASH3_FIELD(sink),
    FLASH3_FIELD(softcap),
    FLASH3_FIELD(chunk),
    FLASH3_FIELD(dsink, .is_written = true),
    FLASH3_FIELD(fill_padding, .is_flag = true),
    FLASH3_FIELD(mask_alignment, .words = "bottom_right top_left"),
    FLASH3_FIELD(mask, .is_context = true),
    FLASH3_FIELD(alibi_slopes, .dtype = FLASH3_FLOAT32, .shapes = "heads batch_heads", .without = "tree_mask"),
    FLASH3_FIELD(bias, .shapes = "hqk bhqk qk bqk hk bhk k bk", .without = "tree_mask", .any_strides = true),
    FLASH3_FIELD(bias_table, .dtype = FLASH3_FLOAT32, .shapes = "hd d", .without = "tree_mask"),
    FLASH3_FIELD(dbias, .is_written = true, .shapes = "hqk bhqk qk bqk hk bhk k bk", .like = "bias", .any_strides = true),
    FLASH3_FIELD(dbias_table, .is_written = true, .dtype = FLASH3_FLOAT32, .shapes = "hd d", .like = "bias_table"),
    FLASH3_FIELD(dalibi_slopes, .is_written = true, .dtype = FLASH3_FLOAT32, .shapes = "heads batch_heads", .like = "alibi_slopes"),
    FLASH3_FIELD(dropout_p),
    FLASH3_FIELD(dropout_seed),
    FLASH3_FIELD(dropout_offset),
    FLASH3_FIELD(dropout_state, .dtype = FLASH3_INT64, .shapes = "state", .without = "qv tree_mask"),
  };
  static constexpr size_t kListed = 33;  // those that calls.py places
  // Calls visit(field, member, view) for each tensor after those, until one returns false; a problem's view of it is the
  // member of the same name (core/added_views.hpp).
  template <class Problem, class Visit>
  static bool visit_added_tensors(Problem& problem, const Visit& visit) {
    return visit(kFields[35], &Params::alibi_slopes, problem.alibi_slopes) &&
           visit(kFields[36], &Params::bias, problem.bias) &&
           visit(kFields[37], &Params::bias_table, problem.bias_table) &&
           visit(kFields[38], &Params::dbias, problem.dbias) &&
           visit(kFields[39], &Params::dbias_table, problem.dbias_table) &&
           visit(kFields[40], &Params::dalibi_slopes, problem.dalibi_slopes) &&
           visit(kFields[44], &Params::dropout_state, problem.dropout_state);
  }
};

template <>
struct FieldsOf<flash3_quantize_params> {
  using Params = flash3_quantize_params;
  static constexpr ParamField kFields[] = {
    FLASH3_FIELD(struct_size, .is_context = true),
    FLASH3_FIELD(q, .is_rows = true),
    FLASH3_FIELD(k, .is_rows = true),
    FLASH3_FIELD(v, .is_rows = true),
    FLASH3_FIELD(q_out, .is_written = true),
    FLASH3_FIELD(k_out, .is_written = true),
    FLASH3_FIELD(v_out, .is_written = true),
    FLASH3_FIELD(q_scale, .is_written = true, .dtype = FLASH3_FLOAT32),
    FLASH3_FIELD(k_scale, .is_written = true, .dtype = FLASH3_FLOAT32),
    FLASH3_FIELD(v_scale, .is_written = true, .dtype = FLASH3_FLOAT32),
    FLASH3_FIELD(rotary_cos),
    FLASH3_FIELD(rotary_sin),
    FLASH3_FIELD(rotary_interleaved, .is_flag = true),
    FLASH3_FIELD(rotate, .is_flag = true),
    FLASH3_FIELD(rotary_offset_q),
    FLASH3_FIELD(rotary_offset_k),
    FLASH3_FIELD(rotation_seed),
    FLASH3_FIELD(cu_seqlens_q, .dtype = FLASH3_INT32),
    FLASH3_FIELD(cu_seqlens_k, .dtype = FLASH3_INT32),
    FLASH3_FIELD(seqused_q, .dtype = FLASH3_INT32),
    FLASH3_FIELD(seqused_k, .dtype = FLASH3_INT32),
    FLASH3_FIELD(max_seqlen_q),
    FLASH3_FIELD(max_seqlen_k),
    FLASH3_FIELD(backend, .words = "auto hopper cpu"),
    FLASH3_FIELD(num_threads),
    FLASH3_FIELD(stream, .is_context = true),
    FLASH3_FIELD(workspace, .is_context = true),
    FLASH3_FIELD(workspace_size, .is_context = true),
  };
  static constexpr size_t kListed = 28;  // those that calls.py places
};

template <>
struct FieldsOf<flash3_merge_params> {
  using Params = flash3_merge_params;
  static constexpr ParamField kFields[] = {
    FLASH3_FIELD(struct_size, .is_context = true),
    FLASH3_FIELD(out_parts, .dtype = FLASH3_FLOAT32),
    FLASH3_FIELD(lse_parts, .dtype = FLASH3_FLOAT32),
    FLASH3_FIELD(out, .is_written = true, .is_rows = true),
    FLASH3_FIELD(lse, .is_written = true, .dtype = FLASH3_FLOAT32),
    FLASH3_FIELD(sink),
    FLASH3_FIELD(backend, .words = "auto hopper cpu"),
    FLASH3_FIELD(num_threads),
    FLASH3_FIELD(stream, .is_context = true),
    FLASH3_FIELD(workspace, .is_context = true),
    FLASH3_FIELD(workspace_size, .is_context = true),
  };
  static constexpr size_t kListed = 11;  // those that calls.py places
};

template <>
struct FieldsOf<flash3_mask_params> {
  using Params = flash3_mask_params;
  static constexpr ParamField kFields[] = {
    FLASH3_FIELD(struct_size, .is_context = true),
    FLASH3_FIELD(batch),
    FLASH3_FIELD(heads_q),
    FLASH3_FIELD(seq_q),
    FLASH3_FIELD(seq_k),
    FLASH3_FIELD(causal, .is_flag = true),
    FLASH3_FIELD(window, .is_flag = true),
    FLASH3_FIELD(window_left),
    FLASH3_FIELD(window_right),
    FLASH3_FIELD(chunk),
    FLASH3_FIELD(mask_alignment, .words = "bottom_right top_left"),
    FLASH3_FIELD(ranges, .dtype = FLASH3_INT32),
    FLASH3_FIELD(documents, .dtype = FLASH3_INT32),
    FLASH3_FIELD(dense, .dtype = FLASH3_UINT8),
    FLASH3_FIELD(block_counts, .dtype = FLASH3_INT32),
    FLASH3_FIELD(block_indices, .dtype = FLASH3_INT32),
    FLASH3_FIELD(block_rows),
    FLASH3_FIELD(block_keys),
    FLASH3_FIELD(max_blocks),
    FLASH3_FIELD(max_partial_blocks),
    FLASH3_FIELD(backend, .words = "auto hopper cpu"),
    FLASH3_FIELD(num_threads),
    FLASH3_FIELD(stream, .is_context = true),
    FLASH3_FIELD(bits, .dtype = FLASH3_UINT8),
    FLASH3_FIELD(bit_blocks, .dtype = FLASH3_INT32),
    FLASH3_FIELD(cu_seqlens_q, .dtype = FLASH3_INT32),
    FLASH3_FIELD(cu_seqlens_k, .dtype = FLASH3_INT32),
    FLASH3_FIELD(seqused_q, .dtype = FLASH3_INT32),
    FLASH3_FIELD(seqused_k, .dtype = FLASH3_INT32),
    FLASH3_FIELD(max_documents),
  };
  static constexpr size_t kListed = 29;  // those that calls.py places
};

}  // namespace flash3
