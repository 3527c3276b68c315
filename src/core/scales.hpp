// SPDX-License-Identifier: Apache-2.0
// Where the scales of an FP8 tensor lie, and those of a row. Compiled on the host and, through
// NVRTC too, on the device: nothing of std:: here.
#pragma once

#include "core/mask.hpp"

namespace flash3 {

inline constexpr Index kScaleBlock = 128;  // tokens, FLASH3_FP8_BLOCK

// What a tensor has a scale for. (kRow: in the oracles alone, which gather a cache's rows.)
enum class ScaleKind : int { kNone, kTensor, kHead, kBlock, kRow };

// The scales of a tensor: of block j, a number of scale_block(), of head h in batch element b.
struct ScaleView {
  float* data = nullptr;  // null: none (or the call is only a question)
  ScaleKind kind = ScaleKind::kNone;
  Index heads_per_scale = 1;  // kHead, query heads: those of a KV head share one
  Index stride_batch = 0, stride_head = 0, stride_block = 0;  // 0 where there is but one

  FLASH3_HOST_DEVICE constexpr Index offset(Index b, Index h, Index j) const {
    return b * stride_batch + h / heads_per_scale * stride_head + j * stride_block;
  }
  FLASH3_HOST_DEVICE constexpr float at(Index b, Index h, Index j) const {
    return data ? data[offset(b, h, j)] : 1.f;
  }
  // The scale of a row, for tensors that are not packed.
  FLASH3_HOST_DEVICE constexpr float at_row(Index b, Index h, Index row) const {
    return at(b, h, kind == ScaleKind::kRow ? row : row / kScaleBlock);
  }
};

// The number of the scale block that holds row `row` of sequence b, whose rows begin at row
// `first_row` of the tensor. Blocks of packed tensors begin with their sequences, so that each
// sequence may use up one more than its rows fill.
template <class Int>
FLASH3_HOST_DEVICE constexpr Int scale_block(bool packed, Int first_row, Int b, Int row) {
  constexpr Int kBlock = kScaleBlock;
  return (packed ? first_row / kBlock + b : 0) + row / kBlock;
}

// The scales of one head of one sequence, by blocks of its own rows.
struct RowScales {
  const float* first = nullptr;  // null: 1
  Index stride = 0;
  FLASH3_HOST_DEVICE constexpr float at(Index row) const {
    return first ? first[row / kScaleBlock * stride] : 1.f;
  }
};

template <class Int>
FLASH3_HOST_DEVICE constexpr RowScales row_scales(const ScaleView& scale, bool packed,
                                                  Int first_row, Int b, Int head) {
  RowScales row{scale.data, scale.stride_block};
  if (row.first) row.first += scale.offset(b, head, scale_block(packed, first_row, b, Int(0)));
  return row;
}

}  // namespace flash3
