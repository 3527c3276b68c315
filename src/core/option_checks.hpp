// SPDX-License-Identifier: Apache-2.0
// The rules of flash3.h for what a call may have in addition to q, k, v and its results: ragged
// batches and sinks, the scales of FP8 tensors, the tables of a rotary position embedding, what
// multi-head latent attention needs (a second part of the queries, wide heads, and values that are
// a part of their keys), and tree_mask.
#pragma once

#include <cstdint>

#include "core/tensor_checks.hpp"
#include "flash3/limits.h"

namespace flash3 {

// ---- ragged batches and sinks ----

// What tells the sequences of q, or those of k, apart; each may be not given.
struct SequenceFields {
  Field cu;    // [batch + 1]
  Field used;  // [batch]
  const char* max_name;
  int64_t max_length;
  bool paged = false;  // a maximum has a page table to go with

  bool packed() const { return is_given(cu.tensor); }
  bool has_used() const { return is_given(used.tensor); }
};

// An int32 tensor by itself: dtype, ndim, the least first size and why, stride, memory.
Status check_index_field(const Field& field, int64_t least, const char* why, Pointers pointers);

// Each by itself: dtype, ndim, size, stride, memory.
Status check_sequence_fields(const SequenceFields& fields, Pointers pointers);

// What cu_seqlens and seqused hold.
Status check_lengths_of(const Sequences& sequences, int64_t batch, const char* cu, const char* used,
                        const char* max_name);

// seqused has an element for each sequence.
Status check_used(const SequenceFields& fields, const Extent& batch);

// A sink or a dsink that is given.
Status check_sink(const Field& sink, const Field& q, const Field& out, Pointers pointers);
Status check_dsink(const Field& dsink, const Field& sink, const Field& q, Pointers pointers);

// ---- scales of FP8 tensors ----

// What scales are checked against besides the tensor that they belong to.
struct ScaleChecks {
  Extent batch;
  Extent heads_k;
  Pointers pointers;
  const char* elements = nullptr;  // what a tensor's first dimension counts if not the batch
};

// A scale tensor, whose dimensions its ndim tells.
Field scale_field(const char* name, const flash3_tensor& scale);

// dtype, shape, strides and memory of the scales of `of`.
Status check_scale(const Field& scale, const Field& of, const ScaleChecks& checks);

// The scales of a tensor that is read; they may be not given, and must be if it is not FP8.
Status check_scale_of(const flash3_tensor& scale, const char* name, const Field& of,
                      const ScaleChecks& checks);

// heads: those of the tensor that share a scale where there is one for each KV head.
ScaleView scale_view(const flash3_tensor& scale, Index heads);

// ---- tables of a rotary position embedding ----

inline Field rotary_field(const char* name, const flash3_tensor& table) {
  return {name, "[positions, rotary_dim / 2]", 2, table};
}

// Two tables, of which one at least is given, against a tensor that gets the embedding. `whose`:
// the tensors that do, in a message.
Status check_rotary_tables(const Field& cos, const Field& sin, const Field& of, const char* whose,
                           Pointers pointers);

RotaryView rotary_view(const flash3_tensor& cos, const flash3_tensor& sin, bool interleaved);

// ---- multi-head latent attention ----

// The largest head dims of valid calls; a backend may take less.
DimLimits limits_of(flash3_head_dims_of calls);
DimLimits forward_limits(const flash3_forward_params& params);

// qv against q, v and what else the call has.
Status check_qv(const flash3_forward_params& params, const Field& q, const Field& v,
                Pointers pointers);

// For an append without v_new: v may be a part of k's rows, as far as their sizes tell.
Status check_values_in_keys(const Field& k, const Field& v);

// For an append without v_new: v is a part of k's rows. Compares their addresses, which a plan's
// owner may change. With v_new they share no memory, which check_aliases() checks.
Status check_shared_rows(const ForwardProblem& problem);

// ---- tree_mask, and the field of the problem that it becomes ----

Status check_tree(const flash3_forward_params& params, const Field& q, Pointers pointers);

TreeMask tree_mask(const flash3_forward_params& params);

// The rules of flash3.h for a KV cache, for tokens that are appended to it, and for their rotary
// embedding and rotation; core/problem.cpp calls them in this order. A call without any of it
// passes them all.

// Which fields go together, and the index tensors each by itself.
Status check_cache_fields(const flash3_forward_params& params, Pointers pointers);

Status check_cache_dtypes(const flash3_forward_params& params);

// What check_shapes() checks: pages and elements of a cache are not the batch.
Status check_cache_shapes(const flash3_forward_params& params, const Field& q, const Field& k,
                          const Field& v, const Field& out, const Extent& batch_q,
                          const Extent& batch_k);

// k_new, v_new and the rotary tables against q, k and v, which are outputs then.
Status check_append(const flash3_forward_params& params, const Field& q, const Field& k,
                    const Field& v, Pointers pointers);

// Whether q and k_new can be rotated, if they are to be.
Status check_rotation(const flash3_forward_params& params, const Field& q);

Status check_cache_options(const flash3_forward_params& params);

// What the index tensors hold: for check_lengths().
Status check_cache_places(const Problem& problem);

// The fields of a problem whose params have passed. Pages tell how many keys a sequence can have,
// which the other fields follow from.
void fill_pages(const flash3_forward_params& params, Problem* problem);
void fill_append(const flash3_forward_params& params, Problem* problem);

}  // namespace flash3
