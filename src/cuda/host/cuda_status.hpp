// SPDX-License-Identifier: Apache-2.0
// The runtime's refusals as a Status.
#pragma once

#include <cuda_runtime_api.h>

#include "core/message.hpp"
#include "core/status.hpp"

namespace flash3::cuda {

inline Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return {FLASH3_CUDA_ERROR, message(what, " failed: ", cudaGetErrorString(error))};
}

// function(arguments..., stream), which launches and returns the runtime's answer, for
// Launches::add(). `what`: as in "launching the copy".
template <auto function, class... Arguments>
auto runtime_launch(const char* what, const Arguments&... arguments) {
  return [=](void* stream) {
    return cuda_status(function(arguments..., static_cast<cudaStream_t>(stream)), what);
  };
}

// Why the runtime has no device. Where there is no driver it would say that the driver is too old.
inline const char* why_no_device(cudaError_t error) {
  int version = 0;  // of CUDA, that the driver has; 0: there is none
  const bool unclear = error == cudaErrorInsufficientDriver &&
                       cudaDriverGetVersion(&version) == cudaSuccess && version == 0;
  return unclear ? "no NVIDIA driver found" : cudaGetErrorString(error);
}

}  // namespace flash3::cuda
