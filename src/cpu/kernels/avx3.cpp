// SPDX-License-Identifier: Apache-2.0
#include <hwy/detect_targets.h>
#undef HWY_TARGET
#define HWY_TARGET HWY_AVX3
// clang-format off: the second needs the first
#include "cpu/kernels/attention-inl.hpp"
#include "cpu/kernels/backward-inl.hpp"
// clang-format on

namespace flash3::cpu {
const AttentionKernel kAvx3Kernel{scratch_bytes, run_task};
const BackwardKernel kAvx3Backward{backward_scratch_bytes, run_backward_task};
}  // namespace flash3::cpu
