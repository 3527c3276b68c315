// SPDX-License-Identifier: Apache-2.0
// What kernels are compiled for, columns of the tile tables; and parts of what they are launched
// with: maps, outputs, sequences and their masks. Plain data: host and device.
#pragma once

#include "core/arithmetic.hpp"
#include "core/mask.hpp"

namespace flash3::cuda {

// A block can have so much shared memory, in bytes.
inline constexpr int kMostSharedBytes = 227 * 1024;

// The element types of q, k and v.
enum class Element { kFloat16, kBFloat16, kE4m3 };

constexpr int element_bytes(Element e) { return e == Element::kE4m3 ? 1 : 2; }

// What a kernel makes of q·k.
enum class ScoreKind {
  kPlain,    // softmax_scale · q·k
  kSoftcap,  // softcap · tanh(softmax_scale · q·k / softcap)
  kBiased    // either, and what depends on the place (device/score/bias.cuh); dropout too
};

// Of what a kernel of biased scores has: one thing alone, without a softcap; or any, which a call's
// params tell at run time, in more code than instruction caches like.
enum class BiasTerms { kAny, kSlopes, kTable, kPairs, kDropout };

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

// ---- a sequence: its mask and, of a ragged batch, its rows ----

// Rows, keys, the mask's bounds and their sums are 32-bit in the kernels.
inline constexpr int kMaxLength = 1 << 30;
static_assert(kMaxLength <= BandOf<int>::kUnbounded);
// Any size that kernels count in 32 bits is at most this, so that a tile fits after it.
inline constexpr int kMostCounted = kMaxLength - 256;
FLASH3_HOST_DEVICE constexpr int clamped(int x, int least, int most) {
  return x < least ? least : x < most ? x : most;
}

using TileMask = MaskOf<int>;
using TileMaskRule = NarrowMaskRuleOf<int>;

// The keys that a row sees: [first, end), also outside the tensor.
struct RowKeys {
  int first, end;
};

// What a query of a sequence with seq_k keys sees; mask: the sequence's.
template <bool kBand>
FLASH3_HOST_DEVICE constexpr RowKeys keys_of_row(const TileMask& mask, int seq_k, int row) {
  if constexpr (!kBand) return {0, seq_k};
  const int first = mask.first(row), end = mask.end(row);
  return {first, seq_k < end ? seq_k : end};
}

// One sequence of a ragged batch, which a small kernel lists (varlen/varlen_schedule.cu) before
// those that compute on it: its rows in the tensors of queries and of keys, and its tiles.
struct ListedSequence {
  int batch;
  int q_first, q_length;  // from its first row of a packed tensor, else 0
  int k_first, k_length;
  int k_capacity;        // k_length and the unused rows after them
  int tiles;             // of each group of heads
  int groups_at_a_time;  // groups of heads whose tiles run at the same time
};

// Null pointers: all sequences have one length, and nothing is listed.
struct SequenceList {
  const ListedSequence* rows;
  // [count + 1] tiles of the sequences before; the last is the number of all. Null: not cut into
  // tiles.
  const int* first_tile;
  int count;
};

}  // namespace flash3::cuda
