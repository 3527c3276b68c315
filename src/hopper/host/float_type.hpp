// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "flash3/flash3.h"
#include "hopper/device/views.h"

namespace flash3::hopper {

// Of a float dtype, not of FP8.
constexpr FloatType float_type(flash3_dtype dtype) {
  return dtype == FLASH3_FLOAT32   ? FloatType::kFloat32
         : dtype == FLASH3_FLOAT16 ? FloatType::kFloat16
                                   : FloatType::kBFloat16;
}

}  // namespace flash3::hopper
