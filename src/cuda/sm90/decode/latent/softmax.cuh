// SPDX-License-Identifier: Apache-2.0
// The consumers' softmax, and the ends of their runs. A thread has two query rows, r and r + 8:
// element 4j + 2h + e of its scores is row r + 8h and key 8j + 2·(thread % 4) + e of its
// warpgroup's; of O the same with head dims.
#pragma once

#include "cuda/device/score/softcap.cuh"
#include "cuda/device/score/softmax.cuh"
#include "cuda/sm90/decode/latent/partials.cuh"
#include "cuda/sm90/decode/latent/traits.cuh"
#include "cuda/sm90/device/tile.cuh"

namespace flash3::cuda::sm90 {

template <class Traits>
class LatentSoftmax {
 public:
  using Shared = typename Traits::Shared;

  __device__ __forceinline__ LatentSoftmax(const DecodeParams& params, Shared& shared,
                                           int warpgroup)
      : params_(params),
        shared_(shared),
        warpgroup_(warpgroup),
        thread_(thread_in_warpgroup()),
        score_{{params.scale_log2}, kSlack / params.scale_log2} {}

 protected:
  using KvState = typename Traits::KvState;
  using View = QueriesByKeys<Traits::kTileN / 2>;
  using Scores = typename View::Scores;
  using Probabilities = uint32_t[Traits::kTileN / 4];  // packed, as a product takes them
  static constexpr float kSlack = 8.f;  // in powers of two: p stays far from the largest float16

  struct Sums {
    float out[Traits::kDims / 2];
    float max[2], sum[2], largest[2];  // sum, and the largest score: over this thread's keys

    __device__ __forceinline__ void clear() {
      max[0] = max[1] = largest[0] = largest[1] = -kInfinity;
      sum[0] = sum[1] = 0.f;
#pragma unroll
      for (float& x : out) x = 0.f;
    }
  };

  static __device__ __forceinline__ void sync_all() {
    named_barrier_sync(int(DecodeBarrier::kAllConsumers), Traits::kThreads);
  }

  __device__ __forceinline__ void sync_warpgroup() const {
    named_barrier_sync(
        int(warpgroup_ == 0 ? DecodeBarrier::kConsumers : DecodeBarrier::kSecondConsumers),
        kWarpgroupThreads);
  }

  // Rows that producers gathered came through the generic proxy.
  __device__ __forceinline__ void wait_for(uint64_t& full, uint32_t phase, const char* name) const {
    wait(&full, phase, name);
    if (params_.box_rows == 0) fence_shared_for_async_proxy();
  }

  // ---- a tile ----

  // Turns the scores of a tile into P, in registers and for the other warpgroup. P of the maximum
  // so far is computed beside the test whether that serves, and seldom once more.
  __device__ __forceinline__ void softmax(const DecodeRun& run, const TileMask::Range& unmasked,
                                          int tile, int stage, Scores& r_s, Probabilities& r_p,
                                          Sums& sums) const {
    const int first_key = tile * Traits::kTileN;
    const View view{row_of(0), first_key + thread_ % 4 * 2};
    if (params_.capped) apply_mod(ModOf<ScoreKind::kSoftcap>{params_.softcap}, view, r_s);
    if (tile < unmasked.begin || tile >= unmasked.end) {
      mask(run, view, r_s);
      clear_hidden_values<Traits>(
          run, first_key, shared_.v[stage], thread_, kWarpgroupThreads, [] {},
          [&] { sync_warpgroup(); });
    }
    keep_largest<View>(r_s, sums.largest);
    const bool within = sums.largest[0] <= score_.limit(sums.max[0]) &&
                        sums.largest[1] <= score_.limit(sums.max[1]);
    float added[2];
    weigh(view, r_s, sums, r_p, added);
    const bool raises = __any_sync(~0u, !within);
    if (raises) {
      raise_max(sums);
      weigh(view, r_s, sums, r_p, added);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (thread_ % 4 == 0) shared_.max[stage][row_of(h)] = sums.max[h];
    }
    sums.sum[0] += added[0];
    sums.sum[1] += added[1];
    store_probabilities(r_p, shared_.k[stage]);
    if (thread_ % 32 == 0) shared_.raised[stage][thread_ / 32] = raises;
    __syncwarp();
    if (thread_ % 32 == 0) arrive(&shared_.p_full[stage]);
  }

  // The maximum to which P of the other warpgroup refers becomes this one's.
  __device__ __forceinline__ void take_max(int stage, Sums& sums) const {
    if (!__any_sync(~0u, shared_.raised[stage][thread_ / 32])) return;
    const float max[2] = {shared_.max[stage][row_of(0)], shared_.max[stage][row_of(1)]};
    rescale(max, sums);
  }

