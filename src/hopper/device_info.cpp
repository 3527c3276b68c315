#include "hopper/device_info.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "core/message.hpp"
#include "hopper/driver.hpp"

namespace flash3::hopper {
namespace {

struct Memory {
  bool device = false;   // lives on a GPU, or moves there on demand
  bool managed = false;  // moves on demand: the host reads it too
};

// Asks the driver and not the runtime, which would create a context for a call that may run on the
// CPU. With no driver or no GPU all memory is the host's.
Memory memory_of(const void* address) {
  static const auto get_attributes =
      driver_function<decltype(&cuPointerGetAttributes)>("cuPointerGetAttributes", 7000);
  if (!get_attributes) return {};
  CUmemorytype type{};
  unsigned managed = 0;
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                      CU_POINTER_ATTRIBUTE_IS_MANAGED};
  void* values[] = {&type, &managed};
  if (get_attributes(2, attributes, values, reinterpret_cast<CUdeviceptr>(address)) !=
      CUDA_SUCCESS) {
    return {};  // not initialised: nothing has been allocated on a GPU
  }
  return {type == CU_MEMORYTYPE_DEVICE || managed != 0, managed != 0};
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

bool is_device_memory(const void* address) { return memory_of(address).device; }

bool is_device_only_memory(const void* address) {
  const Memory memory = memory_of(address);
  return memory.device && !memory.managed;
}

}  // namespace flash3::hopper
