// SPDX-License-Identifier: Apache-2.0
// Vectors of what is added to the scores of a row (cpu/biases.hpp).

#include "cpu/biases.hpp"

HWY_BEFORE_NAMESPACE();
namespace flash3::cpu {
namespace {

// The biases by pair of keys from j on, of which `count` are read at most; the rest are 0.
template <class T>
HWY_INLINE VecF pairs_at(const T* row, Index stride, Index j, Index count) {
  const int most = static_cast<int>(std::min<Index>(count, kLanes));
  if (stride == 1) return load_first(row + j, most);
  T values[kLanes] = {};
  for (int n = 0; n < most; ++n) values[n] = row[(j + n) * stride];
  return load(values);
}
HWY_INLINE VecF pairs_at(const RowBias& bias, Index j, Index count) {
  switch (bias.dtype) {
    case FLASH3_FLOAT16:
      return pairs_at(static_cast<const Fp16*>(bias.pairs), bias.stride, j, count);
    case FLASH3_BFLOAT16:
      return pairs_at(static_cast<const Bf16*>(bias.pairs), bias.stride, j, count);
    default: return pairs_at(static_cast<const float*>(bias.pairs), bias.stride, j, count);
  }
}

// The entries of the table for keys from j on.
HWY_INLINE VecF entries_at(const RowBias& bias, Index j) {
  const Index first = bias.from_diagonal + j;
  if (first >= -bias.distance && first + kLanes - 1 <= bias.distance)
    return load(bias.table + first);
  float values[kLanes];
  for (int n = 0; n < kLanes; ++n) values[n] = bias.of_table(j + n);
  return load(values);
}

// |j − i'| of keys from j on.
HWY_INLINE VecF distances_at(const RowBias& bias, Index j) {
  return hn::Abs(hn::Add(set(static_cast<float>(bias.from_diagonal + j)), hn::Iota(F32(), 0)));
}

// All of it; count: as above.
HWY_INLINE VecF bias_at(const RowBias& bias, Index j, Index count) {
  VecF sum = hn::Zero(F32());
  if (bias.table) sum = entries_at(bias, j);
  if (bias.pairs) sum = hn::Add(sum, pairs_at(bias, j, count));
  if (bias.slope != 0) sum = hn::NegMulAdd(set(bias.slope), distances_at(bias, j), sum);
  return sum;
}

HWY_INLINE auto is_hidden(VecF bias) {
  return hn::Eq(bias, set(-std::numeric_limits<float>::infinity()));
}

// scores = factor · scores + biases for the vectors that hold [begin, end) of one row; begin is a
// multiple of kLanes. A bias of −∞ hides the pair, whatever its score is; returns whether one did.
HWY_NOINLINE bool add_biases(const RowBias& bias, float factor, Index begin, Index end,
                             float* scores) {
  bool hides = false;
  for (Index j = begin; j < end; j += kLanes) {
    const VecF added = bias_at(bias, j, end - j);
    const auto hidden = is_hidden(added);
    const VecF sum = hn::MulAdd(hn::Load(F32(), scores + j), set(factor), added);
    hn::Store(hn::IfThenElse(hidden, added, sum), F32(), scores + j);
    hides = hides || !hn::AllFalse(F32(), hidden);
  }
  return hides;
}

}  // namespace
}  // namespace flash3::cpu
HWY_AFTER_NAMESPACE();
