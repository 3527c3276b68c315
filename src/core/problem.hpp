// SPDX-License-Identifier: Apache-2.0
// A validated, normalised call. Made once, in make_forward_problem, make_backward_problem or
// make_quantize_problem; nothing behind them checks user input again.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/arithmetic.hpp"
#include "core/fp8.hpp"
#include "core/mask.hpp"
#include "core/seq_info.hpp"
#include "core/status.hpp"
#include "flash3/flash3.h"

namespace flash3 {

inline constexpr int kMaxHeadDim = 256;

// [batch, seq, head, dim], strides in elements, the last one is 1. The stride of a dimension with
// fewer than two elements is 0, whatever the caller gave. Packed tensors [total, head, dim] have
// the same form with stride_batch 0: batch is the number of sequences, seq the most tokens that one
// can have, and row i of sequence b is row rows_of(…, b).first + i of the tensor.
struct TensorView {
  void* data = nullptr;
  int64_t batch = 0, seq = 0, heads = 0, dim = 0;
  int64_t stride_batch = 0, stride_seq = 0, stride_head = 0;
};

// [batch, head, seq] float32, strides in elements, the last one is 1. Packed ones, [head, total],
// have stride_batch 0 and the rows of packed tensors.
struct LseView {
  float* data = nullptr;  // null: no LSE wanted (or the call is only a question)
  bool wanted = false;
  int64_t stride_batch = 0, stride_head = 0;
};

// [head], contiguous: a sink, or its gradient.
struct SinkView {
  void* data = nullptr;  // null: none (or the call is only a question)
  flash3_dtype dtype = FLASH3_DTYPE_NONE;
  bool given = false;
};

// Where a call runs.
struct ExecutionContext {
  flash3_backend backend = FLASH3_BACKEND_AUTO;
  int num_threads = 0;  // 0: all
  void* stream = nullptr;
  void* workspace = nullptr;
  size_t workspace_size = 0;
};

// Every part of a workspace begins at a multiple of so many bytes.
inline constexpr size_t kWorkspaceAlignment = 256;

// Adds a part of so many bytes to a workspace of *size; returns where in it the part begins.
inline size_t reserve_workspace(size_t bytes, size_t* size) {
  return std::exchange(*size, *size + round_up(bytes, kWorkspaceAlignment));
}

// What forward and backward calls have in common.
struct Problem : ExecutionContext {
  flash3_dtype dtype = FLASH3_DTYPE_NONE;      // of q, k and v
  flash3_dtype out_dtype = FLASH3_DTYPE_NONE;  // another one only if a forward computes in FP8
  int64_t batch = 0;
  int64_t seq_q = 0, seq_k = 0;  // of a ragged batch: no sequence is longer
  int64_t heads_q = 0, heads_k = 0;
  int head_dim = 0, head_dim_v = 0;

  // Where each sequence lies; of a batch that is not ragged all are seq_q and seq_k long.
  Sequences sequences_q, sequences_k;

  TensorView q, k, v;
  TensorView out;  // written by the forward, read by the backward
  LseView lse;     // likewise

  float softmax_scale = 0.f;  // never the "0 = default" of the C interface
  float softcap = 0.f;        // 0: none
  SinkView sink;
  MaskRule mask_rule;

  int64_t queries_per_kv_head() const { return heads_k > 0 ? heads_q / heads_k : 0; }
  bool is_ragged() const {
    return sequences_q.packed || sequences_q.has_used || sequences_k.packed || sequences_k.has_used;
  }

  // Sequence b, by what cu_seqlens and seqused hold: for the CPU, and not for questions.
  SeqInfo sequence(int64_t b) const { return seq_info(sequences_q, sequences_k, b); }
  Mask mask(const SeqInfo& s) const { return Mask::make(s.q.length, s.k.length, mask_rule); }

  // The mask of a batch that is not ragged, and its band: all of it if there are no chunks.
  Mask mask() const { return Mask::make(seq_q, seq_k, mask_rule); }
  Band band() const { return mask().band; }
};

struct ForwardProblem : Problem {
  ScaleView q_scale, k_scale, v_scale;  // of FP8 tensors

