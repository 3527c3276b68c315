// SPDX-License-Identifier: Apache-2.0
// Appends to a KV cache, and brings q into the workspace as the attention reads it.
#include "core/arithmetic.hpp"
#include "hopper/decode/append.hpp"
#include "hopper/decode/append_rows.cuh"
#include "hopper/decode/lengths.hpp"
#include "hopper/host/cuda_status.hpp"
#include "hopper/host/row_pieces.hpp"

namespace flash3::hopper {
namespace {

constexpr int kTokens = 8;  // that a block has at once
constexpr Index kLeastBlocks = 512, kMostBlocks = 1 << 20;
static_assert(kMostLanes * kPiece == kMaxHeadDim);

// Whatever the lengths and the offsets hold, the tables have the position.
__device__ __forceinline__ long long position_of(const AppendParams& p, int b, int token) {
  if (p.rotary.half == 0) return -1;
  const long long first = p.offsets != nullptr ? p.offsets[b] : rows_of(p.keys, b).length;
  const long long position = first + token;
  return position < 0 ? 0 : position < p.positions ? position : p.positions - 1;
}

// Whatever table and indices hold, the row is one of the cache.
__device__ __forceinline__ CacheRow cache_place(const AppendParams& p, int b, int place) {
  int element = b, row = place;
  if (p.page_table != nullptr) {
    const int number = place / p.page_size;
    element = p.page_table[b * p.page_table_stride + number];
    row -= number * p.page_size;
  } else if (p.batch_idx != nullptr) {
    element = p.batch_idx[b];
  }
  return {clamped(element, 0, p.elements - 1), row};
}

// The keys of so many new tokens of sequence b, from this one on.
template <Element kFrom, Element kTo>
__device__ __forceinline__ void append_rotated(const AppendParams& p, int b,
                                               const DecodeRows& added, int used, int first,
                                               int tokens) {
  const CopiedRows& k = p.k;
  for_each_rotated(p, k, tokens, [&](int token, int head, int col, bool counts) {
    const int n = first + token;
    const CacheRow at = cache_place(p, b, used + n);
    const auto* const from = static_cast<const Bits<kFrom>*>(k.from) + b * k.from_batch +
                             (added.first + n) * k.from_row + head * k.from_head;
    auto* const to = static_cast<Bits<kTo>*>(k.to) + at.element * k.to_batch + at.row * k.to_row +
                     head * k.to_head;
    const float scale = kTo == Element::kE4m3 ? cache_scale(k.scale, b, head, at) : 1.f;
    rotate_piece<kFrom, kTo>(p, k, from, to, col, position_of(p, b, n), scale, counts);
  });
}

// The new tokens of sequence b that block `index` of it has.
template <Element kFrom, Element kTo, bool kRotates>
__device__ __forceinline__ void append_tokens(const AppendParams& p, int b, int index) {
  const DecodeRows added = rows_of(p.added, b);
  const int used = rows_of(p.keys, b).length;
  const int count = min(added.length, p.keys.max_length - used);
  const int of_k = kRotates ? 0 : p.k.heads * p.k.pieces();
  const int of_token = of_k + p.v.heads * p.v.pieces();
  for (int first = index * kTokens; first < count; first += p.blocks * kTokens) {
    const int tokens = min(kTokens, count - first);
    if constexpr (kRotates) append_rotated<kFrom, kTo>(p, b, added, used, first, tokens);
    for (int i = threadIdx.x; i < tokens * of_token; i += kAppendThreads) {
      const int n = first + i / of_token, piece = i % of_token;
      const bool is_k = piece < of_k;
      const CopiedRows& rows = is_k ? p.k : p.v;
      const CacheRow at = cache_place(p, b, used + n);
      copy_piece<kFrom, kTo>(p.rotary, rows,
                             b * rows.from_batch + (added.first + n) * rows.from_row,
                             at.element * rows.to_batch + at.row * rows.to_row,
                             is_k ? piece : piece - of_k, is_k ? position_of(p, b, n) : -1,
                             [&](int head) { return cache_scale(rows.scale, b, head, at); });
    }
  }
}

// So many queries of sequence b, from this one on.
template <Element kElement>
__device__ __forceinline__ void rotate_queries(const AppendParams& p, int b,
                                               const DecodeRows& queries, int first, int tokens) {
  const CopiedRows& q = p.q;
  for_each_rotated(p, q, tokens, [&](int token, int head, int col, bool counts) {
    const int n = first + token;
    const long long row = queries.first + n;
    const auto* const from = static_cast<const Bits<kElement>*>(q.from) + b * q.from_batch +
                             row * q.from_row + head * q.from_head;
    auto* const to =
        static_cast<Bits<kElement>*>(q.to) + b * q.to_batch + row * q.to_row + head * q.to_head;
    rotate_piece<kElement, kElement>(p, q, from, to, col,
                                     position_of(p, b, p.queries_advance ? n : 0), 1.f, counts);
  });
}

// The queries of sequence b that block `index` of it has.
template <Element kElement, bool kRotates>
__device__ __forceinline__ void transform_queries(const AppendParams& p, int b, int index) {
  const DecodeRows queries = rows_of(p.queries, b);
  const int of_token = p.q.heads * p.q.pieces();
  for (int first = index * kTokens; first < queries.length; first += p.q_blocks * kTokens) {
    const int tokens = min(kTokens, queries.length - first);
    if constexpr (kRotates) {
      rotate_queries<kElement>(p, b, queries, first, tokens);
    } else {
      for (int i = threadIdx.x; i < tokens * of_token; i += kAppendThreads) {
        const int n = first + i / of_token;
        const long long row = queries.first + n;
        copy_piece<kElement, kElement>(p.rotary, p.q, b * p.q.from_batch + row * p.q.from_row,
                                       b * p.q.to_batch + row * p.q.to_row, i % of_token,
                                       position_of(p, b, p.queries_advance ? n : 0),
                                       [](int) { return 1.f; });
      }
    }
  }
}

// Tokens of kFrom into a cache of kTo. Queries that get an embedding or a rotation are of kFrom
// too.
template <Element kFrom, Element kTo, bool kRotates>
__global__ void __launch_bounds__(kAppendThreads)
    append_kernel(const __grid_constant__ AppendParams params) {
  const int of_keys = params.batch * params.blocks;
  const int block = int(blockIdx.x) - of_keys;
  if (block < 0)
    append_tokens<kFrom, kTo, kRotates>(params, int(blockIdx.x) / params.blocks,
                                        int(blockIdx.x) % params.blocks);
  else if constexpr (kFrom != Element::kE4m3)
    transform_queries<kFrom, kRotates>(params, block / params.q_blocks, block % params.q_blocks);
}

using AppendKernel = void (*)(AppendParams);

template <Element kFrom, Element kTo>
AppendKernel append_kernel_of(bool rotates) {
  return rotates ? append_kernel<kFrom, kTo, true> : append_kernel<kFrom, kTo, false>;
}

AppendKernel append_kernel_of(const ForwardProblem& problem) {
  using enum Element;
  const flash3_dtype from = problem.append.given ? problem.append.dtype : problem.dtype;
  if (from == FLASH3_FLOAT8_E4M3) return append_kernel<kE4m3, kE4m3, false>;
  const bool is_float16 = from == FLASH3_FLOAT16, rotates = problem.rotates;
  if (problem.has_fp8_keys())
    return is_float16 ? append_kernel_of<kFloat16, kE4m3>(rotates)
                      : append_kernel_of<kBFloat16, kE4m3>(rotates);
  return is_float16 ? append_kernel_of<kFloat16, kFloat16>(rotates)
                    : append_kernel_of<kBFloat16, kBFloat16>(rotates);
}

// Blocks of a sequence: enough for the longest, or of packed ones for the average; a block goes on
// to later tokens.
int blocks_of(const Sequences& s, Index batch) {
  const Index typical = s.packed ? ceil_div(Index{s.rows}, batch) : s.max_length;
  const Index wanted = ceil_div(typical, Index{kTokens}), least = ceil_div(kLeastBlocks, batch);
  const Index most = ceil_div(s.max_length, Index{kTokens});
  const Index blocks = wanted > least ? wanted : least;
  const Index room = ceil_div(kMostBlocks, batch);
  const Index bound = most < room ? most : room;
  return int(blocks < bound ? blocks : bound);
}

bool in_whole_pieces(const TensorView& t, flash3_dtype dtype) {
  const int bytes = dtype_size(dtype);
  return in_pieces(t, bytes, kPiece * bytes);
}

CopiedRows copied_rows(const TensorView& from, flash3_dtype from_dtype, const TensorView& to,
                       flash3_dtype to_dtype, const ScaleView& scale = {}) {
  return {from.data,
          from.stride_batch,
          from.stride_seq,
          from.stride_head,
          to.data,
          to.stride_batch,
          to.stride_seq,
          to.stride_head,
          int(from.heads),
          int(from.dim),
          in_whole_pieces(from, from_dtype) && in_whole_pieces(to, to_dtype),
          scale};
}

}  // namespace

AppendPlan plan_append(const ForwardProblem& problem, size_t* workspace) {
  AppendPlan plan;
  if (problem.has_tokens_to_append())
    plan.blocks = blocks_of(problem.append.sequences, problem.batch);
  if (!problem.transforms_q() || !problem.has_output()) return plan;
  const Sequences& q = problem.sequences_q;
  plan.q_blocks = blocks_of(q, problem.batch);
  const Index rows = q.packed ? q.rows : problem.batch * problem.seq_q;
  plan.q_offset =
      reserve_workspace(size_t(rows * problem.heads_q * problem.head_dim) * 2, workspace);
  return plan;
}

TensorView transformed_q(const ForwardProblem& problem, const AppendPlan& plan) {
  TensorView q = problem.q;
  if (plan.q_blocks == 0) return q;
  q.data = problem.workspace ? static_cast<char*>(problem.workspace) + plan.q_offset : nullptr;
  q.stride_head = problem.head_dim;
  q.stride_seq = problem.heads_q * q.stride_head;
  q.stride_batch = problem.sequences_q.packed ? 0 : problem.seq_q * q.stride_seq;
  return q;
}

Status launch_append(const ForwardProblem& problem, const AppendPlan& plan) {
  AppendParams params{};
  const Append& append = problem.append;
  const flash3_dtype to = problem.kv_dtype;
  if (append.given) {
    params.k = copied_rows(append.k, append.dtype, problem.k, to, problem.k_scale);
    params.v = copied_rows(append.v, append.dtype, problem.v, to, problem.v_scale);
  }
  params.q = copied_rows(problem.q, problem.dtype, transformed_q(problem, plan), problem.dtype);
  params.keys = decode_lengths(problem.sequences_k);
  params.added = decode_lengths(problem.append.sequences);
  params.queries = decode_lengths(problem.sequences_q);
  params.page_table = problem.cache.page_table;
  params.page_table_stride = problem.cache.stride_table;
  params.page_size = int(problem.cache.page_size);
  params.batch_idx = problem.cache.batch_idx;
  params.elements = int(problem.k.batch);
  const RotaryView& rotary = problem.append.rotary;
  if (rotary.given && rotary.positions > 0)
    params.rotary = {rotary.cos,        rotary.sin,     rotary.stride_cos,
                     rotary.stride_sin, rotary.dim / 2, rotary.dtype == FLASH3_FLOAT32,
                     rotary.interleaved};
  params.positions = rotary.positions;
  params.offsets = problem.append.rotary_offsets;
  params.queries_advance = !problem.mask_rule.is_none();
  params.batch = int(problem.batch);
  params.blocks = plan.blocks;
  params.q_blocks = plan.q_blocks;
  params.lanes = problem.head_dim <= 64 ? 8 : problem.head_dim <= 128 ? 16 : kMostLanes;
  if (problem.rotates) fill_signs(problem.rotation_seed, params.signs);
  const AppendKernel kernel = append_kernel_of(problem);
  const Index blocks = problem.batch * (plan.blocks + plan.q_blocks);
  kernel<<<unsigned(blocks), kAppendThreads, 0, static_cast<cudaStream_t>(problem.stream)>>>(
      params);
  return cuda_status(cudaPeekAtLastError(), "launching the append kernel");
}

}  // namespace flash3::hopper
