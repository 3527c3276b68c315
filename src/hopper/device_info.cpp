#include "hopper/device_info.hpp"

#include <cuda_runtime_api.h>

#include "core/message.hpp"

namespace flash3::hopper {
namespace {

// With no driver or no GPU all memory is the host's.
cudaMemoryType memory_type(const void* address) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
    cudaGetLastError();  // not the caller's to find later
    return cudaMemoryTypeUnregistered;
  }
  return attributes.type;
}

}  // namespace

Status current_device(Device* device) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0) {
    cudaGetLastError();  // not the caller's to find later
    return unsupported(message("no CUDA device: ",
                               error == cudaSuccess ? "none found" : cudaGetErrorString(error)));
  }
  int index = 0, major = 0, minor = 0;
  if (const cudaError_t error = cudaGetDevice(&index); error != cudaSuccess) {
    cudaGetLastError();
    return unsupported(message("no CUDA device: ", cudaGetErrorString(error)));
  }
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
  if (major != 9 || minor != 0) {
    return unsupported(message("CUDA device ", index, " has compute capability ", major, ".", minor,
                               " but the hopper backend needs 9.0"));
  }
  device->index = index;
  cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, index);
  return {};
}

std::string device_name(const Device& device) {
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, device.index) != cudaSuccess) {
    cudaGetLastError();
    return "unknown device";
  }
  return message(properties.name, ", ", device.multiprocessors, " SMs");
}

bool is_device_memory(const void* address) {
  const cudaMemoryType type = memory_type(address);
  return type == cudaMemoryTypeDevice || type == cudaMemoryTypeManaged;
}

bool is_device_only_memory(const void* address) {
  return memory_type(address) == cudaMemoryTypeDevice;
}

}  // namespace flash3::hopper
