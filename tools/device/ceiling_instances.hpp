// SPDX-License-Identifier: Apache-2.0
// The ceiling kernel's instances, and how the host reaches them.
#pragma once

#include <cstddef>

#include "cuda/device/types.hpp"

namespace flash3::device {

// What a block leaves.
struct CeilingBlock {
  long long cycles;  // from the first product to the last, added up over launches
  float sink[256];   // of each thread: an accumulator element of every product, added up
};

// One instance, ready to be launched with (const uint4* data, const float* scores, int rounds,
// CeilingBlock* blocks): ceiling.cu.
struct CeilingInstance {
  const void* kernel;
  size_t shared_bytes;  // also of `data`
  int scores;           // values in `scores`
  int threads, head_dim, keys;
  double flops;  // of a block and a round
};

// For head_dim 64, 128 and 256, with the instruction shapes of the attention kernels.
template <cuda::Element kElement>
struct CeilingInstances {
  static const CeilingInstance all[3];
};
extern template struct CeilingInstances<cuda::Element::kFloat16>;
extern template struct CeilingInstances<cuda::Element::kBFloat16>;
extern template struct CeilingInstances<cuda::Element::kE4m3>;

}  // namespace flash3::device
