// SPDX-License-Identifier: Apache-2.0
// The scales of K and V in e4m3, key by key. A warp of the producers looks them up and leaves them
// where V's tile lies, so that nobody waits for memory after the scores. That of K multiplies a
// score. That of V becomes part of the weight, so that weights follow the largest of both together
// and never leave float16:
//
//   P = 2^(s − m)·v_scale = 2^(s + log2 v_scale − m)      l = Σ P / v_scale
#pragma once

#include "cuda/sm90/decode/load.cuh"

namespace flash3::cuda::sm90 {

inline constexpr int kScaleWarp = 2;  // of the producers

// The scales of K or V that a run may need.
struct RunScales {
  const float* first;  // by blocks, of the KV head; null: one scale for all keys
  long long stride_element, stride_block;
  float scale;

  __device__ __forceinline__ RunScales(const ScaleView& view, const DecodeRun& run)
      : first(nullptr), stride_element(view.stride_batch), stride_block(view.stride_block) {
    if (view.kind == ScaleKind::kBlock)
      first = view.data + view.offset(0, run.kv_head, 0);
    else
      scale = view.at(run.batch, run.kv_head, 0);
  }
  __device__ __forceinline__ float at(int element, int block) const {
    return first ? __ldg(first + element * stride_element + block * stride_block) : scale;
  }
};

// The scale block of a key, in an element.
__device__ __forceinline__ KeyPlace scale_place(const DecodeParams& params, const DecodeRun& run,
                                                int key) {
  if (params.k_packed) {
    const int row = max(min(key, run.k_length - 1), 0);
    return {0, scale_block(true, run.k_first, run.batch, row)};
  }
  const KeyPlace place = place_of_key(params, run, key);
  return {batch_element(params, place), place.row / int(kScaleBlock)};
}

// One warp calls it.
template <class Traits>
__device__ __forceinline__ void load_scales(const DecodeParams& params,
                                            typename Traits::Shared& shared) {
  constexpr int kOfLane = Traits::kTileN / 32;  // keys
  const int lane = threadIdx.x % 32;
  typename Traits::KvState state;
  for (RunReader runs(shared.runs); runs.next(); runs.release()) {
    const DecodeRun& run = runs.run();
    const TileMask::Range tiles = run.tiles;
    const RunScales k(params.k_scale, run), v(params.v_scale, run);
    for (int tile = tiles.begin; tile < tiles.end; ++tile, state.advance()) {
      float2 scales[kOfLane];
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        KeyPlace place = {};
        if (k.first || v.first)
          place = scale_place(params, run, tile * Traits::kTileN + 32 * i + lane);
        scales[i] = {k.at(place.element, place.row), v.at(place.element, place.row)};
      }
      wait(&shared.v_barriers.empty[state.stage], state.phase ^ 1, "v_empty");
#pragma unroll
      for (int i = 0; i < kOfLane; ++i)
        shared.fp8.scales[state.stage][32 * i + lane] = {scales[i].x, log2_approx(scales[i].y)};
      arrive(&shared.fp8.scales_full[state.stage]);
    }
  }
}

// 1 / v_scale. A row that does not see the key multiplies it by 0.
__device__ __forceinline__ float inverse_v_scale(const KeyScales& scales) {
  return fabsf(scales.log2_v) < kInfinity ? exp2_approx(-scales.log2_v) : 1.f;
}

}  // namespace flash3::cuda::sm90
