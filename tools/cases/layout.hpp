// SPDX-License-Identifier: Apache-2.0
// How the tensors of a case lie in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "flash3/flash3.h"

namespace flash3::cases {

enum class Layout {
  kBatchSeq,    // "bshd": contiguous [batch, seq, heads, dim]
  kHeadsFirst,  // "bhsd": contiguous [batch, heads, seq, dim]
  kPadded,      // "padded": [batch, seq, heads, dim] with gaps of whole 16-byte units
  kOdd,         // "odd": gaps of odd sizes, and a base address that is aligned to one element only
};

// The tensors whose layout an id can give by itself. In flash3_quantize kDq, kDk and kDv are q_out,
// k_out and v_out, and the scales of blocks lie as kLse says.
enum class TensorName { kQ, kK, kV, kOut, kLse, kDout, kDlse, kDq, kDk, kDv };
inline constexpr size_t kTensorNames = 10;

// "k:bhsd.at3.gap8.heads0"
struct TensorLayout {
  Layout layout = Layout::kBatchSeq;
  int64_t offset = 0;      // "at<n>": elements from an aligned address to the first one
  int64_t gap = 0;         // "gap<n>": elements more from row to row (lse: from head to head)
  bool one_batch = false;  // "batch0", "rows0", "heads0": stride 0, all share the memory of one
  bool one_row = false;
  bool one_head = false;
  bool wild = false;  // "wild": what is never used, the stride of a dimension of size 0 or 1, is
                      // nonsense
  bool operator==(const TensorLayout&) const = default;
};

const char* short_name(Layout layout);
const char* short_name(TensorName name);
std::optional<Layout> parse_layout(std::string_view name);

std::string to_text(TensorName name, const TensorLayout& layout);
// False if text names no tensor and layout.
bool parse_layout(std::string_view text, TensorName* name, TensorLayout* layout);

// Views without data: [batch, seq, heads, dim], and [batch, heads, seq] float32.
flash3_tensor view_of(flash3_dtype dtype, int64_t batch, int64_t seq, int64_t heads, int64_t dim,
                      const TensorLayout& layout);
flash3_tensor lse_view_of(int64_t batch, int64_t heads, int64_t seq, const TensorLayout& layout);

// Without its first dimension, of size 1.
flash3_tensor packed(flash3_tensor t);

}  // namespace flash3::cases