  // ---- the end of a run ----

  __device__ __forceinline__ void end_run(const DecodeRun& run, Sums& sums,
                                          LatentPartials& partials) {
    end_sums(sums);
    if (run.is_whole) return store_result(run, sums);
    const bool begins = run.has_first;
    if (begins) {
      partials.begins = 1;
      partials.batch = run.batch;
      partials.head_group = run.head_group;
      partials.q_row = run.q_row;
      partials.rows = run.rows;
    } else {
      partials.continues = 1;
      partials.ends = run.ends_item;
    }
    store_partial(run, sums, begins ? LatentSlot::kBegun : LatentSlot::kContinued);
  }

  const DecodeParams& params_;
  Shared& shared_;
  const int warpgroup_, thread_;
  const Score<ScoreKind::kPlain> score_;  // of raw scores, or capped ones in base 2

 private:
  __device__ __forceinline__ int row_of(int h) const {
    return thread_ / 32 * 16 + thread_ % 32 / 4 + 8 * h;
  }

  __device__ __forceinline__ void mask(const DecodeRun& run, const View& view, Scores& r_s) const {
    const RowKeys rows[2] = {shared_.row_keys[view.row(0)], shared_.row_keys[view.row(1)]};
    mask_decode_scores(params_, run, view, r_s, [&](int r) { return rows[r]; });
  }

  // P = 2^(c·s − c·m), rounded, and what it adds to the sums.
  __device__ __forceinline__ void weigh(const View& view, const Scores& r_s, const Sums& sums,
                                        Probabilities& r_p, float (&added)[2]) const {
    const float shift[2] = {shift_under(score_, sums.max[0]), shift_under(score_, sums.max[1])};
    added[0] = added[1] = 0.f;
#pragma unroll
    for (int i = 0; i < Traits::kTileN / 4; ++i) {
      const int h = i % 2;
      float p[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const ScorePlace<View> at{view, h, View::key_of(2 * i + e)};
        p[e] = exp2_approx(score_.log2_above(r_s[2 * i + e], shift[h], at));
      }
      added[h] += p[0] + p[1];
      r_p[i] = pack2<Traits::kElement>(p[0], p[1]);
    }
  }

  __device__ __forceinline__ void store_probabilities(const Probabilities& r_p,
                                                      uint8_t* shared_p) const {
    using PTile = typename Traits::PTile;
    const int lane = thread_ % 32, row = thread_ / 32 * 16 + lane % 16;
    const uint32_t base = uint32_t(__cvta_generic_to_shared(shared_p));
#pragma unroll
    for (int i = 0; i < Traits::kTileN / 4; i += 4)  // rows r and r + 8 of eight keys, of the next
      stmatrix_x4(base + PTile::offset(row, 4 * i + lane / 16 * 8), r_p[i], r_p[i + 1], r_p[i + 2],
                  r_p[i + 3]);
    fence_shared_for_async_proxy();
  }

  // Makes maxima, none lower than before, this thread's rows'.
  __device__ __forceinline__ void rescale(const float (&max)[2], Sums& sums) const {
    float alpha[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float old = sums.max[h];
      alpha[h] = rescaling(score_, old, max[h], shift_under(score_, max[h]));
      sums.max[h] = max[h];
      sums.sum[h] *= alpha[h];
    }
#pragma unroll
    for (int i = 0; i < Traits::kDims / 2; ++i) sums.out[i] *= alpha[i / 2 % 2];
  }

  // Raises the maxima that a tile demands, and only those, so that no row's bits depend on others.
  // A score that demands it is the largest so far.
  __device__ __forceinline__ void raise_max(Sums& sums) const {
    float max[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      max[h] = raised_max(sums.max[h], score_.limit(sums.max[h]), quad_max(sums.largest[h]));
    rescale(max, sums);
  }

  // From numbers of threads to those of rows, and maxima and largest scores in base 2.
  __device__ __forceinline__ void end_sums(Sums& sums) const {
    const bool largest_too = wants_largest<Traits>(params_);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = quad_sum(sums.sum[h]);
      if (thread_ % 4 == 0) shared_.sums[warpgroup_][row_of(h)] = sum;
      if (!largest_too) continue;
      const float largest = quad_max(sums.largest[h]);
      if (thread_ % 4 == 0) shared_.largest[warpgroup_][row_of(h)] = largest;
    }
    sync_all();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sums.sum[h] = shared_.sums[0][row_of(h)] + shared_.sums[1][row_of(h)];
      if (sums.max[h] != -kInfinity) sums.max[h] = score_.shift_of(sums.max[h]);
      if (!largest_too) continue;
      const float x = fmaxf(shared_.largest[0][row_of(h)], shared_.largest[1][row_of(h)]);
      sums.largest[h] = x == -kInfinity ? x : score_.shift_of(x);
    }
  }

