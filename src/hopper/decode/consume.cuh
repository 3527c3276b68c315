// SPDX-License-Identifier: Apache-2.0
// The consumer warpgroup: products and online softmax of the block's runs, key tile by key tile.
//
//   tile j:  softmax of S_j | O += Vᵀ·P_{j−1} runs     then S_{j+1} = K·Qᵀ and O += Vᵀ·P_j are
//   issued
//
// Keys are the rows of S (traits.cuh): a query row's scores lie in all four warps, and what depends
// on all of them goes through shared memory. The maximum follows lazily
// (device/online_softmax.cuh): each tile is first exponentiated with the maximum as it is, and only
// where one of the threads says that it does not do, again.
#pragma once

#include "hopper/decode/products.cuh"
#include "hopper/decode/queries.cuh"
#include "hopper/decode/share.cuh"
#include "hopper/device/softcap.hpp"
#include "hopper/device/tma.cuh"

namespace flash3::hopper {

__device__ __forceinline__ void sync_consumers() {
  named_barrier_sync(int(DecodeBarrier::kConsumers), kWarpgroupThreads);
}

template <class Traits>
class DecodeConsumer {
  using Shared = typename Traits::Shared;
  using Sums = RowSums<Traits>;
  using KvState = typename Traits::KvState;
  static constexpr int kRows = Traits::kRows, kColumns = Traits::kColumns,
                       kKeyBlocks = Traits::kKeyBlocks, kDimBlocks = Traits::kDimBlocks;
  static constexpr float kSlack = 8.f;  // in powers of two: p stays far from the largest float16

 public:
  using Scores = float[kKeyBlocks][kRows / 2];

  __device__ __forceinline__ DecodeConsumer(const DecodeParams& params, Shared& shared)
      : params_(params), shared_(shared), thread_(thread_in_warpgroup()) {}

  __device__ __forceinline__ void run() {
    for (RunReader runs(shared_.runs); runs.next(); runs.release()) {
      const DecodeRun& run = runs.run();
      load_queries<Traits>(params_, run, shared_, thread_);
      sync_consumers();
      Parts parts;
      compute(run, parts);
      if (run.is_whole)
        store_whole(run, parts);
      else
        store_parts(run, parts);
    }
    arrive(&shared_.runs.ended);
  }

 private:
  // What a run's splits have been merged into so far.
  struct Parts {
    Sums fold, all;
    bool no_fold = true, no_all = true;  // nothing there yet
    int slot = 0;                        // of the next part, of a run that begins inside the item
  };

  __device__ __forceinline__ void compute(const DecodeRun& run, Parts& parts) {
    const int begin = uniform(run.tiles.begin), end = uniform(run.tiles.end),
              split_tiles = uniform(run.split_tiles);
    if (begin < end) {
      const Descriptor q = descriptor(Traits::QTile::kMajorK, shared_.q);
      Scores r_s;
      Sums sums;
      int split = begin / split_tiles, split_end = (split + 1) * split_tiles;
      wait_for(shared_.k_barriers.full[state_.stage], state_.phase, "k_full");
      issue_scores<Traits>(r_s, key_tile(state_.stage), q);
      wgmma_wait<0>();
      end_scores(r_s, state_.stage);
      softmax<true>(run, begin, r_s, sums);
      for (int tile = begin; tile + 1 < end; ++tile) {
        KvState next = state_;
        next.advance();
        wait_for(shared_.k_barriers.full[next.stage], next.phase, "k_full");
        issue_scores<Traits>(r_s, key_tile(next.stage), q);
        issue_output_of(tile, sums);
        wgmma_wait<1>();
        end_scores(r_s, next.stage);
        stage_before_ = state_.stage;
        state_ = next;
        if (tile + 1 < split_end) {
          softmax<false>(run, tile + 1, r_s, sums);
        } else {
          end_output(sums, stage_before_);
          end_split(run, split++, sums, parts);
          split_end += split_tiles;
          softmax<true>(run, tile + 1, r_s, sums);
        }
      }
      issue_output_of(end - 1, sums);
      end_output(sums, state_.stage);
      state_.advance();
      end_split(run, split, sums, parts);
    }
  }

  // ---- one tile ----

  __device__ __forceinline__ Descriptor key_tile(int stage) const {
    return descriptor(Traits::KTile::kMajorK, shared_.k[stage]);
  }

  // Rows that producers gathered came through the generic proxy.
  __device__ __forceinline__ void wait_for(uint64_t& full, uint32_t phase, const char* name) const {
    wait(&full, phase, name);
    if (params_.box_rows == 0) fence_shared_for_async_proxy();
  }

  // The scores are there: their K goes back.
  __device__ __forceinline__ void end_scores(Scores& r_s, int stage) const {
#pragma unroll
    for (int b = 0; b < kKeyBlocks; ++b) fence_operand(r_s[b]);
    release(&shared_.k_barriers.empty[stage], thread_);
  }

  __device__ __forceinline__ void issue_output_of(int tile, Sums& sums) const {
    wait_for(shared_.v_barriers.full[state_.stage], state_.phase, "v_full");
    issue_output<Traits>(sums.out, descriptor(Traits::VTile::kMajorMN, shared_.v[state_.stage]),
                         descriptor(Traits::PTile::kMajorK, shared_.p[tile % 2]));
  }

