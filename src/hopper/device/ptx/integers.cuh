// SPDX-License-Identifier: Apache-2.0
// Fixed-width integers. Values of the element types travel as bits (uint16_t, or two or four packed
// in a uint32_t): the tensor cores and TMA take bits, and this keeps the CUDA type headers out of
// every translation unit.
#pragma once

#include <cuda/std/cstdint>

namespace flash3::hopper {

using cuda::std::int32_t;
using cuda::std::int64_t;
using cuda::std::uint16_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;
using cuda::std::uint8_t;

}  // namespace flash3::hopper
