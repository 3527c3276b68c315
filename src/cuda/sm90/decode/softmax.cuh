// SPDX-License-Identifier: Apache-2.0
// The softmax of a decode kernel's consumers, and its masks. Keys are the rows of S (traits.cuh): a
// query row's scores lie in all four warps, and what depends on all of them goes through shared
// memory.
#pragma once

#include "cuda/device/ptx/mma.cuh"
#include "cuda/device/score/softcap.cuh"
#include "cuda/device/score/softmax.cuh"
#include "cuda/device/score/transposed_views.hpp"
#include "cuda/sm90/decode/fold.cuh"
#include "cuda/sm90/decode/key_scales.cuh"
#include "cuda/sm90/device/tile.cuh"

namespace flash3::cuda::sm90 {

template <class Traits>
class DecodeSoftmax {
 public:
  using Shared = typename Traits::Shared;

  __device__ __forceinline__ DecodeSoftmax(const DecodeParams& params, Shared& shared)
      : params_(params),
        shared_(shared),
        thread_(thread_in_warpgroup()),
        consumer_(Traits::kConsumers > 1 ? warpgroup_index() - 1 : 0) {}

  // Of this warpgroup.
  __device__ __forceinline__ void sync_consumers() const {
    named_barrier_sync(barrier(), kWarpgroupThreads);
  }

 protected:
  using Sums = RowSums<Traits>;
  using KvState = typename Traits::KvState;
  static constexpr int kRows = Traits::kRows, kColumns = Traits::kColumns,
                       kKeyBlocks = Traits::kKeyBlocks, kDimBlocks = Traits::kDimBlocks;
  using View = KeyBlocks<kKeyBlocks, kRows / 2>;
  using Scores = typename View::Scores;
  static constexpr float kSlack = 8.f;  // in powers of two: p stays far from the largest float16

  __device__ __forceinline__ int barrier() const {
    static_assert(Traits::kConsumers <= 2);
    return int(consumer_ == 0 ? DecodeBarrier::kConsumers : DecodeBarrier::kSecondConsumers);
  }

  // ---- before the softmax ----

  // Rows that producers gathered came through the generic proxy.
  __device__ __forceinline__ void wait_for(uint64_t& full, uint32_t phase, const char* name) const {
    wait(&full, phase, name);
    if (params_.box_rows == 0) fence_shared_for_async_proxy();
  }

  // To capped scores in base 2.
  __device__ __forceinline__ void cap_scores(Scores& r_s) const {
    apply_mod(ModOf<ScoreKind::kSoftcap>{params_.softcap}, View{}, r_s);
  }

  // The key, from the tile's first, of elements 4j + 2h + e of a block of scores.
  __device__ __forceinline__ int key_of(int block, int h) const {
    return 64 * block + thread_ / 32 * 16 + thread_ % 32 / 4 + 8 * h;
  }

  // What the query row of a column sees.
  __device__ __forceinline__ const RowKeys& keys_of_column(int c) const {
    return shared_.row_keys[consumer_][c / 2 * 8 + thread_ % 4 * 2 + c % 2];
  }

  __device__ __forceinline__ View view_of(int first_key) const {
    return {thread_ % 4 * 2, first_key + key_of(0, 0)};
  }

  __device__ __forceinline__ void mask_scores(const DecodeRun& run, const View& view,
                                              Scores& r_s) const {
    mask_decode_scores(params_, run, view, r_s,
                       [&](int r) -> const RowKeys& { return keys_of_column(r); });
  }

  // Of e4m3, of the tile that state_ is at.
  __device__ __forceinline__ const KeyScales& scales_of(int block, int h) const {
    return shared_.fp8.scales[state_.stage][key_of(block, h)];
  }

  // The barrier that follows before the product orders this.
  __device__ __forceinline__ void clear_hidden_values(const DecodeRun& run, int first_key) const {
    constexpr int kThreads = Traits::kConsumers * kWarpgroupThreads;
    sm90::clear_hidden_values<Traits>(
        run, first_key, const_cast<uint8_t*>(shared_.v[state_.stage]),
        consumer_ * kWarpgroupThreads + thread_, kThreads,
        [&] { wait_for(shared_.v_barriers.full[state_.stage], state_.phase, "v_full"); },
        [&] {
          if constexpr (Traits::kConsumers > 1)
            named_barrier_sync(int(DecodeBarrier::kAllConsumers), kThreads);
        });
  }

  // ---- the softmax: columns are query rows ----

  // Raw scores, or capped ones in base 2, which are maxima too.
  using Score = cuda::Score<ScoreKind::kPlain>;
  __device__ __forceinline__ Score score() const {
    const float scale_log2 = Traits::kFp8 ? 1.f : params_.scale_log2;
    return {{scale_log2}, kSlack / scale_log2};
  }

