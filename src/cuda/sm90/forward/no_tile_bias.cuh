// SPDX-License-Identifier: Apache-2.0
// What a consumer asks of what depends on a score's place, and that of kernels without it.
#pragma once

#include "cuda/sm90/forward/config.hpp"

namespace flash3::cuda::sm90 {

// What scores get by their place, and which weights are dropped: nothing and none.
struct NoTileBias {
  NoTileBias() = default;
  template <class Consumer>
  __device__ __forceinline__ explicit NoTileBias(const Consumer&) {}

  // While the scores are under way.
  template <class Tile>
  __device__ __forceinline__ void read(const Tile&) const {}
  // Before the mask. True: apply_rarely() is left, beside masks, which few tiles need either.
  template <class Tile>
  __device__ __forceinline__ bool apply(Tile&) const {
    return false;
  }
  template <class Tile>
  __device__ __forceinline__ void apply_rarely(Tile&) const {}
  // Of weights that are summed up.
  template <class Tile>
  __device__ __forceinline__ void drop(Tile&) const {}
  __device__ __forceinline__ void scale_normalisation(float (&)[2]) const {}
};
// tile_bias.cuh has the others.
template <class Traits, BiasTerms kTerms = Traits::kConfig.terms>
struct TileBias;
template <class Traits>
struct TileBias<Traits, BiasTerms::kNone> : NoTileBias {
  using NoTileBias::NoTileBias;
};

}  // namespace flash3::cuda::sm90
