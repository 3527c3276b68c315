// SPDX-License-Identifier: Apache-2.0
// FP8 scores whose maximum follows every one of them. Without slack, what it took from the range of
// e4m3 goes to the offset.
#pragma once

#include "device/ablation/instance.cuh"

namespace flash3::device {

struct EagerFp8Score : Fp8Score<ScoreKind::kPlain> {
  static constexpr float kOffset = 8.f;

  template <class Params>
  static __device__ __forceinline__ EagerFp8Score of(const Params&) {
    return {};
  }
  __device__ __forceinline__ float limit(float m) const { return m; }
  __device__ __forceinline__ float shift_of(float m) const { return m - kOffset; }
  __device__ __forceinline__ float max_above(float m, float shift) const {
    return m - kOffset - shift;
  }
};

template <class Traits>
struct EagerOperandsFp8 : OperandsFp8<Traits> {
  using Score = EagerFp8Score;
  using OperandsFp8<Traits>::OperandsFp8;
};

}  // namespace flash3::device
