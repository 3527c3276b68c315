// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/host/explain.hpp"

#include <string>

#include "core/explain.hpp"
#include "core/message.hpp"
#include "cuda/sm90/decode/plan.hpp"
#include "cuda/sm90/host/kernel_kind.hpp"

namespace flash3::cuda::sm90 {
namespace {

std::string describe_rows(const ForwardProblem& problem, const DecodePlan& plan) {
  const int queries = plan.rule.tile_queries;
  return message(plan.heads, " of the ", problem.queries_per_kv_head(),
                 " query heads of a KV head share a tile, ", queries,
                 queries == 1 ? " query" : " queries", " of each");
}

std::string describe_splits(const DecodePlan& plan) {
  if (plan.most_splits == 1) return "none: no sequence is long enough";
  const DecodeRule& rule = plan.rule;
  if (plan.kernel->config.latent)
    return message("of a sequence at most ", plan.most_splits,
                   ", so that blocks have even shares; what blocks share is merged by a kernel ",
                   "of its own");
  return message("of a sequence at most ", plan.most_splits,
                 ", cut by its own length at multiples ", "of ", rule.least_tiles * rule.tile_n,
                 " keys or more, and merged in a fixed ",
                 "order: the bits of a result depend on no other sequence");
}

std::string describe_loads(const ForwardProblem& problem, const DecodePlan& plan) {
  if (plan.box_rows > 0) return message("TMA, in boxes of ", plan.box_rows, " rows");
  return message("rows are gathered one by one: ",
                 problem.cache.paged && problem.cache.has_leftpad
                     ? "padding moves keys across the ends of pages"
                 : problem.cache.paged
                     ? "pages, or their common divisor with a tile, are narrow, or rows are not "
                       "multiples of 16 bytes"
                     : "TMA needs a 16-byte aligned base and strides of 16 bytes");
}

}  // namespace

void explain(const ForwardProblem& problem, const DecodePlan& plan, Explanation* out) {
  const DecodeConfig& c = plan.kernel->config;
  explain_scores(problem.softcap > 0.f ? ScoreKind::kSoftcap : ScoreKind::kPlain, BiasTerms::kNone,
                 out);
  out->add("tile", message(c.rows, " rows x ", c.tile_n, " keys"));
  out->add("rows", describe_rows(problem, plan));
  out->add("splits", describe_splits(plan));
  out->add("k and v", describe_loads(problem, plan));
  out->add("schedule", message("at most ", plan.most_items,
                               " tiles of queries, dealt to the blocks by a kernel of its "
                               "own: lengths are read on the device"));
  out->add("warpgroups",
           message("1 producer, ", c.consumers, c.consumers == 1 ? " consumer" : " consumers"));
  out->add("stages", message(c.stages, " of K, ", c.stages, " of V"));
  out->add(
      "grid",
      message(plan.grid, " blocks of ", c.threads(), " threads, persistent",
              plan.mergers > 0 ? message("; ", plan.mergers, " more merge what they share") : ""));
  out->add("shared memory", message(c.shared_bytes(), " bytes a block"));
  out->add("workspace",
           message("the schedule", plan.most_splits > 1 ? ", parts of shared tiles" : "",
                   problem.transforms_q() ? ", " + describe_transformed_q(problem) : ""));
}

}  // namespace flash3::cuda::sm90
