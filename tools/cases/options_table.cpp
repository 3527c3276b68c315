// SPDX-License-Identifier: Apache-2.0
// The part of the case table with sinks, softcaps and chunks, and the table of ragged batches; at
// the end the part of that in which tensors have no rows, or sequences no tokens or a single one.

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "cases/table.hpp"

namespace flash3::cases {
namespace {

struct Dims {
  int64_t qk, v;
};
constexpr Dims kDims[] = {{64, 64}, {128, 128}, {256, 256}, {33, 33}, {192, 128}, {100, 72}};

struct MaskOptions {
  bool causal, window;
  int64_t left, right, chunk;
};
constexpr MaskOptions kMasks[] = {{false, false, -1, -1, 0},  // full
                                  {true, false, -1, -1, 0},   // causal
                                  {false, true, 100, 50, 0},  // sliding, both sides
                                  {true, true, 128, -1, 0},   // sliding and causal
                                  {true, false, -1, -1, 64},  // chunks, causal as Llama 4 has them
                                  {false, false, -1, -1, 100}, {true, true, 20, -1, 37}};

struct ScoreOptions {
  Sink sink;
  float softcap;
};
constexpr ScoreOptions kScores[] = {{Sink::kNone, 0.f},  {Sink::kFloat32, 0.f},
                                    {Sink::k16, 0.f},    {Sink::kNone, 30.f},
                                    {Sink::kNone, 50.f}, {Sink::kFloat32, 30.f}};

struct Heads {
  int64_t q, k;
};
constexpr Heads kHeads[] = {{3, 3}, {4, 2}, {6, 1}, {8, 1}};
constexpr Layout kLayouts[] = {Layout::kBatchSeq, Layout::kHeadsFirst, Layout::kPadded,
                               Layout::kOdd};

Case make_case(flash3_dtype dtype, Dims dims, Heads heads, const MaskOptions& mask,
               const ScoreOptions& scores) {
  Case c;
  c.dtype = dtype, c.head_dim = dims.qk, c.head_dim_v = dims.v;
  c.heads_q = heads.q, c.heads_k = heads.k;
  c.causal = mask.causal, c.window = mask.window;
  c.window_left = mask.left, c.window_right = mask.right, c.chunk = mask.chunk;
  c.sink = scores.sink, c.softcap = scores.softcap;
  // Scores of a quarter of the cap: smaller ones it hardly changes.
  if (c.softcap > 0)
    c.softmax_scale = std::round(250 * c.softcap / std::sqrt(static_cast<float>(dims.qk))) / 1000;
  if (dtype == FLASH3_FLOAT32 && c.sink == Sink::k16) c.sink = Sink::kFloat32;
  return c;
}

// Softcaps: under every mask in every head dim that has a kernel for them, and in one that runs in
// a larger one's. Scores of the usual size, which a cap hardly touches, and large ones; with
// infinities too where a mask hides nothing.
void add_softcaps(std::span<const flash3_dtype> dtypes, std::vector<Case>* cases) {
  constexpr struct {
    int64_t batch, seq_q, seq_k;
  } kSizes[] = {{2, 200, 200}, {1, 150, 333}, {2, 333, 150}};
  size_t i = 0;
  for (const flash3_dtype dtype : dtypes)
    for (const int64_t dim : {64, 96, 128, 256}) {
      for (const MaskOptions& mask : std::span(kMasks).first(4))
        for (const bool large : {false, true}) {
          Case c = make_case(dtype, {dim, dim}, kHeads[i % std::size(kHeads)], mask,
                             {Sink::kNone, i % 5 < 2 ? 50.f : 20.f});
          if (!large) c.softmax_scale = 0;
          c.batch = kSizes[i % 3].batch, c.seq_q = kSizes[i % 3].seq_q;
          c.seq_k = kSizes[i % 3].seq_k;
          cases->push_back(c);
          ++i;
        }
      // A cap so small that no weight rounds to 0 in float16: 0 · ∞ would be in V's place.
      Case c = make_case(dtype, {dim, dim}, {4, 2}, kMasks[0], {Sink::kNone, 4.f});
      c.batch = 2, c.seq_q = 200, c.seq_k = 300;
      c.distribution = Distribution::kSpecial;
      cases->push_back(c);
    }
}

struct Shape {
  int64_t batch, seq_q, seq_k;
  Lengths lengths;
};
constexpr Shape kShapes[] = {{9, 300, 300, Lengths::kRandom},   {7, 129, 257, Lengths::kRandom},
                             {5, 200, 64, Lengths::kRandom},    {40, 1000, 1000, Lengths::kGiant},
                             {1000, 40, 40, Lengths::kRandom},  {3, 150, 150, Lengths::kAll},
                             {1, 65, 65, Lengths::kRandom},     {17, 1, 300, Lengths::kRandom},
                             {0, 64, 64, Lengths::kRandom},     {300, 20, 200, Lengths::kRandom},
                             {30, 900, 1500, Lengths::kRandom}, {120, 2500, 2500, Lengths::kGiant},
                             {4000, 16, 16, Lengths::kRandom}};
constexpr size_t kQuickShapes = 9;

struct Packing {
  bool packed_q, packed_k, used_q, used_k, max_known;
};
constexpr Packing kPackings[] = {
    {true, true, false, false, true},  // training
    {true, true, true, true, true},    {true, true, false, true, false},
    {false, false, true, true, true},  // padded
    {false, false, false, true, true}, {true, false, false, true, true},
    {true, false, false, false, true}, {false, true, false, false, true},
    {true, true, false, false, false}};

// Rows of no token that are filled: before and after packed sequences, and unused ones; of all
// widths that stores have, in more sequences than a block looks at, and where no sequence has a
// token.
void add_filled(std::span<const flash3_dtype> dtypes, std::vector<Case>* cases) {
  constexpr Shape kFilled[] = {{5, 100, 130, Lengths::kRandom},
                               {700, 20, 20, Lengths::kRandom},
                               {3, 200, 200, Lengths::kEmpty},
                               {0, 64, 64, Lengths::kRandom}};
  constexpr Dims kWidths[] = {{64, 64}, {128, 128}, {33, 33}, {100, 72}};
  size_t i = 0;
  for (const Shape& shape : kFilled)
    for (const Packing& packing : std::span(kPackings).first(6)) {
      if (!packing.packed_q && !packing.used_q) continue;
      Case c = make_case(dtypes[i % dtypes.size()], kWidths[i % std::size(kWidths)],
                         kHeads[i % std::size(kHeads)], kMasks[i % 2], kScores[i % 2]);
      c.batch = shape.batch, c.seq_q = shape.seq_q, c.seq_k = shape.seq_k;
      c.lengths = shape.lengths;
      c.packed_q = packing.packed_q, c.packed_k = packing.packed_k;
      c.used_q = packing.used_q, c.used_k = packing.used_k;
      c.max_known = packing.max_known || !(c.packed_q || c.packed_k);
      c.front = c.packed_q ? 70 : 0;
      c.layout = kLayouts[i % std::size(kLayouts)];
      c.fill = true;
      cases->push_back(c);
      ++i;
    }
}

}  // namespace

std::vector<Case> option_cases(Level level, std::span<const flash3_dtype> dtypes) {
  constexpr Shape kDense[] = {{2, 129, 300, {}}, {1, 300, 129, {}}, {2, 200, 200, {}},
                              {3, 1, 257, {}},   {1, 65, 64, {}},   {1, 30, 0, {}},
                              {1, 333, 1000, {}}};
  std::vector<Case> cases;
  size_t i = 0;
  for (const flash3_dtype dtype : level == Level::kQuick ? dtypes.first(1) : dtypes)
    for (const Dims dims : kDims)
      for (const MaskOptions& mask : kMasks)
        for (const ScoreOptions& scores : kScores) {
          ++i;
          if (scores.sink == Sink::kNone && scores.softcap == 0 && mask.chunk == 0) continue;
          if (level == Level::kQuick && i % 3 != 0) continue;
          const Shape& shape = kDense[i / 3 % std::size(kDense)];
          Case c = make_case(dtype, dims, kHeads[i / 7 % std::size(kHeads)], mask, scores);
          c.batch = shape.batch, c.seq_q = shape.seq_q, c.seq_k = shape.seq_k;
          c.layout = kLayouts[i / 2 % std::size(kLayouts)];
          c.want_lse = i % 5 != 0;
          cases.push_back(c);
        }
  add_softcaps(dtypes, &cases);
  return cases;
}

std::vector<Case> ragged_case_table(Level level, std::span<const flash3_dtype> dtypes) {
  const auto n = [](const auto& list) { return static_cast<int>(std::size(list)); };
  const int shapes = level == Level::kQuick ? static_cast<int>(kQuickShapes) : n(kShapes);
  const auto rows = pairwise({shapes, n(kPackings), n(kMasks), n(kScores), n(kDims), n(kHeads),
                              n(kLayouts), n(dtypes), 2});
  std::vector<Case> cases;
  const uint64_t seeds = level == Level::kQuick ? 1 : 4;
  for (uint64_t seed = 1; seed <= seeds; ++seed)
    for (const auto& row : rows) {
      const auto level_of = [&](const auto& list, size_t factor) {
        return list[size_t(row[factor])];
      };
      Case c = make_case(level_of(dtypes, 7), level_of(kDims, 4), level_of(kHeads, 5),
                         level_of(kMasks, 2), level_of(kScores, 3));
      const Shape shape = level_of(kShapes, 0);
      c.batch = shape.batch, c.seq_q = shape.seq_q, c.seq_k = shape.seq_k;
      c.lengths = shape.lengths;
      const Packing packing = level_of(kPackings, 1);
      c.packed_q = packing.packed_q, c.packed_k = packing.packed_k;
      c.used_q = packing.used_q, c.used_k = packing.used_k;
      c.max_known = packing.max_known || !(c.packed_q || c.packed_k);
      c.layout = level_of(kLayouts, 6);
      c.want_lse = row[8] == 0;
      c.seed = seed;
      if (c.batch * c.seq_q > 30'000)  // keeps the oracle's work in bounds
        c.heads_q /= c.heads_k, c.heads_k = 1;
      cases.push_back(c);
    }
  add_filled(dtypes, &cases);
  for (const Case& c : empty_cases(level == Level::kQuick ? dtypes.first(1) : dtypes))
    cases.push_back(c);
  return with_unrounded(std::move(cases));
}

namespace {

// Which side is empty, and whether its tensors have rows that do not count.
struct Emptiness {
  int64_t seq_q, seq_k;
  Lengths lengths;
};
constexpr Emptiness kEmpty[] = {{24, 0, Lengths::kAll},
                                {0, 24, Lengths::kAll},
                                {0, 0, Lengths::kAll},
                                {24, 24, Lengths::kEmpty},
                                {130, 0, Lengths::kAll},
                                // One token each: packed rows whose stride no sequence steps over.
                                {1, 1, Lengths::kAll}};

struct EmptyPacking {
  bool packed_q, packed_k, used_q, used_k;
};
constexpr EmptyPacking kEmptyPackings[] = {
    {false, false, false, true}, {false, false, true, false}, {false, false, true, true},
    {false, true, false, false}, {true, false, false, false}, {true, true, false, false},
    {true, false, false, true},  {false, true, true, false},  {true, true, true, true}};

constexpr int64_t kEmptyDims[] = {64, 128, 256, 100};

}  // namespace

std::vector<Case> empty_cases(std::span<const flash3_dtype> dtypes) {
  std::vector<Case> cases;
  size_t i = 0;
  for (const Emptiness& empty : kEmpty)
    for (const EmptyPacking& packing : kEmptyPackings)
      for (const flash3_dtype dtype : dtypes)
        for (int options = 0; options < 4; ++options, ++i) {
          Case c;
          c.dtype = dtype;
          c.batch = i % 5 == 0 || empty.seq_q == 1 ? 3 : 1;
          c.seq_q = empty.seq_q, c.seq_k = empty.seq_k, c.lengths = empty.lengths;
          c.packed_q = packing.packed_q, c.packed_k = packing.packed_k;
          c.used_q = packing.used_q, c.used_k = packing.used_k;
          c.max_known = i % 3 != 0 || !(c.packed_q || c.packed_k);
          c.heads_q = 2, c.heads_k = i / 2 % 2 == 0 ? 2 : 1;
          c.head_dim = c.head_dim_v = kEmptyDims[(i + i / 4 + i / 16) % std::size(kEmptyDims)];
          c.softcap = options == 1 ? 20.f : 0.f;
          c.sink = options == 2 ? Sink::kFloat32 : Sink::kNone;
          c.causal = (i / 4 + i) % 2 == 0;
          if (i % 7 == 0) c.window = true, c.window_left = 9;
          cases.push_back(c);
        }
  return cases;
}

}  // namespace flash3::cases
