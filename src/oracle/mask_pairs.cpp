// SPDX-License-Identifier: Apache-2.0
#include "oracle/mask_pairs.hpp"

#include <stdexcept>

namespace flash3 {
namespace {

bool given(const flash3_tensor& t) { return t.ndim > 0; }

template <class Element>
Element at(const flash3_tensor& t, int64_t b, int64_t h, int64_t row, int64_t column) {
  const int64_t index[4] = {t.shape[0] == 1 ? 0 : b, t.shape[1] == 1 ? 0 : h, row, column};
  int64_t offset = 0;
  for (int d = 0; d < t.ndim; ++d) offset += index[d] * t.stride[d];
  return static_cast<const Element*>(t.data)[offset];
}

// A sequence and a head.
struct Place {
  int64_t b, h;
  Tokens q, k;
};

int document(const flash3_tensor& t, int64_t b, int64_t key) {
  return static_cast<const int32_t*>(
      t.data)[(t.shape[0] == 1 ? 0 : b) * t.stride[0] + key * t.stride[1]];
}

bool in_ranges(const flash3_mask_params& p, const Place& s, int64_t i, int64_t j) {
  const int64_t column = s.q.first + i;
  const auto bound = [&](int64_t which) { return at<int32_t>(p.ranges, s.b, s.h, which, column); };
  for (int64_t r = 0; r < p.ranges.shape[2] / 2; ++r)
    if (bound(2 * r) <= j && j < bound(2 * r + 1)) return true;
  return false;
}

bool in_document(const flash3_mask_params& p, const Place& s, int64_t i, int64_t j) {
  const int64_t own = i + s.k.count - s.q.count;
  if (own < 0 || own >= s.k.count) return false;
  const auto number = [&](int64_t key) { return document(p.documents, s.b, s.k.first + key); };
  for (int64_t key = own;; key += j > own ? 1 : -1) {
    if (number(key) != number(own)) return false;
    if (key == j) return true;
  }
}

bool in_blocks(const flash3_mask_params& p, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t row = i / p.block_rows, most = p.block_indices.shape[3];
  const int64_t count = at<int32_t>(p.block_counts, b, h, row, 0);
  for (int64_t n = 0; n < count && n < most; ++n)
    if (at<int32_t>(p.block_indices, b, h, row, n) == j / p.block_keys) return true;
  return false;
}

bool in_bits(const flash3_mask_params& p, int64_t b, int64_t h, int64_t i, int64_t j) {
  return (at<uint8_t>(p.bits, b, h, i, j / 8) >> (j % 8) & 1) != 0;
}

bool in_bit_blocks(const flash3_mask_params& p, int64_t b, int64_t h, int64_t i, int64_t j) {
  constexpr int64_t kBlock = FLASH3_MASK_BLOCK;
  const int32_t which = at<int32_t>(p.bit_blocks, b, h, i / kBlock, j / kBlock);
  if (which == FLASH3_MASK_ALL_SEEN) return true;
  if (which < 0 || which >= p.bits.shape[0]) return false;
  const auto* const block = static_cast<const uint8_t*>(p.bits.data) + which * p.bits.stride[0];
  return (block[i % kBlock * p.bits.stride[1] + j % kBlock / 8] >> (j % 8) & 1) != 0;
}

bool in_source(const flash3_mask_params& p, const Place& s, int64_t i, int64_t j) {
  const int64_t b = s.b, h = s.h;
  if (given(p.ranges)) return in_ranges(p, s, i, j);
  if (given(p.documents)) return in_document(p, s, i, j);
  if (given(p.dense)) return at<uint8_t>(p.dense, b, h, i, j) != 0;
  if (given(p.bit_blocks)) return in_bit_blocks(p, b, h, i, j);
  if (given(p.bits)) return in_bits(p, b, h, i, j);
  return !given(p.block_counts) || in_blocks(p, b, h, i, j);
}

const flash3_tensor* source_of(const flash3_mask_params& p) {
  for (const flash3_tensor* t :
       {&p.ranges, &p.documents, &p.dense, &p.block_counts, &p.bit_blocks, &p.bits})
    if (given(*t)) return t;
  return nullptr;
}

}  // namespace

Tokens tokens_of(const flash3_tensor& cu_seqlens, const flash3_tensor& seqused, int64_t b,
                 int64_t rows) {
  const auto entry = [](const flash3_tensor& t, int64_t i) {
    return int64_t{static_cast<const int32_t*>(t.data)[i * t.stride[0]]};
  };
  Tokens tokens{0, rows};
  if (given(cu_seqlens)) {
    tokens.first = entry(cu_seqlens, b);
    tokens.count = entry(cu_seqlens, b + 1) - tokens.first;
  }
  if (given(seqused)) tokens.count = entry(seqused, b);
  return tokens;
}

MaskPairs mask_pairs(const flash3_mask_params& p) {
  const flash3_tensor* const source = source_of(p);
  const bool differ =
      given(p.cu_seqlens_q) || given(p.cu_seqlens_k) || given(p.seqused_q) || given(p.seqused_k);
  MaskPairs pairs{differ   ? p.batch
                  : source ? source->shape[0]
                           : 1,
                  source && source->ndim > 2 ? source->shape[1] : 1,
                  p.seq_q,
                  p.seq_k,
                  {}};
  pairs.seen.reserve(static_cast<size_t>(pairs.batch * pairs.heads * p.seq_q * p.seq_k));
  for (int64_t b = 0; b < pairs.batch; ++b)
    for (int64_t h = 0; h < pairs.heads; ++h) {
      const Place s{b, h, tokens_of(p.cu_seqlens_q, p.seqused_q, b, p.seq_q),
                    tokens_of(p.cu_seqlens_k, p.seqused_k, b, p.seq_k)};
      const VisibleKeys band = VisibleKeys::of(p, s.q.count, s.k.count);
      for (int64_t i = 0; i < p.seq_q; ++i)
        for (int64_t j = 0; j < p.seq_k; ++j)
          pairs.seen.push_back(i < s.q.count && j < s.k.count && band.sees(i, j) &&
                               in_source(p, s, i, j));
    }
  return pairs;
}

CallMask::CallMask(const flash3_mask* mask, const flash3_mask_params* source)
    : given_(source != nullptr) {
  if ((mask != nullptr) != given_)
    throw std::invalid_argument(
        given_ ? "a source is given but the call has no mask; they belong together"
               : "the call has a mask but its source is not given; they belong together");
  if (given_) pairs_ = mask_pairs(*source);
}

}  // namespace flash3
