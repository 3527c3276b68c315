// SPDX-License-Identifier: Apache-2.0
// The cases on a KV cache: pages of every size, with what decoding and the parts of a prefill ask.
#include <utility>

#include "cases/table.hpp"

namespace flash3::cases {
namespace {

// Few queries of every head dim for which kernels are made, with so many query rows a KV head that
// each of them runs, with a softcap and without; rows that lie aligned and others.
void add_every_kernel(std::span<const flash3_dtype> dtypes, std::vector<Case>* table) {
  constexpr int64_t kDims[][2] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}};
  for (const flash3_dtype dtype : dtypes)
    for (const auto& [dim, dim_v] : kDims)
      for (const int64_t heads : {4, 8, 16, 32})
        for (const auto& [softcap, layout] :
             {std::pair{0.f, Layout::kBatchSeq}, std::pair{20.f, Layout::kBatchSeq},
              std::pair{0.f, Layout::kOdd}, std::pair{20.f, Layout::kOdd}}) {
          Case c;
          c.dtype = dtype, c.layout = layout, c.batch = 3, c.seq_q = 2, c.seq_k = 300;
          c.heads_q = heads, c.heads_k = 1, c.head_dim = dim, c.head_dim_v = dim_v;
          c.causal = true, c.softcap = softcap;
          c.lengths = Lengths::kRandom, c.used_k = true, c.page_size = 16;
          table->push_back(c);
        }
}

// Trees of drafts, with as many query rows a KV head as each kernel has and more: in plain tensors,
// in a cache, and in one in which the call appends keys, which may be all that there are. A
// quick table has each size in one of the three.
void add_trees(Level level, std::span<const flash3_dtype> dtypes, std::vector<Case>* table) {
  constexpr int64_t kDims[][2] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}, {80, 80}};
  constexpr int64_t kSizes[][2] = {{1, 300}, {4, 2000}, {7, 3}, {16, 128}, {33, 200}, {64, 500}};
  constexpr int64_t kPageSizes[] = {0, 16, 64};
  size_t n = 0;
  for (const flash3_dtype dtype : dtypes)
    for (const auto& [dim, dim_v] : kDims)
      for (const auto& [queries, keys] : kSizes) {
        ++n;
        for (size_t i = 0; i < std::size(kPageSizes); ++i) {
          if (level == Level::kQuick && i != (n + n / 6) % std::size(kPageSizes)) continue;
          Case c;
          c.dtype = dtype, c.batch = 3, c.seq_q = queries, c.seq_k = keys;
          c.heads_q = n % 2 == 0 ? 4 : 6, c.heads_k = n % 2 == 0 ? 1 : 2;
          c.head_dim = dim, c.head_dim_v = dim_v;
          c.tree = c.used_k = true;
          c.packed_q = (n + i) % 4 == 1, c.used_q = (n + i) % 4 == 2;
          c.lengths = keys < 128 ? Lengths::kAll : Lengths::kRandom;
          c.page_size = kPageSizes[i];
          if (c.page_size == 64) c.append = queries;
          c.leftpad = c.page_size == 16 && n % 4 == 0;
          c.softcap = (n + i) % 5 == 0 ? 20 : 0;
          c.sink = n % 7 == 0 ? Sink::kFloat32 : Sink::kNone;
          c.rotate = (n + i) % 3 == 0;
          c.seed = 3000 + table->size();
          table->push_back(c);
        }
      }
}

