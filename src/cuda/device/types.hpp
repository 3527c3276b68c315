// SPDX-License-Identifier: Apache-2.0
// What kernels are compiled for, columns of the tile tables; and parts of what they are launched
// with. Plain data: host and device.
#pragma once

#include "core/arithmetic.hpp"

namespace flash3::cuda {

// A block can have so much shared memory, in bytes.
inline constexpr int kMostSharedBytes = 227 * 1024;

// The element types of q, k and v.
enum class Element { kFloat16, kBFloat16, kE4m3 };

constexpr int element_bytes(Element e) { return e == Element::kE4m3 ? 1 : 2; }

// What a kernel makes of q·k.
enum class ScoreKind {
  kPlain,   // softmax_scale · q·k
  kSoftcap  // softcap · tanh(softmax_scale · q·k / softcap)
};

// The copy engine's description of a tensor: a CUtensorMap that host and device can hold without
// the driver's header.
struct alignas(64) TensorMap {
  unsigned long long bytes[16];
};

// Where the rows of a ragged map end; no tensor has so many.
inline constexpr int kRaggedEnd = 1 << 30;

// How the rows of a map are counted: by sequence, or, ragged, all of the tensor's in one go
// (tile.cuh, box_at).
struct RowMap {
  bool ragged;
  int rows_per_batch;  // ragged: from one batch element to the next; 0 if packed
};

// Of what a kernel reads or writes in any of them.
enum class FloatType { kFloat32, kFloat16, kBFloat16 };

// The sinks, [heads_q]; data null: none.
struct SinkRow {
  const void* data;
  FloatType type;
};

// A number of each row, [batch, heads_q, rows]: data null where the call does not want it.
struct RowOutput {
  float* data;
  long long stride_batch, stride_head;
};

// All that a call may want of its rows beside their output (score/row_end.cuh).
struct RowOutputs {
  RowOutput lse, max_logits;
};

// What a soft-capped score is computed from, and how (softcap.hpp).
struct Softcap {
  float a, b, c;  // P · unit = s·(a + s²·(b + s²·c))
  float range;    // of |s| in which P is tanh: |x| ≤ 1/2
  float log2_u;   // of |s|, to log2 u
  float raw;      // of x, to s

  FLASH3_HOST_DEVICE constexpr float factor(float s) const;
  FLASH3_HOST_DEVICE constexpr bool must_remap_negative(float shift) const;
  FLASH3_HOST_DEVICE constexpr float remapped(float u) const;
};

}  // namespace flash3::cuda
