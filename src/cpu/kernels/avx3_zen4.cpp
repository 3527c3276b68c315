// SPDX-License-Identifier: Apache-2.0
// AVX-512 and the bfloat16 dot products of AVX512_BF16, which this Highway has no target for: the
// AVX3 target under an attribute more.
#include <hwy/detect_targets.h>
#undef HWY_TARGET
#define HWY_TARGET HWY_AVX3
#include <hwy/highway.h>
#undef HWY_TARGET_STR
#define HWY_TARGET_STR HWY_TARGET_STR_AVX3 ",avx512bf16"
#define FLASH3_NATIVE_BF16 1
// clang-format off: the second needs the first
#include "cpu/kernels/attention-inl.hpp"
#include "cpu/kernels/backward_pairs-inl.hpp"
// clang-format on

namespace flash3::cpu {
const AttentionKernel kAvx3Zen4Kernel{scratch_bytes, run_task};
const BackwardKernel kAvx3Zen4Backward{pair_scratch_bytes, run_pair_task};
}  // namespace flash3::cpu
