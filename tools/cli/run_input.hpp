// SPDX-License-Identifier: Apache-2.0
// What `flash3 run` computes: the tensors of a safetensors file, as the options say to read them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cases/tensors.hpp"
#include "cli/commands.hpp"
#include "cli/safetensors.hpp"

namespace flash3::cli {

struct Input {
  safetensors::Metadata metadata;  // of the file
  cases::Case c;                   // ragged: seq_q and seq_k are the longest
  cases::CaseSequences sequences;
  // Views into data, always [batch, seq, heads, dim], or packed [total, heads, dim].
  flash3_tensor q{}, k{}, v{};
  flash3_tensor sink{};                      // all zero: none
  std::vector<std::vector<std::byte>> data;  // of these tensors

  // cu_seqlens point into `sequences`.
  cases::ExtraViews extra() const;
};

// Reads of the file what the options ask for. Throws UsageError and FileError.
Input load_input(const RunOptions& options);

// The contiguous tensor of this shape in memory, seen as [(batch,) seq, heads, dim]; or of any
// other rank, with Layout::kBatchSeq.
flash3_tensor view_of(void* data, flash3_dtype dtype, const std::vector<int64_t>& shape,
                      cases::Layout layout);

// The shape of out in memory, in the layout of the input.
std::vector<int64_t> out_shape(const Input& in);

}  // namespace flash3::cli
