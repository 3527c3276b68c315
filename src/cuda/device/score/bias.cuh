// SPDX-License-Identifier: Apache-2.0
// Scores with what they get by their place (bias.hpp): ALiBi's slopes, a table by distance, a bias
// of each pair. One kind of kernels takes them all, in any company and under a softcap: which of
// them a call has, a few uniform branches a tile tell.
#pragma once

#include "cuda/device/ptx/memory.cuh"
#include "cuda/device/score/bias.hpp"
#include "cuda/device/score/mask.cuh"
#include "cuda/device/score/softcap.cuh"

namespace flash3::cuda {

// Its scores are values in base 2 once add_bias() has been: nothing is left to do.
template <>
struct ModOf<ScoreKind::kBiased> {
  static constexpr bool kRemaps = false, kSlope = true;

  template <class Params>
  static __device__ __forceinline__ ModOf of(const Params&) {
    return {};
  }
  template <class... Place>
  __device__ __forceinline__ float value(float s, const Place&...) const {
    return s;
  }
  template <class... Place>
  __device__ __forceinline__ float above(float s, float shift, const Place&...) const {
    return s - shift;
  }
};

static_assert(ScoreMod<ModOf<ScoreKind::kBiased>, QueriesByKeys<8>> &&
              KeepsOrder<ModOf<ScoreKind::kBiased>>);

// Of ALiBi, times log2 e; 0: there is none.
__device__ __forceinline__ float slope_of(const ScoreBias& bias, int batch, int head) {
  if (bias.slopes == nullptr) return 0.f;
  return __ldg(bias.slopes + batch * bias.slopes_batch + head * bias.slopes_head) * float(kLog2E);
}

// Of one head of a sequence. What only some calls need is found where it is needed.
struct HeadBias {
  const ScoreBias& bias;
  const ListedSequence& sequence;
  int head;
  int diagonal;  // i' − i
  float slope;   // slope_of()
};

// Least and most of j − i that a view's elements add to that of its first.
template <ScoreView View>
FLASH3_HOST_DEVICE constexpr int least_offset() {
  return -View::row_offset(View::kRows - 1);
}
template <ScoreView View>
FLASH3_HOST_DEVICE constexpr int most_offset() {
  return View::key_offset(View::kKeys - 1);
}

// s · scale + slope · (j − i'); first: that of the view's first element, step: the slope, of either
// sign.
template <ScoreView View>
__device__ __forceinline__ void add_slope(typename View::Scores& r_s, float scale, float first,
                                          float step) {
#pragma unroll
  for (int r = 0; r < View::kRows; ++r)
#pragma unroll
    for (int k = 0; k < View::kKeys; ++k) {
      float& s = View::at(r_s, r, k);
      s = fmaf(s, scale, fmaf(float(View::key_offset(k) - View::row_offset(r)), step, first));
    }
}

// On which side of the diagonal the seen keys of a warp's part of a tile are: 1: all before or on
// it, −1: all after or on it, 0: on both. By whole warps.
template <ScoreView View>
__device__ __forceinline__ int side_of(const HeadBias& head, const View& view) {
  if (head.bias.no_later_keys) return 1;
  const int distance = view.key(0) - view.row(0) - head.diagonal;
  if (__all_sync(~0u, distance + most_offset<View>() <= 0)) return 1;
  return __all_sync(~0u, distance + least_offset<View>() >= 0) ? -1 : 0;
}

// s · scale − slope · |j − i'|, on one side, where that is linear.
template <ScoreView View>
__device__ __forceinline__ void add_distances(const HeadBias& head, const View& view,
                                              typename View::Scores& r_s, float scale, int side) {
  const float step = side > 0 ? head.slope : -head.slope;
  add_slope<View>(r_s, scale, float(view.key(0) - view.row(0) - head.diagonal) * step, step);
}
// The same on both.
template <ScoreView View>
__device__ __forceinline__ void add_distances(const HeadBias& head, const View& view,
                                              typename View::Scores& r_s, float scale) {
  const float distance = float(view.key(0) - view.row(0) - head.diagonal);
#pragma unroll
  for (int r = 0; r < View::kRows; ++r)
#pragma unroll
    for (int k = 0; k < View::kKeys; ++k) {
      float& s = View::at(r_s, r, k);
      const float x = distance + float(View::key_offset(k) - View::row_offset(r));
      s = fmaf(s, scale, -head.slope * fabsf(x));
    }
}

// Adds the table's entries.
template <ScoreView View>
__device__ __forceinline__ void add_table(const HeadBias& head, const View& view,
                                          typename View::Scores& r_s) {
  const int distance = view.key(0) - view.row(0) - head.diagonal, reach = head.bias.reach;
  const float* const middle = head.bias.table + head.head * head.bias.table_head + reach;
  const auto entry = [&](int at) { return __ldg(middle + clamped(at, -reach, reach)); };
  const bool before = distance + most_offset<View>() <= -reach,
             after = distance + least_offset<View>() >= reach;
  if (__all_sync(~0u, before || after)) {
    const float same = entry(distance) * float(kLog2E);
#pragma unroll
    for (int r = 0; r < View::kRows; ++r)
#pragma unroll
      for (int k = 0; k < View::kKeys; ++k) View::at(r_s, r, k) += same;
    return;
  }
#pragma unroll
  for (int r = 0; r < View::kRows; ++r)
#pragma unroll
    for (int k = 0; k < View::kKeys; ++k) {
      float& s = View::at(r_s, r, k);
      s = fmaf(entry(distance + View::key_offset(k) - View::row_offset(r)), float(kLog2E), s);
    }
}

// Adds the bias of each pair that exists; load(exists, element): it. kInside: all do, and keys lie
// side by side.
template <bool kInside, ScoreView View, class Load>
__device__ __forceinline__ void add_pairs(const HeadBias& head, const View& view,
                                          typename View::Scores& r_s, const Load& load) {
  const ScoreBias& bias = head.bias;
  const ListedSequence& s = head.sequence;
  const long long first = s.batch * bias.pairs_batch + head.head * bias.pairs_head +
                          (s.q_first + view.row(0)) * bias.pairs_row + view.key(0) * bias.pairs_key;
  const int queries = s.q_length - view.row(0), keys = s.k_length - view.key(0);
  const auto add = [&](int r, int k) {
    const int row = View::row_offset(r), key = View::key_offset(k);
    const bool exists = kInside || (row < queries && key < keys);
    const long long at = first + row * bias.pairs_row + key * (kInside ? 1 : bias.pairs_key);
    float& x = View::at(r_s, r, k);
    x = fmaf(load(exists, at), float(kLog2E), x);
  };
  // The outer loop is over the more: registers hold no offset of each of them. Those that may not
  // exist are loaded in groups, each after a branch: no more are under way than registers can take.
  constexpr bool kFewKeys = kHasFewKeys<View>;
  constexpr int kOuter = kFewKeys ? View::kRows : View::kKeys,
                kInner = kFewKeys ? View::kKeys : View::kRows, kGroup = 4;
#pragma unroll
  for (int group = 0; group < kOuter; group += kGroup) {
    if (!kInside &&
        (kFewKeys ? View::row_offset(group) >= queries : View::key_offset(group) >= keys))
      continue;
#pragma unroll
    for (int i = group; i < group + kGroup; ++i)
#pragma unroll
      for (int j = 0; j < kInner; ++j) kFewKeys ? add(i, j) : add(j, i);
  }
}
template <ScoreView View>
__device__ __forceinline__ void add_pairs(const HeadBias& head, const View& view,
                                          typename View::Scores& r_s) {
  const ScoreBias& bias = head.bias;
  const bool bfloat = bias.type == FloatType::kBFloat16;
  const auto load_32 = [&](bool exists, long long element) {
    return load_if(exists, static_cast<const float*>(bias.pairs) + element);
  };
  const auto load_16 = [&](bool exists, long long element) {
    const uint16_t bits = load_if(exists, static_cast<const uint16_t*>(bias.pairs) + element);
    return bfloat ? bfloat16_to_float(bits) : float16_to_float(bits);
  };
  const bool inside = bias.pairs_key == 1 &&
                      view.row(0) + View::row_offset(View::kRows - 1) < head.sequence.q_length &&
                      view.key(0) + View::key_offset(View::kKeys - 1) < head.sequence.k_length;
  const auto add = [&](const auto& load) {
    if (__all_sync(~0u, inside))
      add_pairs<true>(head, view, r_s, load);
    else
      add_pairs<false>(head, view, r_s, load);
  };
  if (bias.type == FloatType::kFloat32)
    add(load_32);
  else
    add(load_16);
}

// Whether a kernel with these terms has that one: always, never, or if a call has it.
template <BiasTerms kTerms>
__device__ __forceinline__ bool has(BiasTerms term, bool given) {
  return kTerms == BiasTerms::kAny ? given : kTerms == term;
}

// Makes values in base 2 of raw scores, which a softcap has scaled already (scale: what is left).
// Where a tile's slopes seldom go another way, that is left to the caller: true, and nothing is
// done.
template <BiasTerms kTerms, ScoreView View>
__device__ __forceinline__ bool add_bias(const HeadBias& head, const View& view,
                                         typename View::Scores& r_s, float scale) {
  if constexpr (kTerms == BiasTerms::kSlopes) {
    const int side = side_of(head, view);
    if (side == 0) return true;
    add_distances(head, view, r_s, scale, side);
    return false;
  }
  if (has<kTerms>(BiasTerms::kSlopes, head.bias.slopes != nullptr)) {
    add_distances(head, view, r_s, scale);
  } else {
#pragma unroll
    for (int r = 0; r < View::kRows; ++r)
#pragma unroll
      for (int k = 0; k < View::kKeys; ++k) View::at(r_s, r, k) *= scale;
  }
  if (has<kTerms>(BiasTerms::kTable, head.bias.table != nullptr)) add_table(head, view, r_s);
  if (has<kTerms>(BiasTerms::kPairs, head.bias.pairs != nullptr)) add_pairs(head, view, r_s);
  return false;
}

}  // namespace flash3::cuda
