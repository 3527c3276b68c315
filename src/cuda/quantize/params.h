// SPDX-License-Identifier: Apache-2.0
// What the kernels that bring tensors to FP8 are launched with, and which tokens a block of threads
// has. Plain data: host and device, so no <cstdint>.
#pragma once

#include "core/fp8.hpp"
#include "core/rotation.hpp"
#include "core/seq_info.hpp"

namespace flash3::cuda {

// A strided view, [batch, seq, head, dim].
template <class T>
struct QuantizeView {
  T* data;
  long long stride_batch, stride_seq, stride_head;
  int width;  // bytes that an access may take: 16, 4, or an element's

  FLASH3_HOST_DEVICE constexpr Index offset(Index batch, Index row, Index head) const {
    return batch * stride_batch + row * stride_seq + head * stride_head;
  }
  FLASH3_HOST_DEVICE constexpr T* row(Index batch, Index row, Index head) const {
    return data + offset(batch, row, head);
  }
};

// One of q, k and v.
struct QuantizedTensor {
  QuantizeView<const unsigned short> in;
  QuantizeView<unsigned char> out;
  ScaleView scale;
  Sequences sequences;
  int batch, heads, dim;
  bool transforms;      // rotary embedding and rotation apply to it
  Index rotary_offset;  // position of each sequence's first token
  Index blocks;         // scale blocks of a head, those of one batch element or of a packed tensor
  Index first, past;    // its blocks of threads, of all that are launched
};

// [positions, half] float32, or the dtype of q and k.
struct RotaryTables {
  const void *cos, *sin;  // null: none
  long long stride_cos, stride_sin;
  int half;  // pairs of dimensions
  bool is_float, interleaved;
};

inline constexpr int kRotationWords = 8;  // of 32 signs

// Bit i % 32 of word i / 32: dimension i is negated.
using RotationSigns = unsigned[kRotationWords];

FLASH3_HOST_DEVICE constexpr void fill_signs(unsigned long long seed, RotationSigns& signs) {
  for (int w = 0; w < kRotationWords; ++w)
    signs[w] = static_cast<unsigned>(rotation_word(seed, w / 2) >> (w % 2 * 32));
}

struct QuantizeParams {
  QuantizedTensor tensors[3];
  int count;
  // Scales of more than a block: true: this launch only finds how large they must be, false: they
  // are there.
  bool gathers;
  bool rotates;
  RotationSigns signs;
  RotaryTables rotary;
};

// The scales of a tensor that are for more than a block of tokens.
struct WideScales {
  ScaleView view;
  Index count;
  int heads;  // scales of one batch element
};

struct WideScalesParams {
  WideScales tensors[3];  // count 0: none
  // Before: 0 everywhere, which the kernels raise to the largest size. After: from that the scale.
  bool before;
};

// 1 / √n, rounded as float32 division and root round it, for the n = 2^log2_size dimensions of a
// transform.
FLASH3_HOST_DEVICE constexpr float rotation_factor(int log2_size) {
  const float power = float_of(static_cast<unsigned>(127 - log2_size / 2) << 23);
  return log2_size % 2 != 0 ? power * 0x1.6a09e6p-1f : power;
}

// What a block of threads has: up to kScaleBlock tokens of one head.
struct QuantizeTile {
  int tensor;
  Index batch, head;
  Index token;  // the first, counted in its sequence
  Index row;    // and in the tensor
  int count;    // so many
  Index scale_block;
};

// The tensor of block `index`, the head, and the scale block, counted over all sequences; false if
// there is none. Neighbours have the same tokens of the next head.
FLASH3_HOST_DEVICE constexpr bool find_tensor(const QuantizeParams& params, Index index,
                                              QuantizeTile* tile) {
  int i = 0;
  while (i + 1 < params.count && index >= params.tensors[i].past) ++i;
  const QuantizedTensor& t = params.tensors[i];
  if (index >= t.past) return false;
  index -= t.first;
  tile->tensor = i;
  tile->scale_block = index / t.heads;
  tile->head = index - tile->scale_block * t.heads;
  return true;
}

// The tokens of the block, of a packed tensor of sequence b; false if it has none.
FLASH3_HOST_DEVICE constexpr bool find_tokens(const QuantizedTensor& t, Index b,
                                              QuantizeTile* tile) {
  if (!t.sequences.packed) {
    b = tile->scale_block / t.blocks;
    tile->scale_block -= b * t.blocks;
  }
  tile->batch = b;
  const RowRange rows = rows_of(t.sequences, b);
  const Index block = tile->scale_block - scale_block(t.sequences, rows, b, 0);
  tile->token = block * kScaleBlock;
  tile->row = rows.first + tile->token;
  const Index left = rows.length - tile->token;
  tile->count = static_cast<int>(left < kScaleBlock ? left : kScaleBlock);
  // A block below the first of its sequence: lengths that decrease.
  return block >= 0 && left > 0;
}

// Where the scale blocks of sequence b of a packed tensor begin; the last sequence that begins at a
// block or before it has it.
FLASH3_HOST_DEVICE constexpr Index first_scale_block(const QuantizedTensor& t, Index b) {
  const Index rows = t.sequences.rows, begin = t.sequences.cu[b];
  return (begin < 0 ? 0 : begin < rows ? begin : rows) / kScaleBlock + b;
}

}  // namespace flash3::cuda
