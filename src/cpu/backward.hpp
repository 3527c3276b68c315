// SPDX-License-Identifier: Apache-2.0
// What the driver of the backward (backward.cpp) hands to a kernel, and what a kernel offers. Query
// heads are packed as in the forward (attention.hpp).
//
// A task is a block of keys of one KV head, and goes over all blocks of rows that see it. dK and dV
// are its own; the sums of dQ belong to all tasks of the head, which add to each block of rows in
// the order of the keys: a task waits for the one before it. So every score is computed once,
// nothing is reduced afterwards, and the sums are the same on any number of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>
#include <string>

#include "core/arithmetic.hpp"
#include "core/problem.hpp"
#include "cpu/attention.hpp"
#include "cpu/bias_gradients.hpp"
#include "cpu/target.hpp"

namespace flash3::cpu {

// The most that a block has.
inline constexpr int kMaxBackwardRows = 96;
inline constexpr int kMaxBackwardKeys = 384;
inline constexpr int kBackwardStrip = 6;  // rows or keys of a matrix product

// size cut into equal parts, none larger than `largest`, each a multiple of `unit` as is `largest`.
constexpr int even_part(Index size, int largest, int unit) {
  if (size < 1) size = 1;
  const Index parts = ceil_div(size, largest), part = ceil_div(size, parts);
  return static_cast<int>(round_up(part, unit));
}

// How the scores of one KV head of a sequence are cut into blocks. That of rows follows from the
// sequence alone, and so do the sums of dK and dV.
struct BackwardBlocks {
  Index group = 1;  // query heads of a KV head
  Sequence sequence;
  bool masked;  // by lists: a block of keys lies in one block of them
  MaskReader reader;
  TileShape tile;  // rows: a multiple of kBackwardStrip; keys: of kKeyAlignment

  BackwardBlocks(const BackwardProblem& p, const Sequence& s, int largest_keys)
      : group(p.queries_per_kv_head()),
        sequence(s),
        masked(p.mask_lists.given),
        reader(p.mask_lists, s.batch),
        tile{even_part(rows(), kMaxBackwardRows, kBackwardStrip),
             even_part(shares_keys(p) ? p.seq_k : keys(), largest_keys, kKeyAlignment)} {}

  // Whether sequences add to the same elements of dbias: all are cut in the same places then.
  static bool shares_keys(const BackwardProblem& p) { return p.dbias.given && p.dbias.sums_batch; }

  Index rows() const { return sequence.q.length * group; }
  Index keys() const { return sequence.k.length; }
  Index row_blocks() const { return ceil_div(rows(), tile.rows); }
  Index key_blocks() const { return ceil_div(keys(), tile.keys); }

  Range rows_of(Index block) const {
    return {block * tile.rows, std::min<Index>((block + 1) * tile.rows, rows())};
  }
  Range keys_of(Index block) const {
    return {block * tile.keys, std::min<Index>((block + 1) * tile.keys, keys())};
  }
  // The blocks of keys from the first of which this block of a KV head's rows sees some to the
  // last; begin = end if none.
  Range key_blocks_of(Index kv_head, Index row_block) const {
    const Range rows = rows_of(row_block);
    if (masked) {
      const Range blocks = reader.k_blocks(rows, group, kv_head);
      const Index each = kMaskBlock / tile.keys;
      return {blocks.begin * each, std::min(blocks.end * each, key_blocks())};
    }
    return sequence.mask.key_tiles({rows.begin / group, (rows.end - 1) / group + 1}, keys(),
                                   tile.keys);
  }
  // Whether some of these rows see this block of keys, one of those between the first and the last.
  bool sees(Index kv_head, Index row_block, Index key_block) const {
    return !masked ||
           reader.lists(rows_of(row_block), group, kv_head, keys_of(key_block).begin / kMaskBlock);
  }
  // The packed rows that see some of these keys by the band. The keys must not be none.
  Range rows_that_see(Range keys) const {
    const Range queries = sequence.mask.transposed().keys(keys, sequence.q.length);
    return {queries.begin * group, queries.end * group};
  }
};

// Floats from row to row of the dQ sums: whole vectors on every instruction set.
constexpr int dq_stride(int head_dim) { return (head_dim + 15) / 16 * 16; }

struct BackwardTask {
  const BackwardProblem* problem = nullptr;
  BackwardBlocks blocks;
  int64_t kv_head = 0, key_block = 0;
  float* dq = nullptr;          // [packed row][dq_stride] of this KV head
  float* sink_terms = nullptr;  // [packed row] of it: what the row adds to −dsink; or null
  std::atomic<int>* next_keys = nullptr;  // [row block]: the block of keys that may add to dq
  BiasGradients biases;
};

// What a row takes from its sink, times delta, is what it adds to −dsink. No row that saw nothing
// at all has any.
inline float sink_term(const BackwardProblem& p, Index head, float lse, float delta) {
  if (lse == -std::numeric_limits<float>::infinity()) return 0.f;
  return std::exp(load_float(p.sink.data, p.sink.dtype, head) - lse) * delta;
}

struct BackwardKernel {
  // Bytes of 64-byte aligned scratch that one thread needs.
  size_t (*scratch_bytes)(const BackwardProblem& problem, TileShape tile);
  // Waits until tasks with a smaller key_block of the same sequence and KV head have done what it
  // needs.
  void (*run)(const BackwardTask& task, void* scratch);
};

extern const BackwardKernel kBaselineBackward;
#if defined(__x86_64__)
extern const BackwardKernel kAvx2Backward, kAvx3Backward;
extern const BackwardKernel kAvx3Zen4Backward, kAmxBackward;  // bfloat16 only
#endif

// The backward on the CPU: exact, tiled, many threads, the same bits on any number of them.

// How one call runs. Made by plan_backward alone, for every question and for the launch.
struct BackwardPlan {
  CpuTarget target = CpuTarget::kBaseline;
  const BackwardKernel* kernel = nullptr;
  TileShape tile;           // the largest
  int threads = 1;          // the most
  int64_t tasks = 0;        // batch × KV heads × blocks of keys; ragged: at most
  size_t scratch_size = 0;  // of one thread
  size_t workspace_size = 0;
  std::string why;
};

// target: the fastest that this machine has, unless a test asks for another. What comes after kAvx3
// is for bfloat16 alone and counts as kAvx3 for other dtypes.
BackwardPlan plan_backward(const BackwardProblem& problem,
                           std::optional<CpuTarget> target = std::nullopt);

// Computes dq, dk, dv and, if it is wanted, dsink. The problem's workspace holds at least
// plan.workspace_size bytes. INVALID_ARGUMENT, and nothing written, if cu_seqlens or
// seqused hold what they must not.
Status run_backward(const BackwardProblem& problem, const BackwardPlan& plan);

}  // namespace flash3::cpu
