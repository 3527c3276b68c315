// SPDX-License-Identifier: Apache-2.0
// Small floats on the host: bits to float, and float to bits rounded to nearest even. NaN stays
// NaN. (e4m3: core/fp8.hpp.)
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/fp8.hpp"
#include "flash3/flash3.h"

namespace flash3 {

inline float bfloat16_to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

inline uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x))
    return static_cast<uint16_t>((bits >> 16) | 0x40);  // quiet, and never rounded up to infinity
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

#if defined(__aarch64__)
using Half = __fp16;  // GCC knows _Float16 here from 13 on
#else
using Half = _Float16;
#endif

inline float float16_to_float(uint16_t bits) {
  return static_cast<float>(std::bit_cast<Half>(bits));
}

inline uint16_t float_to_float16(float x) { return std::bit_cast<uint16_t>(static_cast<Half>(x)); }

// Element `index` of an array of `dtype`.
inline float load_float(const void* data, flash3_dtype dtype, int64_t index) {
  switch (dtype) {
    case FLASH3_FLOAT16: return float16_to_float(static_cast<const uint16_t*>(data)[index]);
    case FLASH3_BFLOAT16: return bfloat16_to_float(static_cast<const uint16_t*>(data)[index]);
    case FLASH3_FLOAT8_E4M3: return e4m3_to_float(static_cast<const unsigned char*>(data)[index]);
    default: return static_cast<const float*>(data)[index];
  }
}

inline void store_float(void* data, flash3_dtype dtype, int64_t index, float x) {
  switch (dtype) {
    case FLASH3_FLOAT16: static_cast<uint16_t*>(data)[index] = float_to_float16(x); break;
    case FLASH3_BFLOAT16: static_cast<uint16_t*>(data)[index] = float_to_bfloat16(x); break;
    case FLASH3_FLOAT8_E4M3: static_cast<unsigned char*>(data)[index] = float_to_e4m3(x); break;
    default: static_cast<float*>(data)[index] = x; break;
  }
}

}  // namespace flash3
