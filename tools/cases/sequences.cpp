// SPDX-License-Identifier: Apache-2.0
#include "cases/sequences.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>
#include <random>

namespace flash3::cases {
namespace {

constexpr int64_t kSmall = 40;      // the longest beside a giant
constexpr int64_t kRowsBehind = 3;  // that belong to no sequence
constexpr double kLogWidth = 6;     // of log-uniform lengths: 2^6 = 64

// In (0, 1].
double next_uniform(uint64_t* state) {
  return (static_cast<double>(next_bits(state) >> 11) + 1) * 0x1p-53;
}

// A multiple of the tile of some kernel, or one more or less.
int64_t edge_length(int64_t longest, std::mt19937_64* random) {
  constexpr int64_t kTiles[] = {64, 80, 96, 112, 128, 144, 192, 256};
  const auto below = [&](int64_t n) { return static_cast<int64_t>((*random)() % uint64_t(n)); };
  const int64_t tile = kTiles[below(std::size(kTiles))];
  const int64_t multiple = 1 + below(std::max<int64_t>(1, longest / tile));
  return std::min(longest, tile * multiple + below(3) - 1);
}

int64_t log_uniform_length(int64_t longest, std::mt19937_64* random) {
  const double uniform = static_cast<double>((*random)() >> 11) * 0x1p-53;
  const double length = static_cast<double>(longest) * std::exp2(-kLogWidth * uniform);
  return std::min(longest, std::max<int64_t>(1, std::llround(length)));
}

// The length of sequence b of so many.
int64_t length_of(Lengths lengths, int64_t longest, int64_t b, int64_t batch,
                  std::mt19937_64* random) {
  const auto below = [&](int64_t n) { return static_cast<int64_t>((*random)() % uint64_t(n)); };
  switch (lengths) {
    case Lengths::kAll:
    case Lengths::kLogNormal: break;
    case Lengths::kRandom: return std::min(longest, below(5) == 0 ? below(2) : below(longest + 1));
    case Lengths::kEdges: return edge_length(longest, random);
    case Lengths::kEmpty: return 0;
    case Lengths::kMixed: return b % 2 == 0 ? std::min<int64_t>(longest, 1) : longest;
    case Lengths::kLogUniform: return log_uniform_length(longest, random);
    case Lengths::kGiant:
      if (b != batch / 2) return std::min(longest, below(kSmall + 1));
      break;
  }
  return longest;
}

SequenceLengths make_rows(const Case& c, Lengths how, int64_t longest, bool packed, bool used,
                          uint64_t salt) {
  SequenceLengths s;
  s.rows = s.max_length = longest;
  if (!packed && !used) return s;
  std::mt19937_64 lengths(c.seed + salt), gaps(c.seed + salt + 1000);
  std::vector<int64_t> drawn;
  if (how == Lengths::kLogNormal)
    drawn = log_normal_lengths(c.tokens, c.draw + 1000 * static_cast<int64_t>(salt));
  drawn.resize(static_cast<size_t>(c.batch));
  if (packed) s.cu.push_back(static_cast<int32_t>(c.front));
  for (int64_t b = 0; b < c.batch; ++b) {
    const int64_t n = how == Lengths::kLogNormal ? std::min(longest, drawn[static_cast<size_t>(b)])
                                                 : length_of(how, longest, b, c.batch, &lengths);
    if (used) s.used.push_back(static_cast<int32_t>(n));
    if (packed)
      s.cu.push_back(s.cu.back() + static_cast<int32_t>(n + (used ? int64_t(gaps() % 8) : 0)));
  }
  const bool exact = how == Lengths::kAll || how == Lengths::kEmpty;
  if (packed) s.rows = s.cu.back() + (exact ? 0 : kRowsBehind);
  return s;
}

}  // namespace

Sequences SequenceLengths::view() const {
  return {.packed = !cu.empty(),
          .has_used = !used.empty(),
          .cu = cu.empty() ? nullptr : cu.data(),
          .used = used.empty() ? nullptr : used.data(),
          .rows = rows,
          .max_length = max_length};
}

std::vector<int64_t> log_normal_lengths(int64_t tokens, int64_t draw) {
  constexpr double kDeviation = 1.2;
  const double median = static_cast<double>(tokens) / 128;
  auto state = static_cast<uint64_t>(draw);
  std::vector<int64_t> lengths;
  for (int64_t left = tokens; left > 0; left -= lengths.back()) {
    const double radius = std::sqrt(-2 * std::log(next_uniform(&state)));
    const double normal = radius * std::cos(2 * std::numbers::pi * next_uniform(&state));
    const double length = std::floor(median * std::exp(kDeviation * normal));
    lengths.push_back(static_cast<int64_t>(std::clamp(length, 1., static_cast<double>(left))));
  }
  return lengths;
}

CaseSequences make_sequences(const Case& c) {
  const Lengths of_k = c.lengths == Lengths::kMixed ? Lengths::kAll : c.lengths;
  return {make_rows(c, c.lengths, c.seq_q, c.packed_q, c.used_q, 0),
          make_rows(c, of_k, c.seq_k, c.packed_k, c.used_k, c.seq_q == c.seq_k ? 0 : 1)};
}

std::vector<RowUse> row_uses(const SequenceLengths& rows, int64_t batch) {
  const Sequences view = rows.view();
  const int64_t batch_rows = view.packed ? 0 : rows.rows;
  std::vector<RowUse> uses(static_cast<size_t>(view.packed ? rows.rows : batch * rows.rows),
                           RowUse::kOutside);
  for (int64_t b = 0; b < batch; ++b) {
    const RowRange s = rows_of(view, b);
    const auto first = uses.begin() + b * batch_rows + s.first;
    std::fill_n(first, s.length, RowUse::kCounts);
    std::fill_n(first + s.length, s.capacity - s.length, RowUse::kUnused);
  }
  return uses;
}

}  // namespace flash3::cases
