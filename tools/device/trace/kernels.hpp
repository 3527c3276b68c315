// SPDX-License-Identifier: Apache-2.0
// The kernels of `flash3 trace`: some of the library's forward kernels once more, with stamps. They
// are linked into the tools and not into the library, whose own kernels know nothing of them.
#pragma once

#include "cuda/sm90/forward/tile_table.hpp"

namespace flash3::device {

struct TracedKernel {
  const void* function;
  const void* target;  // the kernel's TraceTarget, for cudaMemcpyToSymbol
};

// In instances/.
template <cuda::Element kElement, int kHeadDim, bool kBand, int kTileM, int kTileN>
TracedKernel traced_kernel();

}  // namespace flash3::device