// Prompts of those head dims, in parts, some beside sequences that decode: what forward kernels
// read from a cache, in boxes of every number of rows, with keys before a window or without.
void add_prompts(std::span<const flash3_dtype> dtypes, std::vector<Case>* table) {
  constexpr int64_t kDims[][2] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}};
  constexpr int64_t kPageSizes[] = {16, 64, 128, 256, 0};
  for (const flash3_dtype dtype : dtypes)
    for (const auto& [dim, dim_v] : kDims)
      for (const int64_t page_size : kPageSizes)
        for (const float softcap : {0.f, 20.f}) {
          Case c;
          c.dtype = dtype, c.batch = 4, c.seq_q = 200, c.seq_k = 500;
          c.heads_q = 6, c.heads_k = 2, c.head_dim = dim, c.head_dim_v = dim_v;
          c.causal = true, c.softcap = softcap;
          c.lengths = page_size % 128 == 0 ? Lengths::kGiant : Lengths::kRandom;
          c.used_k = true, c.packed_q = true;
          c.page_size = page_size, c.batch_idx = page_size == 0;
          c.leftpad = c.batch_idx && softcap > 0;
          c.window = page_size == 16 || page_size == 256;
          if (c.window) c.window_left = 150;
          if (page_size >= 64) c.append = 40, c.append_packed = true, c.rotary = Rotary::kHalves;
          c.rotate = table->size() % 3 == 0;
          c.seed = 1000 + table->size();
          table->push_back(c);
          if (page_size != 0 && page_size != 64) continue;
          // So many heads fill a GPU: the same in kernels that split no keys.
          c.batch = 2, c.seq_q = 33, c.seq_k = 300;
          c.heads_q = 128, c.packed_q = false;
          if (c.append > 0) c.append = 20;
          c.seed = 1000 + table->size();
          table->push_back(c);
        }
}

// Prompts with more keys than FP8 sums up in one level, for head dims with a kernel.
void add_long_fp8_prompts(std::vector<Case>* table) {
  constexpr int64_t kDims[][2] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}};
  for (const auto& [dim, dim_v] : kDims)
    for (const int64_t page_size : {128, 32, 0}) {
      Case c;
      c.dtype = FLASH3_FLOAT8_E4M3, c.batch = 2, c.seq_q = 130, c.seq_k = 9000;
      c.heads_q = 4, c.heads_k = 2, c.head_dim = dim, c.head_dim_v = dim_v;
      c.causal = page_size != 0, c.used_k = true, c.lengths = Lengths::kRandom;
      c.page_size = page_size, c.batch_idx = page_size == 0;
      if (page_size == 128) c.append = 130;
      c.seed = 7000 + table->size();
      table->push_back(c);
      // So many heads fill a GPU, as in add_prompts().
      c.batch = 1, c.seq_q = 20, c.seq_k = 5000, c.heads_q = 128;
      if (c.append > 0) c.append = 20;
      c.seed = 7000 + table->size();
      table->push_back(c);
    }
}

// Queries with so many keys that blocks share them. n: of a series; what it changes are the
// masks, of which some leave a part nothing, and which lengths and sinks there are.
Case split_prompt(flash3_dtype dtype, int64_t dim, int64_t dim_v, int64_t page_size, size_t n) {
  Case c;
  c.dtype = dtype, c.batch = 2, c.seq_q = 40, c.seq_k = 15000;
  c.head_dim = dim, c.head_dim_v = dim_v;
  c.causal = n % 5 != 4;
  c.lengths = n % 4 == 3 ? Lengths::kAll : Lengths::kRandom;
  c.used_k = true, c.packed_q = n % 2 == 1;
  if (page_size > 0) c.page_size = page_size;
  c.batch_idx = page_size == 0;
  c.window = n % 4 == 2;
  if (c.window) c.window_left = 8000;
  if (n % 7 == 3) c.chunk = 9000;
  if (n % 3 == 2) c.sink = Sink::kFloat32;
  return c;
}

// More parts than the workspace has room for, and as many of one tile as there can be. c has their
// dtype and scales.
void add_many_parts(Case c, int64_t page_size, int64_t page_size_of_one_tile,
                    std::vector<Case>* table) {
  c.causal = c.used_k = true;
  Case many = c;
  many.batch = 140, many.seq_q = 17, many.seq_k = 7300;
  many.head_dim = many.head_dim_v = 64;
  many.lengths = Lengths::kGiant, many.page_size = page_size;
  table->push_back(many);
  many.lengths = Lengths::kAll, many.page_size = 0;
  table->push_back(many);
  c.seq_q = 33, c.seq_k = 58001, c.heads_q = 2;
  c.head_dim = c.head_dim_v = 128, c.page_size = page_size_of_one_tile;
  table->push_back(c);
}

