// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/device_info.hpp"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include "core/message.hpp"
#include "cuda/host/cuda_status.hpp"

namespace flash3::cuda {
namespace {

// No device to run on, and why: or the one there was is lost.
Status no_device(cudaError_t error) {
  cudaGetLastError();  // not the caller's to find later
  if (is_context_lost(error)) return context_lost(error);
  return unsupported(message("no CUDA device: ", why_no_device(error)));
}

// What a device has for as long as the process lives.
struct Properties {
  Capability capability;
  int multiprocessors = 0;
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
  Capability& capability = properties->capability;
  for (const cudaError_t error :
       {cudaDeviceGetAttribute(&capability.major, cudaDevAttrComputeCapabilityMajor, device),
        cudaDeviceGetAttribute(&capability.minor, cudaDevAttrComputeCapabilityMinor, device),
        cudaDeviceGetAttribute(&properties->multiprocessors, cudaDevAttrMultiProcessorCount,
                               device)})
    if (error != cudaSuccess) return no_device(error);
  known.emplace(device, *properties);
  return {};
}

}  // namespace

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

Status current_device(Device* device) {
  // What has ended the context stays the last error; the driver may still answer.
  if (const cudaError_t error = cudaPeekAtLastError(); is_context_lost(error))
    return context_lost(error);
  int index = 0;
  if (const cudaError_t error = cudaGetDevice(&index); error != cudaSuccess)
    return no_device(error);
  Properties properties;
  FLASH3_CHECK(properties_of(index, &properties));
  *device = {index, properties.multiprocessors, properties.capability};
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

}  // namespace flash3::cuda
