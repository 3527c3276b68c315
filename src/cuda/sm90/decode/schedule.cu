// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/decode/schedule.cuh"
#include "cuda/sm90/decode/schedule.hpp"

namespace flash3::cuda::sm90 {

const void* decode_schedule_function() {
  return reinterpret_cast<const void*>(&decode_schedule_kernel);
}

}  // namespace flash3::cuda::sm90
