// SPDX-License-Identifier: Apache-2.0
// The rules of flash3.h for ragged batches and for sinks, as core/tensor_checks has for the rest.
#pragma once

#include <cstdint>

#include "core/tensor_checks.hpp"

namespace flash3 {

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

}  // namespace flash3
