// SPDX-License-Identifier: Apache-2.0
// The forward kernels that are built in.
#pragma once

#include <span>
#include <string>

#include "cuda/device/kinds.hpp"
#include "cuda/sm90/forward/config.hpp"

namespace flash3::cuda::sm90 {

struct ForwardKernel {
  std::string id;  // "fwd_bf16_d128_band_192x80", "fwd_bf16_d128_softcap_128x128"
  Element element;
  ForwardConfig config;
  const void* function;  // for cudaLaunchKernel
};

// All of them, in the order of the tile table.
std::span<const ForwardKernel> forward_kernels();
std::span<const ForwardKernel> forward_kernels(Element element);

}  // namespace flash3::cuda::sm90
