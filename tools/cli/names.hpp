// SPDX-License-Identifier: Apache-2.0
// Names of a file in order, so that one that occurs twice is found in n log n comparisons.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

namespace flash3::cli {

struct NameIndex {
  std::vector<size_t> order;  // of the items, by name
  size_t repeated = 0;        // an item whose name another has too; their number: none
  uint64_t comparisons = 0;   // that this took

  // name(item): its name.
  template <class Items, class Name>
  NameIndex(const Items& items, Name name) : order(items.size()), repeated(items.size()) {
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      ++comparisons;
      return name(items[a]) < name(items[b]);
    });
    for (size_t i = 1; i < order.size() && repeated == items.size(); ++i, ++comparisons)
      if (name(items[order[i - 1]]) == name(items[order[i]])) repeated = order[i];
  }
  NameIndex() = default;
};

}  // namespace flash3::cli
