// SPDX-License-Identifier: Apache-2.0
// Appends to a KV cache, and brings q into the workspace as the attention reads it.
#include "core/arithmetic.hpp"
#include "cuda/append/append_rows.cuh"

namespace flash3::cuda {
namespace {

constexpr int kTokens = kAppendTokens;

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
                                               const SequenceRows& added, int used, int first,
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
  const SequenceRows added = rows_of(p.added, b);
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
                                               const SequenceRows& queries, int first, int tokens) {
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
  const SequenceRows queries = rows_of(p.queries, b);
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

template <Element kFrom, Element kTo>
const void* append_function(bool rotates) {
  return reinterpret_cast<const void*>(rotates ? append_kernel<kFrom, kTo, true>
                                               : append_kernel<kFrom, kTo, false>);
}

}  // namespace

const void* append_function(Element from, Element to, bool rotates) {
  using enum Element;
  if (from == kE4m3) return reinterpret_cast<const void*>(append_kernel<kE4m3, kE4m3, false>);
  if (to == kE4m3)
    return from == kFloat16 ? append_function<kFloat16, kE4m3>(rotates)
                            : append_function<kBFloat16, kE4m3>(rotates);
  return from == kFloat16 ? append_function<kFloat16, kFloat16>(rotates)
                          : append_function<kBFloat16, kBFloat16>(rotates);
}

}  // namespace flash3::cuda