  __device__ __forceinline__ int first_dim() const {
    return warpgroup_ * Traits::kDims + thread_ % 4 * 2;
  }

  __device__ __forceinline__ void store_result(const DecodeRun& run, Sums& sums) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const QueryRow at = query_row(params_, run, row_of(h));
      const RowResult result =
          finish_row(params_, sums.max[h], sums.sum[h], sums.largest[h], at.head);
      if (warpgroup_ == 0 && thread_ % 4 == 0 && row_of(h) < run.rows)
        store_values<Traits::kMaxLogits>(params_, run, at, result.values);
#pragma unroll
      for (int i = 2 * h; i < Traits::kDims / 2; i += i % 2 == 0 ? 1 : 3)
        sums.out[i] *= result.inverse_sum;
    }
    if (params_.out_float32)
      store_float32(run, sums);
    else
      store_16_bit(run, sums);
  }

  // Straight to memory: OutRow::store_pair() would ask for the type at every pair, in code that is
  // cold.
  __device__ __forceinline__ void store_float32(const DecodeRun& run, const Sums& sums) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row_of(h) >= run.rows) continue;
      const OutRow<Traits> out(params_, run, query_row(params_, run, row_of(h)));
      float* const to = static_cast<float*>(params_.out) + out.begin + first_dim();
#pragma unroll
      for (int j = 0; j < Traits::kDims / 8; ++j) {
        to[8 * j] = sums.out[4 * j + 2 * h];
        to[8 * j + 1] = sums.out[4 * j + 2 * h + 1];
      }
    }
  }

  // By way of shared memory, where nobody reads Q any more: a warp stores its rows one by one.
  __device__ __forceinline__ void store_16_bit(const DecodeRun& run, const Sums& sums) const {
    using Tile = SharedTile<16, Traits::kDims>;
    const int lane = thread_ % 32, first_row = thread_ / 32 * 16;
    uint8_t* const tile = shared_.q + (warpgroup_ * 4 + thread_ / 32) * Tile::kBytes;
    const uint32_t base = uint32_t(__cvta_generic_to_shared(tile));
#pragma unroll
    for (int i = 0; i < Traits::kDims / 2; i += 8) {
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        packed[j] = pack2<Traits::kElement>(sums.out[i + 2 * j], sums.out[i + 2 * j + 1]);
      stmatrix_x4(base + Tile::offset(lane % 16, 2 * i + lane / 16 * 8), packed[0], packed[1],
                  packed[2], packed[3]);
    }
    sync_warpgroup();
    const OutRow<Traits> out(params_, run, query_row(params_, run, first_row + lane % 16));
    const int rows = min(run.rows - first_row, 16), dim = warpgroup_ * Traits::kDims + 8 * lane;
#pragma unroll 4
    for (int row = 0; row < rows; ++row)
      store_piece(static_cast<uint16_t*>(params_.out) + __shfl_sync(~0u, out.begin, row) + dim,
                  *reinterpret_cast<const uint4*>(tile + Tile::offset(row, 8 * lane)));
    sync_all();  // the next queries come there
  }

  // Eight elements, aligned or not.
  static __device__ __forceinline__ void store_piece(uint16_t* to, const uint4& piece) {
    if (reinterpret_cast<unsigned long long>(to) % sizeof(piece) == 0) {
      *reinterpret_cast<uint4*>(to) = piece;
      return;
    }
    const uint32_t pairs[] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = uint16_t(pairs[i]);
      to[2 * i + 1] = uint16_t(pairs[i] >> 16);
    }
  }

  __device__ __forceinline__ void store_partial(const DecodeRun& run, const Sums& sums,
                                                LatentSlot slot) const {
    const int block = partial_block(params_);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of(h);
      if (row >= run.rows) continue;
      float* const out = partial_row(params_, params_.blocks, block, slot, row) + first_dim();
#pragma unroll
      for (int j = 0; j < Traits::kDims / 8; ++j)
        *reinterpret_cast<float2*>(out + 8 * j) = {sums.out[4 * j + 2 * h],
                                                   sums.out[4 * j + 2 * h + 1]};
      if (warpgroup_ != 0 || thread_ % 4 != 0) continue;
      *partial_sum(params_, params_.blocks, block, slot, row) = {sums.max[h], sums.sum[h]};
      if (wants_largest<Traits>(params_))
        *partial_largest(params_, params_.blocks, block, slot, row) = sums.largest[h];
    }
  }
};

}  // namespace flash3::cuda::sm90