  // Waits for the product with the V of a stage, which goes back.
  __device__ __forceinline__ void end_output(Sums& sums, int stage) const {
    wgmma_wait<0>();
#pragma unroll
    for (int b = 0; b < kDimBlocks; ++b) fence_operand(sums.out[b]);
    release(&shared_.v_barriers.empty[stage], thread_);
  }

  // Turns the scores of a tile into P in shared memory. kFirst: of a split; otherwise the product
  // of the tile before, whose V is in stage_before_, is done when this ends, for all consumers.
  template <bool kFirst>
  __device__ __forceinline__ void softmax(const DecodeRun& run, int tile, Scores& r_s,
                                          Sums& sums) const {
    const int first_key = tile * Traits::kTileN;
    if constexpr (Traits::kCapped) cap_scores(r_s);
    if (tile < run.unmasked.begin || tile >= run.unmasked.end) {
      mask_scores(r_s, first_key);
      clear_hidden_values(run, first_key);
    }
    uint8_t* const p = shared_.p[tile % 2];
    float added[kColumns];
    bool must_raise = true;
    if constexpr (kFirst) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums.max[c] = -kInfinity, sums.sum[c] = 0.f;
      clear_output(sums);
    } else {
      bool within = true;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const float limit = limit_of(sums.max[c]);
#pragma unroll
        for (int b = 0; b < kKeyBlocks; ++b)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            within &= r_s[b][c / 2 * 4 + 2 * h + c % 2] <= limit;  // a NaN is not
      }
      store_probabilities(r_s, sums.max, added, p);
      fence_shared_for_async_proxy();
      end_output(sums, stage_before_);
      must_raise = named_barrier_any(int(DecodeBarrier::kConsumers), kWarpgroupThreads, !within);
    }
    if (must_raise) {
      raise_max<kFirst>(r_s, sums);
      store_probabilities(r_s, sums.max, added, p);
      fence_shared_for_async_proxy();
      sync_consumers();
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sums.sum[c] += added[c];
  }

  // To capped scores in base 2: softcap · tanh(softmax_scale · s / softcap) · log2 e.
  __device__ __forceinline__ void cap_scores(Scores& r_s) const {
    const Softcap& cap = params_.softcap;
#pragma unroll
    for (int b = 0; b < kKeyBlocks; ++b)
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        float& s = r_s[b][i];
        const float size = fabsf(s);  // a NaN stays one
        if (size > cap.range) s = copysignf(cap.remapped(exp2_approx(size * cap.log2_u)), s);
        s *= cap.factor(s);
      }
  }

  // The key, from the tile's first, of elements 4j + 2h + e of a block of scores.
  __device__ __forceinline__ int key_of(int block, int h) const {
    return 64 * block + thread_ / 32 * 16 + thread_ % 32 / 4 + 8 * h;
  }

  __device__ __forceinline__ void mask_scores(Scores& r_s, int first_key) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const RowKeys keys = shared_.row_keys[c / 2 * 8 + thread_ % 4 * 2 + c % 2];
