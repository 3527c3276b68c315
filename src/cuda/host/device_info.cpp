// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/device_info.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include "core/message.hpp"
#include "cuda/host/cuda_status.hpp"
#include "cuda/host/driver.hpp"

namespace flash3::cuda {
namespace {

struct Memory {
  bool device = false;   // lives on a GPU, or moves there on demand
  bool managed = false;  // moves on demand: the host reads it too
};

// Whether an error means that a fault has ended the device's context: every call then fails, until
// the process ends. The driver's codes have the same numbers.
bool is_context_lost(int error) {
  switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorContextIsDestroyed:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure: return true;
    default: return false;
  }
}

Status context_lost(int error) {
  return {FLASH3_CUDA_ERROR,
          message("the CUDA context is lost: ", cudaGetErrorString(static_cast<cudaError_t>(error)),
                  " in an earlier call of this process")};
}

// No device to run on, and why: or the one there was is lost.
Status no_device(cudaError_t error) {
  cudaGetLastError();  // not the caller's to find later
  if (is_context_lost(error)) return context_lost(error);
  return unsupported(message("no CUDA device: ", why_no_device(error)));
}

// What a device has for as long as the process lives.
struct Properties {
  int major = 0, minor = 0, multiprocessors = 0;
};

Status properties_of(int device, Properties* properties) {
  // A device that cannot be asked is asked again by the next call.
  static std::mutex mutex;
  static std::map<int, Properties> known;
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(device); found != known.end()) {
    *properties = found->second;
    return {};
  }
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess)
    return no_device(error);
  if (count == 0) return unsupported("no CUDA device: none found");
  for (const cudaError_t error :
       {cudaDeviceGetAttribute(&properties->major, cudaDevAttrComputeCapabilityMajor, device),
        cudaDeviceGetAttribute(&properties->minor, cudaDevAttrComputeCapabilityMinor, device),
        cudaDeviceGetAttribute(&properties->multiprocessors, cudaDevAttrMultiProcessorCount,
                               device)})
    if (error != cudaSuccess) return no_device(error);
  known.emplace(device, *properties);
  return {};
}

// Asks the driver and not the runtime, which would create a context for a call that may run on the
// CPU. With no driver or no GPU all memory is the host's.
Status memory_of(const void* address, Memory* memory) {
  *memory = {};
  static const auto get_attributes =
      driver_function<decltype(&cuPointerGetAttributes)>("cuPointerGetAttributes", 7000);
  if (!get_attributes) return {};
  CUmemorytype type{};
  unsigned managed = 0;
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                      CU_POINTER_ATTRIBUTE_IS_MANAGED};
  void* values[] = {&type, &managed};
  const CUresult result =
      get_attributes(2, attributes, values, reinterpret_cast<CUdeviceptr>(address));
  if (is_context_lost(result)) return context_lost(result);
  if (result != CUDA_SUCCESS) return {};  // not initialised: nothing has been allocated on a GPU
  *memory = {type == CU_MEMORYTYPE_DEVICE || managed != 0, managed != 0};
  return {};
}

}  // namespace

Status current_device(Device* device) {
  // What has ended the context stays the last error; the driver may still answer.
  if (const cudaError_t error = cudaPeekAtLastError(); is_context_lost(error))
    return context_lost(error);
  int index = 0;
  if (const cudaError_t error = cudaGetDevice(&index); error != cudaSuccess)
    return no_device(error);
  Properties properties;
  FLASH3_CHECK(properties_of(index, &properties));
  if (properties.major != 9 || properties.minor != 0) {
    return unsupported(message("CUDA device ", index, " has compute capability ", properties.major,
                               ".", properties.minor, " but the hopper backend needs 9.0"));
  }
  *device = {index, properties.multiprocessors};
  return {};
}

Status check_is_current(const Device& device) {
  if (const cudaError_t error = cudaPeekAtLastError(); is_context_lost(error))
    return context_lost(error);
  int index = 0;
  if (const cudaError_t error = cudaGetDevice(&index); error != cudaSuccess)
    return no_device(error);
  if (index == device.index) return {};
  return invalid_argument(message("the current CUDA device is ", index,
                                  " but the plan was made for device ", device.index));
}

std::string device_name(const Device& device) {
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, device.index) != cudaSuccess) {
    cudaGetLastError();
    return "unknown device";
  }
  return message(properties.name, ", ", device.multiprocessors, " SMs");
}

Status is_device_memory(const void* address, bool* answer) {
  Memory memory;
  FLASH3_CHECK(memory_of(address, &memory));
  *answer = memory.device;
  return {};
}

Status is_device_only_memory(const void* address, bool* answer) {
  Memory memory;
  FLASH3_CHECK(memory_of(address, &memory));
  *answer = memory.device && !memory.managed;
  return {};
}

}  // namespace flash3::cuda
