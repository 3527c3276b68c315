// SPDX-License-Identifier: Apache-2.0
// Appends to a KV cache. A thread writes pieces of eight columns of a row. Every product and sum of
// the rotary embedding is rounded as on the CPU, so that a cache has the same bits from both.
#include "core/arithmetic.hpp"
#include "hopper/decode/append.hpp"
#include "hopper/decode/lengths.hpp"
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
  const unsigned short* from;
  long long from_batch, from_row, from_head;
  unsigned short* to;
  long long to_batch, to_row, to_head;
  int heads, dim;
  bool in_pieces;  // both sides: rows begin at multiples of 16 bytes, and dim is a multiple of 8

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

// Eight elements of a row.
struct Piece {
  uint32_t pairs[kPiece / 2];

  __device__ __forceinline__ uint16_t operator[](int i) const {
    return uint16_t(pairs[i / 2] >> (16 * (i % 2)));
  }
};

__device__ __forceinline__ Piece load(const CopiedRows& rows, const unsigned short* row, int col) {
  if (rows.in_pieces) {
    const uint4 x = __ldg(reinterpret_cast<const uint4*>(row + col));
    return {{x.x, x.y, x.z, x.w}};
  }
  Piece piece{};
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    if (col + i < rows.dim) piece.pairs[i / 2] |= uint32_t(__ldg(row + col + i)) << (16 * (i % 2));
  return piece;
}

__device__ __forceinline__ void store(const CopiedRows& rows, const Piece& piece,
                                      unsigned short* row, int col) {
  if (rows.in_pieces) {
    const uint32_t(&x)[4] = piece.pairs;
    *reinterpret_cast<uint4*>(row + col) = {x[0], x[1], x[2], x[3]};
    return;
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    if (col + i < rows.dim) row[col + i] = piece[i];
}

// Columns outside of the embedding keep their bits.
template <Element kElement>
__device__ __forceinline__ Piece rotated(const RotaryTables& tables, long long position,
                                         const unsigned short* row, int col, const Piece& piece) {
  Piece result{};
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    const int at = col + i, half = tables.half;
    uint32_t bits = piece[i];
    if (at < 2 * half) {
      const bool first = tables.interleaved ? at % 2 == 0 : at < half;
      const int pair = tables.interleaved ? at / 2 : first ? at : at - half;
      const int step = tables.interleaved ? 1 : half;
      const float x = to_float<kElement>(uint16_t(bits)),
                  y = to_float<kElement>(__ldg(row + (first ? at + step : at - step)));
      const auto angle = [&](const void* table, long long stride) {
        return load_angle<kElement>(table, position * stride + pair, tables.is_float);
      };
      const float by_cos = __fmul_rn(x, angle(tables.cos, tables.stride_cos)),
                  by_sin = __fmul_rn(y, angle(tables.sin, tables.stride_sin));
      bits = pack2<kElement>(first ? __fsub_rn(by_cos, by_sin) : __fadd_rn(by_sin, by_cos), 0.f);
    }
    result.pairs[i / 2] |= bits << (16 * (i % 2));
  }
  return result;
}

// One piece of a token's rows: number `index` of all heads. position < 0: without an embedding.
template <Element kElement>
__device__ __forceinline__ void copy_piece(const RotaryTables& tables, const CopiedRows& rows,
                                           long long from_token, long long to_token, int index,
                                           long long position) {
  const int head = index / rows.pieces(), col = index % rows.pieces() * kPiece;
  const unsigned short* const from = rows.from + from_token + head * rows.from_head;
  Piece piece = load(rows, from, col);
  if (position >= 0 && col < 2 * tables.half)
    piece = rotated<kElement>(tables, position, from, col, piece);
  store(rows, piece, rows.to + to_token + head * rows.to_head, col);
}

// Whatever the lengths and the offsets hold, the tables have the position.
__device__ __forceinline__ long long position_of(const AppendParams& p, int b, int token) {
  if (p.rotary.half == 0) return -1;
  const long long first = p.offsets != nullptr ? p.offsets[b] : rows_of(p.keys, b).length;
  const long long position = first + token;
  return position < 0 ? 0 : position < p.positions ? position : p.positions - 1;
}

// Whatever table and indices hold, the row is one of the cache.
__device__ __forceinline__ long long cache_offset(const AppendParams& p, const CopiedRows& rows,
                                                  int b, int place) {
  int element = b, row = place;
  if (p.page_table != nullptr) {
    const int number = place / p.page_size;
    element = p.page_table[b * p.page_table_stride + number];
    row -= number * p.page_size;
  } else if (p.batch_idx != nullptr) {
    element = p.batch_idx[b];
  }
  return clamped(element, 0, p.elements - 1) * rows.to_batch + row * rows.to_row;
}

// The new tokens of sequence b that block `index` of it has.
template <Element kElement>
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
      copy_piece<kElement>(p.rotary, rows, b * rows.from_batch + (added.first + n) * rows.from_row,
                           cache_offset(p, rows, b, used + n), is_k ? piece : piece - of_k,
                           is_k ? position_of(p, b, n) : -1);
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
      copy_piece<kElement>(p.rotary, p.q, b * p.q.from_batch + row * p.q.from_row,
                           b * p.q.to_batch + row * p.q.to_row, i % of_token,
                           position_of(p, b, p.queries_advance ? n : 0));
    }
  }
}

template <Element kElement>
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ AppendParams params) {
  const int of_keys = params.batch * params.blocks;
  const int block = int(blockIdx.x) - of_keys;
  if (block < 0)
    append_tokens<kElement>(params, int(blockIdx.x) / params.blocks,
                            int(blockIdx.x) % params.blocks);
  else
    rotate_queries<kElement>(params, block / params.q_blocks, block % params.q_blocks);
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

CopiedRows copied_rows(const TensorView& from, const TensorView& to) {
  return {static_cast<const unsigned short*>(from.data),
          from.stride_batch,
          from.stride_seq,
          from.stride_head,
          static_cast<unsigned short*>(to.data),
          to.stride_batch,
          to.stride_seq,
          to.stride_head,
          int(from.heads),
          int(from.dim),
          in_pieces(from) && in_pieces(to)};
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
  params.k = copied_rows(problem.append.k, problem.k);
  params.v = copied_rows(problem.append.v, problem.v);
  params.q = copied_rows(problem.q, rotated_q(problem, plan));
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
  const auto kernel = problem.dtype == FLASH3_FLOAT16 ? append_kernel<Element::kFloat16>
                                                      : append_kernel<Element::kBFloat16>;
  const Index blocks = problem.batch * (plan.blocks + plan.q_blocks);
  kernel<<<unsigned(blocks), kThreads, 0, static_cast<cudaStream_t>(problem.stream)>>>(params);
  return cuda_status(cudaPeekAtLastError(), "launching the append kernel");
}

}  // namespace flash3::hopper