  // q, k and v are brought to FP8 first. No backend sees such a problem: core/quantized_forward.hpp
  // makes two of it.
  bool quantizes = false;
  uint64_t rotation_seed = 0;

  // No output element exists: nothing to run.
  bool is_empty() const { return batch == 0 || seq_q == 0 || heads_q == 0; }
};

struct BackwardProblem : Problem {
  TensorView dout, dq, dk, dv;
  LseView dlse;    // gradient of lse; not wanted: zero
  SinkView dsink;  // gradient of sink
  bool deterministic = false;

  // No gradient element exists: nothing to run.
  bool is_empty() const {
    if (dsink.given && heads_q > 0) return false;  // the sum of no rows is 0, and is written
    return batch == 0 || (seq_q * heads_q == 0 && seq_k * heads_k == 0);  // products below 2^62
  }
};

// A tensor that is to become FP8.
struct QuantizePart {
  bool given = false;
  TensorView in, out;
  ScaleView scale;
};

// The tables of a rotary position embedding, [positions, dim / 2].
struct RotaryView {
  bool given = false;
  const void *cos = nullptr, *sin = nullptr;
  flash3_dtype dtype = FLASH3_DTYPE_NONE;
  bool interleaved = false;
  int dim = 0;
  int64_t stride_cos = 0, stride_sin = 0;  // from position to position
  int64_t offset_q = 0, offset_k = 0;      // position of each sequence's first token
};

struct QuantizeProblem : ExecutionContext {
  flash3_dtype dtype = FLASH3_DTYPE_NONE;  // of q, k and v
  int64_t batch = 0;
  Sequences sequences_q, sequences_k;
  QuantizePart q, k, v;
  bool rotates = false;
  uint64_t rotation_seed = 0;
  RotaryView rotary;

  bool is_ragged() const {
    return sequences_q.packed || sequences_q.has_used || sequences_k.packed || sequences_k.has_used;
  }
  // No scale exists either: nothing to run.
  bool is_empty() const {
    const auto none = [](const QuantizePart& part) {
      if (!part.given) return true;
      return part.scale.kind != ScaleKind::kTensor && (part.in.heads == 0 || part.in.batch == 0);
    };
    return none(q) && none(k) && none(v);
  }
};

template <class T>
concept AnyProblem = std::same_as<T, ForwardProblem> || std::same_as<T, BackwardProblem> ||
                     std::same_as<T, QuantizeProblem>;

// Whether data pointers must be there: a launch needs them, a question does not.
enum class Pointers { kRequired, kOptional };

// Checks every rule of flash3.h and fills *problem. The message names the field, both values and
// the rule.
Status make_forward_problem(const flash3_forward_params* params, Pointers pointers,
                            ForwardProblem* problem);
Status make_backward_problem(const flash3_backward_params* params, Pointers pointers,
                             BackwardProblem* problem);

Status make_quantize_problem(const flash3_quantize_params* params, Pointers pointers,
                             QuantizeProblem* problem);

// The same under one name, for code that treats all kinds alike.
inline Status make_problem(const flash3_forward_params* params, Pointers pointers,
                           ForwardProblem* problem) {
  return make_forward_problem(params, pointers, problem);
}
inline Status make_problem(const flash3_backward_params* params, Pointers pointers,
                           BackwardProblem* problem) {
  return make_backward_problem(params, pointers, problem);
}
inline Status make_problem(const flash3_quantize_params* params, Pointers pointers,
                           QuantizeProblem* problem) {
  return make_quantize_problem(params, pointers, problem);
}

// The rules for what cu_seqlens and seqused hold, of a problem whose memory the host can read.
Status check_lengths(const Problem& problem);
Status check_lengths(const QuantizeProblem& problem);

const char* dtype_name(flash3_dtype dtype);

// Bytes of an element; 0 for what is no dtype.
inline int dtype_size(flash3_dtype dtype) {
  switch (dtype) {
    case FLASH3_FLOAT16:
    case FLASH3_BFLOAT16: return 2;
    case FLASH3_FLOAT32:
    case FLASH3_INT32: return 4;
    case FLASH3_FLOAT8_E4M3: return 1;
    case FLASH3_DTYPE_NONE: break;
  }
  return 0;
}

}  // namespace flash3
