// SPDX-License-Identifier: Apache-2.0
// The consumer warpgroup of e4m3 keys and values, which brings them to float16 on their way to the
// tensor cores (products_fp8.cuh). Two blocks share a multiprocessor, so that one's products run
// under the other's softmax, and neither overlaps anything itself. So each product and the softmax
// stand in the code once: a short call's time is that of fetching its instructions.
#pragma once

#include "cuda/sm90/decode/products_fp8.cuh"
#include "cuda/sm90/decode/queries_fp8.cuh"
#include "cuda/sm90/decode/splits.cuh"

namespace flash3::cuda::sm90 {

template <class Traits>
class Fp8DecodeConsumer : DecodeSplits<Traits> {
  using Base = DecodeSplits<Traits>;
  using Base::cap_scores;
  using Base::clear_hidden_values;
  using Base::kColumns;
  using Base::kDimBlocks;
  using Base::kKeyBlocks;
  using Base::kRows;
  using Base::mask_scores;
  using Base::params_;
  using Base::scales_of;
  using Base::shared_;
  using Base::state_;
  using Base::store_probabilities;
  using Base::thread_;
  using typename Base::KvState;
  using typename Base::Partials;
  using typename Base::Scores;
  using typename Base::Sums;
  using typename Base::View;

 public:
  using Base::Base;
  using Base::sync_consumers;

  __device__ __forceinline__ void run() {
    for (RunReader runs(shared_.runs); runs.next(); runs.release()) {
      const DecodeRun& run = runs.run();
      load_queries_fp8<Traits>(params_, run, shared_, thread_);
      sync_consumers();
      Partials partials;
      compute(run, partials);
      this->end_run(run, partials);
    }
  }

 private:
  __device__ __forceinline__ void compute(const DecodeRun& run, Partials& partials) {
    const int begin = uniform(run.tiles.begin), end = uniform(run.tiles.end),
              split_tiles = uniform(run.split_tiles);
    Sums sums;
    int split = begin / split_tiles, split_end = (split + 1) * split_tiles;
    bool is_first = true;  // of a split
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      Scores r_s;
      compute_scores(r_s);
      scale_scores(r_s);
      softmax(run, tile, r_s, sums, is_first);
      add_output(tile, sums);
      state_.advance();
      is_first = tile + 1 == split_end || tile + 1 == end;
      if (!is_first) continue;
      this->end_split(run, split++, tile + 1 == end, sums, partials);
      split_end += split_tiles;
    }
  }

  __device__ __forceinline__ void compute_scores(Scores& r_s) {
    wait(&shared_.k_barriers.full[state_.stage], state_.phase, "k_full");
    products_.issue_scores(r_s, shared_.k[state_.stage],
                           descriptor(Traits::QTile::kMajorK, shared_.q[0]), thread_);
    __syncwarp();  // all lanes have read K
    release(&shared_.k_barriers.empty[state_.stage], thread_);
    wgmma_wait<0>();
#pragma unroll
    for (int b = 0; b < kKeyBlocks; ++b) fence_operand(r_s[b]);
  }

  __device__ __forceinline__ void add_output(int tile, Sums& sums) {
    wait(&shared_.v_barriers.full[state_.stage], state_.phase, "v_full");
    products_.issue_output(sums.out, shared_.v[state_.stage],
                           descriptor(Traits::PTile::kMajorK, shared_.p[0][tile % 2]), thread_);
    __syncwarp();
    release(&shared_.v_barriers.empty[state_.stage], thread_);
    wgmma_wait<0>();
#pragma unroll
    for (int b = 0; b < kDimBlocks; ++b) fence_operand(sums.out[b]);
  }

  // Of e4m3, of the tile that state_ is at: to scores in base 2 that hold the scale of V.
  __device__ __forceinline__ void scale_scores(Scores& r_s) const {
    wait(&shared_.fp8.scales_full[state_.stage], state_.phase, "scales_full");
#pragma unroll
    for (int b = 0; b < kKeyBlocks; ++b)
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i)
        r_s[b][i] *=
            shared_.fp8.factors[i / 4 * 8 + thread_ % 4 * 2 + i % 2] * scales_of(b, i / 2 % 2).k;
    if (params_.capped) cap_scores(r_s);
#pragma unroll
    for (int b = 0; b < kKeyBlocks; ++b)
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) r_s[b][i] += scales_of(b, i / 2 % 2).log2_v;
  }
  // Turns the scores of a tile into P in shared memory.
  __device__ __forceinline__ void softmax(const DecodeRun& run, int tile, Scores& r_s, Sums& sums,
                                          bool is_first) {
    const int first_key = tile * Traits::kTileN;
    const View view = this->view_of(first_key);
    if (tile < run.unmasked.begin || tile >= run.unmasked.end) {
      mask_scores(run, view, r_s);
      clear_hidden_values(run, first_key);
    }
    if (is_first) sums.clear();
    const bool within = this->all_within(r_s, sums);
    float added[kColumns];
    bool raises = is_first;
#pragma unroll 1
    for (bool again = true; again;) {
      if (raises) this->template raise_max<false>(r_s, sums);
      store_probabilities(view, r_s, sums.max, added, shared_.p[0][tile % 2]);
      fence_shared_for_async_proxy();
      again = named_barrier_any(this->barrier(), kWarpgroupThreads, !within) && !raises;
      raises = true;
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sums.sum[c] += added[c];
  }

  Fp8Products<Traits> products_;
};

}  // namespace flash3::cuda::sm90