// Prompts with few query tiles and many keys, so that blocks share them: pages of
// several sizes and none, rows and keys that fill no tile, sequences of too few keys beside others.
void add_split_prompts(std::span<const flash3_dtype> dtypes, std::vector<Case>* table) {
  constexpr int64_t kDims[][2] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}};
  constexpr int64_t kPageSizes[] = {16, 64, 0, -1};  // 0: batch_idx, -1: no cache
  for (const flash3_dtype dtype : dtypes) {
    size_t n = 0;
    for (const auto& [dim, dim_v] : kDims)
      for (const int64_t page_size : kPageSizes)
        for (const float softcap : {0.f, 20.f}) {
          Case c = split_prompt(dtype, dim, dim_v, page_size, n);
          c.heads_q = n % 3 == 0 ? 4 : 2, c.heads_k = n % 2 == 0 ? 2 : 1;
          c.softcap = softcap;
          c.leftpad = c.batch_idx && n % 3 == 1;
          if (page_size == 64) c.append = 40, c.append_packed = true, c.rotary = Rotary::kHalves;
          c.seed = 5000 + table->size();
          table->push_back(c);
          ++n;
        }
    Case of_dtype;
    of_dtype.dtype = dtype;
    add_many_parts(of_dtype, 64, 16, table);
  }
}

}  // namespace

