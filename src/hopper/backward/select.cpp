#include "hopper/backward/select.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/message.hpp"
#include "hopper/backward/instances.hpp"
#include "hopper/backward/params.h"
#include "hopper/plain_call.hpp"
#include "hopper/tensor_map.hpp"

namespace flash3::hopper {
namespace {

// Rows, keys, the band's bounds and their sums are 32-bit in the kernel.
constexpr int64_t kMaxLength = (int64_t{1} << 30) - 256;

// Q, dOut and the sums of dQ of the heads that run at the same time should fit the half of the L2
// cache that is near.
constexpr int64_t kL2Budget = 16 << 20;

template <Element kElement, int kRow>
BackwardKernel kernel_of_row() {
  constexpr BackwardConfig c = kBackwardConfigs[kRow];
  std::string id =
      message("bwd_", kElement == Element::kFloat16 ? "fp16" : "bf16", "_d", c.head_dim);
  if (c.head_dim_v != c.head_dim) id += message("x", c.head_dim_v);
  id += message(c.band ? "_band_" : "_full_", c.tile_m, "x", c.tile_n());
  return {std::move(id), kElement, c,
          backward_kernel_function<kElement, c.head_dim, c.head_dim_v, c.band, c.tile_m>()};
}

template <Element kElement, int... kRows>
void add_kernels(std::vector<BackwardKernel>& list, std::integer_sequence<int, kRows...>) {
  (list.push_back(kernel_of_row<kElement, kRows>()), ...);
}

// The first that holds the head dims; null if there is none.
const BackwardKernel* find_kernel(const BackwardProblem& problem) {
  const Element element = problem.dtype == FLASH3_FLOAT16 ? Element::kFloat16 : Element::kBFloat16;
  const bool band = !problem.band().is_full(problem.seq_q, problem.seq_k);
  for (const BackwardKernel& kernel : backward_kernels()) {
    const BackwardConfig& c = kernel.config;
    if (kernel.element == element && c.band == band && c.head_dim >= problem.head_dim &&
        c.head_dim_v >= problem.head_dim_v && c.from_queries <= problem.seq_q)
      return &kernel;
  }
  return nullptr;
}

// TMA stores rows in pieces of 16 bytes: one that ends in between would write past its end.
bool stored_by_tma(const TensorView& view) { return tma_can_address(view) && view.dim % 8 == 0; }

}  // namespace

std::span<const BackwardKernel> backward_kernels() {
  static const std::vector<BackwardKernel> list = [] {
    std::vector<BackwardKernel> kernels;
    constexpr auto rows = std::make_integer_sequence<int, int(std::size(kBackwardConfigs))>();
    add_kernels<Element::kFloat16>(kernels, rows);
    add_kernels<Element::kBFloat16>(kernels, rows);
    return kernels;
  }();
  return list;
}

Status plan_backward(const BackwardProblem& problem, const Device& device, BackwardPlan* plan) {
  *plan = {};
  if (problem.dtype != FLASH3_FLOAT16 && problem.dtype != FLASH3_BFLOAT16)
    return unsupported(message("q.dtype = ", dtype_name(problem.dtype),
                               " but the hopper backend computes in float16 and bfloat16 only"));
  FLASH3_CHECK(check_plain(problem));
  plan->kernel = find_kernel(problem);
  if (!plan->kernel)
    return unsupported(message("no backward kernel for head_dim = ", problem.head_dim,
                               ", head_dim_v = ", problem.head_dim_v));
  const BackwardConfig& c = plan->kernel->config;

  const int64_t m_tiles = (problem.seq_q + c.tile_m - 1) / c.tile_m;
  const int64_t n_tiles = (problem.seq_k + c.tile_n() - 1) / c.tile_n();
  const int64_t kv_heads = problem.batch * problem.heads_k;
  const int64_t rows = problem.batch * problem.heads_q * m_tiles * c.tile_m;
  const int64_t dq_blocks = rows / c.dq_queries() * (c.head_dim / 64);
  if (std::max({problem.seq_q, problem.seq_k, problem.heads_q, kv_heads * n_tiles, dq_blocks}) >
      kMaxLength)
    return unsupported(
        message("seq_q = ", problem.seq_q, ", seq_k = ", problem.seq_k,
                ", heads_q = ", problem.heads_q, ", ", kv_heads * n_tiles, " tiles of keys and ",
                dq_blocks, " blocks of dq, but the hopper backend counts each up to ", kMaxLength));

  plan->q = plan_copy(problem.q, &plan->workspace_bytes);
  plan->k = plan_copy(problem.k, &plan->workspace_bytes);
  plan->v = plan_copy(problem.v, &plan->workspace_bytes);
  plan->dout = plan_copy(problem.dout, &plan->workspace_bytes);
  plan->dk_by_tma = stored_by_tma(problem.dk);
  plan->dv_by_tma = stored_by_tma(problem.dv);
  const auto reserve = [&](int64_t floats) {
    return std::exchange(plan->workspace_bytes,
                         plan->workspace_bytes + align_up(size_t(floats) * sizeof(float)));
  };
  plan->lse_offset = reserve(rows);
  plan->delta_offset = reserve(rows);
  plan->dq_offset = reserve(rows * c.head_dim);

  plan->padded_q = int(m_tiles * c.tile_m);
  plan->n_tiles = int(n_tiles);
  plan->kv_heads = int(kv_heads);
  plan->grid = int(kv_heads * n_tiles);
  plan->deterministic = problem.deterministic;
  if (plan->deterministic) {
    plan->turns_offset = reserve(problem.batch * problem.heads_q * m_tiles * kTurns);
    plan->ticket_offset = reserve(1);
    // Heads whose blocks run at the same time take turns, so that blocks that come one after the
    // other in a head also begin, and end, one after the other.
    plan->kv_heads_at_a_time = int(std::clamp<int64_t>(
        device.multiprocessors / std::max<int64_t>(n_tiles, 1), 1, std::max<int64_t>(kv_heads, 1)));
  } else if (c.band) {
    const int64_t bytes = problem.queries_per_kv_head() * plan->padded_q *
                          (problem.head_dim * 6 + problem.head_dim_v * 2);
    plan->kv_heads_at_a_time = int(std::clamp<int64_t>(kL2Budget / std::max<int64_t>(bytes, 1), 1,
                                                       std::max<int64_t>(kv_heads, 1)));
  }
  return {};
}

}  // namespace flash3::hopper
