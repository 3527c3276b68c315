// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup of 16-bit keys and values: products and online softmax of the block's runs,
// key tile by key tile. Two share an item's rows and wait for each other nowhere, unless values are
// cleared.
//
//   tile j:  softmax of S_j | O += Vᵀ·P_{j−1} runs     then S_{j+1} = K·Qᵀ and O += Vᵀ·P_j are
//   issued
//
// The maximum follows lazily (device/score/softmax.cuh): each tile is first exponentiated with the
// maximum as it is, and only where one of the threads says that it does not do, again.
#pragma once

#include "cuda/sm90/decode/products.cuh"
#include "cuda/sm90/decode/queries.cuh"
#include "cuda/sm90/decode/splits.cuh"

namespace flash3::cuda::sm90 {

template <class Traits>
class DecodeConsumer : DecodeSplits<Traits> {
  using Base = DecodeSplits<Traits>;
  using Base::cap_scores;
  using Base::clear_hidden_values;
  using Base::consumer_;
  using Base::kColumns;
  using Base::kDimBlocks;
  using Base::kKeyBlocks;
  using Base::mask_scores;
  using Base::params_;
  using Base::shared_;
  using Base::state_;
  using Base::store_probabilities;
  using Base::thread_;
  using Base::wait_for;
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
      load_queries<Traits>(params_, run, shared_, consumer_, thread_);
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
    if (begin < end) {
      const Descriptor q = descriptor(Traits::QTile::kMajorK, shared_.q[consumer_]);
      Scores r_s;
      Sums sums;
      int split = begin / split_tiles, split_end = (split + 1) * split_tiles;
      wait_for(shared_.k_barriers.full[state_.stage], state_.phase, "k_full");
      issue_scores<Traits>(r_s, key_tile(state_.stage), q);
      wgmma_wait<0>();
      end_scores(r_s, state_.stage);
      softmax<true>(run, begin, r_s, sums, partials);
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
          softmax<false>(run, tile + 1, r_s, sums, partials);
        } else {
          end_output(sums, stage_before_);
          this->end_split(run, split++, false, sums, partials);
          split_end += split_tiles;
          softmax<true>(run, tile + 1, r_s, sums, partials);
        }
      }
      issue_output_of(end - 1, sums);
      end_output(sums, state_.stage);
      state_.advance();
      this->end_split(run, split, true, sums, partials);
    }
  }

  // ---- one tile ----

  __device__ __forceinline__ Descriptor key_tile(int stage) const {
    return descriptor(Traits::KTile::kMajorK, shared_.k[stage]);
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
                         descriptor(Traits::PTile::kMajorK, shared_.p[consumer_][tile % 2]));
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
  __device__ __forceinline__ void softmax(const DecodeRun& run, int tile, Scores& r_s, Sums& sums,
                                          Partials& partials) const {
    const int first_key = tile * Traits::kTileN;
    const View view = this->view_of(first_key);
    if constexpr (Traits::kCapped) cap_scores(r_s);
    if (tile < run.unmasked.begin || tile >= run.unmasked.end) {
      mask_scores(run, view, r_s);
      clear_hidden_values(run, first_key);
    }
    uint8_t* const p = shared_.p[consumer_][tile % 2];
    float added[kColumns];
    bool must_raise = true;
    if constexpr (kFirst) sums.clear();
    const bool within = this->take_largest(r_s, sums, partials.largest);
    if constexpr (!kFirst) {
      store_probabilities(view, r_s, sums.max, added, p);
      fence_shared_for_async_proxy();
      end_output(sums, stage_before_);
      must_raise = named_barrier_any(this->barrier(), kWarpgroupThreads, !within);
    }
    if (must_raise) {
      this->template raise_max<kFirst>(r_s, sums);
      store_probabilities(view, r_s, sums.max, added, p);
      fence_shared_for_async_proxy();
      sync_consumers();
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sums.sum[c] += added[c];
  }

  int stage_before_ = 0;
};

}  // namespace flash3::cuda::sm90
