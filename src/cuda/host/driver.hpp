// SPDX-License-Identifier: Apache-2.0
// The driver's functions, found at run time: the library links and loads where there is no driver.
#pragma once

#include <cuda_runtime_api.h>

namespace flash3::cuda {

// The function of this name as CUDA `version` (12000: 12.0) defines it; null if the driver lacks it
// or there is none. Creates no context.
template <class Function>
Function driver_function(const char* name, unsigned version) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &result);
  if (error == cudaSuccess && result == cudaDriverEntryPointSuccess)
    return reinterpret_cast<Function>(entry);
  cudaGetLastError();  // not the caller's to find later
  return nullptr;
}

}  // namespace flash3::cuda
