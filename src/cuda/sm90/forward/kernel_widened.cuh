// SPDX-License-Identifier: Apache-2.0
// What kernels are put together from that widen K and V.
//
// Operands of a consumer (consume.cuh): Q of 16 bits, K and V that were e4m3 and have scales. The
// products are those of 16 bits, scores and scales are handled as in FP8: O is in units of the
// present key tile's scale of V.
#pragma once

#include "cuda/sm90/forward/kernel.cuh"
#include "cuda/sm90/forward/kernel_16bit.cuh"
#include "cuda/sm90/forward/kernel_fp8.cuh"
#include "cuda/sm90/forward/load_widened.cuh"
#include "cuda/sm90/forward/traits_widened.cuh"

namespace flash3::cuda::sm90 {

template <class Traits>
class OperandsWidened : public Operands16Bit<Traits> {
 public:
  using Score = Fp8Score<Traits::kScore>;

  __device__ __forceinline__ OperandsWidened(const ForwardParams& params,
                                             const typename Traits::Shared& shared, int q_stage,
                                             int warpgroup)
      : Operands16Bit<Traits>(params, shared, q_stage, warpgroup),
        params_(params),
        shared_(shared) {}

  static __device__ __forceinline__ int warp_in_warpgroup(int) { return cuda::warp_in_warpgroup(); }

  // What follows from the scales of the key tile in this stage, and of the one before it, with
  // which O ends. The lane reads them that releases the stage.
  template <class Tile>
  __device__ __forceinline__ void begin_key_tile(Tile& tile, const typename Traits::KvState& k,
                                                 const typename Traits::KvState&) {
    float k_scale = 0.f, v_scale = 0.f;
    if (threadIdx.x % 32 == 0) {
      const KeyTileScales& scales = shared_.key_scales[k.phase][k.stage];
      k_scale = scales.k, v_scale = scales.v;
    }
    k_scale = __shfl_sync(~0u, k_scale, 0), v_scale = __shfl_sync(~0u, v_scale, 0);
    tile.softmax.score.scale.begin_tile({fp8_params(params_).q_factor}, k_scale);
    changes_v_scale_ = has_output_ && __any_sync(~0u, v_scale != v_scale_);
    v_ratio_ = v_scale_ / v_scale;
    v_scale_ = v_scale;
    has_output_ = true;
  }
  template <class Tile>
  __device__ __forceinline__ void scale_scores(Tile& tile) const {
    if constexpr (Score::kCapped) tile.softmax.score.scale_scores(tile.scores);
  }

  template <class Tile>
  __device__ __forceinline__ bool changes_output(const Tile&) const {
    return changes_v_scale_;
  }
  // By alpha; to the next key tile's scale of V by way of it.
  template <class Tile>
  __device__ __forceinline__ void change_output(Tile& tile, bool,
                                                const typename Traits::KvState&) const {
    if (changes_v_scale_) tile.alpha[0] *= v_ratio_, tile.alpha[1] *= v_ratio_;
    tile.softmax.scale_rows(tile.output, tile.alpha);
  }
  // Takes the last key tile's scale of V into what normalises O.
  __device__ __forceinline__ void scale_normalisation(float (&inverse_sum)[2],
                                                      const typename Traits::KvState&) const {
    inverse_sum[0] *= v_scale_, inverse_sum[1] *= v_scale_;
  }

 private:
  const ForwardParams& params_;
  const typename Traits::Shared& shared_;
  float v_scale_ = 1.f;           // the present key tile's
  float v_ratio_ = 1.f;           // that of the key tile before to it
  bool has_output_ = false;       // of a key tile before
  bool changes_v_scale_ = false;  // from that key tile
};

// ---- the kernel ----

template <ForwardConfig kRow, Element kElement>
  requires(kRow.operands == Operands::kWidened)
struct PoliciesOf<kRow, kElement> {
  using Traits = WidenedTraits<kRow, kElement>;
  using Producer = WidenedProducer<Traits>;
  using Operands = OperandsWidened<Traits>;
  using Store = StoreInPlaceOfQ<Traits>;
  using Consumer = sm90::Consumer<Traits, Operands, Store>;

  static const void* kernel() { return reinterpret_cast<const void*>(&forward_kernel<PoliciesOf>); }
};

}  // namespace flash3::cuda::sm90
