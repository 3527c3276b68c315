// SPDX-License-Identifier: Apache-2.0
#include "cases/pairwise.hpp"

#include <cstddef>

namespace flash3::cases {
namespace {

// Which pairs (factor f at level i, factor g at level j) are still to be met.
class Uncovered {
 public:
  explicit Uncovered(const std::vector<int>& sizes) {
    for (const int n : sizes) first_.push_back(levels_), levels_ += static_cast<size_t>(n);
    open_.assign(levels_ * levels_, 0);
    for (size_t f = 0; f < sizes.size(); ++f)
      for (size_t g = f + 1; g < sizes.size(); ++g)
        for (int i = 0; i < sizes[f]; ++i)
          for (int j = 0; j < sizes[g]; ++j) set(f, i, g, j, 1), ++left_;
  }
  bool has(size_t f, int i, size_t g, int j) const { return open_[at(f, i, g, j)] != 0; }
  void cover(size_t f, int i, size_t g, int j) {
    if (!has(f, i, g, j)) return;
    set(f, i, g, j, 0);
    --left_;
  }
  size_t left() const { return left_; }

 private:
  size_t at(size_t f, int i, size_t g, int j) const {
    return (first_[f] + static_cast<size_t>(i)) * levels_ + first_[g] + static_cast<size_t>(j);
  }
  void set(size_t f, int i, size_t g, int j, char value) {
    open_[at(f, i, g, j)] = open_[at(g, j, f, i)] = value;
  }

  std::vector<size_t> first_;
  size_t levels_ = 0;
  std::vector<char> open_;
  size_t left_ = 0;
};

}  // namespace

// Greedy: each row starts from a pair not met yet, then takes, factor by factor, the level that
// meets most open pairs with the levels already chosen. Ties rotate from row to row.
std::vector<std::vector<int>> pairwise(const std::vector<int>& sizes) {
  const size_t factors = sizes.size();
  Uncovered uncovered(sizes);
  std::vector<std::vector<int>> rows;
  while (uncovered.left() > 0) {
    std::vector<int> row(factors, -1);
    const auto start_row = [&] {
      for (size_t f = 0; f < factors; ++f)
        for (size_t g = f + 1; g < factors; ++g)
          for (int i = 0; i < sizes[f]; ++i)
            for (int j = 0; j < sizes[g]; ++j)
              if (uncovered.has(f, i, g, j)) return void((row[f] = i, row[g] = j));
    };
    start_row();
    for (size_t f = 0; f < factors; ++f) {
      if (row[f] >= 0) continue;
      int best = -1, best_gain = -1;
      for (int step = 0; step < sizes[f]; ++step) {
        const int level = (step + static_cast<int>(rows.size() + f)) % sizes[f];
        int gain = 0;
        for (size_t g = 0; g < factors; ++g)
          gain += g != f && row[g] >= 0 && uncovered.has(f, level, g, row[g]);
        if (gain > best_gain) best = level, best_gain = gain;
      }
      row[f] = best;
    }
    for (size_t f = 0; f < factors; ++f)
      for (size_t g = f + 1; g < factors; ++g) uncovered.cover(f, row[f], g, row[g]);
    rows.push_back(row);
  }
  return rows;
}

}  // namespace flash3::cases
