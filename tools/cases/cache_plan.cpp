// SPDX-License-Identifier: Apache-2.0
#include "cases/cache_plan.hpp"

#include <algorithm>
#include <numeric>
#include <random>

#include "cases/sequences.hpp"

namespace flash3::cases {
namespace {

constexpr int64_t kMostPadding = 7, kSpareElements = 2, kMostOffset = 9;
constexpr int32_t kNoPage = 123456789;

std::vector<int32_t> shuffled(int64_t count, std::mt19937_64* random) {
  std::vector<int32_t> all(static_cast<size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  for (size_t i = all.size(); i > 1; --i) std::swap(all[i - 1], all[(*random)() % i]);
  return all;
}

}  // namespace

int64_t CachePlan::pages_of(const Case& c, int64_t b) const {
  const auto at = static_cast<size_t>(b);
  return ceil_div(int64_t{used[at]} + added[at], c.page_size);
}

CachePlan make_cache_plan(const Case& c) {
  CachePlan plan;
  std::mt19937_64 random(c.seed + 5000);
  const auto below = [&](int64_t n) { return static_cast<int32_t>(random() % uint64_t(n)); };
  const CaseSequences sequences = make_sequences(c);
  plan.cu_new.push_back(0);
  for (int64_t b = 0; b < c.batch; ++b) {
    plan.padding.push_back(c.leftpad ? below(kMostPadding + 1) : 0);
    plan.used.push_back(sequences.k.used[static_cast<size_t>(b)] + plan.padding.back());
    plan.added.push_back(c.append_packed ? below(c.append + 1) : static_cast<int32_t>(c.append));
    plan.cu_new.push_back(plan.cu_new.back() + plan.added.back());
    plan.offsets.push_back(below(kMostOffset + 1));
  }
  plan.capacity = c.seq_k + c.append + (c.leftpad ? kMostPadding : 0);
  plan.positions = std::max(plan.capacity, kMostOffset) + std::max({c.seq_q, c.append, int64_t{1}});
  plan.elements = c.batch + (c.batch_idx ? kSpareElements : 0), plan.rows = plan.capacity;
  if (c.page_size == 0) return plan;
  plan.max_pages = std::max<int64_t>(1, ceil_div(plan.capacity, c.page_size));
  plan.elements = kSpareElements, plan.rows = c.page_size;
  for (int64_t b = 0; b < c.batch; ++b) plan.elements += plan.pages_of(c, b);
  return plan;
}

CachePlaces make_cache_places(const Case& c, const CachePlan& plan) {
  CachePlaces places;
  std::mt19937_64 random(c.seed + 6000);
  if (c.page_size > 0) {
    const std::vector<int32_t> order = shuffled(plan.elements, &random);
    places.page_table.assign(static_cast<size_t>(c.batch * plan.max_pages), kNoPage);
    auto next = order.begin();
    for (int64_t b = 0; b < c.batch; ++b) {
      const int64_t pages = plan.pages_of(c, b);
      std::copy_n(next, pages, places.page_table.begin() + b * plan.max_pages);
      next += pages;
    }
  } else if (c.batch_idx) {
    places.batch_idx = shuffled(plan.elements, &random);
    places.batch_idx.resize(static_cast<size_t>(c.batch));
  }
  return places;
}

CacheRow CachePlaces::row_of(const Case& c, const CachePlan& plan, int64_t b, int64_t place) const {
  if (c.page_size > 0)
    return {page_table[static_cast<size_t>(b * plan.max_pages + place / c.page_size)],
            place % c.page_size};
  return {c.batch_idx ? batch_idx[static_cast<size_t>(b)] : b, place};
}

}  // namespace flash3::cases
