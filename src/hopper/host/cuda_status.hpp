// SPDX-License-Identifier: Apache-2.0
// The runtime's refusals as a Status.
#pragma once

#include <cuda_runtime_api.h>

#include "core/message.hpp"
#include "core/status.hpp"

namespace flash3::hopper {

inline Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return {FLASH3_CUDA_ERROR, message(what, " failed: ", cudaGetErrorString(error))};
}

}  // namespace flash3::hopper
