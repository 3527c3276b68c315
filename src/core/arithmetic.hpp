// SPDX-License-Identifier: Apache-2.0
// What many places compute, on the host and, through NVRTC too, on the device.
#pragma once

// Marks what host and device share.
#if defined(__CUDACC__)
#define FLASH3_HOST_DEVICE __host__ __device__
#else
#define FLASH3_HOST_DEVICE
#endif

namespace flash3 {

inline constexpr double kLog2E = 1.4426950408889634;  // NVRTC has no <numbers>

// a ≥ 0, b > 0.
template <class A, class B>
FLASH3_HOST_DEVICE constexpr auto ceil_div(A a, B b) {
  return (a + b - 1) / b;
}
// The next multiple of b, or a itself.
template <class A, class B>
FLASH3_HOST_DEVICE constexpr auto round_up(A a, B b) {
  return ceil_div(a, b) * b;
}

}  // namespace flash3
