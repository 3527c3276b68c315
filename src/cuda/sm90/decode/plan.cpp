// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/decode/plan.hpp"

#include <algorithm>

#include "core/message.hpp"
#include "cuda/sm90/decode/block_splits.hpp"
#include "cuda/sm90/decode/latent/partials.hpp"
#include "cuda/sm90/decode/latent/plan.hpp"
#include "cuda/sm90/decode/params.h"
#include "cuda/sm90/host/kernel_kind.hpp"
#include "cuda/sm90/host/tensor_map.hpp"

namespace flash3::cuda::sm90 {
namespace {

// A sequence is cut into so many splits, over all KV heads. Half of an H100's multiprocessors read
// boxes nearly as fast as all of them, and more splits take longer to merge. A tile of 32 KB takes
// as long as one of 64, so it gets twice as many splits. A long sequence gets more: blocks that
// gather rows read at two thirds of that speed, and unequal lengths are shared more evenly. The
// numbers are fixed, so that results are the same on every device.
constexpr int64_t kSplitsOfSequence = 64, kSplitsOfLongSequence = 128;
constexpr int kLongSequence = 8192;
constexpr int64_t kMostShortSplits = 32, kLeastSplitTiles = 2;
// A split has at most so many key tiles for each KV head: with longer ones, unequal lengths would
// be shared unevenly.
constexpr int64_t kTilesOfSplits = 8;

int largest_divisor(int64_t n, int64_t most) {
  int64_t d = std::min(n, most);
  while (n % d != 0) --d;
  return int(d);
}

// Takes the narrowest head dims that hold the call's, and there the rows that make the fewest items
// of a KV head, which read its keys once each: the fewest such rows.
const DecodeKernel* find_kernel(const ForwardProblem& problem, Index most_queries) {
  const Element element = element_type(problem.kv_dtype);
  const bool latent = is_latent(problem);
  const bool capped = problem.softcap > 0.f && element != Element::kE4m3 && !latent;
  const int64_t group = problem.queries_per_kv_head();
  const DecodeKernel* found = nullptr;
  Index found_items = 0;
  for (const DecodeKernel& kernel : decode_kernels()) {
    const DecodeConfig& c = kernel.config;
    if (kernel.element != element || kernel.capped != capped || c.latent != latent) continue;
    if (latent) return &kernel;
    if (c.head_dim < problem.head_dim || c.head_dim_v < problem.head_dim_v) continue;
    if (found && c.head_dim != found->config.head_dim) continue;
    const int heads = largest_divisor(group, c.rows);
    const Index items = group / heads * ceil_div(most_queries, Index{c.rows / heads});
    if (found && items >= found_items) continue;
    found = &kernel, found_items = items;
  }
  return found;
}

// Fewer rows than these are copied faster by threads than by TMA.
constexpr int kLeastBoxRows = 32;

// Rows of K and V that TMA copies at once; 0: TMA copies none.
int box_rows(const ForwardProblem& problem, const DecodeConfig& config) {
  const KeyViews keys = key_views(problem, config);
  const TensorView k = tensor_rows(keys.k, problem.sequences_k),
                   v = tensor_rows(keys.v, problem.sequences_k);
  const auto by_tma = [&](const TensorView& t) {
    return tma_can_address(t, RowIndexing::kBySequence, config.element_bytes());
  };
  if (!by_tma(k) || !by_tma(v) || k.batch * k.seq == 0) return 0;
  const int rows = cache_box_rows(problem.cache, config.tile_n);
  return rows < kLeastBoxRows ? 0 : rows;
}

DecodeRule rule_of(const ForwardProblem& problem, const DecodeConfig& config, Index most_queries,
                   int heads) {
  DecodeRule rule{};
  rule.most_queries = int(std::min<Index>(most_queries, kMaxLength));
  rule.mask = tile_mask_rule(problem.mask_rule);
  rule.tree = problem.tree.given;
  rule.tile_n = config.tile_n;
  rule.tile_queries = config.rows / heads;
  rule.head_groups = int(problem.heads_q) / heads;
  const int64_t heads_k = problem.heads_k,
                splits = kSplitsOfSequence * (config.tile_bytes() > 32768 ? 1 : 2) * config.blocks;
  rule.splits = int(std::clamp<int64_t>(splits / heads_k, 1, kMostShortSplits));
  rule.long_splits = int(std::clamp<int64_t>(kSplitsOfLongSequence * config.blocks / heads_k,
                                             rule.splits, kMostShortSplits));
  rule.long_tiles = kLongSequence / config.tile_n;
  rule.least_tiles = kLeastSplitTiles;
  rule.most_tiles = int(std::min(kTilesOfSplits * heads_k, 8 * kTilesOfSplits));
  // Splits of a latent call are only where blocks may cut: they are not merged one by one.
  if (config.latent) rule.splits = rule.long_splits = kMostDecodeSplits;
  return rule;
}

// A call has no more items than this, whatever the lengths.
Index most_items(const ForwardProblem& problem, const DecodeRule& rule) {
  const Sequences& q = problem.sequences_q;
  const Index tile = rule.tile_queries,
              of_each = problem.batch * ceil_div(Index{rule.most_queries}, tile);
  return rule.head_groups * (q.packed ? std::min(of_each, q.rows / tile + problem.batch) : of_each);
}

// Blocks that merge what others share: few rows each, since a multiprocessor reads 15 to 30 GB/s of
// partials, and less where other blocks compute on it too, as those of e4m3 do.
int mergers_of(const DecodePlan& plan, Index most_queries, int most_blocks) {
  const DecodeConfig& config = plan.kernel->config;
  if (config.latent || plan.most_splits == 1 || plan.grid == 1) return 0;
  const Index rows_of_each = config.e4m3 ? 2 : 6;
  // A block ends one shared item at most, or a fold of it.
  const Index folds = plan.most_items * ceil_div(plan.most_splits, kSplitsPerFold),
              ends = std::min<Index>(plan.grid, folds),
              rows = ends * std::min<Index>(config.rows, most_queries * plan.heads);
  return int(std::min<Index>(ceil_div(rows, rows_of_each), most_blocks));
}

// How many blocks compute, one for each key tile at most, and how many merge: with few splits, even
// shares of the cost are not one split each. Those that merge run after the others, but where
// multiprocessors are left to other kernels.
void plan_blocks(const ForwardProblem& problem, Index tiles, Index most_queries,
                 int multiprocessors, DecodePlan* plan) {
  const int most = std::min(multiprocessors * plan->kernel->config.blocks, kMaxDecodeBlocks);
  plan->grid = int(std::min<Index>(plan->most_items * tiles, most));
  plan->mergers = mergers_of(*plan, most_queries, most);
  if (problem.sm_margin == 0 || plan->grid + plan->mergers <= most) return;
  plan->mergers = std::min(plan->mergers, ceil_div(most, 16));
  plan->grid = std::min(plan->grid, most - plan->mergers);
}

Status check_dtype(const ForwardProblem& problem) {
  const flash3_dtype q = problem.dtype;
  if (q == FLASH3_FLOAT16 || q == FLASH3_BFLOAT16 || problem.has_fp8_keys()) return {};
  return unsupported(message("q.dtype = ", dtype_name(q),
                             " but the hopper backend has a KV cache in float16, bfloat16 and "
                             "float8_e4m3 only"));
}

Status check_sizes(const ForwardProblem& problem, Index items) {
  const Index of_token =
      problem.heads_q * (problem.append.given || problem.rotates ? kMaxScoreDim : 1);
  const Index most = std::max<Index>({problem.sequences_q.rows, problem.sequences_k.rows,
                                      problem.append.sequences.rows, problem.batch, of_token,
                                      problem.k.batch, items});
  if (most <= kMostCounted) return {};
  return unsupported(message("a size of ", most,
                             " rows, pages, sequences, elements of a token or tiles of work, but "
                             "the hopper backend counts each up to ",
                             kMostCounted));
}

}  // namespace

bool decodes(const ForwardProblem& problem) { return check_dtype(problem).ok(); }

Status check_append_alone(const ForwardProblem& problem) {
  FLASH3_CHECK(check_dtype(problem));
  FLASH3_CHECK(check_softcap(problem));
  return check_sizes(problem, 0);
}

Status plan(const ForwardProblem& problem, const Device& device, Index most_queries,
            Index likely_queries, size_t* workspace, DecodePlan* plan) {
  *plan = {};
  FLASH3_CHECK(check_dtype(problem));
  FLASH3_CHECK(check_softcap(problem));
  plan->kernel = find_kernel(problem, likely_queries);
  if (!plan->kernel)
    return unsupported(message("no decode kernel for head_dim = ", problem.head_dim,
                               ", head_dim_v = ", problem.head_dim_v));
  const DecodeConfig& config = plan->kernel->config;
  const int64_t group = problem.queries_per_kv_head();
  plan->heads = largest_divisor(group, config.rows);
  plan->groups_per_kv = int(group) / plan->heads;
  plan->box_rows = box_rows(problem, config);
  // Two blocks side by side read the same keys, the second out of L2.
  if (config.latent && plan->groups_per_kv % 2 == 0) plan->cluster = 2;
  plan->groups_per_kv /= plan->cluster;
  plan->rule = rule_of(problem, config, most_queries, plan->heads);
  plan->rule.head_groups /= plan->cluster;
  plan->most_items = most_items(problem, plan->rule);
  FLASH3_CHECK(check_sizes(problem, plan->most_items));

  const int tiles = int(ceil_div(std::max<int64_t>(problem.seq_k, 1), int64_t{config.tile_n}));
  plan->most_splits = std::min(kMostDecodeSplits, ceil_div(tiles, plan->rule.least_tiles));
  const int64_t items = plan->most_items;
  const int multiprocessors =
      std::max(1, (device.multiprocessors - problem.sm_margin) / plan->cluster);
  plan_blocks(problem, tiles, most_queries, multiprocessors, plan);
  const Index cost = items * (2 * tiles + kItemCost + plan->rule.least_tiles + 1);
  while ((cost >> plan->rule.cost_shift) + items > (Index{1} << 32) / plan->grid - 1)
    ++plan->rule.cost_shift;
  // Each block has a record for its first run, one for the end, and one for each of its items; two
  // blocks may share an item.
  reserve_workspace((size_t(items) + 3 * size_t(plan->grid)) * sizeof(DecodeRun),
                    &plan->schedule_bytes);
  if (plan->most_splits > 1 && !config.latent)
    plan->lists_offset =
        reserve_workspace(size_t(plan->grid) * sizeof(MergeLists), &plan->schedule_bytes);
  plan->schedule_offset = reserve_workspace(plan->schedule_bytes, workspace);
  plan->grid *= plan->cluster;
  if (plan->most_splits == 1) return {};
  plan->slots = config.latent ? kLatentSlots : slots_of_block(plan->most_splits);
  const size_t block_bytes = size_t(plan->slots) * size_t(config.partial_units()) * 16;
  plan->partials_offset = reserve_workspace(
      config.latent ? size_t(latent_partials_bytes(plan->grid)) : size_t(plan->grid) * block_bytes,
      workspace);
  return {};
}

}  // namespace flash3::cuda::sm90
