// SPDX-License-Identifier: Apache-2.0
// A dtype of the interface as the kernels have it.
#pragma once

#include "cuda/device/types.hpp"
#include "flash3/flash3.h"

namespace flash3::cuda {

// Of a float dtype, not of FP8.
constexpr FloatType float_type(flash3_dtype dtype) {
  return dtype == FLASH3_FLOAT32   ? FloatType::kFloat32
         : dtype == FLASH3_FLOAT16 ? FloatType::kFloat16
                                   : FloatType::kBFloat16;
}

// The elements of a dtype that kernels take.
constexpr Element element_type(flash3_dtype dtype) {
  return dtype == FLASH3_FLOAT16    ? Element::kFloat16
         : dtype == FLASH3_BFLOAT16 ? Element::kBFloat16
                                    : Element::kE4m3;
}

inline const char* short_name(Element element) {
  return element == Element::kFloat16 ? "fp16" : element == Element::kBFloat16 ? "bf16" : "e4m3";
}

}  // namespace flash3::cuda