#pragma unroll
      for (int b = 0; b < kKeyBlocks; ++b)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int key = first_key + key_of(b, h);
          if (key < keys.first || key >= keys.end) r_s[b][c / 2 * 4 + 2 * h + c % 2] = -kInfinity;
        }
    }
  }

  // Keys that no query sees have weight 0, but 0 · NaN is NaN. The barrier that follows before the
  // product orders this.
  __device__ __forceinline__ void clear_hidden_values(const DecodeRun& run, int first_key) const {
    using VTile = typename Traits::VTile;
    constexpr int kPieces = VTile::kRowBytes / 16;
    const int begin = run.keys.begin - first_key, end = run.keys.end - first_key;
    if (begin <= 0 && end >= Traits::kTileN) return;
    wait_for(shared_.v_barriers.full[state_.stage], state_.phase, "v_full");
    uint8_t* const tile = const_cast<uint8_t*>(shared_.v[state_.stage]);
    for (int i = thread_; i < Traits::kTileN * kPieces; i += kWarpgroupThreads) {
      const int row = i / kPieces;
      if (row >= begin && row < end) continue;
#pragma unroll
      for (int chunk = 0; chunk < VTile::kChunks; ++chunk)
        *reinterpret_cast<uint4*>(tile + chunk * VTile::kChunkBytes + i * 16) = {};
    }
    fence_shared_for_async_proxy();
  }

  // ---- the softmax: columns are query rows ----

  // The largest score that this maximum serves; both are raw, or capped ones in base 2.
  __device__ __forceinline__ float limit_of(float max) const {
    return max + kSlack / params_.scale_log2;
  }
  __device__ __forceinline__ float shift_of(float max) const {
    return max == -kInfinity ? 0.f : max * params_.scale_log2;
  }

  // P = 2^(c·s − c·m), rounded, to shared memory; added: this thread's sums of them.
  __device__ __forceinline__ void store_probabilities(const Scores& r_s,
                                                      const float (&max)[kColumns],
                                                      float (&added)[kColumns],
                                                      uint8_t* shared_p) const {
    using PTile = typename Traits::PTile;
    constexpr int kMatrices = kRows / 4;  // 8×8, of a block: (columns, h)
    const int lane = thread_ % 32;
    float shift[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) shift[c] = shift_of(max[c]), added[c] = 0.f;
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
          p[e] = exp2_approx(fmaf(r_s[b][2 * n + e], params_.scale_log2, -shift[c]));
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
      if (lane < 4) shared_.reduction[warp][c / 2 * 8 + lane * 2 + c % 2] = x[c];
    sync_consumers();
  }
  __device__ __forceinline__ float of_warp(int warp, int c) const {
    return shared_.reduction[warp][c / 2 * 8 + thread_ % 4 * 2 + c % 2];
  }

  // Raises the maxima that a tile demands, and only those, so that no row's bits depend on others.
  template <bool kFirst>
  __device__ __forceinline__ void raise_max(const Scores& r_s, Sums& split) const {
    float largest[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      largest[c] = -kInfinity;
#pragma unroll
      for (int b = 0; b < kKeyBlocks; ++b)
        largest[c] =
            fmaxf(largest[c], fmaxf(r_s[b][c / 2 * 4 + c % 2], r_s[b][c / 2 * 4 + 2 + c % 2]));
    }
    // Before it is written again all have passed the barrier behind P.
    reduce_lanes(largest, [](float x, float y) { return fmaxf(x, y); });
    exchange(largest);
    float alpha[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      largest[c] = fmaxf(fmaxf(of_warp(0, c), of_warp(1, c)), fmaxf(of_warp(2, c), of_warp(3, c)));
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float old = split.max[c];
      if (!(largest[c] <= limit_of(old))) split.max[c] = fmaxf(old, largest[c]);
      alpha[c] = split.max[c] == old
                     ? 1.f
                     : exp2_approx(fmaf(old, params_.scale_log2, -shift_of(split.max[c])));
      split.sum[c] *= alpha[c];
    }
    if constexpr (!kFirst) {
#pragma unroll
      for (int b = 0; b < kDimBlocks; ++b)
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) split.out[b][i] *= alpha[Sums::column_of(i)];
    }
  }

  // ---- splits and parts ----

  __device__ __forceinline__ void store(const Sums& sums, int rows, int slot) const {
    store_part<Traits>(sums, part_at<Traits>(params_, blockIdx.x * params_.slots + slot),
                       params_.ticket, rows, thread_);
  }

  // A split as fold.cuh has it: sums of the warp's keys, and the maximum in base 2.
  __device__ __forceinline__ void end_split(const DecodeRun& run, int index, Sums& split,
                                            Parts& parts) const {
    reduce_lanes(split.sum, [](float x, float y) { return x + y; });
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (split.max[c] != -kInfinity) split.max[c] *= params_.scale_log2;
    const int in_item = index - run.splits.begin;
    const bool ends_fold =
        in_item % kSplitsPerFold == kSplitsPerFold - 1 || index + 1 == run.splits.end;
    const bool has_first = run.has_first;
    // Part of a fold that another block has begun.
    const bool is_single = !has_first && in_item / kSplitsPerFold * kSplitsPerFold <
                                             run.first_split - run.splits.begin;
    fold<Traits>(parts.fold, split, parts.no_fold);
    parts.no_fold = ends_fold || is_single;
    if (!parts.no_fold) return;
    if (has_first) {
      fold<Traits>(parts.all, parts.fold, parts.no_all);
      parts.no_all = false;
    } else {
      store(parts.fold, run.rows, parts.slot++);
    }
  }

  __device__ __forceinline__ void store_whole(const DecodeRun& run, Parts& parts) const {
    if (parts.no_all) set_unseen(parts.all);
    exchange(parts.all.sum);
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      parts.all.sum[c] = sum_of_warps({of_warp(0, c), of_warp(1, c), of_warp(2, c), of_warp(3, c)});
    store_result<Traits>(params_, run, parts.all, run.rows, thread_);
  }

  // What remains at the end of a run that others share: finished folds and the one begun.
  __device__ __forceinline__ void store_parts(const DecodeRun& run, Parts& parts) const {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      if (!parts.no_all)
        store(parts.all, run.rows,
              run.has_first ? params_.slots - (i == 0 ? kFirstFoldsSlot : kBegunFoldSlot)
                            : parts.slot);
      parts.all = parts.fold;
      parts.no_all = parts.no_fold;
    }
  }

  static __device__ __forceinline__ void set_unseen(Sums& sums) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sums.max[c] = -kInfinity, sums.sum[c] = 0.f;
    clear_output(sums);
  }
  static __device__ __forceinline__ void clear_output(Sums& sums) {
#pragma unroll
    for (int b = 0; b < kDimBlocks; ++b)
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) sums.out[b][i] = 0.f;
  }

  const DecodeParams& params_;
  Shared& shared_;
  const int thread_;
  KvState state_{};
  int stage_before_ = 0;
};

}  // namespace flash3::hopper
