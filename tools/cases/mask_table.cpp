// SPDX-License-Identifier: Apache-2.0
// The table of masks as data: every source under every band, shared or not, in sizes at and beside
// the edges of blocks, and with sequences of unequal lengths.
#include <algorithm>
#include <cmath>
#include <iterator>

#include "cases/table.hpp"

namespace flash3::cases {
namespace {

constexpr CaseMask kSources[] = {{CaseMaskSource::kBand},
                                 {CaseMaskSource::kRanges, 1},
                                 {CaseMaskSource::kRanges, 2},
                                 {CaseMaskSource::kRanges, 8},
                                 {CaseMaskSource::kDocuments},
                                 {CaseMaskSource::kDense},
                                 {CaseMaskSource::kBlocks, 0, 128, 128},
                                 {CaseMaskSource::kBlocks, 0, 64, 64},
                                 {CaseMaskSource::kBlocks, 0, 8, 40},
                                 {CaseMaskSource::kBlocks, 0, 256, 128},
                                 {CaseMaskSource::kBits},
                                 {CaseMaskSource::kBitBlocks}};

struct Band {
  bool causal, window;
  int64_t left, right, chunk;
};
constexpr Band kBands[] = {{false, false, -1, -1, 0},
                           {true, false, -1, -1, 0},
                           {false, true, 100, 50, 0},
                           {true, true, 130, -1, 0},
                           {true, false, -1, -1, 100}};

struct Sizes {
  int64_t batch, seq_q, seq_k;
};
constexpr Sizes kSizes[] = {{2, 128, 128}, {1, 129, 127}, {2, 1, 300},  {1, 300, 1},
                            {2, 257, 384}, {1, 0, 130},   {1, 130, 0},  {0, 130, 130},
                            {3, 200, 65},  {1, 640, 513}, {1, 127, 700}};

struct Heads {
  int64_t q, k;
};
constexpr Heads kHeads[] = {{2, 2}, {4, 2}, {3, 1}, {8, 1}};

struct Dims {
  int64_t qk, v;
};
constexpr Dims kDims[] = {{64, 64}, {128, 128}, {256, 256}, {96, 40},
                          {33, 72}, {192, 128}, {160, 160}};

constexpr size_t kPackings = 15;  // which lengths a batch has: any of four, and at least one
constexpr Lengths kLengths[] = {Lengths::kRandom, Lengths::kEdges, Lengths::kGiant, Lengths::kEmpty,
                                Lengths::kRandom};

// The options that all masks meet, by turns.
void add_options(size_t i, bool backward, Case* c) {
  *c->added.find("mask_alignment") = i % 7 == 3;
  if (i % 4 == 1) c->sink = c->dtype == FLASH3_FLOAT32 ? Sink::kFloat32 : Sink::k16;
  if (i % 5 == 2) c->softcap = 20.f;
  if (c->softcap > 0) c->softmax_scale = 0.5f;
  c->layout = i % 6 == 5 ? Layout::kHeadsFirst : Layout::kBatchSeq;
  c->seed = i + 1;
  if (!backward) return;
  c->backward = true;
  c->deterministic = i % 2 == 0, c->want_dlse = i % 3 == 0;
}

void set_band(const Band& band, Case* c) {
  c->causal = band.causal, c->window = band.window, c->chunk = band.chunk;
  c->window_left = band.left, c->window_right = band.right;
}

// Sequences of unequal lengths under every source and band.
void add_ragged(Level level, std::span<const flash3_dtype> dtypes, bool backward,
                std::vector<Case>* table) {
  size_t i = 0;
  const size_t rounds = level == Level::kFull ? 4 : 1;
  for (size_t round = 0; round < rounds; ++round)
    for (const CaseMask& source : kSources)
      for (const Band& band : kBands) {
        Case c;
        c.mask = source;
        const bool may_differ = source.source != CaseMaskSource::kBand;
        c.mask.of_heads = may_differ && source.source != CaseMaskSource::kDocuments && i % 2 != 0;
        c.mask.of_batch = may_differ && i % 3 == 0;
        c.dtype = dtypes[i % dtypes.size()];
        c.batch = 3 + static_cast<int64_t>(i % 4);
        c.seq_q = i % 5 == 4 ? 200 : 300, c.seq_k = 300;
        const Heads& heads = kHeads[(i + round) % std::size(kHeads)];
        c.heads_q = heads.q, c.heads_k = heads.k;
        const Dims& dims = kDims[(i / 2 + round) % std::size(kDims)];
        c.head_dim = dims.qk, c.head_dim_v = dims.v;
        // In four rounds each source meets all of them, and so does each band.
        const size_t packing = 1 + (i + i / std::size(kBands) + 7 * round) % kPackings;
        c.packed_q = packing & 1, c.packed_k = packing & 2;
        c.used_q = packing & 4, c.used_k = packing & 8;
        c.max_known = i % 4 != 2 || !(c.packed_q || c.packed_k);
        c.lengths = kLengths[(i / 3 + round) % std::size(kLengths)];
        set_band(band, &c);
        add_options(i, backward, &c);
        c.layout = Layout::kBatchSeq;
        c.fill = i % 3 == 1;
        table->push_back(c);
        ++i;
      }
}

// Long documents of one sequence, which a GPU computes as a packed batch, but under chunks.
void add_long_documents(Level level, std::span<const flash3_dtype> dtypes, bool backward,
                        std::vector<Case>* table) {
  constexpr int64_t kTokens[] = {2048, 2900, 4097};
  const size_t all = std::size(kBands) * (level == Level::kFull ? 6 : 1);
  for (size_t i = 0; i < all; ++i) {
    Case c;
    c.mask.source = CaseMaskSource::kDocuments;
    c.dtype = dtypes[i % dtypes.size()];
    c.batch = 1, c.seq_q = c.seq_k = kTokens[i % std::size(kTokens)];
    const Heads& heads = kHeads[i / 2 % std::size(kHeads)];
    c.heads_q = heads.q, c.heads_k = heads.k;
    const Dims& dims = kDims[i % std::size(kDims)];
    c.head_dim = dims.qk, c.head_dim_v = dims.v;
    set_band(kBands[i % std::size(kBands)], &c);
    add_options(i, backward, &c);
    c.layout = i % 2 == 0 ? Layout::kBatchSeq : Layout::kHeadsFirst;
    table->push_back(c);
  }
}

// Keys that a table finds: pages of every size that a GPU loads at once, and elements.
void add_cached(Level level, std::span<const flash3_dtype> dtypes, std::vector<Case>* table) {
  constexpr int64_t kPages[] = {16, 0, 64, 48, 128, 0, 256};  // 0: cache_batch_idx
  constexpr Dims kCached[] = {{64, 64}, {128, 128}, {256, 256}, {96, 40}, {192, 128}};
  const size_t rounds = level == Level::kFull ? 3 : 1;
  for (size_t i = 0; i < rounds * std::size(kSources) * std::size(kBands); ++i) {
    Case c;
    c.mask = kSources[i / std::size(kBands) % std::size(kSources)];
    const bool may_differ = c.mask.source != CaseMaskSource::kBand;
    c.mask.of_heads = may_differ && c.mask.source != CaseMaskSource::kDocuments && i % 2 != 0;
    c.mask.of_batch = may_differ && i % 3 == 0;
    c.dtype = dtypes[i % dtypes.size()];
    c.batch = 2 + static_cast<int64_t>(i % 3);
    c.seq_q = i % 4 == 3 ? 1 : 200, c.seq_k = i % 2 == 0 ? 300 : 700;
    const Heads& heads = kHeads[i / 2 % std::size(kHeads)];
    c.heads_q = heads.q, c.heads_k = heads.k;
    const Dims& dims = kCached[(i + i / std::size(kBands)) % std::size(kCached)];
    c.head_dim = dims.qk, c.head_dim_v = dims.v;
    c.page_size = kPages[i % std::size(kPages)], c.batch_idx = c.page_size == 0;
    c.used_k = true, c.packed_q = i % 4 == 1;
    c.lengths = kLengths[i / 3 % std::size(kLengths)];
    set_band(kBands[i % std::size(kBands)], &c);
    add_options(i, false, &c);
    c.layout = Layout::kBatchSeq;
    table->push_back(c);
  }
}

}  // namespace

std::vector<Case> mask_case_table(Level level, std::span<const flash3_dtype> dtypes,
                                  bool backward) {
  std::vector<Case> table;
  // Steps without a common factor: each option meets each other one after a while.
  size_t i = 0;
  const size_t rounds = level == Level::kFull ? 4 : 1;
  for (size_t round = 0; round < rounds; ++round)
    for (const CaseMask& source : kSources)
      for (const Band& band : kBands)
        for (size_t share = 0; share < 4; ++share, ++i) {
          Case c;
          c.mask = source;
          const bool own_heads = share % 2 != 0, own_batch = share / 2 != 0;
          if (source.source == CaseMaskSource::kBand && share > 0) continue;
          if (source.source == CaseMaskSource::kDocuments && own_heads) continue;
          c.mask.of_heads = own_heads, c.mask.of_batch = own_batch;
          c.dtype = dtypes[i % dtypes.size()];
          const Sizes& sizes = kSizes[(i + round) % std::size(kSizes)];
          c.batch = sizes.batch, c.seq_q = sizes.seq_q, c.seq_k = sizes.seq_k;
          const Heads& heads = kHeads[(i / 3 + round) % std::size(kHeads)];
          c.heads_q = heads.q, c.heads_k = heads.k;
          const Dims& dims = kDims[(i / 2) % std::size(kDims)];
          c.head_dim = dims.qk, c.head_dim_v = dims.v;
          set_band(band, &c);
          add_options(i, backward, &c);
          table.push_back(c);
        }
  add_ragged(level, dtypes, backward, &table);
  add_long_documents(level, dtypes, backward, &table);
  if (!backward) add_cached(level, dtypes, &table);
  return table;
}

std::vector<Case> fp8_mask_case_table() {
  constexpr flash3_dtype kFp8[] = {FLASH3_FLOAT8_E4M3};
  auto table = mask_case_table(Level::kQuick, kFp8, false);
  std::erase_if(table, [](const Case& c) { return c.softcap > 0 || c.has_cache(); });
  // Every third with slopes, a table or both too.
  for (size_t i = 0, count = table.size(); i < count; i += 3) {
    Case c = table[i];
    const size_t kind = i / 3 % 3;
    if (kind != 1) *c.added.find("alibi_slopes") = 1 + static_cast<int64_t>(i % 2);
    if (kind != 0) *c.added.find("bias_table") = 1 + static_cast<int64_t>(i % 2);
    c.seed = i + 1;  // which tells the size of a table
    table.push_back(c);
  }
  return table;
}

}  // namespace flash3::cases
