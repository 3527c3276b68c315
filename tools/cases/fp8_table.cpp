// SPDX-License-Identifier: Apache-2.0
// The tables of FP8: those of the other dtypes with alternating scales and outputs, calls that
// compute in FP8, and flash3_quantize.
#include <iterator>

#include "cases/table.hpp"

namespace flash3::cases {
namespace {

constexpr Scales kScales[] = {Scales::kBlock, Scales::kHead, Scales::kTensor, Scales::kNone};
constexpr Scales kGivenScales[] = {Scales::kBlock, Scales::kHead, Scales::kTensor};
constexpr flash3_dtype kOuts[] = {FLASH3_DTYPE_NONE, FLASH3_FLOAT16, FLASH3_FLOAT32};

// Every few cases of a table of 16-bit ones, computed in FP8.
constexpr size_t kEachRagged = 3, kEachDense = 11;

struct Shape {
  int64_t batch, seq_q, seq_k, heads_q, heads_k, dim, dim_v;
};
constexpr Shape kShapes[] = {
    {2, 129, 300, 4, 2, 64, 64}, {1, 128, 127, 6, 1, 128, 128}, {2, 257, 1, 3, 3, 96, 96},
    {1, 1, 513, 8, 2, 192, 128}, {1, 200, 200, 2, 2, 33, 100},  {3, 64, 130, 2, 1, 256, 256},
    {1, 70, 0, 2, 1, 2, 1},      {0, 30, 30, 2, 2, 64, 64},     {1, 150, 150, 5, 5, 3, 255}};
constexpr Layout kLayouts[] = {Layout::kBatchSeq, Layout::kHeadsFirst, Layout::kPadded,
                               Layout::kOdd};

// Scores with what depends on the distance, in each kernel that has it and in one wider than the
// head dims: under every kind of mask, beside softcaps and sinks. The quick ones are a third.
void add_biased(Level level, std::vector<Case>* list) {
  constexpr struct {
    int64_t slopes, table;  // values of the two options
  } kTerms[] = {{1, 0}, {0, 1}, {2, 0}, {0, 2}, {2, 1}};
  constexpr struct {
    int64_t batch, seq_q, seq_k, heads_q, heads_k;
  } kSizes[] = {
      {2, 200, 200, 4, 2}, {1, 150, 333, 3, 3}, {2, 333, 150, 6, 1}, {1, 700, 1100, 2, 1}};
  constexpr struct {
    int64_t qk, v;
  } kDims[] = {{64, 64}, {128, 128}, {256, 256}, {96, 72}, {192, 128}};
  size_t i = 0;
  for (const auto& dims : kDims)
    for (const auto& terms : kTerms)
      for (const int mask : {0, 1, 2, 3, 4}) {
        const auto& size = kSizes[(i + i / 4) % std::size(kSizes)];
        Case c;
        c.dtype = FLASH3_FLOAT8_E4M3, c.head_dim = dims.qk, c.head_dim_v = dims.v;
        c.batch = size.batch, c.seq_q = size.seq_q, c.seq_k = size.seq_k;
        c.heads_q = size.heads_q, c.heads_k = size.heads_k;
        *c.added.find("alibi_slopes") = terms.slopes, *c.added.find("bias_table") = terms.table;
        c.causal = mask == 1 || mask == 3, c.window = mask == 2 || mask == 3;
        if (c.window) c.window_left = 100;
        if (mask == 2) c.window_right = 50;
        if (mask == 4) c.chunk = 100;
        if (i % 4 == 3) c.softcap = 30;
        c.sink = i % 5 == 0 ? Sink::kFloat32 : i % 5 == 3 ? Sink::k16 : Sink::kNone;
        c.scales = kScales[i / 2 % std::size(kScales)];
        c.out_dtype = kOuts[i % std::size(kOuts)], c.want_lse = true;
        c.seed = i + 1;  // which tells the size of a table
        if (level == Level::kFull || i % 3 == 0) list->push_back(c);
        ++i;
      }
}

}  // namespace

std::vector<Case> fp8_case_table(Level level, bool ragged) {
  constexpr flash3_dtype kFp8[] = {FLASH3_FLOAT8_E4M3}, kHalf[] = {FLASH3_BFLOAT16, FLASH3_FLOAT16};
  const auto table = [&](std::span<const flash3_dtype> dtypes) {
    return ragged ? ragged_case_table(level, dtypes) : case_table(level, dtypes);
  };
  std::vector<Case> list;
  size_t i = 0;
  for (Case c : table(kFp8)) {
    c.scales = kScales[i % std::size(kScales)];
    c.out_dtype = kOuts[i / 4 % std::size(kOuts)];
    ++i;
    list.push_back(c);
  }
  // A kernel that 16 bits do not have.
  if (!ragged)
    for (const int64_t dim_v : {192, 150}) {
      Case c;
      c.dtype = FLASH3_FLOAT8_E4M3, c.batch = 1, c.seq_q = 150, c.seq_k = 333;
      c.heads_q = 4, c.heads_k = 2, c.head_dim = 192, c.head_dim_v = dim_v;
      c.causal = dim_v != 192, c.softcap = 30, c.want_lse = true, c.scales = Scales::kBlock;
      list.push_back(c);
    }
  if (!ragged) add_biased(level, &list);
  // Sums in other levels than their lengths lead to.
  if (!ragged)
    for (const int64_t dim : {64, 128, 192, 256})
      for (const int sums : {1, 2}) {
        Case c;
        c.dtype = FLASH3_FLOAT8_E4M3, c.batch = 1, c.seq_q = 70, c.seq_k = sums == 1 ? 3000 : 700;
        c.heads_q = c.heads_k = 1, c.head_dim = c.head_dim_v = dim, c.causal = dim != 64;
        c.scales = Scales::kHead, c.sums = sums;
        list.push_back(c);
      }
  i = 0;
  for (Case c : table(kHalf)) {
    if (i++ % (ragged ? kEachRagged : kEachDense) != 0) continue;
    if (c.distribution == Distribution::kSpecial) continue;  // infinities are NaN to FP8
    c.fp8 = true;
    list.push_back(c);
  }
  return list;
}

std::vector<Case> quantize_case_table(Level level, std::span<const flash3_dtype> dtypes) {
  std::vector<Case> list;
  size_t i = 0;
  const auto add = [&](Case c) {
    c.quantize = true;
    c.want_lse = true;
    for (const Scales scales : kGivenScales)
      for (const bool rotate : {false, true}) {
        ++i;
        if (level == Level::kQuick && (i + i / 6) % 2 == 0) continue;  // both of `rotate`
        c.scales = scales;
        c.rotate = rotate;
        c.rotary = c.head_dim < 2 ? Rotary::kNone : static_cast<Rotary>((i + i / 6 + i / 36) % 3);
        c.layout = kLayouts[i / 3 % std::size(kLayouts)];
        c.distribution = i % 7 == 0   ? Distribution::kSpecial
                         : i % 3 == 0 ? Distribution::kOutliers
                                      : Distribution::kNormal;
        c.seed = i;
        list.push_back(c);
      }
  };
  for (const flash3_dtype dtype : dtypes) {
    for (const Shape& s : kShapes) {
      Case c;
      c.dtype = dtype, c.batch = s.batch, c.seq_q = s.seq_q, c.seq_k = s.seq_k;
      c.heads_q = s.heads_q, c.heads_k = s.heads_k, c.head_dim = s.dim, c.head_dim_v = s.dim_v;
      add(c);
      if (s.batch == 0) continue;
      c.batch = 7;
      c.lengths = Lengths::kRandom;
      c.packed_q = c.packed_k = true;
      add(c);
      c.used_k = true;
      add(c);
      c.packed_q = c.packed_k = false;
      c.used_q = true;
      add(c);
    }
    size_t empty = 0;
    for (const Case& c : empty_cases({&dtype, 1}))
      if (c.softcap == 0 && c.sink == Sink::kNone && !c.causal &&
          (level == Level::kFull || empty++ % 3 == 0))
        add(c);
  }
  return list;
}

}  // namespace flash3::cases
