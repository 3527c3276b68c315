// SPDX-License-Identifier: Apache-2.0
// Which decode kernel runs a forward call of few queries, or those sequences of a call that have
// few, and with what: the one place that decides, what it says of itself, and the launch.
#pragma once

#include <span>
#include <string>

#include "core/plan.hpp"
#include "hopper/decode/append.hpp"
#include "hopper/decode/config.hpp"
#include "hopper/decode/work.hpp"
#include "hopper/host/device_info.hpp"

namespace flash3::hopper {

// What these kernels are for: no sequence has more queries. Fewer keys than kLeastDecodeKeys, where
// they are no cache, the forward kernels read faster.
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
  const DecodeKernel* kernel = nullptr;  // null: no query, all that there is to do is to append
  DecodeRule rule;                       // without addresses
  int heads = 0;                         // query heads of an item
  int groups_per_kv = 0;
  int box_rows = 0;     // of K and V that TMA copies at once; 0: producers gather rows
  int grid = 0;         // blocks
  int slots = 0;        // parts of a block
  int most_splits = 0;  // of any sequence of the call
  int64_t most_items = 0;
  size_t schedule_bytes = 0, lists_offset = 0;  // the schedule, and the lists in it
  size_t schedule_offset = 0, parts_offset = 0;
  size_t workspace_bytes = 0;
};

// Whether the decode kernels run a call: few 16-bit queries look at a cache, or at many keys, or
// the cache is one that the forward kernels cannot read. Neither the number of sequences nor that
// of heads counts.
bool is_decode(const ForwardProblem& problem);
// Why they do.
std::string why_decode(const ForwardProblem& problem);

Status plan(const ForwardProblem& problem, const Device& device, DecodePlan* plan);
// The attention alone, of the sequences that have at most so many queries. Of *plan the append and
// the workspace in front of what is planned here are given.
Status plan_attention(const ForwardProblem& problem, const Device& device, Index most_queries,
                      DecodePlan* plan);

void explain(const ForwardProblem& problem, const DecodePlan& plan, Explanation* out);
// What is appended, then the schedule, unless the caller has one, and then the attention.
Status launch(const ForwardProblem& problem, const DecodePlan& plan);

// Likewise without what is appended.
void explain_attention(const ForwardProblem& problem, const DecodePlan& plan, Explanation* out);
Status launch_attention(const ForwardProblem& problem, const DecodePlan& plan);

// The schedule alone, which depends on the lengths.
ScheduleNeeds schedule_needs(const DecodePlan& plan);
Status make_schedule(const ForwardProblem& problem, const DecodePlan& plan, void* data);

}  // namespace flash3::hopper
