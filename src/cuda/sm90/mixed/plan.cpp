// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/mixed/plan.hpp"

#include "core/message.hpp"
#include "cuda/sm90/decode/params.h"
#include "cuda/sm90/forward/params.h"

namespace flash3::cuda::sm90 {
namespace {

// Of the sequences that run in the decode kernel most have one query, or a few drafts: rows for
// sixteen queries of each head would cost them more than a second item costs the others.
constexpr Index kLikelyQueries = 4;

// Packed queries that look at the used keys of a dense tensor are a server's too; a training batch
// packs both sides or pads both, and has no FP8 keys.
bool keys_are_a_cache(const ForwardProblem& problem) {
  const Sequences& k = problem.sequences_k;
  return problem.has_cache() || problem.widens_keys() ||
         (problem.sequences_q.packed && !k.packed && k.has_used &&
          (!k.bounded || problem.seq_k >= kLeastDecodeKeys));
}

}  // namespace

bool is_mixed(const ForwardProblem& problem) {
  const bool is_16_bit = problem.dtype == FLASH3_FLOAT16 || problem.dtype == FLASH3_BFLOAT16;
  const bool decodes =
      is_16_bit || (problem.has_fp8_keys() && (problem.has_cache() || !asks_for_fp8_sums(problem)));
  const bool queries_differ = problem.sequences_q.packed || problem.sequences_q.has_used;
  return decodes && queries_differ && keys_are_a_cache(problem) && !is_decode(problem);
}

Status plan(const ForwardProblem& problem, const Device& device, MixedPlan* plan) {
  *plan = {};
  FLASH3_CHECK(sm90::plan(problem, device, &plan->forward));
  plan->forward.least_queries = int(kMostDecodeQueries) + 1;
  plan->decode.append = plan->forward.append;
  plan->decode.workspace_bytes = plan->forward.workspace_bytes;
  FLASH3_CHECK(plan_attention(problem, device, kMostDecodeQueries, kLikelyQueries, &plan->decode));
  plan->workspace_bytes = plan->decode.workspace_bytes;
  return {};
}

void explain(const ForwardProblem& problem, const MixedPlan& plan, Explanation* out) {
  out->add("kernel", message(plan.forward.kernel->id, ", ", plan.decode.kernel->id));
  out->add("why", message("a sequence of at most ", kMostDecodeQueries,
                          " queries runs in the decode kernel and any other in the forward "
                          "kernel, as it would alone"));
  Explanation forward, decode;
  explain(problem, plan.forward, &forward);
  explain_attention(problem, plan.decode, &decode);
  out->add("forward", forward);
  out->add("decode", decode);
}

Status launch(const ForwardProblem& problem, const MixedPlan& plan) {
  const AppendPlan& append = plan.forward.append;
  DecodeParams decode{};
  ForwardParams forward{};
  FLASH3_CHECK(prepare_attention(problem, plan.decode, &decode));
  FLASH3_CHECK(prepare_attention(problem, plan.forward, &forward));
  if (append.launches()) FLASH3_CHECK(launch_append(problem, append));
  FLASH3_CHECK(launch_prepared(problem, plan.decode, &decode));
  return launch_prepared(problem, plan.forward, &forward);
}

ScheduleNeeds schedule_needs(const MixedPlan& plan) { return schedule_needs(plan.decode); }

Status make_schedule(const ForwardProblem& problem, const MixedPlan& plan, void* data) {
  return make_schedule(problem, plan.decode, data);
}

}  // namespace flash3::cuda::sm90
