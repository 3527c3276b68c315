// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/host/explain.hpp"

#include <string>

#include "core/message.hpp"
#include "cuda/sm90/backward/plan.hpp"

namespace flash3::cuda::sm90 {

void explain(const BackwardProblem& problem, const BackwardPlan& plan, Explanation* out) {
  const BackwardConfig& c = plan.kernel->config;
  out->add("kernel", plan.kernel->id);
  out->add("why", message("the first row of the tile table that holds head_dim ", problem.head_dim,
                          " and head_dim_v ", problem.head_dim_v, " and serves so many queries; ",
                          explain_mask(problem)));
  explain_scores(c.score, c.terms, out);
  out->add("tile", message(c.tile_m, " queries x ", c.tile_n, " keys"));
  out->add("warpgroups", message("1 producer, ", kConsumerWarpgroups,
                                 c.wide ? " consumers, of dV and of dK of the same 64 keys, 1 of dQ"
                                        : " consumers of 64 keys"));
  out->add("stages", message(kQueryStages, " of Q and dOut"));
  if (problem.is_ragged())
    out->add("sequences", message(problem.batch,
                                  ", longest first, listed by a kernel of their own: their "
                                  "lengths are read on the device"));
  out->add("grid",
           message(plan.grid, " blocks of ", c.threads(), " threads",
                   c.persistent
                       ? message(", persistent over ", plan.key_tiles,
                                 problem.is_ragged() ? " tiles of keys or fewer" : " tiles of keys")
                   : problem.is_ragged() ? "; those that the lengths leave no tile end at once"
                                         : ""));
  out->add("dq", message("float32 sums, added to by one block for each tile of keys, ",
                         plan.deterministic ? "in a fixed order" : "in any order"));
  explain_block(c, out, c.wide ? message(", ", c.dq_registers(), " a thread of dQ") : "");
  explain_copy("q", plan.q, out);
  explain_copy("k", plan.k, out);
  explain_copy("v", plan.v, out);
  explain_copy("dout", plan.dout, out);
  const auto explain_store = [&](const char* name, bool by_tma) {
    out->add("store", message(name, by_tma ? " by TMA"
                                    : problem.gradient_dtype == FLASH3_FLOAT32
                                        ? " from registers"
                                        : " element by element: its base, strides or rows are not "
                                          "multiples of 16 bytes"));
  };
  explain_store("dk", plan.dk_by_tma);
  explain_store("dv", plan.dv_by_tma);
  if (problem.dbias.given)
    out->add("store", plan.stores_dbias ? "dbias by TMA: tiles of dS"
                                        : "dbias by a kernel of its own, which sums dS");
}

}  // namespace flash3::cuda::sm90
