// SPDX-License-Identifier: Apache-2.0
// A small valid call on a KV cache that a test can then bend: two sequences in pages of 4, to which
// tokens are appended, with a rotary embedding.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "call.hpp"

namespace flash3::test {

// Owns the memory of a float32 call: 4 query heads on 2 KV heads, head_dim 8, head_dim_v 16.
struct CacheCall {
  static constexpr int64_t kPages = 5, kPageSize = 4, kMaxPages = 3, kPositions = 20;

  // An entry that no key needs may be anything.
  std::array<int32_t, 6> table{3, 1, -77, 0, 4, 2};
  std::array<int32_t, 2> used{5, 9}, leftpad{2, 0}, offsets{1, 4}, batch_idx{4, 1};
  std::array<int32_t, 3> cu_new{0, 1, 3};
  std::vector<float> q = std::vector<float>(2 * 2 * 4 * 8, 0.25f);
  std::vector<float> k = std::vector<float>(kPages * kPageSize * 2 * 8, 0.5f);
  std::vector<float> v = std::vector<float>(kPages * kPageSize * 2 * 16, 1.f);
  std::vector<float> k_new = std::vector<float>(2 * 3 * 2 * 8, 0.75f);
  std::vector<float> v_new = std::vector<float>(2 * 3 * 2 * 16, 2.f);
  std::vector<float> cos = std::vector<float>(kPositions * 3, 0.5f), sin = cos;
  std::vector<float> out = std::vector<float>(2 * 2 * 4 * 16, Call::kUntouched);

  CacheCall() = default;
  CacheCall(const CacheCall&) = delete;
  CacheCall& operator=(const CacheCall&) = delete;

  Forward args() {
    Forward f;
    f.q = tensor(q.data(), FLASH3_FLOAT32, {2, 2, 4, 8});
    f.k = tensor(k.data(), FLASH3_FLOAT32, {kPages, kPageSize, 2, 8});
    f.v = tensor(v.data(), FLASH3_FLOAT32, {kPages, kPageSize, 2, 16});
    f.out = tensor(out.data(), FLASH3_FLOAT32, {2, 2, 4, 16});
    f.page_table = page_table_tensor(table.data(), 2, kMaxPages);
    f.seqused_k = index_tensor(used.data(), 2);
    f.leftpad_k = index_tensor(leftpad.data(), 2);
    f.k_new = tensor(k_new.data(), FLASH3_FLOAT32, {2, 3, 2, 8});
    f.v_new = tensor(v_new.data(), FLASH3_FLOAT32, {2, 3, 2, 16});
    f.rotary_cos = rotary_tensor(cos.data(), FLASH3_FLOAT32, kPositions, 3);
    f.rotary_sin = rotary_tensor(sin.data(), FLASH3_FLOAT32, kPositions, 3);
    f.rotary_offsets = index_tensor(offsets.data(), 2);
    f.causal = true;
    return f;
  }

  // The same without pages: a cache of five elements with four rows each.
  Forward elements() {
    Forward f = args();
    f.page_table = {};
    f.cache_batch_idx = index_tensor(batch_idx.data(), 2);
    f.k_new = f.v_new = f.rotary_cos = f.rotary_sin = f.rotary_offsets = {};
    used = {3, 4};
    return f;
  }
};

}  // namespace flash3::test
