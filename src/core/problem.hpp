// A validated, normalised call. Made once, in make_forward_problem or make_backward_problem;
// nothing behind them checks user input again.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "core/band.hpp"
#include "core/status.hpp"
#include "flash3/flash3.h"

namespace flash3 {

inline constexpr int kMaxHeadDim = 256;

// [batch, seq, head, dim], strides in elements, the last one is 1. The stride of a dimension with
// fewer than two elements is 0, whatever the caller gave.
struct TensorView {
  void* data = nullptr;
  int64_t batch = 0, seq = 0, heads = 0, dim = 0;
  int64_t stride_batch = 0, stride_seq = 0, stride_head = 0;
};

// [batch, head, seq] float32, strides in elements, the last one is 1.
struct LseView {
  float* data = nullptr;  // null: no LSE wanted (or the call is only a question)
  bool wanted = false;
  int64_t stride_batch = 0, stride_head = 0;
};

// What forward and backward calls have in common.
struct Problem {
  flash3_dtype dtype = FLASH3_DTYPE_NONE;
  int64_t batch = 0, seq_q = 0, seq_k = 0, heads_q = 0, heads_k = 0;
  int head_dim = 0, head_dim_v = 0;

  TensorView q, k, v;
  TensorView out;  // written by the forward, read by the backward
  LseView lse;     // likewise

  float softmax_scale = 0.f;  // never the "0 = default" of the C interface
  Band band;

  flash3_backend backend = FLASH3_BACKEND_AUTO;
  int num_threads = 0;  // 0: all
  void* stream = nullptr;
  void* workspace = nullptr;
  size_t workspace_size = 0;

  int64_t queries_per_kv_head() const { return heads_k > 0 ? heads_q / heads_k : 0; }
};

struct ForwardProblem : Problem {
  // No output element exists: nothing to run.
  bool is_empty() const { return batch == 0 || seq_q == 0 || heads_q == 0; }
};

struct BackwardProblem : Problem {
  TensorView dout, dq, dk, dv;
  LseView dlse;  // gradient of lse; not wanted: zero
  bool deterministic = false;

  // No gradient element exists: nothing to run.
  bool is_empty() const {
    return batch == 0 || (seq_q * heads_q == 0 && seq_k * heads_k == 0);  // products below 2^62
  }
};

template <class T>
concept AnyProblem = std::same_as<T, ForwardProblem> || std::same_as<T, BackwardProblem>;

// Whether data pointers must be there: a launch needs them, a question does not.
enum class Pointers { kRequired, kOptional };

// Checks every rule of flash3.h and fills *problem. The message names the field, both values and
// the rule.
Status make_forward_problem(const flash3_forward_params* params, Pointers pointers,
                            ForwardProblem* problem);
Status make_backward_problem(const flash3_backward_params* params, Pointers pointers,
                             BackwardProblem* problem);

const char* dtype_name(flash3_dtype dtype);
int dtype_size(flash3_dtype dtype);  // bytes

}  // namespace flash3
