// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <atomic>
#include <mutex>
#include <stdexcept>

#include "device/device.hpp"

namespace {

std::atomic<bool> logs{false};
std::mutex mutex;
std::set<const void*> launched;

cudaError_t note(const void* kernel, cudaError_t code) {
  if (code == cudaSuccess && logs.load(std::memory_order_relaxed)) {
    const std::lock_guard lock(mutex);
    launched.insert(kernel);
  }
  return code;
}

}  // namespace

// The linker sends calls of f to __wrap_f, and those of __real_f to f. The last is what <<< >>>
// becomes, with a handle instead of the function.
// NOLINTBEGIN(bugprone-reserved-identifier): the linker's names
extern "C" {
cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**);
cudaError_t __real_cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t);
cudaError_t __real___cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t);

cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                       void** arguments) {
  return note(kernel, __real_cudaLaunchKernelExC(config, kernel, arguments));
}
cudaError_t __wrap_cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments,
                                    size_t shared_bytes, cudaStream_t stream) {
  return note(kernel,
              __real_cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream));
}
cudaError_t __wrap___cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                                      size_t shared_bytes, cudaStream_t stream) {
  return note(kernel,
              __real___cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream));
}
}
// NOLINTEND(bugprone-reserved-identifier)

namespace flash3::device {

void start_launch_log() {
  const std::lock_guard lock(mutex);
  launched.clear();
  logs = true;
}

std::set<std::string> stop_launch_log() {
  logs = false;
  const std::lock_guard lock(mutex);
  std::set<std::string> names;
  for (const void* kernel : launched) {
    const char* name = nullptr;
    if (const cudaError_t code = cudaFuncGetName(&name, kernel); code != cudaSuccess)
      throw std::runtime_error(std::string("cudaFuncGetName: ") + cudaGetErrorString(code));
    names.insert(name);
  }
  return names;
}

}  // namespace flash3::device
