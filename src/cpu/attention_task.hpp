// What the driver (attention.cpp) hands to a kernel, and what a kernel offers. One kernel object
// per instruction set: kernels/*.cpp.
//
// Query heads that share a KV head are packed: row r of a KV head is query r / group of its head
// r % group, so that they share every load of K and V.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/problem.hpp"

namespace flash3 {

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
inline float log_sum_exp(float max, float sum) {
  return static_cast<float>((max + std::log2(static_cast<double>(sum))) * 0.69314718055994531);
}

struct AttentionTask {
  const ForwardProblem* problem = nullptr;
  int64_t batch = 0, kv_head = 0;
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

}  // namespace flash3
