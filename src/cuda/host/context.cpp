// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/context.hpp"

#include <cuda_runtime_api.h>

#include "core/message.hpp"

namespace flash3::cuda {

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

}  // namespace flash3::cuda
