// SPDX-License-Identifier: Apache-2.0
// The end of a row: what normalises its output, its log-sum-exp, and where what a call wants of it
// goes; and learnable sinks, one more logit per query head that takes part in the softmax's
// denominator and has no value.
#pragma once

#include "core/arithmetic.hpp"
#include "cuda/device/ptx/arithmetic.cuh"
#include "cuda/device/types.hpp"

namespace flash3::cuda {

__device__ __forceinline__ float load_sink(const SinkRow& sink, int head) {
  if (sink.type == FloatType::kFloat32) return static_cast<const float*>(sink.data)[head];
  const uint16_t bits = static_cast<const uint16_t*>(sink.data)[head];
  return sink.type == FloatType::kBFloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
}

// What normalises a row with this sum, 0 if it saw no key.
__device__ __forceinline__ float inverse_of(float sum) {
  return sum == 0.f ? 0.f : reciprocal_approx(sum);
}

// Its natural log-sum-exp, −∞ if it saw no key; max(): what its weights are counted from, in
// base 2.
template <class Max>
__device__ __forceinline__ float lse_of(float sum, const Max& max) {
  return sum == 0.f ? -kInfinity : fmaf(max(), kLn2, log_approx(sum));
}

// What a row's outputs become.
struct RowValues {
  float lse, max_logit;
};

// Stores those that the call wants. kMaxLogits: whether the kernel knows the largest logit.
template <bool kMaxLogits>
__device__ __forceinline__ void store_row_values(const RowOutputs& to, int batch, int head, int row,
                                                 const RowValues& values) {
  const auto store = [&](const RowOutput& output, float x) {
    if (output.data != nullptr)
      output.data[batch * output.stride_batch + head * output.stride_head + row] = x;
  };
  store(to.lse, values.lse);
  if constexpr (kMaxLogits) store(to.max_logits, values.max_logit);
}

// Takes a row's sink into the factor that normalises its output and into its log-sum-exp; both are
// of the scores alone.
__device__ __forceinline__ void add_sink(float sink, float& inverse_sum, float& lse) {
  const float larger = fmaxf(lse, sink);
  if (larger == -kInfinity) return;  // nothing to see, and no sink either
  const float ratio =
      exp2_approx(-fabsf(lse - sink) * float(kLog2E));  // of the smaller to the larger
  const float share = reciprocal_approx(1.f + ratio);
  inverse_sum *= lse >= sink ? share : ratio * share;
  lse = larger + log_approx(1.f + ratio);
}

}  // namespace flash3::cuda
