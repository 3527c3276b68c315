// SPDX-License-Identifier: Apache-2.0
#include "cuda/memory.hpp"

#include <cuda.h>

#include "cuda/host/device_info.hpp"
#include "cuda/host/driver.hpp"

namespace flash3::cuda {
namespace {

struct Memory {
  bool device = false;   // lives on a GPU, or moves there on demand
  bool managed = false;  // moves on demand: the host reads it too
};

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
