// SPDX-License-Identifier: Apache-2.0
// A number that is part of the type, for lambdas: f(Constant<1>{}) with `constexpr int i = c.value`
// inside.
#pragma once

namespace flash3::cuda {

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Calls f with the run-time i, 0 ≤ i < kCount, as a constant: one copy of f for each value.
template <int kCount, int kFirst = 0, class F>
__device__ __forceinline__ void as_constant(int i, const F& f) {
  if constexpr (kFirst == kCount - 1) {
    f(Constant<kFirst>{});
  } else if (i == kFirst) {
    f(Constant<kFirst>{});
  } else {
    as_constant<kCount, kFirst + 1>(i, f);
  }
}

// Calls first(i) and then second(i), both with i as a constant; with kOnce second() has one copy
// for all values.
template <int kCount, bool kOnce, class First, class Second>
__device__ __forceinline__ void as_constant_then(int i, const First& first, const Second& second) {
  if constexpr (kOnce) {
    as_constant<kCount>(i, [&](auto constant) { first(constant.value); });
    second(i);
  } else {
    as_constant<kCount>(i, [&](auto constant) {
      first(constant.value);
      second(constant.value);
    });
  }
}

}  // namespace flash3::cuda
