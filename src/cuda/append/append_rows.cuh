// SPDX-License-Identifier: Apache-2.0
// Rows of k, v and q on their way into a cache or the workspace: copied, with their rotary
// embedding, with the rotation, to e4m3. A thread has pieces of eight columns. Every product and
// sum of the embedding and of the rotation is rounded as on the CPU, and in its order, so that a
// cache has the same bits from both.
#pragma once

#include "cuda/append/append_params.h"
#include "cuda/device/choice.cuh"
#include "cuda/device/ptx/e4m3.cuh"
#include "cuda/quantize/elements.cuh"

namespace flash3::cuda {

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
__device__ __forceinline__ Piece<kElement> with_embedding(const RotaryTables& tables,
                                                          long long position,
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
      if (position >= 0) piece = with_embedding<kFrom>(tables, position, from, col, piece);
    store<kTo>(rows, piece, to, col);
  }
}

// Eight floats of a row, rounded; for an e4m3 cache each over the scale before.
template <Element kTo>
__device__ __forceinline__ Piece<kTo> rounded(const float (&x)[kPiece], float scale) {
  Piece<kTo> piece;
#pragma unroll
  for (int i = 0; i < kPiece; i += 2) {
    uint32_t two;
    if constexpr (kTo == Element::kE4m3)
      two = pack2_e4m3(__fdiv_rn(x[i], scale), __fdiv_rn(x[i + 1], scale));
    else
      two = pack2<kTo>(x[i], x[i + 1]);
    piece.elements[i] = Bits<kTo>(two);
    piece.elements[i + 1] = Bits<kTo>(two >> (8 * int(sizeof(Bits<kTo>))));
  }
  return piece;
}

// A lane's columns of a row, from `col` on, with their embedding and their rotation. A group of
// p.lanes lanes has a row, and a whole warp calls this; `stores`: the lane's row counts.
template <Element kFrom, Element kTo>
__device__ __forceinline__ void rotate_piece(const AppendParams& p, const CopiedRows& rows,
                                             const Bits<kFrom>* from, Bits<kTo>* to, int col,
                                             long long position, float scale, bool stores) {
  const bool has_columns = col < rows.dim;
  Piece<kFrom> piece{};
  if (has_columns) piece = load<kFrom>(rows, from, col);
  const unsigned signs = p.signs[col / 32] >> (col % 32);
  float x[kPiece];
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    const uint16_t bits = piece.elements[i];
    x[i] = position < 0 ? to_float<kFrom>(bits)
                        : embedded<kFrom>(p.rotary, position, from, col + i, bits);
    x[i] = __uint_as_float(__float_as_uint(x[i]) ^ (signs >> i & 1) << 31);
  }
  rotate<kMostLanes * kPiece, false>(col, rows.dim, 0.f, x);
  if (stores && has_columns) store<kTo>(rows, rounded<kTo>(x, scale), to, col);
}

// Calls each(token, head, its first column, whether the row counts) for the rows of so many tokens,
// p.lanes lanes side by side for each, by whole warps.
template <class Each>
__device__ __forceinline__ void for_each_rotated(const AppendParams& p, const CopiedRows& rows,
                                                 int tokens, const Each& each) {
  const int count = tokens * rows.heads, lane = int(threadIdx.x % 32);
  const int rows_at_once = kAppendThreads / p.lanes;
  const int col = lane % p.lanes * kPiece, own = int(threadIdx.x) / p.lanes;
  const int first_of_warp = (int(threadIdx.x) - lane) / p.lanes;
#pragma unroll 1
  for (int first = 0; first + first_of_warp < count; first += rows_at_once) {
    const int row = min(first + own, count - 1);
    each(row / rows.heads, row % rows.heads, col, first + own < count);
  }
}

}  // namespace flash3::cuda
