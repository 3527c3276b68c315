// SPDX-License-Identifier: Apache-2.0
// AVX-512 as in avx3_zen4.cpp, and the tiles of AMX for the matrix products of bfloat16. Nothing
// else: other dtypes are for the other targets.
#include <hwy/detect_targets.h>
#undef HWY_TARGET
#define HWY_TARGET HWY_AVX3
#include <hwy/highway.h>
#undef HWY_TARGET_STR
#define HWY_TARGET_STR HWY_TARGET_STR_AVX3 ",avx512bf16,amx-tile,amx-bf16"
#define FLASH3_NATIVE_BF16 1
#define FLASH3_AMX 1
// clang-format off: the second needs the first
#include "cpu/kernels/attention-inl.hpp"
#include "cpu/kernels/backward_pairs-inl.hpp"
// clang-format on

namespace flash3::cpu {
#if defined(FLASH3_EMULATE_AMX)
extern const AttentionKernel kEmulatedAmxKernel;
const AttentionKernel kEmulatedAmxKernel{scratch_bytes, run_task};
extern const BackwardKernel kEmulatedAmxBackward;
const BackwardKernel kEmulatedAmxBackward{pair_scratch_bytes, run_pair_task};
#else
const AttentionKernel kAmxKernel{scratch_bytes, run_task};
const BackwardKernel kAmxBackward{pair_scratch_bytes, run_pair_task};
#endif
}  // namespace flash3::cpu
