#include "hopper/forward/select.hpp"

#include <algorithm>
#include <vector>

#include "core/message.hpp"
#include "hopper/forward/instances.hpp"
#include "hopper/forward/params.h"
#include "hopper/tensor_map.hpp"

namespace flash3::hopper {
namespace {

// K and V of the heads that run at the same time should fit the L2 cache (50 MB on the H100 and up)
// beside the rest.
constexpr int64_t kL2Budget = 32 << 20;

template <Element kElement, int kRow>
ForwardKernel kernel_of_row() {
  constexpr ForwardConfig c = kForwardConfigs[kRow];
  std::string id =
      message("fwd_", kElement == Element::kFloat16 ? "fp16" : "bf16", "_d", c.head_dim);
  if (c.head_dim_v != c.head_dim) id += message("x", c.head_dim_v);
  id += c.band ? "_band" : "_full";
  return {std::move(id), kElement, c,
          forward_kernel_function<kElement, c.head_dim, c.head_dim_v, c.band>()};
}

template <Element kElement, int... kRows>
void add_kernels(std::vector<ForwardKernel>& list, std::integer_sequence<int, kRows...>) {
  (list.push_back(kernel_of_row<kElement, kRows>()), ...);
}

size_t align_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

PackedCopy plan_copy(const TensorView& view, size_t* workspace) {
  PackedCopy copy;
  const int64_t elements = view.batch * view.seq * view.heads;
  if (elements == 0 || tma_can_address(view)) return copy;
  copy.needed = true;
  copy.offset = *workspace;
  copy.row = (view.dim + 7) / 8 * 8;
  *workspace += align_up(size_t(elements * copy.row) * 2);
  return copy;
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

Status plan_forward(const ForwardProblem& problem, const Device& device, ForwardPlan* plan) {
  if (problem.dtype != FLASH3_FLOAT16 && problem.dtype != FLASH3_BFLOAT16) {
    return unsupported(message("q.dtype = ", dtype_name(problem.dtype),
                               " but the hopper backend computes in float16 and bfloat16 only"));
  }
  const Element element = problem.dtype == FLASH3_FLOAT16 ? Element::kFloat16 : Element::kBFloat16;
  const bool band = !problem.band.is_full(problem.seq_q, problem.seq_k);
  *plan = {};
  for (const ForwardKernel& kernel : forward_kernels()) {
    if (kernel.element == element && kernel.config.band == band &&
        kernel.config.head_dim >= problem.head_dim &&
        kernel.config.head_dim_v >= problem.head_dim_v) {
      plan->kernel = &kernel;
      break;
    }
  }
  if (!plan->kernel) {
    return unsupported(message("no kernel for head_dim = ", problem.head_dim,
                               ", head_dim_v = ", problem.head_dim_v));
  }
  const ForwardConfig& config = plan->kernel->config;

  plan->q = plan_copy(problem.q, &plan->workspace_bytes);
  plan->k = plan_copy(problem.k, &plan->workspace_bytes);
  plan->v = plan_copy(problem.v, &plan->workspace_bytes);
  // TMA stores rows in pieces of 16 bytes: one that ends in between would write past its end.
  plan->out_by_tma = tma_can_address(problem.out) && problem.head_dim_v % 8 == 0;

  const int64_t m_tiles = (problem.seq_q + config.tile_m() - 1) / config.tile_m();
  const int64_t batch_heads = problem.batch * problem.heads_q;
  const int64_t tiles = m_tiles * batch_heads;

  if (std::max({problem.seq_q, problem.seq_k, tiles}) > kMaxLength - 256) {
    return unsupported(message("seq_q = ", problem.seq_q, ", seq_k = ", problem.seq_k, " and ",
                               tiles, " tiles of work, but the hopper backend counts each up to ",
                               kMaxLength - 256));
  }
  plan->m_tiles = int(m_tiles);
  plan->batch_heads = int(batch_heads);
  plan->tiles = int(tiles);
  plan->grid = std::min(plan->tiles, device.multiprocessors);

  plan->heads_in_group = 1;
  if (band) {
    // Tiles of equal length need no counter, nor does a single round of them.
    plan->dynamic = plan->tiles > plan->grid;
    if (plan->dynamic) {
      plan->counter_offset = plan->workspace_bytes;
      plan->workspace_bytes += align_up(sizeof(TileCounterMemory));
    }
    const int64_t kv_bytes =
        std::max<int64_t>(1, problem.seq_k * (problem.head_dim + problem.head_dim_v) * 2);
    const int64_t heads =
        std::max<int64_t>(1, kL2Budget / kv_bytes) * problem.queries_per_kv_head();
    plan->heads_in_group = int(std::clamp<int64_t>(heads, 1, batch_heads));
  }
  return {};
}

}  // namespace flash3::hopper
