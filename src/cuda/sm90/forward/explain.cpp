// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/host/explain.hpp"

#include <cmath>
#include <string>

#include "core/message.hpp"
#include "cuda/device/key_splits.hpp"
#include "cuda/sm90/forward/plan.hpp"

namespace flash3::cuda::sm90 {
namespace {

std::string describe(const ForwardChoice& choice) {
  if (choice.slot_rows > 0) return message("slots of ", choice.slot_rows, " rows");
  return choice.pack.heads == 1 ? std::string("one head a tile")
                                : message(choice.pack.heads, " heads packed in a tile");
}

std::string estimated(const Estimate& e) {
  return message(e.tiles, " tiles, ", std::llround(e.us), " us");
}

// Which rows share a tile, and why: only where query heads share a KV head, or sequences are short,
// is there a choice.
void explain_rows(const ForwardProblem& problem, const ForwardPlan& plan, Explanation* out) {
  const int heads = plan.pack.heads, queries = plan.kernel->config.warpgroups * plan.pack.queries;
  if (plan.slot_rows > 0) {
    out->add("rows", message("one query head and ", queries / plan.slot_rows, " sequences a tile, ",
                             plan.slot_rows, " rows each"));
  } else if (heads == 1) {
    out->add("rows", message("one query head a tile, ", queries, " queries"));
  } else {
    out->add("rows",
             message(heads, " of the ", problem.queries_per_kv_head(),
                     " query heads of a KV head share a tile, ", queries, " queries of each"));
  }
  const EstimatedChoice rival = best_rival(problem, plan);
  if (rival.choice.kernel)
    out->add("why rows", message("estimated at ", estimated(plan.estimate), "; ",
                                 describe(rival.choice), " at ", estimated(rival.estimate)));
}

// Whether blocks share the keys of a query tile, and why.
void explain_splits(const ForwardProblem& problem, const ForwardPlan& plan, Explanation* out) {
  if (!plan.kernel->config.split) return;
  const std::string why = message("; ", plan.estimate.m_tiles * (problem.heads_q / plan.pack.heads),
                                  " query tiles of a sequence do not fill a GPU");
  if (plan.splits.most == 1) {
    out->add("parts", message("none: a part has ", kLeastSplitKeys, " keys at least"));
  } else {
    out->add("parts", message("the keys of a query tile in at most ", plan.splits.most, ", of ",
                              kLeastSplitKeys, " at least, one block each", why,
                              "; the last one merges them"));
  }
}

// How FP8 sums up O, and why.
void explain_sums(const ForwardProblem& problem, const ForwardPlan& plan, Explanation* out) {
  const ForwardConfig& c = plan.kernel->config;
  if (!c.fp8()) return;
  const bool two_levels = plan.flush_tiles != kNeverFlush;
  const std::string how = two_levels
                              ? message("two levels: float32 sums in ",
                                        sums_in_shared(c) ? "shared memory" : "the workspace",
                                        " take over every ", plan.flush_tiles * c.tile_n, " keys")
                              : std::string("one level, in the tensor cores");
  const std::string why =
      problem.fp8_sums != FLASH3_FP8_SUMS_AUTO
          ? std::string("; fp8_sums says so")
          : message(two_levels ? "; a query may see more than " : "; no query sees more than ",
                    kLongRow, " keys");
  out->add("sums", message("of O in ", how, why));
}

}  // namespace

void explain_kernel(const ForwardProblem& problem, const ForwardPlan& plan, Explanation* out) {
  out->add("kernel", plan.kernel->id);
  out->add("why",
           message("the narrowest tiles that hold head_dim ", problem.head_dim, " and head_dim_v ",
                   problem.head_dim_v, ", and the fastest of them by estimate; ",
                   plan.slot_rows > 0 ? "the sequences of a tile mask each other"
                                      : explain_mask(problem)));
}

void explain(const ForwardProblem& problem, const ForwardPlan& plan, Explanation* out) {
  const ForwardConfig& c = plan.kernel->config;
  explain_scores(c.score, c.terms, out);
  out->add("tile", message(c.tile_m(), " rows x ", c.tile_n, " keys"));
  explain_rows(problem, plan, out);
  out->add("warpgroups", message("1 producer, ", c.warpgroups, " consumers of 64 rows",
                                 c.fp8()       ? "; two warps of the producer transpose V"
                                 : c.widened() ? "; two warps of the producer widen K and V"
                                               : ""));
  out->add("stages",
           message(c.stages, " of K, ", c.stages, " of V",
                   c.fp8()       ? message(", ", c.raw_v_stages, " of V as it comes")
                   : c.widened() ? message(", ", c.raw_stages, " of half a tile as it comes")
                                 : ""));
  explain_splits(problem, plan, out);
  explain_sums(problem, plan, out);
  if (problem.is_ragged())
    out->add("sequences",
             message(problem.batch, plan.slot_rows > 0 ? " in order" : ", longest first",
                     ", listed by a kernel of their own: their lengths are read on the device"));
  out->add("grid", message(plan.grid, " blocks of ", c.threads(), " threads, persistent over ",
                           problem.is_ragged() && plan.slot_rows == 0 ? "at most " : "", plan.tiles,
                           plan.splits.most > 1 ? " parts of" : "",
                           plan.dynamic ? " tiles, longest first, from a counter"
                                        : " tiles, dealt out round robin"));
  if (c.paged && (problem.cache.paged || problem.cache.has_batch_idx))
    out->add("k and v",
             message("TMA, in boxes of ", plan.box_keys, " rows; a warp looks each up in ",
                     problem.cache.paged ? "page_table" : "cache_batch_idx", " before it loads"));
  explain_block(c, out);
  explain_copy("q", plan.q, out);
  explain_copy("k", plan.k, out);
  explain_copy("v", plan.v, out);
  out->add("store",
           c.fp8() || problem.out_dtype == FLASH3_FLOAT32 ? "from registers"
           : plan.out_by_tma
               ? "TMA"
               : "element by element: out's base, strides or rows are not multiples of 16 bytes");
}

}  // namespace flash3::cuda::sm90
