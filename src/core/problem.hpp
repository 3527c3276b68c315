// SPDX-License-Identifier: Apache-2.0
// A validated, normalised call. Made once, in make_forward_problem, make_backward_problem,
// make_quantize_problem or make_merge_problem; nothing after them checks user input again.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/added_views.hpp"
#include "core/arithmetic.hpp"
#include "core/dropout.hpp"
#include "core/fp8.hpp"
#include "core/kv_cache.hpp"
#include "core/mask.hpp"
#include "core/mask_problem.hpp"
#include "core/mask_rule.hpp"
#include "core/seq_info.hpp"
#include "core/status.hpp"
#include "core/tensor_view.hpp"
#include "flash3/flash3.h"

namespace flash3 {

inline constexpr int kMaxHeadDim = 256;  // of both; of forward calls that are not FP8:
inline constexpr int kMaxScoreDim = 576, kMaxValueDim = 512;
inline constexpr int kMaxMergedDim = 512;  // of the parts that flash3_merge takes

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
inline constexpr size_t kWorkspaceAlignment = FLASH3_WORKSPACE_ALIGNMENT;

// Adds a part of so many bytes to a workspace of *size; returns where in it the part begins.
inline size_t reserve_workspace(size_t bytes, size_t* size) {
  return std::exchange(*size, *size + round_up(bytes, kWorkspaceAlignment));
}

// The tables of a rotary position embedding, [positions, dim / 2].
struct RotaryView {
  bool given = false;
  const void *cos = nullptr, *sin = nullptr;
  flash3_dtype dtype = FLASH3_DTYPE_NONE;
  bool interleaved = false;
  int dim = 0;
  int64_t positions = 0;
  int64_t stride_cos = 0, stride_sin = 0;  // from position to position
};

// Tokens that a forward call writes into its cache first.
struct Append {
  bool given = false;
  bool has_v = false;                      // false: v is a part of the cache's k
  flash3_dtype dtype = FLASH3_DTYPE_NONE;  // of k and v: kv_dtype, or 16-bit for an FP8 cache
  TensorView k, v;                         // [batch, seq, head, dim], or packed
  Sequences sequences;                     // of k and v
  RotaryView rotary;
  const int* rotary_offsets = nullptr;  // [batch]; null: the cache's lengths
};

// Which of its sequence's last keys a query sees; as many keys as there are queries, at most
// kMostDrafts.
inline constexpr int64_t kMostDrafts = 64;
struct TreeMask {
  bool given = false;
  const uint64_t* words = nullptr;  // [batch, seq_q]; packed: [total_q], with stride_batch 0
  int64_t stride_batch = 0;

  // The words of a sequence with these rows; null: the call has none.
  const uint64_t* of(int64_t batch, const RowRange& q) const {
    return words ? words + batch * stride_batch + q.first : nullptr;
  }
};

// Which weights are dropped (core/dropout.hpp); the seed and the offset are those of dropout_state
// where that is given.
struct Dropout {
  unsigned threshold = 0;  // 0: none is
  uint64_t seed = 0, offset = 0;
  int64_t first_sequence = 0;  // the problem's, of the batch that it was taken from

  bool given() const { return threshold > 0; }
  // On the host, which reads the state.
  PhiloxKey key(const StateView& state) const {
    if (!state.data) return dropout_key(seed, offset);
    return dropout_key(static_cast<uint64_t>(state.data[0]), static_cast<uint64_t>(state.data[1]));
  }
  float scale() const { return dropout_scale(threshold); }
};

// What forward and backward calls have in common.
struct Problem : ExecutionContext, AddedViews {
  flash3_dtype dtype = FLASH3_DTYPE_NONE;      // of q
  flash3_dtype kv_dtype = FLASH3_DTYPE_NONE;   // of k and v: that of q, or FP8 where q is 16-bit
  flash3_dtype out_dtype = FLASH3_DTYPE_NONE;  // that of q, float32 too; of FP8 any but FP8
  int64_t batch = 0;
  int64_t seq_q = 0, seq_k = 0;  // of a ragged batch: no sequence is longer, with what it appends
  int64_t heads_q = 0, heads_k = 0;
  int head_dim = 0, head_dim_v = 0;

  // Where each sequence lies; of a batch that is not ragged all are seq_q and seq_k long.
  Sequences sequences_q, sequences_k;

  TensorView q, k, v;  // of a paged cache k and v are [pages, page_size, head, dim]
  TensorView out;      // written by the forward, read by the backward
  LseView lse;         // as out

