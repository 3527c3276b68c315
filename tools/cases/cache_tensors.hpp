// SPDX-License-Identifier: Apache-2.0
// The tensors of a case whose k and v are a cache: how many keys each sequence has, where they lie,
// and what is in them. Rows that hold no key that counts hold the fill pattern, those that are to
// be appended too, and page table entries that no key needs are out of range.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cases/case.hpp"
#include "cases/internals.hpp"
#include "cases/tensors.hpp"

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

struct CacheField {
  const char* name;
  flash3_tensor flash3_forward_params::*member;
};
inline constexpr CacheField kCacheFields[] = {
    {"seqused_k", &flash3_forward_params::seqused_k},
    {"page_table", &flash3_forward_params::page_table},
    {"cache_batch_idx", &flash3_forward_params::cache_batch_idx},
    {"leftpad_k", &flash3_forward_params::leftpad_k},
    {"k_new", &flash3_forward_params::k_new},
    {"v_new", &flash3_forward_params::v_new},
    {"cu_seqlens_k_new", &flash3_forward_params::cu_seqlens_k_new},
    {"rotary_cos", &flash3_forward_params::rotary_cos},
    {"rotary_sin", &flash3_forward_params::rotary_sin},
    {"rotary_offsets", &flash3_forward_params::rotary_offsets}};
inline constexpr size_t kCacheFieldCount = std::size(kCacheFields);

struct CacheTensors {
  ForwardTensors call;  // q, k, v, out, lse, and what else a call has
  std::array<GuardedTensor, kCacheFieldCount> fields;  // without bytes: not given
};

CacheTensors make_cache_tensors(const Case& c);
// Its fields alone.
std::array<GuardedTensor, kCacheFieldCount> make_cache_fields(const Case& c, const CachePlan& plan,
                                                              const CachePlaces& places);

// What else a call has, with the scales of its cache.
ExtraTensors make_cache_extra(const Case& c, const CachePlan& plan);

// The call on these views, without workspace, stream or backend.
flash3_forward_params make_cache_params(const Case& c, const flash3_tensor& q,
                                        const flash3_tensor& k, const flash3_tensor& v,
                                        const flash3_tensor& out, const flash3_tensor& lse,
                                        const ExtraViews& extra,
                                        const std::array<flash3_tensor, kCacheFieldCount>& fields);

// The same on the host's tensors, and without data, for questions.
flash3_forward_params make_cache_params(const Case& c, const CacheTensors& tensors);
flash3_forward_params make_cache_question(const Case& c);

// Whether the backend takes a call on a cache that TMA alone can read for it: one with biased
// scores or with a mask as data. The library says so.
bool takes_cache_by_tma(flash3_backend backend, const Case& c);

// The case without its cache: the queries' side of it.
Case without_cache(Case c);

// The tree_mask of a case: every sequence's drafts are a tree, but now and then a query sees any
// drafts or none, and bits after the last draft are anything.

// Without data: [batch, seq_q], or [total_q].
flash3_tensor tree_mask_view(const Case& c, const CaseSequences& sequences);

// A function of the case's seed.
GuardedTensor make_tree_mask(const Case& c, const CaseSequences& sequences);

}  // namespace flash3::cases
