// What the driver of the backward (backward.cpp) hands to a kernel, and what a kernel offers. Query
// heads are packed as in the forward (attention_task.hpp).
//
// A task is a block of keys of one KV head, and goes over all blocks of rows that see it. dK and dV
// are its own; the sums of dQ belong to all tasks of the head, which add to each block of rows in
// the order of the keys: a task waits for its turn. So every score is computed once, nothing is
// reduced afterwards, and the sums are the same on any number of threads.
#pragma once

#include <algorithm>
#include <atomic>

#include "cpu/attention_task.hpp"

namespace flash3 {

// The most that a block has.
inline constexpr int kMaxBackwardRows = 96;
inline constexpr int kMaxBackwardKeys = 384;
inline constexpr int kBackwardStrip = 6;  // rows or keys of a matrix product

// How the scores of one KV head are cut into blocks.
struct BackwardBlocks {
  const BackwardProblem& problem;
  TileShape tile;  // rows: a multiple of kBackwardStrip; keys: of kKeyAlignment

  Index rows() const { return problem.seq_q * problem.queries_per_kv_head(); }
  Index row_blocks() const { return (rows() + tile.rows - 1) / tile.rows; }
  Index key_blocks() const { return (problem.seq_k + tile.keys - 1) / tile.keys; }

  Range rows_of(Index block) const {
    return {block * tile.rows, std::min<Index>((block + 1) * tile.rows, rows())};
  }
  Range keys_of(Index block) const {
    return {block * tile.keys, std::min<Index>((block + 1) * tile.keys, problem.seq_k)};
  }
  // The queries of packed rows, which must not be none.
  Range queries(Range rows) const {
    const Index group = problem.queries_per_kv_head();
    return {rows.begin / group, (rows.end - 1) / group + 1};
  }
  // The blocks of keys of which this block of rows sees some; begin = end if none.
  Range key_blocks_of(Index row_block) const {
    return problem.band().key_tiles(queries(rows_of(row_block)), problem.seq_k, tile.keys);
  }
};

// What a packed row of a KV head is.
struct PackedRow {
  Index query, head;  // of all query heads
};

inline PackedRow packed_row(const Problem& p, Index kv_head, Index r) {
  const Index group = p.queries_per_kv_head();
  return {r / group, kv_head * group + r % group};
}

inline Index row_offset(const TensorView& t, Index batch, PackedRow row) {
  return batch * t.stride_batch + row.query * t.stride_seq + row.head * t.stride_head;
}

// Floats from row to row of the dQ sums: whole vectors on every instruction set.
constexpr int dq_stride(int head_dim) { return (head_dim + 15) / 16 * 16; }

struct BackwardTask {
  const BackwardProblem* problem = nullptr;
  int64_t batch = 0, kv_head = 0, key_block = 0;
  float* dq = nullptr;               // [packed row][dq_stride] of this KV head
  std::atomic<int>* turn = nullptr;  // [row block] of it: the block of keys that may add to dq
};

struct BackwardKernel {
  // Bytes of 64-byte aligned scratch that one thread needs.
  size_t (*scratch_bytes)(const BackwardProblem& problem, TileShape tile);
  // Blocks until tasks with a smaller key_block of the same KV head have done what it needs.
  void (*run)(const BackwardTask& task, TileShape tile, void* scratch);
};

extern const BackwardKernel kBaselineBackward;
#if defined(__x86_64__)
extern const BackwardKernel kAvx2Backward, kAvx3Backward;
#endif

}  // namespace flash3
