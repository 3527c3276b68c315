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

  bool packed() const { return is_given(cu.tensor); }
  bool has_used() const { return is_given(used.tensor); }
};

// Each by itself: dtype, ndim, size, stride, memory.
Status check_sequence_fields(const SequenceFields& fields, Pointers pointers);

// seqused has an element for each sequence.
Status check_used(const SequenceFields& fields, const Extent& batch);

// A sink or a dsink that is given.
Status check_sink(const Field& sink, const Field& q, const Field& out, Pointers pointers);
Status check_dsink(const Field& dsink, const Field& sink, const Field& q, Pointers pointers);

}  // namespace flash3
