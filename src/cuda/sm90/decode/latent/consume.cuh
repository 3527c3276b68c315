// SPDX-License-Identifier: Apache-2.0
// The two consumer warpgroups. They take turns: one has the scores and the softmax of the even
// tiles of a run, the other of the odd ones. O is halved by head dims, so each multiplies every
// tile's P, its own from registers and the other's from shared memory:
//
//   own tile n:  O += P_{n−1}·V_{n−1} | S_n | softmax of S_n | O += P_n·V_n
//
// The tile n−1 goes back before S_n is issued: with two tiles in shared memory, what counts is how
// soon the next one may come.
//
// The maximum follows lazily, as in the other decode kernels (decode/consume.cuh), and goes from
// warpgroup to warpgroup with P.
#pragma once

#include "cuda/sm90/decode/latent/queries.cuh"
#include "cuda/sm90/decode/latent/softmax.cuh"

namespace flash3::cuda::sm90 {

template <class Traits>
class LatentConsumer : LatentSoftmax<Traits> {
  using Base = LatentSoftmax<Traits>;
  using Base::params_;
  using Base::shared_;
  using Base::sync_all;
  using Base::thread_;
  using Base::wait_for;
  using Base::warpgroup_;
  using typename Base::KvState;
  using typename Base::Probabilities;
  using typename Base::Scores;
  using typename Base::Sums;
  using HalfTile = typename Traits::HalfTile;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    LatentPartials partials{};
    for (RunReader runs(shared_.runs); runs.next(); runs.release()) {
      const DecodeRun& run = runs.run();
      load_latent_queries<Traits>(params_, run, shared_, warpgroup_ * kWarpgroupThreads + thread_);
      sync_all();
      Sums sums;
      sums.clear();
      compute(run, sums);
      this->end_run(run, sums, partials);
    }
    if (warpgroup_ == 0 && thread_ == 0 && params_.slots > 0)
      partials_of_block(params_, partial_block(params_)) = partials;
  }

 private:
  __device__ __forceinline__ void compute(const DecodeRun& run, Sums& sums) {
    const int begin = uniform(run.tiles.begin), end = uniform(run.tiles.end);
    if (begin >= end) return;
    const TileMask::Range unmasked{uniform(run.unmasked.begin), uniform(run.unmasked.end)};
    int tile = begin + warpgroup_;
    if (warpgroup_ == 0) {
      compute_own(run, unmasked, tile, sums);
      tile += 2;
    }
    for (; tile < end; tile += 2) {
      add_others_output(sums);
      compute_own(run, unmasked, tile, sums);
    }
    if (tile == end) add_others_output(sums);
  }

  // An own tile: scores, softmax and O.
  __device__ __forceinline__ void compute_own(const DecodeRun& run, const TileMask::Range& unmasked,
                                              int tile, Sums& sums) {
    Scores r_s;
    Probabilities r_p;
    issue_scores(r_s);
    wgmma_wait<0>();
    fence_operand(r_s);
    this->softmax(run, unmasked, tile, state_.stage, r_s, r_p, sums);
    issue_add_ab<Traits::kElement, HalfTile>(sums.out, r_p, values());
    end_output(sums);
  }

  // Issues the scores of a tile: the rope parts are there first.
  __device__ __forceinline__ void issue_scores(Scores& r_s) const {
    const KvState& at = state_;
    using KTile = typename Traits::KTile;
    using VTile = typename Traits::VTile;
    using QTile = typename Traits::QTile;
    using Mma = Wgmma<Traits::kElement, Traits::kTileN>;
    const Descriptor q = descriptor_in_cluster(QTile::kMajorK, shared_.q),
                     k = descriptor_in_cluster(KTile::kMajorK, shared_.k[at.stage]),
                     v = descriptor_in_cluster(VTile::kMajorK, shared_.v[at.stage]);
    wait_for(shared_.k_full[at.stage], at.phase, "k_full");
    mark_undefined(r_s);
    wgmma_fence();
#pragma unroll
    for (int col = 0; col < KTile::kCols; col += KTile::kStep)
      Mma::ss(r_s, q + QTile::k_step(VTile::kCols + col), k + KTile::k_step(col), col != 0);
#pragma unroll
    for (int group = 0; group < Traits::kGroups; ++group) {
      wait_for(shared_.v_full[at.stage][group], at.phase, "v_full");
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < Traits::kGroupDims; i += VTile::kStep) {
        const int col = group * Traits::kGroupDims + i;
        Mma::ss(r_s, q + QTile::k_step(col), v + VTile::k_step(col), true);
      }
    }
    wgmma_commit();
  }

  // This warpgroup's head dims of V.
  __device__ __forceinline__ Descriptor values() const {
    return descriptor_in_cluster(HalfTile::kMajorMN, shared_.v[state_.stage]) +
           warpgroup_ * HalfTile::kBytes;
  }

  // O += P·V of a tile of which the other warpgroup computes P.
  __device__ __forceinline__ void add_others_output(Sums& sums) {
    using PTile = typename Traits::PTile;
    const int stage = state_.stage;
    wait(&shared_.p_full[stage], state_.phase, "p_full");
    this->take_max(stage, sums);
    const Descriptor p = descriptor_in_cluster(PTile::kMajorK, shared_.k[stage]), v = values();
    fence_operand(sums.out);
    wgmma_fence();
#pragma unroll
    for (int key = 0; key < Traits::kTileN; key += 16)
      Wgmma<Traits::kElement, Traits::kDims>::template ss<false, true>(
          sums.out, p + PTile::k_step(key), v + HalfTile::mn_step(key), true);
    wgmma_commit();
    end_output(sums);
  }

  // Waits for O: the tile goes back.
  __device__ __forceinline__ void end_output(Sums& sums) {
    wgmma_wait<0>();
    fence_operand(sums.out);
    release(&shared_.empty[state_.stage], thread_);
    state_.advance();
  }

  KvState state_{};  // of the next tile
};

}  // namespace flash3::cuda::sm90
