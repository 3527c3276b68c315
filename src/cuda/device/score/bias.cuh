// SPDX-License-Identifier: Apache-2.0
// Scores with what they get by their place (bias.hpp): ALiBi's slopes, a table by distance, a bias
// of each pair. One kind of kernels takes them all, in any company and under a softcap: which of
// them a call has, a few uniform branches a tile tell.
#pragma once

#include "cuda/device/ptx/load_if.cuh"
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

// ALiBi's slope, in the kernel's unit; 0: there is none.
__device__ __forceinline__ float slope_of(const BiasParams& params, int batch, int head) {
  const ScoreBias& bias = params.bias;
  if (bias.slopes == nullptr) return 0.f;
  return __ldg(bias.slopes + batch * bias.slopes_batch + head * bias.slopes_head) * params.unit;
}

// Of one head of a sequence. What only some calls need is found where it is needed.
struct HeadBias {
  const BiasParams& params;
  const ListedSequence& sequence;
  int head;
  int diagonal;  // i' − i

  __device__ __forceinline__ HeadBias(const BiasParams& p, const ListedSequence& s, int h,
                                      const TileMaskRule& rule)
      : params(p), sequence(s), head(h), diagonal(rule.shift(s.q_length, s.k_length)) {}

  // Of the view's first element, j − i'.
  template <ScoreView View>
  __device__ __forceinline__ int distance(const View& view) const {
    return view.key(0) - view.row(0) - diagonal;
  }
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

// ---- slopes ----

// What slopes add to a tile on one side of the diagonal, where it is linear in the distance.
struct SlopeOfTile {
  float first, step;  // at the view's first element, and from a key to the next
  bool linear;

  // distance: of the view's first element. By whole warps. A tile near the diagonal is not taken:
  // an element's distance would be the difference of larger ones, with their rounding.
  template <ScoreView View>
  static __device__ __forceinline__ SlopeOfTile of(float slope, int distance) {
    constexpr int kSpan = most_offset<View>() - least_offset<View>();
    const bool before = __all_sync(~0u, distance + most_offset<View>() <= -kSpan);
    const bool after = !before && __all_sync(~0u, distance + least_offset<View>() >= kSpan);
    const float step = after ? -slope : slope;
    return {float(distance) * step, step, before || after};
  }

  // All of it but what a row's keys have in common, which is offset(r): one operation a score.
  template <ScoreView View>
  __device__ __forceinline__ void add_steps(typename View::Scores& r_s) const {
#pragma unroll
    for (int r = 0; r < View::kRows; ++r)
#pragma unroll
      for (int k = 0; k < View::kKeys; ++k) {
        float& s = View::at(r_s, r, k);
        s = fmaf(float(View::key_offset(k)), step, s);
      }
  }
  template <ScoreView View>
  __device__ __forceinline__ float offset(int r) const {
    return fmaf(-float(View::row_offset(r)), step, first);
  }
};

// s · scale − slope · |j − i'|, on whichever side.
template <ScoreView View>
__device__ __forceinline__ void add_distances(float slope, int distance, float scale,
                                              typename View::Scores& r_s) {
#pragma unroll
  for (int r = 0; r < View::kRows; ++r)
#pragma unroll
    for (int k = 0; k < View::kKeys; ++k) {
      float& s = View::at(r_s, r, k);
      const float x = float(distance) + float(View::key_offset(k) - View::row_offset(r));
      s = fmaf(s, scale, -slope * fabsf(x));
    }
}

// ---- a table by distance ----

// The entries that a view's elements need, in the kernel's unit: one for each distance among them.
template <ScoreView View>
struct TableOfTile {
  FLASH3_HOST_DEVICE static constexpr int floor_8(int x) { return (x - (x % 8 + 8) % 8) / 8; }
  // Rows and keys lie 8 apart, or in pairs of one of the two: offsets are 8m and 8m + kOdd.
  static constexpr int kOdd =
      View::key_offset(1) % 8 != 0 ? View::key_offset(1) : 8 - View::row_offset(1);
  static constexpr int kLeast = floor_8(least_offset<View>()), kMost = floor_8(most_offset<View>()),
                       kCount = 2 * (kMost - kLeast + 1);

  float entries[kCount];

  // Of an element so far from the view's first.
  FLASH3_HOST_DEVICE static constexpr int place(int offset) {
    return (floor_8(offset) - kLeast) * 2 + (offset % 8 != 0);
  }

