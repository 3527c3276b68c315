#include "hopper/forward/select.hpp"

#include <algorithm>
#include <vector>

#include "core/message.hpp"
#include "hopper/forward/instances.hpp"
#include "hopper/forward/params.h"
#include "hopper/plain_call.hpp"
#include "hopper/tensor_map.hpp"

namespace flash3::hopper {
namespace {

// K and V of the heads that run at the same time should fit the half of the L2 cache (50 MB on the
// H100 and up) that is near beside the rest.
constexpr int64_t kL2Budget = 16 << 20;

template <Element kElement, int kRow>
ForwardKernel kernel_of_row() {
  constexpr ForwardConfig c = kForwardConfigs[kRow];
  std::string id =
      message("fwd_", kElement == Element::kFloat16 ? "fp16" : "bf16", "_d", c.head_dim);
  if (c.head_dim_v != c.head_dim) id += message("x", c.head_dim_v);
  id += message(c.band ? "_band_" : "_full_", c.tile_m(), "x", c.tile_n);
  return {std::move(id), kElement, c,
          forward_kernel_function<kElement, c.head_dim, c.head_dim_v, c.band, c.tile_n>()};
}

template <Element kElement, int... kRows>
void add_kernels(std::vector<ForwardKernel>& list, std::integer_sequence<int, kRows...>) {
  (list.push_back(kernel_of_row<kElement, kRows>()), ...);
}

// TMA must reach from one group of packed heads to the next; a copy is always laid out so.
bool can_pack(const ForwardProblem& problem, const HeadPack& pack) {
  return tma_can_address(problem.q, pack) || !tma_can_address(problem.q);
}

// Everything else that follows from a choice.
Status complete_plan(const ForwardProblem& problem, const Device& device,
                     const ForwardChoice& choice, const Estimate& estimate, ForwardPlan* plan) {
  *plan = {};
  plan->kernel = choice.kernel;
  plan->pack = choice.pack;
  plan->estimate = estimate;
  const ForwardConfig& config = choice.kernel->config;

  plan->q = plan_copy(problem.q, &plan->workspace_bytes);
  plan->k = plan_copy(problem.k, &plan->workspace_bytes);
  plan->v = plan_copy(problem.v, &plan->workspace_bytes);
  // TMA stores rows in pieces of 16 bytes: one that ends in between would write past its end.
  plan->out_by_tma = tma_can_address(problem.out, choice.pack) && problem.head_dim_v % 8 == 0;

  const int64_t tiles = estimate.tiles;
  if (std::max({problem.seq_q, problem.seq_k, problem.heads_q, tiles}) > kMaxLength - 256) {
    return unsupported(message("seq_q = ", problem.seq_q, ", seq_k = ", problem.seq_k,
                               ", heads_q = ", problem.heads_q, " and ", tiles,
                               " tiles of work, but the hopper backend counts each up to ",
                               kMaxLength - 256));
  }
  const int64_t groups = problem.batch * (problem.heads_q / choice.pack.heads);
  plan->m_tiles = int(estimate.m_tiles);
  plan->groups = int(groups);
  plan->tiles = int(tiles);
  plan->grid = std::min(plan->tiles, device.multiprocessors);

  plan->groups_at_a_time = 1;
  if (config.band) {
    // Tiles of equal length need no counter, nor does a single round of them.
    plan->dynamic = plan->tiles > plan->grid;
    if (plan->dynamic) {
      plan->counter_offset = plan->workspace_bytes;
      plan->workspace_bytes += align_up(sizeof(TileCounterMemory));
    }
    const int64_t kv_bytes =
        std::max<int64_t>(1, problem.seq_k * (problem.head_dim + problem.head_dim_v) * 2);
    const int64_t at_a_time = std::max<int64_t>(1, kL2Budget / kv_bytes) *
                              (problem.queries_per_kv_head() / choice.pack.heads);
    plan->groups_at_a_time = int(std::min(at_a_time, groups));
  }
  return {};
}

}  // namespace

std::span<const ForwardKernel> forward_kernels() {
  static const std::vector<ForwardKernel> list = [] {
    std::vector<ForwardKernel> kernels;
    constexpr auto rows = std::make_integer_sequence<int, int(std::size(kForwardConfigs))>();
    add_kernels<Element::kFloat16>(kernels, rows);
    add_kernels<Element::kBFloat16>(kernels, rows);
    return kernels;
  }();
  return list;
}

std::vector<ForwardChoice> forward_choices(const ForwardProblem& problem) {
  std::vector<ForwardChoice> choices;
  choices.reserve(8);
  if (problem.dtype != FLASH3_FLOAT16 && problem.dtype != FLASH3_BFLOAT16) return choices;
  const Element element = problem.dtype == FLASH3_FLOAT16 ? Element::kFloat16 : Element::kBFloat16;
  const bool band = !problem.band().is_full(problem.seq_q, problem.seq_k);
  const ForwardConfig* narrowest = nullptr;
  for (const ForwardKernel& kernel : forward_kernels()) {
    const ForwardConfig& c = kernel.config;
    if (kernel.element != element || c.band != band || c.head_dim < problem.head_dim ||
        c.head_dim_v < problem.head_dim_v) {
      continue;
    }
    if (!narrowest) narrowest = &c;
    if (c.head_dim != narrowest->head_dim || c.head_dim_v != narrowest->head_dim_v) continue;
    choices.push_back({&kernel, HeadPack{}});
    const int64_t most = std::min<int64_t>(problem.queries_per_kv_head(), HeadPack::kRows);
    for (int heads = 2; heads <= most; ++heads) {
      const HeadPack pack = HeadPack::of(heads);
      if (problem.queries_per_kv_head() % heads == 0 && can_pack(problem, pack))
        choices.push_back({&kernel, pack});
    }
  }
  return choices;
}

Status plan_forward(const ForwardProblem& problem, const Device& device, ForwardPlan* plan) {
  if (problem.dtype != FLASH3_FLOAT16 && problem.dtype != FLASH3_BFLOAT16) {
    return unsupported(message("q.dtype = ", dtype_name(problem.dtype),
                               " but the hopper backend computes in float16 and bfloat16 only"));
  }
  FLASH3_CHECK(check_plain(problem));
  // The best choice without packed heads, and the best with them.
  ForwardChoice best[2];
  Estimate estimate[2];
  for (const ForwardChoice& choice : forward_choices(problem)) {
    const bool packed = choice.pack.heads > 1;
    const Estimate e =
        estimate_forward(problem, choice.kernel->config, choice.pack, device.multiprocessors);
    if (best[packed].kernel && !is_better(e, estimate[packed], kRowMargin)) continue;
    best[packed] = choice;
    estimate[packed] = e;
  }
  if (!best[0].kernel) {
    return unsupported(message("no kernel for head_dim = ", problem.head_dim,
                               ", head_dim_v = ", problem.head_dim_v));
  }
  const bool packed = best[1].kernel && is_better(estimate[1], estimate[0], kPackMargin);
  FLASH3_CHECK(complete_plan(problem, device, best[packed], estimate[packed], plan));
  plan->rival = best[!packed];
  plan->rival_estimate = estimate[!packed];
  return {};
}

Status plan_forward(const ForwardProblem& problem, const Device& device,
                    const ForwardChoice& choice, ForwardPlan* plan) {
  return complete_plan(
      problem, device, choice,
      estimate_forward(problem, choice.kernel->config, choice.pack, device.multiprocessors), plan);
}

TileSchedule tile_schedule(const ForwardProblem& problem, const ForwardPlan& plan) {
  TileSchedule schedule{};
  schedule.band.lo = std::clamp<Index>(problem.band().lo, -kMaxLength, kMaxLength);
  schedule.band.hi = std::clamp<Index>(problem.band().hi, -kMaxLength, kMaxLength);
  schedule.seq_q = int(problem.seq_q);
  schedule.seq_k = int(problem.seq_k);
  schedule.tile_queries = plan.kernel->config.warpgroups * plan.pack.queries;
  schedule.m_tiles = plan.m_tiles;
  schedule.head_groups = int(problem.heads_q) / plan.pack.heads;
  schedule.groups = plan.groups;
  schedule.groups_at_a_time = plan.groups_at_a_time;
  schedule.tiles = plan.tiles;
  return schedule;
}

}  // namespace flash3::hopper