namespace {

// Every two levels of every two factors meet.
std::vector<Case> pairwise_cases(Level level, std::span<const flash3_dtype> dtypes) {
  constexpr int64_t kPageSizes[] = {0, 1, 2, 3, 16, 64, 128, 256};
  constexpr int64_t kDims[][2] = {{64, 64},   {128, 128}, {96, 96}, {192, 128},
                                  {256, 256}, {40, 72},   {80, 80}};
  constexpr int64_t kHeads[][2] = {{1, 1}, {4, 4}, {4, 2}, {8, 1}, {16, 1}, {12, 2}};
  constexpr int64_t kQueries[] = {1, 1, 2, 5, 17, 130}, kAppends[] = {0, 1, 1, 3, 40};
  constexpr Lengths kLengths[] = {Lengths::kRandom, Lengths::kAll, Lengths::kEdges,
                                  Lengths::kGiant};
  const std::vector<int64_t> keys = level == Level::kFull
                                        ? std::vector<int64_t>{1, 40, 300, 1000, 4097}
                                        : std::vector<int64_t>{1, 40, 300};
  const auto n = [](const auto& list) { return static_cast<int>(std::size(list)); };
  std::vector<Case> table;
  uint64_t seed = 0;
  for (const auto& row : pairwise({n(dtypes), n(kPageSizes), n(kDims), n(kHeads), n(kQueries),
                                   n(kAppends), n(keys), n(kLengths), 7, 3, 2, 2, 2, 2, 2})) {
    const auto at = [&](int f) { return static_cast<size_t>(row[static_cast<size_t>(f)]); };
    Case c;
    c.dtype = dtypes[at(0)], c.page_size = kPageSizes[at(1)];
    c.head_dim = kDims[at(2)][0], c.head_dim_v = kDims[at(2)][1];
    c.heads_q = kHeads[at(3)][0], c.heads_k = kHeads[at(3)][1];
    c.batch = level == Level::kFull ? 9 : 4;
    c.seq_q = kQueries[at(4)], c.append = kAppends[at(5)], c.seq_k = keys[at(6)];
    c.lengths = kLengths[at(7)], c.used_k = true;
    c.causal = at(8) < 3;
    c.window = at(8) == 2 || at(8) == 3;
    if (c.window) c.window_left = 33;
    if (at(8) == 3) c.window_right = 4;
    if (at(8) == 4) c.chunk = 50;
    if (at(8) == 5) c.softcap = 20, c.causal = true;
    if (c.append > 0 && at(9) > 0) c.rotary = at(9) == 1 ? Rotary::kHalves : Rotary::kInterleaved;
    c.rotary_offsets = c.rotary != Rotary::kNone && at(10) == 1;
    c.append_packed = c.append > 0 && at(11) == 1;
    c.leftpad = at(12) == 1;
    c.packed_q = at(13) == 1;
    c.rotate = at(14) == 1;
    if (at(10) == 1) c.sink = Sink::kFloat32;
    c.batch_idx = c.page_size == 0 && (at(11) == 1 || !c.has_cache());
    c.layout = at(12) == 1 && at(13) == 1 ? Layout::kPadded : Layout::kBatchSeq;
    c.seed = ++seed;
    table.push_back(c);
  }
  return table;
}

// Prompts of so few queries a tile that FP8 packs heads, of scales that differ from head to head
// and from block to block of queries: packs that leave rows idle and others, a last query tile that
// is nearly empty, masks, pages of every number of rows, cache_batch_idx, and caches without a
// table.
void add_packed_fp8_prompts(std::vector<Case>* table) {
  constexpr int64_t kDims[][2] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}, {80, 72}};
  // Queries, heads; the last ones fill a GPU, and run in kernels that split no keys.
  constexpr int64_t kShapes[][3] = {{32, 8, 2},  {17, 6, 2},   {24, 12, 1},   {64, 8, 4},
                                    {140, 8, 1}, {300, 20, 1}, {40, 128, 16}, {140, 72, 8}};
  constexpr int64_t kPageSizes[] = {64, 128, 0, -1, 16};  // 0: batch_idx, -1: no table
  size_t n = 0;
  for (const auto& [dim, dim_v] : kDims)
    for (const auto& [queries, heads_q, heads_k] : kShapes)
      for (const float softcap : {0.f, 20.f}) {
        const int64_t page_size = kPageSizes[n % std::size(kPageSizes)];
        Case c;
        c.dtype = FLASH3_FLOAT8_E4M3, c.batch = 3, c.seq_q = queries, c.seq_k = 400;
        c.heads_q = heads_q, c.heads_k = heads_k, c.head_dim = dim, c.head_dim_v = dim_v;
        c.scales = Scales::kBlock;
        c.used_k = true, c.packed_q = n % 3 != 0;
        c.lengths = n % 4 == 3 ? Lengths::kAll : Lengths::kRandom;
        if (page_size > 0) c.page_size = page_size;
        c.batch_idx = page_size == 0;
        // Blocks of keys lie in key tiles, or have no scales of their own.
        if (page_size == 64 || page_size == 16)
          c.own_scales[1] = c.own_scales[2] = n % 2 == 0 ? Scales::kHead : Scales::kTensor;
        if (page_size == -1 && n % 2 == 0) c.append = 20, c.append_packed = c.packed_q;
        c.causal = n % 4 != 1, c.softcap = softcap;
        c.window = n % 4 > 1;
        if (c.window) c.window_left = n % 4 == 2 ? 40 : 350;
        if (n % 5 < 2) c.sink = Sink::kFloat32;
        if (n % 7 == 0) c.seq_k = 3000;  // sums in two levels
        c.seed = 8000 + table->size();
        table->push_back(c);
        ++n;
      }
}