  float softmax_scale = 0.f;  // never the "0 = default" of the C interface
  float softcap = 0.f;        // 0: none
  Dropout dropout;
  SinkView sink;
  MaskRule mask_rule;
  MaskLists mask_lists;  // if given, they say all; mask_rule is the band that they were made with
  bool fills_padding = false;  // core/padding.hpp; no backend sees it

  // Forward calls alone have these. `qv`: the part of the queries that is multiplied by v; without
  // dimensions there is none. `cache`: where the keys of a sequence lie in k and v.
  TensorView qv;
  KvCache cache;
  Append append;
  TreeMask tree;

  int64_t queries_per_kv_head() const { return heads_k > 0 ? heads_q / heads_k : 0; }
  bool has_qv() const { return qv.dim > 0; }
  // Products that a score sums up.
  int score_dim() const { return head_dim + static_cast<int>(qv.dim); }
  bool has_cache() const { return cache.given() || append.given; }
  bool has_fp8_keys() const { return kv_dtype == FLASH3_FLOAT8_E4M3; }
  // Under a q of 16 bits FP8 keys and values become 16-bit in the kernel.
  bool widens_keys() const { return has_fp8_keys() && dtype != kv_dtype; }
  bool is_ragged() const {
    return sequences_q.packed || sequences_q.has_used || sequences_k.packed ||
           sequences_k.has_used || has_cache();
  }

  // Sequence b, by what cu_seqlens, seqused and the cache hold: for the CPU, and not for questions.
  // The keys of a cache are given by their places in it.
  SeqInfo sequence(int64_t b) const {
    if (!has_cache()) return seq_info(sequences_q, sequences_k, b);
    const CacheKeys keys = keys_in_cache(b);
    return {rows_of(sequences_q, b), {keys.first, keys.length(), sequences_k.rows - keys.first}};
  }
  CacheKeys keys_in_cache(int64_t b) const {
    return cache_keys(cache, sequences_k, append.given ? rows_of(append.sequences, b).length : 0,
                      b);
  }
  // Of dropout, by what dropout_state holds: for the CPU, and not for questions.
  PhiloxKey dropout_key() const { return dropout.key(dropout_state); }
  // What dropout knows a query head by.
  unsigned dropout_head(int64_t sequence, int64_t head) const {
    return static_cast<unsigned>((dropout.first_sequence + sequence) * heads_q + head);
  }
  Mask mask(const SeqInfo& s) const { return Mask::make(s.q.length, s.k.length, mask_rule); }

  // The mask of a batch that is not ragged, and its band: all of it if there are no chunks.
  Mask mask() const { return Mask::make(seq_q, seq_k, mask_rule); }
  Band band() const { return mask().band; }
};

// No backend sees a max_logits of heads: core/dispatch.cpp makes rows of it.
struct ForwardProblem : Problem, AddedForwardViews {
  ScaleView q_scale, k_scale, v_scale;  // of FP8 tensors

  int sm_margin = 0;
  const flash3_schedule* schedule = nullptr;  // the caller's; null: the call makes its own
  flash3_fp8_sums fp8_sums = FLASH3_FP8_SUMS_AUTO;

  // q, k and v are brought to FP8 first. No backend sees such a problem: core/quantized_forward.hpp
  // makes two of it.
  bool quantizes = false;
  bool rotates = false;  // q and what is appended to k: core/rotation.hpp
  uint64_t rotation_seed = 0;

  // The attention reads q from the workspace, with its rotary embedding, its rotation or both.
  bool transforms_q() const { return append.rotary.given || rotates; }
  bool has_output() const { return batch > 0 && seq_q > 0 && heads_q > 0; }
  bool has_tokens_to_append() const {
    return append.given && batch > 0 && append.sequences.max_length > 0 && heads_k > 0;
  }
  // No element of out or of the cache is to be written: nothing to run.
  bool is_empty() const {
    return !has_output() && !has_tokens_to_append() && !has_padding_to_fill() &&
           !(max_logits.of_heads && heads_q > 0);
  }
  bool has_padding_to_fill() const { return fills_padding && sequences_q.rows > 0 && heads_q > 0; }

  // The rotary embedding's position of query i, where that of the sequence's first new token is
  // `first`.
  int64_t query_position(int64_t first, int64_t i) const {
    return mask_rule.is_none() ? first : first + i;
  }
};

struct BackwardProblem : Problem, AddedBackwardViews {
  flash3_dtype gradient_dtype = FLASH3_DTYPE_NONE;  // of dq, dk and dv: `dtype` or float32
  TensorView dout, dq, dk, dv;
  LseView dlse;    // gradient of lse; not wanted: zero
  SinkView dsink;  // gradient of sink
  bool deterministic = false;

