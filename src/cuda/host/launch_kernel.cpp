// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launch_kernel.hpp"

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "cuda/host/cuda_status.hpp"
#include "cuda/host/programmatic_launch.hpp"

namespace flash3::cuda {
namespace {

// Kernels that the driver has let have their shared memory, which it refuses unasked beyond 48 KB.
// To ask each time takes 0.2 us of a launch of 3. One entry a kernel and device; a full table, or a
// kernel whose place is taken, only means to ask again.
class SharedMemoryGrants {
 public:
  bool has(const void* function, int device) const {
    return place(function, device).load(std::memory_order_relaxed) == key(function, device);
  }
  void add(const void* function, int device) {
    place(function, device).store(key(function, device), std::memory_order_relaxed);
  }

 private:
  static constexpr size_t kPlaces = 1024;

  static uintptr_t key(const void* function, int device) {
    return reinterpret_cast<uintptr_t>(function) +
           static_cast<uintptr_t>(device);  // 16-byte aligned
  }
  std::atomic<uintptr_t>& place(const void* function, int device) const {
    const uint64_t hash = uint64_t{key(function, device)} * 0x9E3779B97F4A7C15;
    return places_[hash >> 54];
  }

  mutable std::array<std::atomic<uintptr_t>, kPlaces> places_{};
};

cudaLaunchAttribute clusters_of(int blocks) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {unsigned(blocks), 1, 1};
  return attribute;
}

SharedMemoryGrants& grants() {
  static SharedMemoryGrants all;
  return all;
}

Status grant_shared_memory(const KernelLaunch& launch) {
  return cuda_status(
      cudaFuncSetAttribute(launch.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           launch.shared_bytes),
      "reserving shared memory");
}

}  // namespace

Status load_kernel(const KernelLaunch& launch) {
  int device = 0;
  FLASH3_CHECK(cuda_status(cudaGetDevice(&device), "reserving shared memory"));
  return grants().has(launch.function, device) ? Status() : grant_shared_memory(launch);
}

Status launch_kernel(const KernelLaunch& launch, void* params, void* stream, const char* what) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(launch.blocks));
  config.blockDim = dim3(unsigned(launch.threads));
  config.dynamicSmemBytes = size_t(launch.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (launch.after_kernel) attributes[config.numAttrs++] = programmatic_launch();
  if (launch.cluster > 1) attributes[config.numAttrs++] = clusters_of(launch.cluster);
  void* arguments[] = {params};
  const auto enqueue = [&] { return cudaLaunchKernelExC(&config, launch.function, arguments); };

  int device = 0;
  FLASH3_CHECK(cuda_status(cudaGetDevice(&device), what));
  if (grants().has(launch.function, device)) {
    const cudaError_t error = enqueue();
    // A device that has been reset has forgotten the grant.
    if (error != cudaErrorInvalidValue) return cuda_status(error, what);
    cudaGetLastError();
  }
  FLASH3_CHECK(grant_shared_memory(launch));
  FLASH3_CHECK(cuda_status(enqueue(), what));
  grants().add(launch.function, device);
  return {};
}

}  // namespace flash3::cuda
