// SPDX-License-Identifier: Apache-2.0
// How many keys each sequence of a case on a KV cache has, and where they lie.
#pragma once

#include <cstdint>
#include <vector>

#include "cases/case.hpp"
#include "cases/internals.hpp"

namespace flash3::cases {

struct CachePlan {
  // Each sequence has keys that are as if not there, keys in the cache with those, keys that the
  // call appends (and their sums), and the position of the first of them.
  std::vector<int32_t> padding, used, added, cu_new, offsets;
  int64_t capacity = 0;            // places of a sequence
  int64_t max_pages = 0;           // of a sequence; 0: not paged
  int64_t elements = 0, rows = 0;  // of k and v
  int64_t positions = 0;           // that a token may have in its sequence

  // Pages that the keys of sequence b need.
  int64_t pages_of(const Case& c, int64_t b) const;
};

// A function of the case's seed.
CachePlan make_cache_plan(const Case& c);

// Where the keys of a plan lie, at random.
struct CachePlaces {
  std::vector<int32_t> page_table, batch_idx;  // empty: not given

  // The element and the row of a place of sequence b.
  CacheRow row_of(const Case& c, const CachePlan& plan, int64_t b, int64_t place) const;
};

// Entries of the page table that no key needs are out of range.
CachePlaces make_cache_places(const Case& c, const CachePlan& plan);

}  // namespace flash3::cases
