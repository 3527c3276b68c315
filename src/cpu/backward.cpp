#include "cpu/backward.hpp"

#include <algorithm>
#include <atomic>
#include <new>

#include "core/convert.hpp"
#include "core/message.hpp"
#include "cpu/parallel.hpp"

namespace flash3 {
namespace {

constexpr size_t kCacheLine = 64;

int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return div_up(a, b) * b; }
size_t whole_lines(size_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

CpuTarget float_target(CpuTarget target) { return std::min(target, CpuTarget::kAvx3); }

const BackwardKernel* kernel_of(CpuTarget target) {
  switch (target) {
#if defined(__x86_64__)
    case CpuTarget::kAvx2: return &kAvx2Backward;
    case CpuTarget::kAvx3: return &kAvx3Backward;
#endif
    default: return &kBaselineBackward;
  }
}

// size cut into equal parts, none larger than `largest`, each a multiple of `unit` as is `largest`.
int even_part(int64_t size, int largest, int unit) {
  size = std::max<int64_t>(size, 1);
  return static_cast<int>(round_up(div_up(size, div_up(size, largest)), unit));
}

// Five arrays of the keys and three of the rows stay within a second-level cache of a megabyte or
// two.
TileShape largest_tile(const BackwardProblem& p) {
  const int keys = std::max(p.head_dim, p.head_dim_v) <= 128 ? kMaxBackwardKeys : 256;
  return {even_part(p.seq_q * p.queries_per_kv_head(), kMaxBackwardRows, kBackwardStrip),
          even_part(p.seq_k, keys, kKeyAlignment)};
}

// Multiply-adds of the five products, masked pairs too.
double work_of(const BackwardProblem& p) {
  return static_cast<double>(p.batch * p.heads_q) * static_cast<double>(p.seq_q) *
         static_cast<double>(p.seq_k) * (3. * p.head_dim + 2. * p.head_dim_v);
}

// The workspace: whose turn it is, the sums of dQ, and each thread's scratch.
struct Space {
  int64_t heads, row_blocks;  // of KV heads, and of each of them
  int64_t head_floats;        // the sums of dQ of one

  Space(const BackwardProblem& p, TileShape tile)
      : heads(p.batch * p.heads_k),
        row_blocks(BackwardBlocks{p, tile}.row_blocks()),
        head_floats(round_up(BackwardBlocks{p, tile}.rows(), kBackwardStrip) *
                    dq_stride(p.head_dim)) {}

  size_t turn_bytes() const {
    return whole_lines(static_cast<size_t>(heads * row_blocks) * sizeof(std::atomic<int>));
  }
  size_t shared_bytes() const {
    return turn_bytes() + whole_lines(static_cast<size_t>(heads * head_floats) * sizeof(float));
  }
  float* dq(void* workspace, int64_t head) const {
    return reinterpret_cast<float*>(static_cast<char*>(workspace) + turn_bytes()) +
           head * head_floats;
  }
  void* scratch(void* workspace, size_t size, int worker) const {
    return static_cast<char*>(workspace) + shared_bytes() + size * static_cast<size_t>(worker);
  }
};

void clear_dq(const BackwardProblem& p, Index batch, Index kv_head, Range rows) {
  for (Index r = rows.begin; r < rows.end; ++r) {
    const Index row = row_offset(p.dq, batch, packed_row(p, kv_head, r));
    for (int d = 0; d < p.head_dim; ++d) store_float(p.dq.data, p.dtype, row + d, 0.f);
  }
}

// The first block of keys that each block of rows sees comes first; rows that see nothing have no
// task, and are done here.
std::atomic<int>* prepare(const BackwardProblem& p, const BackwardPlan& plan, const Space& space) {
  const BackwardBlocks blocks{p, plan.tile};
  auto* turns = static_cast<std::atomic<int>*>(p.workspace);
  for (int64_t head = 0; head < space.heads; ++head)
    for (Index i = 0; i < space.row_blocks; ++i) {
      const Range seen = blocks.key_blocks_of(i);
      new (&turns[head * space.row_blocks + i]) std::atomic<int>(static_cast<int>(seen.begin));
      if (seen.empty()) clear_dq(p, head / p.heads_k, head % p.heads_k, blocks.rows_of(i));
    }
  return turns;
}

}  // namespace

BackwardPlan plan_backward(const BackwardProblem& p, std::optional<CpuTarget> target) {
  BackwardPlan plan;
  plan.target = float_target(target.value_or(best_target(FLASH3_FLOAT32)));
  plan.kernel = kernel_of(plan.target);
  plan.tile = largest_tile(p);
  if (p.is_empty()) {
    plan.why = "no gradient element: nothing to run";
    return plan;
  }
  plan.threads = threads_for(work_of(p), p.num_threads);

  // Several blocks of keys per thread balance the load. But small blocks use what is loaded of Q
  // and dOut less often: with 128 keys a tenth of the speed is lost, with 64 a quarter.
  const int64_t heads = p.batch * p.heads_k;
  const int largest = plan.tile.keys;
  const auto too_few = [&](int64_t per_thread) {
    return heads * div_up(p.seq_k, plan.tile.keys) < per_thread * plan.threads;
  };
  while (plan.tile.keys > kKeyAlignment && too_few(plan.tile.keys > 128 ? 4 : 1))
    plan.tile.keys = static_cast<int>(round_up(plan.tile.keys / 2, kKeyAlignment));
  plan.tasks = heads * BackwardBlocks{p, plan.tile}.key_blocks();
  plan.threads =
      static_cast<int>(std::clamp<int64_t>(plan.threads, 1, std::max<int64_t>(1, plan.tasks)));
  plan.why = message(plan.tasks, " blocks of keys for ", plan.threads,
                     plan.threads > 1 ? " threads" : " thread",
                     plan.tile.keys < largest ? ": small ones, to share them evenly" : "");

  const Space space(p, plan.tile);
  plan.scratch_size = whole_lines(plan.kernel->scratch_bytes(p, plan.tile));
  plan.workspace_size =
      space.shared_bytes() + plan.scratch_size * static_cast<size_t>(plan.threads);
  return plan;
}

Status run_backward(const BackwardProblem& p, const BackwardPlan& plan) {
  if (p.is_empty()) return {};
  const Space space(p, plan.tile);
  if (p.workspace_size < space.shared_bytes() + plan.scratch_size)
    return invalid_argument(message("workspace_size = ", p.workspace_size,
                                    " but this call needs at least ",
                                    space.shared_bytes() + plan.scratch_size, " bytes"));
  const auto affordable =
      static_cast<int64_t>((p.workspace_size - space.shared_bytes()) / plan.scratch_size);
  const int threads = static_cast<int>(std::min<int64_t>(plan.threads, affordable));
  std::atomic<int>* turns = prepare(p, plan, space);

  // Tasks are taken in the order of their keys, so that one which waits waits for one that runs:
  // they cannot block each other. Heads take turns, so that it seldom waits at all. And under a
  // causal mask the long tasks come first.
  std::atomic<int64_t> next{0};
  run_workers(threads, [&](int worker) {
    void* scratch = space.scratch(p.workspace, plan.scratch_size, worker);
    for (int64_t index; (index = next.fetch_add(1)) < plan.tasks;) {
      const int64_t head = index % space.heads;
      const BackwardTask task{&p,
                              head / p.heads_k,
                              head % p.heads_k,
                              index / space.heads,
                              space.dq(p.workspace, head),
                              turns + head * space.row_blocks};
      plan.kernel->run(task, plan.tile, scratch);
    }
  });
  return {};
}

}  // namespace flash3