// add_split_prompts() of FP8 keys: in parts whose values have other scales, or one; of several
// heads in a tile; and of so many keys that sums in two levels are flushed in each part.
void add_split_fp8_prompts(std::span<const flash3_dtype> dtypes, std::vector<Case>* table) {
  constexpr int64_t kDims[][2] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}};
  constexpr int64_t kPageSizes[] = {128, -1, 64, 0, 16};  // 0: batch_idx, -1: no table
  constexpr int64_t kHeads[][2] = {{8, 2}, {2, 1}, {7, 1}, {4, 4}};
  for (const flash3_dtype dtype : dtypes) {
    size_t n = 0;
    const bool kv8 = dtype != FLASH3_FLOAT8_E4M3;
    for (const auto& [dim, dim_v] : kDims)
      for (const int64_t page_size : kPageSizes) {
        Case c = split_prompt(dtype, dim, dim_v, page_size, n);
        c.kv8 = kv8, c.seq_k += int64_t(n);
        if (n % 3 == 0) c.seq_q = 150;
        c.heads_q = kHeads[n % 4][0], c.heads_k = kHeads[n % 4][1];
        c.leftpad = c.batch_idx && n % 2 == 1;
        if (page_size == 128 || page_size == 16) c.append = 40, c.append_packed = c.packed_q;
        c.scales = Scales::kBlock;
        // As in add_packed_fp8_prompts().
        if (page_size == 64 || page_size == 16 || c.leftpad)
          c.own_scales[1] = c.own_scales[2] = n % 2 == 0 ? Scales::kHead : Scales::kTensor;
        c.seed = 9000 + table->size();
        table->push_back(c);
        ++n;
      }
    Case of_dtype;
    of_dtype.dtype = dtype, of_dtype.kv8 = kv8, of_dtype.scales = Scales::kBlock;
    add_many_parts(of_dtype, 128, 128, table);
  }
}

// Some of those with slopes, a table or both too, which each tile has of one head. Rows of V are
// such as TMA can load: no decode kernel takes the call instead.
void add_biased_fp8_prompts(size_t first, std::vector<Case>* table) {
  size_t n = 0;
  for (size_t i = first, count = table->size(); i < count; ++i) {
    Case c = (*table)[i];
    if (c.dtype != FLASH3_FLOAT8_E4M3 || c.head_dim_v % 16 != 0) continue;
    if (c.seq_k < 5000 && i % 3 != 0) continue;
    if (n % 3 != 1) *c.added.find("alibi_slopes") = 1 + static_cast<int64_t>(n % 2);
    if (n % 3 != 0) *c.added.find("bias_table") = 1 + static_cast<int64_t>(n / 2 % 2);
    c.seed += 2000;
    table->push_back(c);
    ++n;
  }
}

// FP8 keys and values under every kind of q, with all kinds of scales.
std::vector<Case> fp8_cases(Level level) {
  constexpr flash3_dtype kDtypes[] = {FLASH3_BFLOAT16, FLASH3_FLOAT16, FLASH3_FLOAT8_E4M3};
  constexpr flash3_dtype kHalves[] = {FLASH3_BFLOAT16, FLASH3_FLOAT16};
  constexpr Scales kScales[] = {Scales::kBlock, Scales::kHead, Scales::kTensor, Scales::kNone};
  std::vector<Case> list = pairwise_cases(level, kDtypes);
  add_every_kernel(kHalves, &list);
  add_prompts(kDtypes, &list);
  add_long_fp8_prompts(&list);
  add_trees(level, kHalves, &list);
  const size_t caches = list.size();
  // Without a cache too: dense, packed and padded.
  for (size_t i = 0; i < caches; i += 5) {
    Case c = list[i];
    if (c.dtype == FLASH3_FLOAT8_E4M3) continue;
    c.page_size = c.append = 0;
    c.batch_idx = c.leftpad = c.append_packed = c.rotary_offsets = false;
    c.rotary = Rotary::kNone;
    c.packed_q = c.packed_k = i % 3 == 0, c.used_k = i % 3 == 1;
    if (!c.is_ragged()) c.lengths = Lengths::kAll;
    c.seed = 2000 + i;
    list.push_back(c);
  }
  size_t i = 0;
  for (Case& c : list) {
    c.kv8 = c.dtype != FLASH3_FLOAT8_E4M3;
    c.scales = kScales[i % std::size(kScales)];
    if (i % 7 == 0) c.own_scales[2] = kScales[i / 7 % std::size(kScales)];
    if (c.append > 0 && i % 3 == 0) c.new_dtype = c.kv8 ? FLASH3_FLOAT8_E4M3 : kHalves[i % 2];
    if (!c.kv8 || c.new_dtype == FLASH3_FLOAT8_E4M3)
      c.rotary = Rotary::kNone, c.rotary_offsets = c.rotate = false;
    ++i;
  }
  const size_t scaled = list.size();
  add_packed_fp8_prompts(&list);
  add_split_fp8_prompts(kDtypes, &list);
  add_biased_fp8_prompts(scaled, &list);
  return list;
}

