// SPDX-License-Identifier: Apache-2.0
#include "cases/table.hpp"

#include <array>
#include <cstddef>
#include <set>
#include <string>
#include <utility>

#include "cases/added_tensors.hpp"
#include "cases/tensors.hpp"

namespace flash3::cases {
namespace {

struct Dims {
  int64_t qk, v;
};
constexpr Dims kDims[] = {{64, 64},   {128, 128}, {96, 96},   {160, 160}, {192, 192}, {256, 256},
                          {192, 128}, {8, 8},     {16, 16},   {32, 32},   {40, 40},   {72, 72},
                          {80, 80},   {104, 104}, {224, 224}, {1, 1},     {3, 3},     {33, 33},
                          {65, 65},   {100, 100}, {127, 127}, {129, 129}, {255, 255}, {64, 128},
                          {128, 64},  {40, 72},   {256, 33}};
// The dims that a Hopper kernel has exactly; they head the list above.
constexpr std::span kNativeDims = std::span(kDims).first(7);

struct Mask {
  bool causal, window;
  int64_t left, right;
};
constexpr Mask kMasks[] = {{false, false, -1, -1},     // full
                           {true, false, -1, -1},      // causal
                           {false, true, 100, 50},     // sliding, both sides
                           {true, true, 128, -1},      // sliding and causal
                           {false, true, 64, -1},      // left only
                           {false, true, -1, 33},      // right only
                           {false, true, 0, 0},        // the diagonal alone
                           {false, true, 5000, 5000},  // wider than any sequence
                           {false, true, 5000, 1}};
constexpr std::span kMainMasks = std::span(kMasks).first(4);

struct Heads {
  int64_t q, k;
};
constexpr Heads kHeads[] = {{3, 3}, {4, 2}, {8, 2}, {6, 1}};

constexpr int64_t kLengths[] = {129, 1000, 65, 127, 4097, 128, 64, 63, 1, 0};
constexpr int64_t kShortLengths[] = {129, 300, 65, 127, 128, 64, 63, 1, 0};
constexpr Layout kLayouts[] = {Layout::kBatchSeq, Layout::kHeadsFirst, Layout::kPadded,
                               Layout::kOdd};
constexpr int64_t kBatches[] = {1, 2, 3};
constexpr Distribution kDistributions[] = {Distribution::kNormal, Distribution::kOutliers};
constexpr float kScales[] = {0.f, 0.3f};

class Table {
 public:
  void add(const Case& c) {
    if (seen_.insert(to_id(c)).second) cases_.push_back(c);
  }
  std::vector<Case> take() { return std::move(cases_); }