  // distance: of the view's first element. By whole warps.
  __device__ __forceinline__ void load(const HeadBias& head, int distance) {
    const ScoreBias& bias = head.params.bias;
    const int reach = bias.reach;
    const float* const middle = bias.table + head.head * bias.table_head + reach;
    const auto entry = [&](int at) { return __ldg(middle + clamped(at, -reach, reach)); };
    const bool before = distance + 8 * kMost + 7 <= -reach, after = distance + 8 * kLeast >= reach;
    if (__all_sync(~0u, before || after)) {
      const float same = entry(distance);
#pragma unroll
      for (float& x : entries) x = same;
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      entries[i] = entry(distance + (i / 2 + kLeast) * 8 + i % 2 * kOdd);
  }

  // unit: BiasParams.
  __device__ __forceinline__ void add(float unit, typename View::Scores& r_s) const {
#pragma unroll
    for (int r = 0; r < View::kRows; ++r)
#pragma unroll
      for (int k = 0; k < View::kKeys; ++k) {
        float& s = View::at(r_s, r, k);
        s = fmaf(entries[place(View::key_offset(k) - View::row_offset(r))], unit, s);
      }
  }
};

// The same where there are no registers for that.
template <ScoreView View>
__device__ __forceinline__ void add_table(const HeadBias& head, const View& view,
                                          typename View::Scores& r_s) {
  const ScoreBias& bias = head.params.bias;
  const int distance = head.distance(view), reach = bias.reach;
  const float* const middle = bias.table + head.head * bias.table_head + reach;
  // The outer loop is over the more, in groups, each after a branch: no more entries are under way
  // than registers can take.
  constexpr bool kFewKeys = kHasFewKeys<View>;
  constexpr int kOuter = kFewKeys ? View::kRows : View::kKeys,
                kInner = kFewKeys ? View::kKeys : View::kRows, kGroup = 8;
  const int exist =
      kFewKeys ? head.sequence.q_length - view.row(0) : head.sequence.k_length - view.key(0);
#pragma unroll
  for (int group = 0; group < kOuter; group += kGroup) {
    if ((kFewKeys ? View::row_offset(group) : View::key_offset(group)) >= exist) break;
#pragma unroll
    for (int i = group; i < group + kGroup; ++i)
#pragma unroll
      for (int j = 0; j < kInner; ++j) {
        const int r = kFewKeys ? i : j, k = kFewKeys ? j : i;
        const int at = distance + View::key_offset(k) - View::row_offset(r);
        float& s = View::at(r_s, r, k);
        s = fmaf(__ldg(middle + clamped(at, -reach, reach)), head.params.unit, s);
      }
  }
}

// ---- a bias of each pair ----

__device__ __forceinline__ float element_of(uint16_t bits, bool bfloat) {
  return bfloat ? bfloat16_to_float(bits) : float16_to_float(bits);
}

// Adds the bias of each pair that exists; load(exists, element): it. kInside: all do, and keys lie
// side by side.
template <bool kInside, ScoreView View, class Load>
__device__ __forceinline__ void add_pairs(const HeadBias& head, const View& view,
                                          typename View::Scores& r_s, const Load& load) {
  const ScoreBias& bias = head.params.bias;
  const ListedSequence& s = head.sequence;
  const long long first = s.batch * bias.pairs_batch + head.head * bias.pairs_head +
                          (s.q_first + view.row(0)) * bias.pairs_row + view.key(0) * bias.pairs_key;
  const int queries = s.q_length - view.row(0), keys = s.k_length - view.key(0);
  const auto add = [&](int r, int k) {
    const int row = View::row_offset(r), key = View::key_offset(k);
    const bool exists = kInside || (row < queries && key < keys);
    const long long at = first + row * bias.pairs_row + key * (kInside ? 1 : bias.pairs_key);
    float& x = View::at(r_s, r, k);
    x = fmaf(load(exists, at), head.params.unit, x);
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
  const ScoreBias& bias = head.params.bias;
  const bool bfloat = bias.type == FloatType::kBFloat16;
  const auto load_32 = [&](bool exists, long long element) {
    return load_if(exists, static_cast<const float*>(bias.pairs) + element);
  };
  const auto load_16 = [&](bool exists, long long element) {
    const uint16_t bits = load_if(exists, static_cast<const uint16_t*>(bias.pairs) + element);
    return element_of(bits, bfloat);
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

// ---- any of them ----

// Makes values in base 2 of raw scores, or of what a softcap has made of them.
template <ScoreView View>
__device__ __forceinline__ void add_bias(const HeadBias& head, const View& view,
                                         typename View::Scores& r_s) {
  const BiasParams& params = head.params;
  const int distance = head.distance(view);
  if (params.bias.slopes != nullptr) {
    add_distances<View>(slope_of(params, head.sequence.batch, head.head), distance,
                        params.scale_log2, r_s);
  } else {
#pragma unroll
    for (int r = 0; r < View::kRows; ++r)
#pragma unroll
      for (int k = 0; k < View::kKeys; ++k) View::at(r_s, r, k) *= params.scale_log2;
  }
  if (params.bias.table != nullptr) add_table(head, view, r_s);
  if (params.bias.pairs != nullptr) add_pairs(head, view, r_s);
}

}  // namespace flash3::cuda