// Multi-head latent attention, with v a part of k or q in two parts: decoding, drafts, parts of
// prompts, and without a cache too.
std::vector<Case> latent_cases(Level level, std::span<const flash3_dtype> dtypes) {
  constexpr int64_t kPageSizes[] = {64, 1, 16, 0, 256}, kHeads[] = {16, 128, 64, 6, 1};
  constexpr int64_t kQueries[] = {1, 2, 4, 17, 70}, kAppends[] = {0, 1, 3};
  constexpr Lengths kLengths[] = {Lengths::kRandom, Lengths::kEdges, Lengths::kGiant};
  constexpr Layout kLayouts[] = {Layout::kBatchSeq, Layout::kPadded, Layout::kOdd};
  const std::vector<int64_t> keys = level == Level::kFull ? std::vector<int64_t>{300, 1, 65, 1500}
                                                          : std::vector<int64_t>{300, 65};
  const auto n = [](const auto& list) { return static_cast<int>(std::size(list)); };
  std::vector<Case> table;
  uint64_t seed = 3000;
  for (const auto& row : pairwise({n(dtypes), 2, n(kPageSizes), n(kHeads), n(kQueries), n(kAppends),
                                   n(keys), n(kLengths), n(kLayouts), 6, 2, 2, 3})) {
    const auto at = [&](int f) { return static_cast<size_t>(row[static_cast<size_t>(f)]); };
    Case c;
    c.dtype = dtypes[at(0)];
    c.latent = at(1) == 0, c.qv = at(1) == 1;
    c.head_dim = c.qv ? 64 : 576, c.head_dim_v = 512;
    c.heads_q = kHeads[at(3)], c.heads_k = 1;
    c.seq_q = kQueries[at(4)], c.seq_k = keys[at(6)];
    c.batch = c.seq_q * c.heads_q > 500 ? 1 : 3;
    c.lengths = kLengths[at(7)], c.layout = kLayouts[at(8)];
    c.causal = at(9) < 4;
    c.window = at(9) == 2;
    if (c.window) c.window_left = 33;
    if (at(9) == 3) c.softcap = 20;
    if (at(9) == 5) c.sink = Sink::kFloat32;
    c.packed_q = at(10) == 1;
    c.rotate = c.qv && at(11) == 0;
    c.seed = ++seed;
    if (at(12) == 2) {  // no cache
      c.packed_k = c.packed_q;
      if (!c.packed_q) c.lengths = Lengths::kAll;
      table.push_back(c);
      continue;
    }
    c.used_k = true;
    c.page_size = kPageSizes[at(2)];
    c.append = kAppends[at(5)], c.append_packed = c.append > 1;
    c.batch_idx = c.page_size == 0, c.leftpad = at(11) == 1;
    if (c.append > 0 && c.qv && at(12) == 1) c.rotary = Rotary::kInterleaved;
    table.push_back(c);
  }
  return table;
}

}  // namespace

std::vector<Case> cache_case_table(Level level, std::span<const flash3_dtype> dtypes) {
  std::vector<Case> table = pairwise_cases(level, dtypes);
  add_every_kernel(dtypes, &table);
  add_prompts(dtypes, &table);
  add_split_prompts(dtypes, &table);
  for (const Case& c : latent_cases(level, dtypes)) table.push_back(c);
  add_trees(level, dtypes, &table);
  table = with_unrounded(std::move(table));
  for (const Case& c : with_unrounded(fp8_cases(level))) table.push_back(c);
  return table;
}

}  // namespace flash3::cases
