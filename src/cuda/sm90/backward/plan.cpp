// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/backward/plan.hpp"

#include <algorithm>
#include <limits>

#include "core/arithmetic.hpp"
#include "core/message.hpp"
#include "cuda/host/device_info.hpp"
#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/backward/tile_table.hpp"
#include "cuda/sm90/host/bias_params.hpp"
#include "cuda/sm90/host/kernel_kind.hpp"
#include "cuda/sm90/host/tensor_map.hpp"

namespace flash3::cuda::sm90 {
namespace {

// The first that holds the head dims; null if there is none.
const BackwardKernel* find_kernel(const BackwardProblem& problem) {
  const Element element = problem.dtype == FLASH3_FLOAT16 ? Element::kFloat16 : Element::kBFloat16;
  const bool band = needs_band(problem);
  // A length that is not known is taken for a long one, whatever the batch.
  const int64_t queries =
      problem.sequences_q.bounded ? problem.seq_q : std::numeric_limits<int64_t>::max();
  for (const BackwardKernel& kernel : backward_kernels()) {
    const BackwardConfig& c = kernel.config;
    if (kernel.element == element && c.lists == problem.mask_lists.given &&
        (c.lists || c.band == band) && takes_scores(c, problem) && c.head_dim >= problem.head_dim &&
        c.head_dim_v >= problem.head_dim_v && c.from_queries <= queries)
      return &kernel;
  }
  return nullptr;
}

// TMA stores rows in pieces of 16 bytes: one that ends in between would write past its end.
bool stored_by_tma(const TensorView& view, RowIndexing rows) {
  return tma_can_address(view, rows) && view.dim % 8 == 0;
}

int64_t tiles_of(int64_t rows, int64_t tile_rows) { return ceil_div(rows, tile_rows); }

// Tiles of keys of one KV head, in all sequences: of a ragged batch no more than these, whatever
// the lengths. They cover unused keys too, of which max_seqlen tells nothing.
int64_t most_key_tiles(const BackwardProblem& problem, int64_t tile_n) {
  const Sequences& k = problem.sequences_k;
  const int64_t of_each = problem.batch * tiles_of(problem.seq_k, tile_n);
  if (!k.packed || of_each == 0) return of_each;
  const int64_t of_rows = k.rows / tile_n + problem.batch;
  return k.has_used ? of_rows : std::min(of_each, of_rows);
}

// Query tiles of one head in the workspace; QueryTiles says why there are more than rows fill.
int64_t query_tiles_of_a_head(const BackwardProblem& problem, int64_t tile_m) {
  const Sequences& q = problem.sequences_q;
  if (!q.packed) return tiles_of(problem.seq_q, tile_m);
  return q.rows == 0 || problem.batch == 0 ? 0 : q.rows / tile_m + problem.batch;
}

int64_t all_rows(const BackwardProblem& problem, const Sequences& sequences) {
  return sequences.packed ? sequences.rows : problem.batch * sequences.rows;
}

// Bytes that a KV head takes for each query: Q, dOut and the sums of dQ of its query heads.
int64_t bytes_of_a_query(const BackwardProblem& problem) {
  return problem.queries_per_kv_head() * (problem.head_dim * 6 + problem.head_dim_v * 2);
}

// That a query sees, if it is the first, the last or in the middle, where a mask leaves the most.
int64_t most_keys(const BackwardProblem& problem) {
  const Mask mask = Mask::make(problem.seq_q, problem.seq_k, problem.mask_rule);
  int64_t most = 0;
  for (const int64_t i : {int64_t{0}, problem.seq_q / 2, problem.seq_q - 1})
    if (i >= 0) most = std::max<int64_t>(most, mask.keys({i, i + 1}, problem.seq_k).size());
  return most;
}

Status check_dtype(const BackwardProblem& problem) {
  if (problem.dtype != FLASH3_FLOAT16 && problem.dtype != FLASH3_BFLOAT16)
    return unsupported(message("q.dtype = ", dtype_name(problem.dtype),
                               " but the hopper backend computes in float16 and bfloat16 only"));
  return {};
}

// What there is of the tiles that kernels count.
struct Counts {
  int64_t n_tiles;          // tiles of keys of the longest sequence
  int64_t key_tiles;        // of all KV heads
  int64_t tiles_of_a_head;  // tiles of queries
  int64_t query_tiles;      // of all query heads
  int64_t dq_blocks;        // of all query tiles
};

Counts counts_of(const BackwardProblem& problem, const BackwardConfig& c) {
  const int64_t tiles_of_a_head = query_tiles_of_a_head(problem, c.tile_m);
  const int64_t query_tiles =
      (problem.sequences_q.packed ? 1 : problem.batch) * problem.heads_q * tiles_of_a_head;
  return {tiles_of(problem.seq_k, c.tile_n), problem.heads_k * most_key_tiles(problem, c.tile_n),
          tiles_of_a_head, query_tiles,
          query_tiles * (c.tile_m / c.dq_queries()) * (c.dq_columns() / 64)};
}

Status check_counts(const BackwardProblem& problem, const Counts& counts) {
  const int64_t rows_q = all_rows(problem, problem.sequences_q),
                rows_k = all_rows(problem, problem.sequences_k);
  const int64_t most =
      std::max({problem.seq_q, problem.seq_k, problem.heads_q, counts.key_tiles, counts.dq_blocks});
  if (most <= kMostCounted && !(problem.is_ragged() && std::max(rows_q, rows_k) > kMostCounted))
    return {};
  return unsupported(
      message("seq_q = ", problem.seq_q, ", seq_k = ", problem.seq_k,
              ", heads_q = ", problem.heads_q, ", ", counts.key_tiles, " tiles of keys, ",
              counts.dq_blocks, " blocks of dq, and ", rows_q, " and ", rows_k,
              " rows of a ragged batch, but the hopper backend counts each up to ", kMostCounted));
}

// Plans how tensors are read and written, with the copies that TMA needs.
void plan_tensors(const BackwardProblem& problem, size_t* workspace, BackwardPlan* plan) {
  plan->rows = indexing_of(problem);
  const auto copy_of = [&](const TensorView& view, const Sequences& sequences) {
    return plan_copy(tensor_rows(view, sequences), plan->rows, workspace);
  };
  plan->q = copy_of(problem.q, problem.sequences_q);
  plan->k = copy_of(problem.k, problem.sequences_k);
  plan->v = copy_of(problem.v, problem.sequences_k);
  plan->dout = copy_of(problem.dout, problem.sequences_q);
  const auto by_tma = [&](const TensorView& view) {
    return problem.gradient_dtype == problem.dtype &&
           stored_by_tma(tensor_rows(view, problem.sequences_k), plan->rows);
  };
  plan->dk_by_tma = by_tma(problem.dk);
  plan->dv_by_tma = by_tma(problem.dv);
}

size_t reserve(size_t* workspace, int64_t count, size_t bytes = sizeof(float)) {
  return reserve_workspace(size_t(count) * bytes, workspace);
}

// Plans in which order blocks run and add to dQ.
void plan_order(const BackwardProblem& problem, const Device& device, const Counts& counts,
                size_t* workspace, BackwardPlan* plan) {
  const BackwardConfig& c = plan->kernel->config;
  plan->deterministic = problem.deterministic;
  const auto at_a_time = [&](int64_t heads) {
    return int(std::clamp<int64_t>(heads, 1, std::max<int64_t>(plan->kv_heads, 1)));
  };
  // The many threads that add a wide tile's dQ would wait to learn who is the first; where many
  // blocks add to a query tile, or all of a head begin with the same one, waiting costs more than
  // zeros.
  constexpr int64_t kFewKeys = 2048;
  plan->zeroed = c.wide || !c.band || most_keys(problem) > kFewKeys;
  plan->counted = plan->deterministic || !plan->zeroed;
  if (plan->counted)
    plan->semaphores_offset = reserve(workspace, counts.query_tiles * kDqParts, sizeof(int));
  if (plan->has_ticket() && counts.query_tiles > 0)
    plan->ticket_offset = reserve(workspace, 1, sizeof(int));
  if (plan->deterministic) {
    // Heads whose blocks run at the same time alternate, so that blocks that follow each other in a
    // head also begin, and end, one after the other.
    plan->tiles_at_a_time = device.multiprocessors;
    plan->kv_heads_at_a_time =
        at_a_time(plan->tiles_at_a_time / std::max<int64_t>(counts.n_tiles, 1));
  } else if (c.band || c.lists) {
    const int64_t bytes = tiles_of(problem.seq_q, c.tile_m) * c.tile_m * bytes_of_a_query(problem);
    plan->kv_heads_at_a_time = at_a_time(kL2Budget / std::max<int64_t>(bytes, 1));
  }
}

// Whether dbias has an element for each pair, rounded as dS is: then it is dS, but for a softcap,
// whose derivative dS has. The copy engine
// stores whole pieces of 16 bytes.
bool stores_dbias(const BackwardProblem& problem, const BackwardPlan& plan) {
  const BiasView& dbias = problem.dbias;
  return plan.kernel->config.bias_tiles() && dbias.given && problem.softcap == 0.f &&
         plan.grid > 0 && !dbias.is_summed() && dbias.rows == problem.seq_q &&
         dbias.dtype == problem.dtype && !problem.is_ragged() && has_tiles(dbias) &&
         dbias.keys % 8 == 0;
}

}  // namespace

Status plan(const BackwardProblem& problem, const Device& device, size_t* workspace,
            BackwardPlan* plan) {
  *plan = {};
  FLASH3_CHECK(check_dtype(problem));
  FLASH3_CHECK(check_softcap(problem));
  plan->kernel = find_kernel(problem);
  if (!plan->kernel)
    return unsupported(message("no backward kernel for head_dim = ", problem.head_dim,
                               ", head_dim_v = ", problem.head_dim_v));
  const BackwardConfig& c = plan->kernel->config;
  const Counts counts = counts_of(problem, c);
  FLASH3_CHECK(check_counts(problem, counts));

  plan->query_tiles = {problem.sequences_q.packed, int(problem.heads_q), c.tile_m,
                       int(counts.tiles_of_a_head)};
  plan->n_tiles = int(counts.n_tiles);
  plan->kv_heads = int(problem.batch * problem.heads_k);
  plan->key_tiles = plan->grid = int(counts.key_tiles);
  // Without queries nobody sets the ticket, and the blocks have one key tile each.
  if (c.persistent && counts.query_tiles > 0)
    plan->grid = std::min(plan->grid, device.multiprocessors);
  plan_tensors(problem, workspace, plan);
  const int64_t rows = counts.query_tiles * c.tile_m;
  plan->lse_offset = reserve(workspace, rows);
  plan->delta_offset = reserve(workspace, rows);
  plan->dq_offset = reserve(workspace, rows * c.dq_columns());
  if (problem.is_ragged() && plan->key_tiles > 0) {
    plan->list_offset = reserve(workspace, problem.batch, sizeof(ListedSequence));
    plan->first_tile_offset = reserve(workspace, problem.batch + 1, sizeof(int));
  }
  plan_order(problem, device, counts, workspace, plan);
  plan->stores_dbias = stores_dbias(problem, *plan);
  return sm90::plan(problem, device, plan->stores_dbias, workspace, &plan->bias);
}

KeySchedule key_schedule(const BackwardProblem& problem, const BackwardPlan& plan) {
  KeySchedule schedule{};
  schedule.rule = tile_mask_rule(problem.mask_rule);
  schedule.query_tiles = plan.query_tiles;
  schedule.heads_k = int(problem.heads_k);
  schedule.one_length.q_length = int(problem.seq_q);
  schedule.one_length.k_length = schedule.one_length.k_capacity = int(problem.seq_k);
  schedule.one_length.tiles = plan.n_tiles;
  schedule.one_length.groups_at_a_time = plan.kv_heads_at_a_time;
  schedule.kv_heads = plan.kv_heads;
  schedule.deterministic = plan.deterministic;
  return schedule;
}

VarlenScheduleParams varlen_schedule_params(const BackwardProblem& problem,
                                            const BackwardPlan& plan) {
  VarlenScheduleParams list{};
  list.q = problem.sequences_q;
  list.k = problem.sequences_k;
  list.batch = int(problem.batch);
  list.tiles_of_keys = true;
  list.tile_rows = plan.kernel->config.tile_n;
  list.groups = int(problem.heads_k);
  list.tiles_at_a_time = plan.tiles_at_a_time;
  if (plan.kernel->config.band && !plan.deterministic) {
    list.bytes_at_a_time = kL2Budget;
    list.bytes_per_row = bytes_of_a_query(problem);
    list.group_step = 1;
  }
  return list;
}

}  // namespace flash3::cuda::sm90
