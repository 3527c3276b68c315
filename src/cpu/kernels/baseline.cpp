// SPDX-License-Identifier: Apache-2.0
// What the compiler may assume anyway.
// clang-format off: the second needs the first
#include "cpu/kernels/attention-inl.hpp"
#include "cpu/kernels/backward-inl.hpp"
// clang-format on

namespace flash3::cpu {
const AttentionKernel kBaselineKernel{scratch_bytes, run_task};
const BackwardKernel kBaselineBackward{backward_scratch_bytes, run_backward_task};
}  // namespace flash3::cpu