 private:
  std::vector<Case> cases_;
  std::set<std::string> seen_;
};

Case with(Case c, const Mask& m) {
  c.causal = m.causal, c.window = m.window, c.window_left = m.left, c.window_right = m.right;
  return c;
}

Case make_case(flash3_dtype dtype, Dims dims, int64_t seq_q, int64_t seq_k, Heads heads) {
  Case c;
  c.dtype = dtype, c.head_dim = dims.qk, c.head_dim_v = dims.v;
  c.seq_q = seq_q, c.seq_k = seq_k, c.heads_q = heads.q, c.heads_k = heads.k;
  return c;
}

// Every seq_q with every seq_k.
void add_length_product(flash3_dtype dtype, Dims dims, std::span<const int64_t> lengths,
                        std::span<const Mask> masks, Table* table) {
  for (const Mask& mask : masks)
    for (const int64_t seq_q : lengths)
      for (const int64_t seq_k : lengths)
        table->add(with(make_case(dtype, dims, seq_q, seq_k, {2, 1}), mask));
}

// All factors, pairwise.
void add_pairwise(std::span<const flash3_dtype> dtypes, std::span<const int64_t> lengths,
                  Table* table) {
  const auto n = [](const auto& list) { return static_cast<int>(std::size(list)); };
  const auto rows = pairwise({n(kDims), n(lengths), n(lengths), n(kMasks), n(kHeads), n(kLayouts),
                              n(dtypes), n(kBatches), n(kDistributions), n(kScales), 2});
  for (const auto& row : rows) {
    const auto level = [&](const auto& list, size_t factor) { return list[size_t(row[factor])]; };
    Case c = make_case(level(dtypes, 6), level(kDims, 0), level(lengths, 1), level(lengths, 2),
                       level(kHeads, 4));
    c = with(c, level(kMasks, 3));
    c.layout = level(kLayouts, 5);
    c.batch = level(kBatches, 7);
    c.distribution = level(kDistributions, 8);
    c.softmax_scale = level(kScales, 9);
    c.want_lse = row[10] == 0;
    if (c.seq_q * c.seq_k > 2'000'000) {  // keeps the oracle's O(n²) work in bounds
      c.batch = 1;
      c.heads_q /= c.heads_k;
      c.heads_k = 1;
    }
    table->add(c);
  }
}

// Query heads that may share a tile (GQA, MQA): every ratio that packs differently, lengths on
// either side of what fills a tile. The rest alternates; masks: how many of them each of these
// gets.
void add_packed_heads(std::span<const flash3_dtype> dtypes, size_t masks, Table* table) {
  constexpr Dims kPackedDims[] = {{64, 64}, {128, 128}, {33, 33},   {72, 72},
                                  {96, 96}, {192, 128}, {127, 127}, {256, 256}};
  constexpr int64_t kMoreKeys[] = {0, 70, -30};
  size_t i = 0;
  for (const flash3_dtype dtype : dtypes)
    for (const int64_t ratio : {2, 3, 4, 7, 8, 16, 24, 32, 64})
      for (const int64_t seq_q : {1, 2, 5, 63, 64, 65, 200})
        for (size_t m = 0; m < masks; ++m, ++i) {
          const int64_t heads_k = ratio > 8 ? 1 : 2, seq_k = seq_q + kMoreKeys[i / 6 % 3];
          Case c = make_case(dtype, kPackedDims[i % 8], seq_q, seq_k < 1 ? 100 : seq_k,
                             {ratio * heads_k, heads_k});
          c = with(c, kMainMasks[(i + i / 8) % kMainMasks.size()]);
          c.batch = heads_k;
          c.layout = kLayouts[i / 3 % std::size(kLayouts)];
          table->add(c);
        }
}

// Every kernel family with every mask.
void add_kernels(std::span<const flash3_dtype> dtypes, std::span<const Heads> lengths,
                 Table* table) {
  for (const flash3_dtype dtype : dtypes)
    for (const Dims dims : kNativeDims)
      for (const Mask& mask : kMasks)
        for (const auto& [seq_q, seq_k] : lengths)
          table->add(with(make_case(dtype, dims, seq_q, seq_k, {2, 1}), mask));
}

// Infinities and NaNs in the inputs.
void add_specials(std::span<const flash3_dtype> dtypes, std::span<const Dims> dims, Table* table) {
  for (const flash3_dtype dtype : dtypes)
    for (const Dims d : dims)
      for (const Mask& mask : {kMasks[0], kMasks[1], kMasks[7]}) {
        Case c = with(make_case(dtype, d, 200, 300, {4, 2}), mask);
        c.batch = 2;
        c.distribution = Distribution::kSpecial;
        table->add(c);
      }
}

// Shapes that load the scheduler unevenly: many heads, many batches, one row, odd groups.
void add_shapes(std::span<const flash3_dtype> dtypes, bool large, Table* table) {
  for (const flash3_dtype dtype : dtypes)
    for (const Mask& mask : {kMasks[0], kMasks[1]}) {
      const auto add = [&](int64_t batch, int64_t seq_q, int64_t seq_k, Heads heads, Dims dims) {
        Case c = with(make_case(dtype, dims, seq_q, seq_k, heads), mask);
        c.batch = batch;
        table->add(c);
      };
      add(40, 1, 257, {16, 2}, {128, 128});
      add(1, 130, 190, {64, 8}, {64, 64});
      add(17, 33, 70, {5, 5}, {96, 96});
      add(0, 64, 64, {2, 2}, {64, 64});
      if (!large) continue;
      add(3, 1000, 1000, {15, 3}, {128, 128});
      add(2, 500, 1300, {48, 16}, {64, 64});
      add(200, 7, 40, {9, 3}, {72, 72});
      add(1, 2048, 2048, {7, 1}, {192, 128});
      add(3, 700, 500, {16, 16}, {96, 96});
    }
}

std::vector<Case> backward_of(const std::vector<Case>& cases) {
  Table table;
  size_t i = 0;
  for (Case c : cases) {
    if (c.out_dtype != FLASH3_DTYPE_NONE) continue;
    const bool full = !c.causal && !c.window;
    if (c.distribution == Distribution::kSpecial && !full) continue;
    c.want_lse = true;
    c.backward = true;
    c.want_dlse = i % 3 == 0;
    c.deterministic = i / 3 % 2 == 0;
    ++i;
    table.add(c);
  }
  return table.take();
}

}  // namespace

std::optional<Level> parse_level(std::string_view name) {
  if (name == "quick") return Level::kQuick;
  if (name == "full") return Level::kFull;
  return std::nullopt;
}

std::span<const flash3_dtype> dtypes_of(flash3_backend backend) {
  static constexpr flash3_dtype kAll[] = {FLASH3_BFLOAT16, FLASH3_FLOAT16, FLASH3_FLOAT32};
  return backend == FLASH3_BACKEND_HOPPER ? std::span(kAll).first(2) : std::span(kAll);
}

std::vector<Case> with_unrounded(std::vector<Case> cases) {
  constexpr size_t kEach = 7;
  for (size_t i = 0, count = cases.size(); i < count; i += kEach) {
    Case c = cases[i];
    if (dtype_size(c.dtype) != 2) continue;
    if (c.backward) {
      c.float32_gradients = true;
    } else {
      c.out_dtype = FLASH3_FLOAT32;
    }
    cases.push_back(c);
  }
  return cases;
}

std::vector<Case> with_added_tensors(std::vector<Case> cases, flash3_backend backend) {
  constexpr size_t kEach = 6;
  struct Choice {
    const ParamField& field;
    int64_t value;
  };
  std::vector<Choice> choices;
  for (const ParamField& field : added_fields<flash3_forward_params>())
    if (field.kind == FieldKind::kTensor && !(field.is_cpu_alone && backend != FLASH3_BACKEND_CPU))
      for (int64_t value = 1; value < count_values(field); ++value)
        choices.push_back({field, value});
  const auto takes = [](const Case& c, const ParamField& field) {
    return (!c.backward || find_field<flash3_backward_params>(field.name)) && goes_with(c, field);
  };
  size_t nexts[2] = {};  // those of latent attention are few, and have a turn of their own
  for (size_t i = 0, count = cases.size(); i < count; i += kEach) {
    const Case c = cases[i];
    size_t& next = nexts[c.latent || c.qv];
    for (size_t tried = 0; tried < choices.size(); ++tried) {
      const Choice& choice = choices[next++ % choices.size()];
      if (!takes(c, choice.field)) continue;
      Case with = c;
      *with.added.find(choice.field.name) = choice.value;
      if (choice.field.name == "dropout_state") {
        if (c.fp8 || c.dtype_of_kv() == FLASH3_FLOAT8_E4M3) continue;
        with.dropout = 0.3f;
      }
      with.want_dadded = c.backward;
      with.seed += next;  // which tells dtypes and the sizes of tables
      if (!takes_added_tensors(backend, with)) continue;
      cases.push_back(with);
      break;
    }
  }
  return cases;
}

std::vector<Case> case_table(Level level, std::span<const flash3_dtype> dtypes) {
  Table table;
  const std::span<const Dims> dims(kDims);
  const flash3_dtype main_dtype = dtypes.front();
  if (level == Level::kQuick) {
    add_length_product(main_dtype, {64, 64}, kShortLengths, kMainMasks.first(2), &table);
    add_pairwise(dtypes, kShortLengths, &table);
    add_kernels(dtypes.first(1), std::array{Heads{150, 280}}, &table);
    add_specials(dtypes, dims.first(2), &table);
    add_shapes(dtypes.first(1), false, &table);
    add_packed_heads(dtypes.first(1), 1, &table);
    for (const Case& c : option_cases(level, dtypes)) table.add(c);
    return with_unrounded(table.take());
  }
  add_length_product(main_dtype, {64, 64}, kLengths, kMainMasks, &table);
  add_length_product(main_dtype, {128, 128}, kLengths, kMainMasks.first(2), &table);
  add_pairwise(dtypes, kLengths, &table);
  add_kernels(dtypes, std::array{Heads{129, 1000}, Heads{1000, 129}, Heads{333, 333}}, &table);
  add_specials(dtypes, dims, &table);
  add_shapes(dtypes, true, &table);
  add_packed_heads(dtypes, 2, &table);
  for (const Case& c : option_cases(level, dtypes)) table.add(c);
  return with_unrounded(table.take());
}

std::vector<Case> backward_case_table(Level level, std::span<const flash3_dtype> dtypes) {
  std::vector<Case> cases = backward_of(case_table(level, dtypes));
  // Tiles of their own, where calls have many queries.
  for (const flash3_dtype dtype : dtypes)
    for (const float softcap : {0.f, 20.f}) {
      Case c = with(make_case(dtype, {128, 128}, 8200, 150, {2, 1}), {false, true, -1, 8100});
      c.want_lse = c.backward = true;
      c.softcap = softcap;
      cases.push_back(c);
    }
  for (const flash3_dtype dtype : dtypes)
    for (const int64_t queries : {1024, 1119, 1201})
      for (const int64_t keys : {1, 127, 300}) {
        Case c = make_case(dtype, {128, 128}, queries, keys, {2, 1});
        c.want_lse = c.backward = true;
        c.want_dlse = keys == 127;
        c.deterministic = keys == 300;
        cases.push_back(c);
      }
  return with_unrounded(std::move(cases));
}

std::vector<Case> ragged_backward_case_table(Level level, std::span<const flash3_dtype> dtypes) {
  return with_unrounded(backward_of(ragged_case_table(level, dtypes)));
}

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
