// SPDX-License-Identifier: Apache-2.0
// What a consumer does where a split or a run ends: it merges what the block has whole, and leaves
// the rest as partials for others (partials.cuh).
#pragma once

#include "cuda/sm90/decode/partials.cuh"
#include "cuda/sm90/decode/softmax.cuh"

namespace flash3::cuda::sm90 {

template <class Traits>
class DecodeSplits : protected DecodeSoftmax<Traits> {
 protected:
  using Base = DecodeSoftmax<Traits>;
  using Base::Base;
  using Base::consumer_;
  using Base::exchange;
  using Base::kColumns;
  using Base::kDimBlocks;
  using Base::largest_of_warps;
  using Base::of_warp;
  using Base::params_;
  using Base::reduce_lanes;
  using Base::score;
  using Base::sync_consumers;
  using Base::thread_;
  using typename Base::Sums;

  static constexpr int kRows = Base::kRows;
  static constexpr bool kParks = Traits::kConfig.parks;

  // What a run's splits have been merged into so far.
  struct Partials {
    Sums fold;
    Choice<kParks, typename Traits::Nothing, Sums> all;  // or parked
    bool no_fold = true, no_all = true;                  // nothing there yet
    float largest[kColumns];  // score of a row in the run, among this thread's keys, for max_logits
    int slot = 0;             // of the next partial, of a run that begins inside the item

    __device__ __forceinline__ Partials() {
#pragma unroll
      for (float& x : largest) x = -kInfinity;
    }
  };

  // beside_sum: as store_partial has it.
  __device__ __forceinline__ void store(const Sums& sums, const float (&beside_sum)[kColumns],
                                        int rows, int slot) const {
    store_partial<Traits>(sums, beside_sum,
                          partial_at<Traits>(params_, blockIdx.x * params_.slots + slot),
                          params_.ticket, consumer_ * kRows, rows, thread_);
  }

  // The largest scores of rows in the run, in base 2; of this thread's keys to begin with. All have
  // read what the warps exchange when this returns.
  __device__ __forceinline__ void find_largest(float (&largest)[kColumns]) const {
    reduce_lanes(largest, [](float x, float y) { return fmaxf(x, y); });
    exchange(largest);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float x = largest_of_warps(c);
      largest[c] = x == -kInfinity ? x : score().shift_of(x);
    }
    sync_consumers();
  }

  __device__ __forceinline__ Sums all_of(const Partials& partials) const {
    if constexpr (kParks)
      return parked();
    else
      return partials.all;
  }

  // ---- sums in shared memory ----

  // As fold(), into the parked sums, element by element. A warp's sums are the same in all lanes
  // that have a row, and so are the maxima.
  __device__ __forceinline__ void fold_parked(const Sums& right, bool is_empty) const {
    auto& to = this->shared_.parked[consumer_];
    MergeWeights weights[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int row = c / 2 * 8 + thread_ % 4 * 2 + c % 2, warp = thread_ / 32;
      float max = to.max[warp][row], sum = to.sum[warp][row];
      weights[c] = merge_max(max, right.max[c], Exp2{});
      sum = merge_element(sum, right.sum[c], weights[c]);
      __syncwarp();  // all have read
      to.max[warp][row] = is_empty ? right.max[c] : max;
      to.sum[warp][row] = is_empty ? right.sum[c] : sum;
    }
#pragma unroll
    for (int b = 0; b < kDimBlocks; ++b)
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        float& left = to.out[b * kRows / 2 + i][thread_];
        const float x = right.out[b][i];
        left = is_empty ? x : merge_element(left, x, weights[Sums::column_of(i)]);
      }
    __syncwarp();
  }

  __device__ __forceinline__ Sums parked() const {
    const auto& from = this->shared_.parked[consumer_];
    Sums sums;
#pragma unroll
    for (int b = 0; b < kDimBlocks; ++b)
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) sums.out[b][i] = from.out[b * kRows / 2 + i][thread_];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int row = c / 2 * 8 + thread_ % 4 * 2 + c % 2;
      sums.max[c] = from.max[thread_ / 32][row];
      sums.sum[c] = from.sum[thread_ / 32][row];
    }
    return sums;
  }

  // A split as fold.cuh has it: sums of the warp's keys, and the maximum in base 2. What the run's
  // last one makes whole end_run() stores.
  __device__ __forceinline__ void end_split(const DecodeRun& run, int index, bool is_last,
                                            Sums& split, Partials& partials) const {
    reduce_lanes(split.sum, [](float x, float y) { return x + y; });
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (split.max[c] != -kInfinity) split.max[c] = score().shift_of(split.max[c]);
    const int in_item = index - run.splits.begin;
    const bool ends_fold =
        in_item % kSplitsPerFold == kSplitsPerFold - 1 || index + 1 == run.splits.end;
    const bool has_first = run.has_first;
    // Part of a fold that another block has begun.
    const bool is_single = !has_first && in_item / kSplitsPerFold * kSplitsPerFold <
                                             run.first_split - run.splits.begin;
    fold<Traits>(partials.fold, split, partials.no_fold);
    partials.no_fold = (ends_fold || is_single) && (has_first || !is_last);
    if (!partials.no_fold) return;
    if (has_first) {
      if constexpr (kParks)
        fold_parked(partials.fold, partials.no_all);
      else
        fold<Traits>(partials.all, partials.fold, partials.no_all);
      partials.no_all = false;
    } else {
      store(partials.fold, partials.fold.max, run.rows, partials.slot++);
    }
  }

  __device__ __forceinline__ void store_whole(const DecodeRun& run,
                                              const Partials& partials) const {
    Sums all = all_of(partials);
    if (partials.no_all) all.clear();
    exchange(all.sum);
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      all.sum[c] = sum_of_warps({of_warp(0, c), of_warp(1, c), of_warp(2, c), of_warp(3, c)});
    store_result<Traits>(params_, run, all, partials.largest, consumer_ * kRows, run.rows, thread_);
  }

  __device__ __forceinline__ void end_run(const DecodeRun& run, Partials& partials) const {
    if (wants_largest<Traits>(params_)) find_largest(partials.largest);
    if (run.is_whole)
      store_whole(run, partials);
    else
      store_partials(run, partials);
  }

 private:
  // What remains at the end of a run that others share: finished folds and the one begun.
  __device__ __forceinline__ void store_partials(const DecodeRun& run, Partials& partials) const {
    Sums all = all_of(partials);
    const bool has_largest = wants_largest<Traits>(params_) && thread_ / 32 == kLargestWarp;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      float beside_sum[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        beside_sum[c] = has_largest ? partials.largest[c] : all.max[c];
      if (!partials.no_all)
        store(all, beside_sum, run.rows,
              run.has_first ? params_.slots - (i == 0 ? kFirstFoldsSlot : kBegunFoldSlot)
                            : partials.slot);
      all = partials.fold;
      partials.no_all = partials.no_fold;
    }
  }
};

}  // namespace flash3::cuda::sm90