  // P = 2^(c·s − c·m), rounded, to shared memory; added: this thread's sums of them.
  __device__ __forceinline__ void store_probabilities(const View& view, const Scores& r_s,
                                                      const float (&max)[kColumns],
                                                      float (&added)[kColumns],
                                                      uint8_t* shared_p) const {
    using PTile = typename Traits::PTile;
    constexpr int kMatrices = kRows / 4;  // 8×8, of a block: (columns, h)
    const int lane = thread_ % 32;
    float shift[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) shift[c] = shift_under(score(), max[c]), added[c] = 0.f;
    const uint32_t base = uint32_t(__cvta_generic_to_shared(shared_p));
#pragma unroll
    for (int b = 0; b < kKeyBlocks; ++b) {
      uint32_t packed[kMatrices];
#pragma unroll
      for (int n = 0; n < kMatrices; ++n) {
        float p[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int c = n / 2 * 2 + e;
          const ScorePlace<View> at{view, c, 2 * b + n % 2};
          p[e] = exp2_approx(score().log2_above(r_s[b][2 * n + e], shift[c], at));
          if constexpr (Traits::kFp8)
            added[c] = fmaf(p[e], inverse_v_scale(scales_of(b, n % 2)), added[c]);
          else
            added[c] += p[e];
        }
        packed[n] = pack2<Traits::kElement>(p[0], p[1]);
      }
      // Matrix n holds query rows 8·(n / 2)…, keys 8·(n % 2)… of the warp's.
      const int key = 64 * b + thread_ / 32 * 16;
      if constexpr (kMatrices == 2) {
        stmatrix_x2_transposed(base + PTile::offset(lane % 8, key + lane / 8 % 2 * 8), packed[0],
                               packed[1]);
      } else {
#pragma unroll
        for (int n = 0; n < kMatrices; n += 4) {
          const int row = n / 2 * 8 + lane / 16 * 8 + lane % 8;
          stmatrix_x4_transposed(base + PTile::offset(row, key + lane / 8 % 2 * 8), packed[n],
                                 packed[n + 1], packed[n + 2], packed[n + 3]);
        }
      }
    }
  }

  // Over the lanes that hold a query row's keys.
  template <class Combine>
  static __device__ __forceinline__ void reduce_lanes(float (&x)[kColumns],
                                                      const Combine& combine) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int step = 4; step < 32; step *= 2)
        x[c] = combine(x[c], __shfl_xor_sync(~0u, x[c], step));
  }

  // Puts a value of each query row, this warp's, where the others find it.
  __device__ __forceinline__ void exchange(const float (&x)[kColumns]) const {
    const int lane = thread_ % 32, warp = thread_ / 32;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (lane < 4) shared_.reduction[consumer_][warp][c / 2 * 8 + lane * 2 + c % 2] = x[c];
    sync_consumers();
  }
  __device__ __forceinline__ float of_warp(int warp, int c) const {
    return shared_.reduction[consumer_][warp][c / 2 * 8 + thread_ % 4 * 2 + c % 2];
  }

  __device__ __forceinline__ float largest_of_warps(int c) const {
    return fmaxf(fmaxf(of_warp(0, c), of_warp(1, c)), fmaxf(of_warp(2, c), of_warp(3, c)));
  }

  // Whether the maxima serve all of this thread's scores.
  __device__ __forceinline__ bool all_within(const Scores& r_s, const Sums& split) const {
    bool within = true;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float limit = score().limit(split.max[c]);
#pragma unroll
      for (int k = 0; k < View::kKeys; ++k) within &= View::at(r_s, c, k) <= limit;  // a NaN is not
    }
    return within;
  }

  // The same, by the largest of them, which become the largest of the run where they are.
  __device__ __forceinline__ bool take_largest(const Scores& r_s, const Sums& split,
                                               float (&of_run)[kColumns]) const {
    bool within = true;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float largest = View::at(r_s, c, 0);
#pragma unroll
      for (int k = 1; k < View::kKeys; ++k) largest = fmaxf(largest, View::at(r_s, c, k));
      within &= largest <= score().limit(split.max[c]);
      of_run[c] = fmaxf(of_run[c], largest);
    }
    return within;
  }

  // Raises the maxima that a tile demands, and only those, so that no row's bits depend on others.
  template <bool kFirst>
  __device__ __forceinline__ void raise_max(const Scores& r_s, Sums& split) const {
    float largest[kColumns];
    find_max<View>(r_s, largest);
    // Before it is written again all have passed the barrier after P.
    reduce_lanes(largest, [](float x, float y) { return fmaxf(x, y); });
    exchange(largest);
    float alpha[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) largest[c] = largest_of_warps(c);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float old = split.max[c];
      split.max[c] = raised_max(old, score().limit(old), largest[c]);
      alpha[c] = rescaling(score(), old, split.max[c], shift_under(score(), split.max[c]));
      split.sum[c] *= alpha[c];
    }
    if constexpr (!kFirst) {
#pragma unroll
      for (int b = 0; b < kDimBlocks; ++b)
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) split.out[b][i] *= alpha[Sums::column_of(i)];
    }
  }

  const DecodeParams& params_;
  Shared& shared_;
  const int thread_, consumer_;
  KvState state_{};
};

}  // namespace flash3::cuda::sm90
