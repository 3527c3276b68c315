// SPDX-License-Identifier: Apache-2.0
// Appends to a KV cache. A thread writes pieces of eight columns of a row. Every product and sum of
// the rotary embedding is rounded as on the CPU, so that a cache has the same bits from both.
#include "core/arithmetic.hpp"
#include "hopper/decode/append.hpp"
#include "hopper/decode/lengths.hpp"
#include "hopper/decode/traits.cuh"
#include "hopper/host/cuda_status.hpp"
#include "hopper/host/row_pieces.hpp"
#include "hopper/quantize/rope.cuh"

namespace flash3::hopper {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 8;  // that a block has at once
constexpr int kPiece = 8;   // columns
constexpr Index kLeastBlocks = 512, kMostBlocks = 1 << 20;

// The rows of k, v or q that are written, and where to.
struct CopiedRows {
  const void* from;
  long long from_batch, from_row, from_head;
  void* to;
  long long to_batch, to_row, to_head;
  int heads, dim;
  bool in_pieces;   // both sides: rows begin at multiples of a piece's bytes, and dim is one of 8
  ScaleView scale;  // of an e4m3 cache

  FLASH3_HOST_DEVICE int pieces() const { return ceil_div(dim, kPiece); }
};

struct AppendParams {
  CopiedRows k, v, q;
  DecodeLengths keys, added, queries;
  const int* page_table;  // or null
  long long page_table_stride;
  int page_size;
  const int* batch_idx;  // or null
  int elements;          // of K and V
  RotaryTables rotary;   // half 0: none
  long long positions;   // of the tables
  const int* offsets;    // of the embedding; or null
  bool queries_advance;  // otherwise all queries of a sequence have one position
  int batch, blocks, q_blocks;
};

// An element's bits.
template <Element kElement>
using Bits = Choice<kElement == Element::kE4m3, unsigned char, unsigned short>;

// Eight elements of a row.
template <Element kElement>
struct alignas(kPiece* element_bytes(kElement)) Piece {
  Bits<kElement> elements[kPiece];
};

template <Element kElement>
__device__ __forceinline__ Piece<kElement> load(const CopiedRows& rows, const Bits<kElement>* row,
                                                int col) {
  using Words = Choice<kElement == Element::kE4m3, uint2, uint4>;
  union {
    Words words;
    Piece<kElement> piece;
  } x{};
  if (rows.in_pieces) {
    x.words = __ldg(reinterpret_cast<const Words*>(row + col));
    return x.piece;
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    if (col + i < rows.dim) x.piece.elements[i] = __ldg(row + col + i);
  return x.piece;
}

template <Element kElement>
__device__ __forceinline__ void store(const CopiedRows& rows, const Piece<kElement>& piece,
                                      Bits<kElement>* row, int col) {
  if (rows.in_pieces) {
    *reinterpret_cast<Piece<kElement>*>(row + col) = piece;
    return;
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    if (col + i < rows.dim) row[col + i] = piece.elements[i];
}

// Column `at` of a 16-bit row with its embedding, not rounded; one outside of the embedding as it
// is.
template <Element kElement>
__device__ __forceinline__ float embedded(const RotaryTables& tables, long long position,
                                          const unsigned short* row, int at, uint16_t bits) {
  const float x = to_float<kElement>(bits);
  const int half = tables.half;
  if (at >= 2 * half) return x;
  const bool first = tables.interleaved ? at % 2 == 0 : at < half;
  const int pair = tables.interleaved ? at / 2 : first ? at : at - half;
  const int step = tables.interleaved ? 1 : half;
  const float y = to_float<kElement>(__ldg(row + (first ? at + step : at - step)));
  const auto angle = [&](const void* table, long long stride) {
    return load_angle<kElement>(table, position * stride + pair, tables.is_float);
  };
  const float by_cos = __fmul_rn(x, angle(tables.cos, tables.stride_cos)),
              by_sin = __fmul_rn(y, angle(tables.sin, tables.stride_sin));
  return first ? __fsub_rn(by_cos, by_sin) : __fadd_rn(by_sin, by_cos);
}

// Columns outside of the embedding keep their bits.
template <Element kElement>
__device__ __forceinline__ Piece<kElement> rotated(const RotaryTables& tables, long long position,
                                                   const unsigned short* row, int col,
                                                   Piece<kElement> piece) {
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    if (col + i < 2 * tables.half)
      piece.elements[i] = uint16_t(pack2<kElement>(
          embedded<kElement>(tables, position, row, col + i, piece.elements[i]), 0.f));
  return piece;
}

// Each element over the scale, rounded once. position < 0: without an embedding.
template <Element kFrom>
__device__ __forceinline__ Piece<Element::kE4m3> quantized(const RotaryTables& tables,
                                                           long long position,
                                                           const unsigned short* row, int col,
                                                           const Piece<kFrom>& piece, float scale) {
  Piece<Element::kE4m3> codes;
#pragma unroll
  for (int i = 0; i < kPiece; i += 2) {
    float x[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint16_t bits = piece.elements[i + e];
      x[e] = __fdiv_rn(position < 0 ? to_float<kFrom>(bits)
                                    : embedded<kFrom>(tables, position, row, col + i + e, bits),
                       scale);
    }
    const uint16_t two = pack2_e4m3(x[0], x[1]);
    codes.elements[i] = uint8_t(two), codes.elements[i + 1] = uint8_t(two >> 8);
  }
  return codes;
}

// One piece of a token's rows: number `index` of all heads. position < 0: without an embedding.
// scale_of(head): by which an e4m3 cache holds what is not e4m3.
template <Element kFrom, Element kTo, class ScaleOf>
__device__ __forceinline__ void copy_piece(const RotaryTables& tables, const CopiedRows& rows,
                                           long long from_token, long long to_token, int index,
                                           long long position, const ScaleOf& scale_of) {
  const int head = index / rows.pieces(), col = index % rows.pieces() * kPiece;
  const auto* const from =
      static_cast<const Bits<kFrom>*>(rows.from) + from_token + head * rows.from_head;
  auto* const to = static_cast<Bits<kTo>*>(rows.to) + to_token + head * rows.to_head;
  Piece<kFrom> piece = load<kFrom>(rows, from, col);
  if constexpr (kFrom != kTo) {
    store<kTo>(rows, quantized<kFrom>(tables, position, from, col, piece, scale_of(head)), to, col);
  } else {
    if constexpr (kFrom != Element::kE4m3)
      if (position >= 0) piece = rotated<kFrom>(tables, position, from, col, piece);
    store<kTo>(rows, piece, to, col);
  }
}

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

// The new tokens of sequence b that block `index` of it has.
template <Element kFrom, Element kTo>
__device__ __forceinline__ void append_tokens(const AppendParams& p, int b, int index) {
  const DecodeRows added = rows_of(p.added, b);
  const int used = rows_of(p.keys, b).length;
  const int count = min(added.length, p.keys.max_length - used);
  const int of_k = p.k.heads * p.k.pieces(), of_token = of_k + p.v.heads * p.v.pieces();
  for (int first = index * kTokens; first < count; first += p.blocks * kTokens) {
    const int tokens = min(kTokens, count - first);
    for (int i = threadIdx.x; i < tokens * of_token; i += kThreads) {
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

// The queries of sequence b that block `index` of it has.
template <Element kElement>
__device__ __forceinline__ void rotate_queries(const AppendParams& p, int b, int index) {
  const DecodeRows queries = rows_of(p.queries, b);
  const int of_token = p.q.heads * p.q.pieces();
  for (int first = index * kTokens; first < queries.length; first += p.q_blocks * kTokens) {
    const int tokens = min(kTokens, queries.length - first);
    for (int i = threadIdx.x; i < tokens * of_token; i += kThreads) {
      const int n = first + i / of_token;
      const long long row = queries.first + n;
      copy_piece<kElement, kElement>(p.rotary, p.q, b * p.q.from_batch + row * p.q.from_row,
                                     b * p.q.to_batch + row * p.q.to_row, i % of_token,
                                     position_of(p, b, p.queries_advance ? n : 0),
                                     [](int) { return 1.f; });
    }
  }
}

// Tokens of kFrom into a cache of kTo. Queries that get an embedding are of kFrom too.
template <Element kFrom, Element kTo>
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ AppendParams params) {
  const int of_keys = params.batch * params.blocks;
  const int block = int(blockIdx.x) - of_keys;
  if (block < 0)
    append_tokens<kFrom, kTo>(params, int(blockIdx.x) / params.blocks,
                              int(blockIdx.x) % params.blocks);
  else if constexpr (kFrom != Element::kE4m3)
    rotate_queries<kFrom>(params, block / params.q_blocks, block % params.q_blocks);
}

using AppendKernel = void (*)(AppendParams);

AppendKernel append_kernel_of(const ForwardProblem& problem) {
  using enum Element;
  const flash3_dtype from = problem.append.given ? problem.append.dtype : problem.dtype;
  if (from == FLASH3_FLOAT8_E4M3) return append_kernel<kE4m3, kE4m3>;
  const bool is_float16 = from == FLASH3_FLOAT16;
  if (problem.has_fp8_keys())
    return is_float16 ? append_kernel<kFloat16, kE4m3> : append_kernel<kBFloat16, kE4m3>;
  return is_float16 ? append_kernel<kFloat16, kFloat16> : append_kernel<kBFloat16, kBFloat16>;
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
  if (!problem.append.rotary.given || !problem.has_output()) return plan;
  const Sequences& q = problem.sequences_q;
  plan.q_blocks = blocks_of(q, problem.batch);
  const Index rows = q.packed ? q.rows : problem.batch * problem.seq_q;
  plan.q_offset =
      reserve_workspace(size_t(rows * problem.heads_q * problem.head_dim) * 2, workspace);
  return plan;
}

TensorView rotated_q(const ForwardProblem& problem, const AppendPlan& plan) {
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
  params.k = copied_rows(append.k, append.dtype, problem.k, to, problem.k_scale);
  params.v = copied_rows(append.v, append.dtype, problem.v, to, problem.v_scale);
  params.q = copied_rows(problem.q, problem.dtype, rotated_q(problem, plan), problem.dtype);
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
  const AppendKernel kernel = append_kernel_of(problem);
  const Index blocks = problem.batch * (plan.blocks + plan.q_blocks);
  kernel<<<unsigned(blocks), kThreads, 0, static_cast<cudaStream_t>(problem.stream)>>>(params);
  return cuda_status(cudaPeekAtLastError(), "launching the append kernel");
}

}  // namespace flash3::hopper
