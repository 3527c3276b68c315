// SPDX-License-Identifier: Apache-2.0
// The plan of a forward call of few queries, or of those sequences of a call that have few: which
// decode kernel runs it, and with what. Nothing else decides that. Also its explanation and launch.
#pragma once

#include <span>
#include <string>

#include "core/plan.hpp"
#include "cuda/append/append.hpp"
#include "cuda/host/device_info.hpp"
#include "cuda/sm90/decode/config.hpp"
#include "cuda/sm90/decode/work.hpp"

namespace flash3::cuda::sm90 {

struct DecodeParams;  // params.h

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
  AppendPlan append;
  const DecodeKernel* kernel = nullptr;  // null: there is no query, the call only appends
  DecodeRule rule;                       // without addresses
  int heads = 0;                         // query heads of an item
  int groups_per_kv = 0;
  int box_rows = 0;     // of K and V that TMA copies at once; 0: producers gather rows
  int grid = 0;         // blocks that compute
  int mergers = 0;      // blocks behind them, which merge what they share
  int cluster = 1;      // blocks that read the same keys, for different heads
  int slots = 0;        // parts of a block
  int most_splits = 0;  // of any sequence of the call
  int64_t most_items = 0;
  size_t schedule_bytes = 0, lists_offset = 0;  // the schedule, and the lists in it
  size_t schedule_offset = 0, parts_offset = 0;
  size_t workspace_bytes = 0;
};

// Whether the call says how products in FP8 are summed up, of which the decode kernels have none.
bool asks_for_fp8_sums(const ForwardProblem& problem);
// Whether the decode kernels run a call: few queries look at a cache, or at many keys, or the cache
// or its mask is one that the forward kernels cannot read. Neither the number of sequences nor that
// of heads counts. Without a cache asks_for_fp8_sums() keeps a call from them.
bool is_decode(const ForwardProblem& problem);
// Why they do.
std::string why_decode(const ForwardProblem& problem);

Status plan(const ForwardProblem& problem, const Device& device, DecodePlan* plan);
// Plans the attention alone, of the sequences that have at most so many queries; the kernel is that
// for sequences of likely_queries. *plan already holds the append, and the bytes of workspace
// before what is planned here.
Status plan_attention(const ForwardProblem& problem, const Device& device, Index most_queries,
                      Index likely_queries, DecodePlan* plan);

void explain(const ForwardProblem& problem, const DecodePlan& plan, Explanation* out);
// Enqueues the append, the schedule unless the caller has one, and the attention.
Status launch(const ForwardProblem& problem, const DecodePlan& plan);

// The same without the append.
void explain_attention(const ForwardProblem& problem, const DecodePlan& plan, Explanation* out);
// In two steps: what can fail before anything is enqueued, and the rest.
Status prepare_attention(const ForwardProblem& problem, const DecodePlan& plan,
                         DecodeParams* params);
Status launch_prepared(const ForwardProblem& problem, const DecodePlan& plan, DecodeParams* params);

// The schedule alone, which depends on the lengths.
ScheduleNeeds schedule_needs(const DecodePlan& plan);
Status make_schedule(const ForwardProblem& problem, const DecodePlan& plan, void* data);

}  // namespace flash3::cuda::sm90
