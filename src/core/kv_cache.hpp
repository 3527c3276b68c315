// SPDX-License-Identifier: Apache-2.0
// Where the keys of a sequence lie in k and v that are a cache, and how many count. Compiled on the
// host and, through NVRTC too, on the device: nothing but integers here.
#pragma once

#include "core/arithmetic.hpp"
#include "core/scales.hpp"
#include "core/seq_info.hpp"

namespace flash3 {

// All false: k and v are no cache. Pointers are null where the call is only a question.
struct KvCache {
  bool paged = false;               // k and v are [pages, page_size, heads, dim]
  const int* page_table = nullptr;  // [batch, max_pages]
  Index stride_table = 0;           // from sequence to sequence
  Index max_pages = 0, page_size = 0, pages = 0;

  bool has_batch_idx = false;      // sequence b has element batch_idx[b] of k and v
  const int* batch_idx = nullptr;  // [batch]
  Index elements = 0;              // of k and v

  bool has_leftpad = false;
  const int* leftpad = nullptr;  // [batch]

  FLASH3_HOST_DEVICE constexpr bool given() const { return paged || has_batch_idx || has_leftpad; }
};

// The keys of one sequence, by their places in the cache: key j of the call is that of place
// first + j.
struct CacheKeys {
  Index first = 0;   // after the padding on the left
  Index cached = 0;  // keys that count and are there already
  Index added = 0;   // after them: those that the call appends

  FLASH3_HOST_DEVICE constexpr Index length() const { return cached + added; }
};

// Whatever the lengths hold, no place is outside of the cache, which has `keys.rows` of them for a
// sequence (of a paged one max_pages · page_size), nor beyond the most that a sequence can have.
FLASH3_HOST_DEVICE constexpr CacheKeys cache_keys(const KvCache& cache, const Sequences& keys,
                                                  Index added, Index b) {
  const RowRange used = rows_of(keys, b);
  Index first = cache.leftpad != nullptr ? cache.leftpad[b] : 0;
  first = first < 0 ? 0 : first < used.length ? first : used.length;
  const Index room = keys.max_length - used.length;
  return {first, used.length - first, added < room ? added : room};
}

// The row of a place: of which element of k and v (a page, a batch element), and which one of it.
struct CacheRow {
  Index element = 0, row = 0;
};

FLASH3_HOST_DEVICE constexpr Index clamp_index(Index i, Index count) {
  return i < 0 ? 0 : i < count ? i : count - 1;
}

FLASH3_HOST_DEVICE constexpr CacheRow cache_row(const KvCache& cache, Index b, Index place) {
  if (cache.paged) {
    const Index page = cache.page_table[b * cache.stride_table + place / cache.page_size];
    return {clamp_index(page, cache.pages), place % cache.page_size};
  }
  if (cache.batch_idx != nullptr) return {clamp_index(cache.batch_idx[b], cache.elements), place};
  return {b, place};
}

// The scale of a row of an FP8 cache that holds a key of sequence b: those by blocks are the
// cache's own, those by heads the sequence's.
FLASH3_HOST_DEVICE constexpr float cache_scale(const ScaleView& scale, Index b, Index head,
                                               const CacheRow& at) {
  return scale.kind == ScaleKind::kBlock ? scale.at(at.element, head, at.row / kScaleBlock)
                                         : scale.at(b, head, 0);
}

}  // namespace flash3
