// SPDX-License-Identifier: Apache-2.0
// The instruction sets that the CPU kernels are compiled for, and which of them this machine runs.
#pragma once

#include <span>
#include <string>

#include "flash3/flash3.h"

namespace flash3::cpu {

// Named as Highway names them, where it has them. Ordered: a later one is faster where it runs.
enum class CpuTarget {
  kBaseline,  // what the compiler may assume anyway: NEON on Arm64, scalar on x86-64
  kAvx2,      // with FMA and F16C
  kAvx3,      // AVX-512 F, BW, DQ, VL
  kAvx3Zen4,  // and AVX512_BF16 dot products (Zen 4, Cooper Lake, Sapphire Rapids)
  kAmx,       // and matrix products in the tiles of AMX, for bfloat16 (Sapphire Rapids)
};

const char* target_name(CpuTarget target);  // "AVX3_ZEN4"

// The targets built in that this machine, with its operating system, can run; the fastest last.
std::span<const CpuTarget> supported_targets();

// The fastest of them for this dtype: kAmx is for bfloat16 alone.
CpuTarget best_target(flash3_dtype dtype);

// Whether one of kAvx3Zen4's dot products, which does the work of two float32 multiply-adds, is
// issued more than half as often as they are: on AMD's processors. On Intel's, which have AMX for
// this, four multiply-adds take the time of one.
bool has_fast_dot_products();

// Why kAmx is not among them; "" if it is.
const std::string& why_no_amx();

}  // namespace flash3::cpu
