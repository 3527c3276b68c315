// SPDX-License-Identifier: Apache-2.0
// What becomes of the raw score s = q·k that a query row has with a key.
#pragma once

#include "cuda/device/ptx/arithmetic.cuh"
#include "cuda/device/score/view.hpp"

namespace flash3::cuda {

// Which row and key of a view a score is of.
template <class View>
struct ScorePlace {
  const View& view;
  int r, k;

  __device__ __forceinline__ int row() const { return view.row(r); }
  __device__ __forceinline__ int key() const { return view.key(k); }
};

// value() is what the score becomes, in the unit that the kernel chose, and above() that less a
// shift, in one rounding.
//   kRemaps   raw scores have to be remapped before (softcap.cuh)
//   kSlope    the derivative is not a constant: slope() is it, by the value, in units of 1
template <class Mod, class View>
concept ScoreMod = ScoreView<View> && requires(const Mod& mod, float x, ScorePlace<View> at) {
  Mod::kRemaps;
  Mod::kSlope;
  x = mod.value(x, at);
  x = mod.above(x, x, at);
};

// A modification that keeps the order of scores and asks for no place: the softmax's maxima may be
// of raw scores. Any other is applied to the scores in place before (apply_mod), and the softmax is
// of their values.
template <class Mod>
concept KeepsOrder = requires(const Mod& mod, float x) {
  x = mod.value(x);
  x = mod.above(x, x);
};

// That of a kind of scores. Each has a header: a kernel that lacks it does not compile.
template <ScoreKind>
struct ModOf;

// scale · s
template <>
struct ModOf<ScoreKind::kPlain> {
  static constexpr bool kRemaps = false, kSlope = false;

  float scale;

  template <class Params>
  static __device__ __forceinline__ ModOf of(const Params& params) {
    return {params.scale_log2};
  }
  template <class... Place>
  __device__ __forceinline__ float value(float s, const Place&...) const {
    return s * scale;
  }
  template <class... Place>
  __device__ __forceinline__ float above(float s, float shift, const Place&...) const {
    return fmaf(s, scale, -shift);
  }
};

static_assert(ScoreMod<ModOf<ScoreKind::kPlain>, QueriesByKeys<8>> &&
              KeepsOrder<ModOf<ScoreKind::kPlain>>);

}  // namespace flash3::cuda
