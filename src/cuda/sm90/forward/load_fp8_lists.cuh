// SPDX-License-Identifier: Apache-2.0
// The key tiles of FP8 kernels that walk the lists of a mask (core/mask_lists.hpp).
#pragma once

#include "cuda/sm90/forward/list_place.cuh"
#include "cuda/sm90/forward/list_walk.cuh"
#include "cuda/sm90/forward/load_fp8.cuh"

namespace flash3::cuda::sm90 {

template <class Traits>
struct Fp8KeyTiles<Traits, true> {
  // In the order of a band: tiles differ in length.
  static __device__ __forceinline__ void schedule(const ForwardParams& params,
                                                  typename Traits::Shared& shared) {
    schedule_tiles<Traits::kTileN, true, false, true>(
        params.schedule, shared.tiles, KeysOfList<Traits>{kernel_params(params).mask});
  }
  static __device__ __forceinline__ int find(const ForwardParams& params,
                                             typename Traits::Shared& shared, const WorkTile& work,
                                             int n, int stage) {
    ListPlace<Traits> at{kernel_params(params).mask, n};
    at.read();
    note_tile(shared.listed[stage], at.tile(n == work.key_tile_begin));
    return shared.listed[stage].tile();
  }
};

}  // namespace flash3::cuda::sm90
