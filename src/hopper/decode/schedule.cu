// SPDX-License-Identifier: Apache-2.0
#include "hopper/decode/schedule.cuh"
#include "hopper/decode/schedule.hpp"

namespace flash3::hopper {

const void* decode_schedule_function() {
  return reinterpret_cast<const void*>(&decode_schedule_kernel);
}

}  // namespace flash3::hopper
