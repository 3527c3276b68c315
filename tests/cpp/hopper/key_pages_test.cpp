// SPDX-License-Identifier: Apache-2.0
// Where the paged kernels find a sequence's keys (cuda/sm90/forward/key_pages.hpp). Needs no GPU.
#include "cuda/sm90/forward/key_pages.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "cuda/sm90/host/tensor_map.hpp"
#include "planned_steps.hpp"

namespace flash3::cuda::sm90 {
namespace {

// Without a table a sequence has the element of its own number, for kernels that may lack one.
TEST(KeyPages, WithoutATableASequenceHasItsOwnElement) {
  const RowMap rows{true, 700};
  const KeyPages none{nullptr, 1, 500, 9, 128};
  ListedSequence s{};
  s.batch = 3, s.k_first = 40, s.k_length = 300;
  for (const int key : {0, 128, 256}) {
    EXPECT_EQ(row_of_key<true>(none, rows, s, key), 3 * 700 + 40 + key);
    EXPECT_EQ(rows_left(none, s, key), std::min(128, 300 - key));
  }
  EXPECT_EQ(row_of_key<true>(none, rows, s, 384), 0) << "after the last key";
}

// The rows that the boxes of a paged kernel bring are those where core/kv_cache.hpp says that the
// keys lie, whatever the table holds, and none after the last key.
TEST(KeyPages, BoxesHoldTheKeysOfTheCore) {
  constexpr int kTileN = 128;
  std::mt19937_64 random(11);
  const auto below = [&](int n) { return int(random() % uint64_t(n)); };
  for (int i = 0; i < 2000; ++i) {
    const bool paged = i % 3 != 0;
    KvCache cache;
    cache.paged = paged, cache.has_batch_idx = !paged;
    cache.page_size = paged ? 16 << below(5) : 1 + below(700);
    const int elements = 1 + below(40), max_pages = paged ? 1 + below(30) : 1, batch = 1 + below(4);
    const int most = max_pages * int(cache.page_size);
    const RowMap rows{true, int(cache.page_size) * (1 + below(3))};  // heads or k and v in between
    ListedSequence s{};
    s.batch = below(batch);
    s.k_first = paged ? 0 : below(most + 1);
    s.k_length = below(most - s.k_first + 1);
    const int used = paged ? (s.k_length + int(cache.page_size) - 1) / int(cache.page_size) : 1;
    // As long as it must be, and not longer: a sanitizer sees what is read beyond it.
    std::vector<int> table(size_t(s.batch * max_pages + used));
    for (int& entry : table) entry = below(4) == 0 ? int(random()) : below(elements);
    cache.page_table = cache.batch_idx = table.data();
    cache.stride_table = max_pages, cache.pages = cache.elements = elements;

    const KeyPages pages{table.data(), max_pages, int(cache.page_size), elements,
                         cache_box_rows(cache, kTileN)};
    ASSERT_GT(pages.box_rows, 0);
    const int total = (elements - 1) * rows.rows_per_batch + int(cache.page_size);
    for (int key = 0; key < s.k_length + 3 * kTileN; key += pages.box_rows) {
      const int row = row_of_key(pages, rows, s, key), left = rows_left(pages, s, key);
      ASSERT_EQ(left, std::clamp(s.k_length - key, 0, pages.box_rows));
      ASSERT_TRUE(row >= 0 && row + left <= total) << "TMA would read the box as zeros";
      for (int r = 0; r < left; ++r) {
        const CacheRow at = cache_row(cache, s.batch, s.k_first + key + r);
        ASSERT_EQ(row + r, at.element * rows.rows_per_batch + at.row)
            << "key " << key + r << " of " << s.k_length << ", pages of " << cache.page_size;
      }
    }
  }
}

}  // namespace
}  // namespace flash3::cuda::sm90
