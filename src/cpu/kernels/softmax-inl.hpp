// SPDX-License-Identifier: Apache-2.0
// The online softmax of one row, and the cap of its scores.

HWY_BEFORE_NAMESPACE();
namespace flash3::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// scores = tanh(scores · scale) for the vectors that hold [begin, end) of one row; begin is a
// multiple of kLanes.
HWY_NOINLINE void cap_row(float* scores, int64_t begin, int64_t end, float scale) {
  const VecF factor = set(scale);
  for (int64_t j = begin; j < end; j += kLanes)
    hn::Store(tanh(hn::Mul(hn::Load(F32(), scores + j), factor)).value, F32(), scores + j);
}

// 2^(scale · s − shift), where the shift is the largest scale · s or more. Fused, the product is
// not rounded as that in the shift has been: the exponent of the largest score is up to half a unit
// in the last place of the shift then, which at 2^32 leaves float32's range. Else it is rounded,
// and at most the shift; the comparison also keeps the compiler from fusing it.
template <bool kFused>
HWY_INLINE VecF weights_of(const float* scores, VecF scale, VecF shift) {
  const VecF s = hn::Load(F32(), scores);
  if constexpr (kFused) return exp2(hn::MulSub(s, scale, shift));
  const VecF scaled = hn::Mul(s, scale);
  return exp2(hn::Sub(hn::IfThenElse(hn::Gt(scaled, shift), shift, scaled), shift));
}
constexpr float kMostFusedShift = 1 << 16;

// Makes weights of scores [begin, end) of one row, a multiple of 2 · kLanes; returns their sum,
// with those that dropout then drops. kept: which it does not (dropout-inl.hpp).
template <class Words, bool kFused, bool kDropped>
HWY_INLINE VecF make_weights(const float* scores, int64_t begin, int64_t end, VecF scale,
                             VecF shift, const uint8_t* kept, float* weights) {
  VecF sum0 = hn::Zero(F32()), sum1 = sum0;
  for (int64_t j = begin; j < end; j += 2 * kLanes) {
    VecF p0 = weights_of<kFused>(scores + j, scale, shift);
    VecF p1 = weights_of<kFused>(scores + j + kLanes, scale, shift);
    sum0 = hn::Add(sum0, p0);
    sum1 = hn::Add(sum1, p1);
    if constexpr (kDropped) p0 = keep(p0, kept, j), p1 = keep(p1, kept, j + kLanes);
    Words::store_weights(p0, p1, weights + j / Words::kElements);
  }
  return hn::Add(sum0, sum1);
}
// kept: null without dropout.
template <class Words, bool kFused>
HWY_INLINE VecF make_weights(const float* scores, int64_t begin, int64_t end, VecF scale,
                             VecF shift, const uint8_t* kept, float* weights) {
  return kept ? make_weights<Words, kFused, true>(scores, begin, end, scale, shift, kept, weights)
              : make_weights<Words, kFused, false>(scores, begin, end, scale, shift, kept, weights);
}

// Makes weights of scores [begin, end) of one row, a multiple of 2 · kLanes; updates the row's
// max and sum; returns the factor that brings what was summed before to the new max.
template <class Words>
HWY_INLINE float softmax_row(const float* scores, int64_t begin, int64_t end, float scale,
                             const uint8_t* kept, float* weights, float* row_max, float* row_sum) {
  VecF max0 = set(-kInfinity), max1 = max0;
  for (int64_t j = begin; j < end; j += 2 * kLanes) {
    max0 = hn::Max(max0, hn::Load(F32(), scores + j));
    max1 = hn::Max(max1, hn::Load(F32(), scores + j + kLanes));
  }
  const float tile_max = hn::GetLane(hn::MaxOfLanes(F32(), hn::Max(max0, max1)));
  const float max = std::max(*row_max, tile_max * scale);
  const float origin = max == -kInfinity ? 0.f : max;
  const float correction = *row_max == max ? 1.f : std::exp2(*row_max - origin);

  const VecF factor = set(scale), shift = set(origin);
  const VecF sum =
      std::abs(origin) <= kMostFusedShift
          ? make_weights<Words, true>(scores, begin, end, factor, shift, kept, weights)
          : make_weights<Words, false>(scores, begin, end, factor, shift, kept, weights);
  *row_max = max;
  *row_sum = *row_sum * correction + hn::GetLane(hn::SumOfLanes(F32(), sum));
  return correction;
}

}  // namespace
}  // namespace flash3::cpu
HWY_AFTER_NAMESPACE();