  // No gradient element exists: nothing to run.
  bool is_empty() const {
    if (dsink.given && heads_q > 0) return false;  // the sum of no rows is 0, and is written
    if (has_bias_gradients()) return false;        // likewise
    if (has_padding_to_fill()) return false;
    return batch == 0 || (seq_q * heads_q == 0 && seq_k * heads_k == 0);  // products below 2^62
  }
  // Whether a gradient of what is added to scores has elements.
  bool has_bias_gradients() const {
    const BiasView& t = dbias;
    return (t.given && t.batch > 0 && t.heads > 0 && t.rows > 0 && t.keys > 0) ||
           (dbias_table.given && dbias_table.heads > 0) ||
           (dalibi_slopes.given && heads_q > 0 && (batch > 0 || !dalibi_slopes.of_batch));
  }
  bool has_padding_to_fill() const {
    return fills_padding && (sequences_q.rows * heads_q > 0 || sequences_k.rows * heads_k > 0);
  }
};

// A tensor that is to become FP8.
struct QuantizePart {
  bool given = false;
  TensorView in, out;
  ScaleView scale;
};

struct QuantizeProblem : ExecutionContext {
  flash3_dtype dtype = FLASH3_DTYPE_NONE;  // of q, k and v
  int64_t batch = 0;
  Sequences sequences_q, sequences_k;
  QuantizePart q, k, v;
  bool rotates = false;
  uint64_t rotation_seed = 0;
  RotaryView rotary;
  int64_t rotary_offset_q = 0, rotary_offset_k = 0;  // position of each sequence's first token

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

// The parts of a merge: out_parts is [parts, rows, head, dim] and lse_parts [parts, head, rows], as
// a batch of so many; out and lse are as those of one packed sequence.
struct MergeProblem : ExecutionContext {
  flash3_dtype out_dtype = FLASH3_DTYPE_NONE;
  int64_t parts = 0, rows = 0, heads = 0;
  int head_dim_v = 0;
  TensorView out_parts, out;
  LseView lse_parts, lse;
  SinkView sink;

  bool is_empty() const { return rows == 0 || heads == 0; }
};

// A call of flash3_dropout_mask.
struct DropoutMaskProblem {
  Dropout dropout;
  StateView state;
  uint8_t* kept = nullptr;  // [batch, head, query, key], the last stride is 1
  int64_t batch = 0, heads = 0, seq_q = 0, seq_k = 0;
  int64_t stride_batch = 0, stride_head = 0, stride_query = 0;
  flash3_backend backend = FLASH3_BACKEND_AUTO;
  int num_threads = 0;  // 0: all
  void* stream = nullptr;

  bool is_empty() const { return batch == 0 || heads == 0 || seq_q == 0 || seq_k == 0; }
};

template <class T>
concept AnyProblem = std::same_as<T, ForwardProblem> || std::same_as<T, BackwardProblem> ||
                     std::same_as<T, QuantizeProblem> || std::same_as<T, MergeProblem>;

// Whether data pointers must be there: a launch needs them, a question does not.
enum class Pointers { kRequired, kOptional };

// The rule for dropout_p.
Status check_dropout_p(float p);

// The mask that the params of a forward or a backward call ask for.
template <class Params>
MaskRule mask_rule_of(const Params& params);

// Checks every rule of flash3.h and fills *problem. The message names the field, both values and
// the rule.
Status make_forward_problem(const flash3_forward_params* params, Pointers pointers,
                            ForwardProblem* problem);
Status make_backward_problem(const flash3_backward_params* params, Pointers pointers,
                             BackwardProblem* problem);

Status make_quantize_problem(const flash3_quantize_params* params, Pointers pointers,
                             QuantizeProblem* problem);
Status make_merge_problem(const flash3_merge_params* params, Pointers pointers,
                          MergeProblem* problem);

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
inline Status make_problem(const flash3_merge_params* params, Pointers pointers,
                           MergeProblem* problem) {
  return make_merge_problem(params, pointers, problem);
}

// The rules for what cu_seqlens, seqused and the index tensors of a cache hold, of a problem whose
// memory the host can read.
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
    case FLASH3_FLOAT8_E4M3:
    case FLASH3_UINT8: return 1;
    case FLASH3_INT64: return 8;
    case FLASH3_DTYPE_NONE: break;
  }
  return 0;
}

}  // namespace flash3
