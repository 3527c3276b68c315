// SPDX-License-Identifier: Apache-2.0
// How the decode kernels attend, as a step of a call's route: for all sequences, or for those that
// have few queries. Which kernel, and with what: nothing else decides that. Also what the step says
// of itself, and its launches.
#pragma once

#include <span>
#include <string>

#include "core/plan.hpp"
#include "cuda/host/device_info.hpp"
#include "cuda/host/launches.hpp"
#include "cuda/sm90/decode/config.hpp"
#include "cuda/sm90/decode/work.hpp"

namespace flash3::cuda::sm90 {

// These kernels are for sequences of at most so many queries. The forward kernels read fewer keys
// than kLeastDecodeKeys faster, if they are no cache.
inline constexpr Index kMostDecodeQueries = 16, kLeastDecodeKeys = 256;

struct DecodeKernel {
  std::string id;  // "decode_bf16_d128_8x64"
  Element element;
  bool capped;  // scores are soft-capped
  DecodeConfig config;
  const void* function;  // for cudaLaunchKernel
};

// Every kernel built in, in the order of the tile table.
std::span<const DecodeKernel> decode_kernels();

struct DecodePlan {
  const DecodeKernel* kernel = nullptr;
  DecodeRule rule;  // without addresses
  int heads = 0;    // query heads of an item
  int groups_per_kv = 0;
  int box_rows = 0;     // of K and V that TMA copies at once; 0: producers gather rows
  int grid = 0;         // blocks that compute
  int mergers = 0;      // blocks after them, which merge what they share
  int cluster = 1;      // blocks that read the same keys, for different heads
  int slots = 0;        // partials of a block
  int most_splits = 0;  // of any sequence of the call
  int64_t most_items = 0;
  size_t schedule_bytes = 0, lists_offset = 0;  // the schedule, and the lists in it
  size_t schedule_offset = 0, partials_offset = 0;
};

// Whether there are decode kernels for q of this dtype, and for its keys.
bool decodes(const ForwardProblem& problem);
// Whether they can run a call without a query, which only appends.
Status check_append_alone(const ForwardProblem& problem);

// Plans the attention of the sequences that have at most so many queries; the kernel is that for
// sequences of likely_queries. *workspace grows by what the step takes.
Status plan(const ForwardProblem& problem, const Device& device, Index most_queries,
            Index likely_queries, size_t* workspace, DecodePlan* plan);

// All but which kernel it is, and why.
void explain(const ForwardProblem& problem, const DecodePlan& plan, Explanation* out);

// The schedule unless the caller has one, the kernel, and the merge of what latent blocks share. q:
// the problem's own, or what an append has made of it.
Status prepare(const ForwardProblem& problem, const TensorView& q, const DecodePlan& plan,
               Launches* launches);

// The schedule alone, which depends on the lengths.
ScheduleNeeds needs_of(const DecodePlan& plan);
void prepare_schedule(const ForwardProblem& problem, const DecodePlan& plan, void* data,
                      Launches* launches);

}  // namespace flash3::cuda::sm90
