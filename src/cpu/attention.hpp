// SPDX-License-Identifier: Apache-2.0
// What the driver (attention.cpp) hands to a kernel, and what a kernel offers. One kernel object
// per instruction set: kernels/*.cpp.
//
// Query heads that share a KV head are packed: row r of a KV head is query r / group of its head
// r % group, so that they share every load of K and V.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "core/arithmetic.hpp"
#include "core/convert.hpp"
#include "core/problem.hpp"
#include "cpu/mask_reader.hpp"
#include "cpu/sequence.hpp"
#include "cpu/target.hpp"

namespace flash3::cpu {

struct TileShape {
  int rows = 0;  // packed rows of a task
  int keys = 0;  // keys packed at a time, a multiple of kKeyAlignment
};
inline constexpr int kKeyAlignment = 64;

// The state of rows that have seen a part of their keys.
struct Partial {
  float* out = nullptr;  // [rows, head_dim_v]: Σ exp2(score − max) · v
  float* max = nullptr;  // [rows]: base-2 exponent that the sums are relative to
  float* sum = nullptr;  // [rows]: Σ exp2(score − max)
};

// Natural logarithm, from those; −∞ where nothing was seen.
inline float log_sum_exp(double max, float sum) {
  return static_cast<float>((max + std::log2(static_cast<double>(sum))) * 0.69314718055994531);
}

// The largest logit, from the former; −∞ where nothing was seen.
inline float max_logit(float max) {
  return static_cast<float>(static_cast<double>(max) * 0.69314718055994531);
}

// What a row comes to when all its keys are summed up: out = scale · Σ exp2(score − max) · v / sum,
// lse = log_sum_exp(max, sum).
struct RowEnd {
  double max = 0;
  float sum = 0, scale = 0;
};

// The head's sink, if there is one, joins what the keys gave.
inline RowEnd end_of_row(float max, float sum, const SinkView& sink, int64_t head) {
  if (!sink.data) return {max, sum, 1.f};
  const double own = load_float(sink.data, sink.dtype, head) * kLog2E;
  if (sum == 0) return {own, 1.f, 1.f};
  const double top = std::max<double>(max, own);
  const float scale = std::exp2(static_cast<float>(max - top));
  return {top, sum * scale + std::exp2(static_cast<float>(own - top)), scale};
}

struct AttentionTask {
  const ForwardProblem* problem = nullptr;
  Sequence sequence;
  int64_t kv_head = 0;
  Range rows;       // packed rows, at most TileShape::rows
  Range keys;       // begins at a multiple of TileShape::keys
  Partial partial;  // where the result goes if keys are not all keys; else null: out and lse
};

struct AttentionKernel {
  // Bytes of 64-byte aligned scratch that one thread needs.
  size_t (*scratch_bytes)(const ForwardProblem& problem, TileShape tile);
  void (*run)(const AttentionTask& task, TileShape tile, void* scratch);
};

extern const AttentionKernel kBaselineKernel;
#if defined(__x86_64__)
extern const AttentionKernel kAvx2Kernel, kAvx3Kernel, kAvx3Zen4Kernel;
extern const AttentionKernel kAmxKernel;  // bfloat16 only
#endif

// Attention on the CPU: exact, tiled, online softmax, many threads.

// How one call runs. Made by plan_attention alone, for every question and for the launch.
struct AttentionPlan {
  CpuTarget target = CpuTarget::kBaseline;
  const AttentionKernel* kernel = nullptr;
  TileShape tile;          // the largest
  int threads = 1;         // the most
  int64_t row_blocks = 0;  // of a KV head's packed rows
  int64_t splits = 1;      // parts of the keys; more than one is followed by a merge
  int64_t split_keys = 0;  // keys of a part
  int64_t tasks = 0;       // batch × KV heads × row_blocks × splits; ragged: at most
  size_t q_offset = 0;     // into the workspace: q with its embedding and rotation
  size_t workspace_size = 0;
  std::string why;
};

// target: the best that this machine has for the dtype, unless a test asks for another; kAmx for
// bfloat16 only.
AttentionPlan plan_attention(const ForwardProblem& problem,
                             std::optional<CpuTarget> target = std::nullopt);

// Computes out and, if it has memory, lse. The problem's workspace holds at least
// plan.workspace_size bytes. INVALID_ARGUMENT, and nothing written, if cu_seqlens or seqused hold
// what they must not.
Status run_attention(const ForwardProblem& problem, const AttentionPlan& plan);

}  // namespace flash3::cpu
