// SPDX-License-Identifier: Apache-2.0
// What kernels are told of memory. Plain data: host and device.
#pragma once

namespace flash3::hopper {

// The copy engine's description of a tensor: a CUtensorMap that host and device can hold without
// the driver's header.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// Where the rows of a ragged map end; no tensor has so many.
inline constexpr int kRaggedEnd = 1 << 30;

// How the rows of a map are counted: by sequence, or, ragged, all of the tensor's in one go
// (tma.cuh, box_at).
struct RowMap {
  bool ragged;
  int rows_per_batch;  // ragged: from one batch element to the next; 0 if packed
};

enum class SinkType { kFloat32, kFloat16, kBFloat16 };

// The sinks, [heads_q]; data null: none.
struct SinkRow {
  const void* data;
  SinkType type;
};

}  // namespace flash3::hopper
