// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launches.hpp"

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <stdexcept>

#include "core/arithmetic.hpp"
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

// Loads the kernel, too.
Status grant_shared_memory(const KernelLaunch& kernel) {
  return cuda_status(
      cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           kernel.shared_bytes),
      "reserving shared memory");
}

Status launch_kernel(const KernelLaunch& kernel, void* params, int device, void* stream,
                     const char* what) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(kernel.blocks), unsigned(kernel.blocks_y));
  config.blockDim = dim3(unsigned(kernel.threads));
  config.dynamicSmemBytes = size_t(kernel.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (kernel.after_kernel) attributes[config.numAttrs++] = programmatic_launch();
  if (kernel.cluster > 1) attributes[config.numAttrs++] = clusters_of(kernel.cluster);
  void* arguments[] = {params};
  const auto enqueue = [&] { return cudaLaunchKernelExC(&config, kernel.function, arguments); };

  if (grants().has(kernel.function, device)) {
    const cudaError_t error = enqueue();
    // A device that has been reset has forgotten the grant.
    if (error != cudaErrorInvalidValue) return cuda_status(error, what);
    cudaGetLastError();
  }
  FLASH3_CHECK(grant_shared_memory(kernel));
  FLASH3_CHECK(cuda_status(enqueue(), what));
  grants().add(kernel.function, device);
  return {};
}

}  // namespace

std::byte* Launches::take(size_t bytes) {
  const size_t begin = used_;
  used_ = round_up(used_ + bytes, kAlignment);
  if (used_ > kBytes) throw std::length_error("a call has more params than Launches has room for");
  return memory_ + begin;
}

Launches::Launch& Launches::next() {
  if (count_ == kMost)
    throw std::length_error("a call has more launches than Launches has room for");
  return launches_[count_++];
}

Status Launches::enqueue(int device, void* stream) const {
  const std::span all(launches_.data(), count_);
  if (all.size() > 1)
    for (const Launch& launch : all)
      if (!launch.enqueue && !grants().has(launch.kernel.function, device))
        FLASH3_CHECK(grant_shared_memory(launch.kernel));
  for (const Launch& launch : all)
    FLASH3_CHECK(launch.enqueue
                     ? launch.enqueue(launch.params, stream)
                     : launch_kernel(launch.kernel, launch.params, device, stream, launch.what));
  return {};
}

}  // namespace flash3::cuda
