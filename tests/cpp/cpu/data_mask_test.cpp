// SPDX-License-Identifier: Apache-2.0
// Masks as data: the lists against the pairs that mask.h's words let through.
#include <algorithm>
#include <limits>

#include "cases/mask.hpp"
#include "cases/sequences.hpp"
#include "cases/table.hpp"
#include "core/mask_problem.hpp"
#include "cpu/mask_reader.hpp"
#include "harness.hpp"
#include "oracle/attention_ref.hpp"

namespace flash3::test {
namespace {

cases::Case parse(const std::string& id) {
  std::string error;
  const auto c = cases::parse_id(id, &error);
  EXPECT_TRUE(c) << error;
  return c.value();
}

MaskShape shape_of(const flash3_mask& m) {
  return {m.batch, m.heads, m.seq_q, m.seq_k, m.ranges, m.blocks, m.partial_blocks, m.granularity};
}

MaskMemory memory_of(const flash3_mask& m) { return MaskMemory::of(shape_of(m), m.data); }

// ---- the lists, block by block ----

// How a block must be listed, by its pairs; nothing where none is seen.
struct Expected {
  int quarters = 0;  // none: it is not listed
  MaskKind kind = kMaskFull;
  int range = 0;
};

class ListCheck {
 public:
  ListCheck(const cases::Case& c, const cases::HostMask& host)
      : memory_(memory_of(host.mask)), pairs_(host.pairs()), sequences_(cases::make_sequences(c)) {}

  void run() const {
    const MaskShape& s = memory_.shape;
    int blocks = 0, partial = 0;
    for (Index b = 0; b < s.batch; ++b)
      for (Index h = 0; h < s.heads; ++h) {
        std::vector<std::vector<MaskBlock>> columns(static_cast<size_t>(s.k_blocks()));
        for (Index q = 0; q < s.q_blocks(); ++q) {
          const MaskList list = *memory_.list(b, h, q);
          int at = 0;
          for (Index k = 0; k < s.k_blocks(); ++k) {
            const Expected expected = expected_of(b, h, q, k);
            if (expected.quarters == 0) continue;
            ASSERT_LT(at, list.count) << "block " << q << ", " << k << " is not listed";
            const MaskBlock& block = memory_.blocks[list.begin + at++];
            check_block(b, h, q, k, expected, block);
            ++blocks, partial += block.kind() == kMaskBits;
            columns[static_cast<size_t>(k)].push_back(block.as_seen_from(static_cast<int>(q)));
          }
          EXPECT_EQ(list.count, at) << "of query block " << q;
        }
        for (Index k = 0; k < s.k_blocks(); ++k)
          check_column(b, h, k, columns[static_cast<size_t>(k)]);
      }
    EXPECT_EQ(memory_.counts->blocks, blocks);
    EXPECT_EQ(memory_.counts->key_blocks, blocks);
    EXPECT_EQ(memory_.counts->partial_blocks, partial);
    EXPECT_EQ(memory_.counts->overflow, 0);
    check_rows_after_the_last();
  }

 private:
  bool seen(Index b, Index h, Index i, Index j) const {
    return pairs_.of(b, h)[i * pairs_.seq_k + j] != 0;
  }
  // Calls what(query, key) for the pairs of a block inside of the sequence.
  template <class What>
  void for_each_pair(Index b, Index q, Index k, const What& what) const {
    const SeqInfo s = sequences_[b];
    for (Index i = q * kMaskBlock; i < std::min<Index>((q + 1) * kMaskBlock, s.q.length); ++i)
      for (Index j = k * kMaskBlock; j < std::min<Index>((k + 1) * kMaskBlock, s.k.length); ++j)
        what(i, j);
  }
  Expected expected_of(Index b, Index h, Index q, Index k) const {
    Expected expected;
    int whole = kAllQuarters;  // quarters without a pair that is hidden
    for_each_pair(b, q, k, [&](Index i, Index j) {
      const int quarter = 1 << (j % kMaskBlock / 64 * 2 + i % kMaskBlock / 64);
      if (seen(b, h, i, j))
        expected.quarters |= quarter;
      else
        whole &= ~quarter;
    });
    for (int half = 0; half < 2; ++half)  // of the keys
      if (k * kMaskBlock + 64 * (half + 1) > sequences_[b].k.length) whole &= ~(3 << 2 * half);
    if (whole == kAllQuarters) return expected;
    expected.kind = kMaskQuarters;
    if ((expected.quarters & ~whole) == 0) return expected;
    expected.kind = kMaskRange;
    for (; expected.range < memory_.shape.ranges; ++expected.range) {
      bool same = true;
      for_each_pair(b, q, k, [&](Index i, Index j) {
        const MaskRange range = *memory_.range(expected.range, b, h, i);
        same = same && (range.begin <= j && j < range.end) == seen(b, h, i, j);
      });
      if (same) return expected;
    }
    expected.kind = kMaskBits;
    return expected;
  }
  void check_block(Index b, Index h, Index q, Index k, const Expected& expected,
                   const MaskBlock& block) const {
    EXPECT_EQ(block.block(), k);
    EXPECT_EQ(block.kind(), expected.kind) << "of block " << q << ", " << k;
    EXPECT_EQ(block.quarters(), expected.quarters) << "of block " << q << ", " << k;
    if (expected.kind == kMaskRange) {
      EXPECT_EQ(block.data, expected.range);
    }
    if (expected.kind != kMaskBits) return;
    ASSERT_LT(block.data, memory_.shape.partial_blocks);
    const unsigned* const words = memory_.words_of(block.data);
    int wrong = 0;
    for (int row = 0; row < kMaskBlock; ++row)
      for (int key = 0; key < kMaskBlock; ++key) {
        const Index i = q * kMaskBlock + row, j = k * kMaskBlock + key;
        const bool inside = i < sequences_[b].q.length && j < sequences_[b].k.length;
        const MaskBit at = mask_bit(row, key);
        wrong += (words[at.word] >> at.bit & 1) != unsigned{inside && seen(b, h, i, j)};
      }
    EXPECT_EQ(wrong, 0) << "bits of block " << q << ", " << k;
  }
  void check_column(Index b, Index h, Index k, const std::vector<MaskBlock>& expected) const {
    const MaskList list = *memory_.key_list(b, h, k);
    ASSERT_EQ(list.count, static_cast<int>(expected.size())) << "of key block " << k;
    for (size_t n = 0; n < expected.size(); ++n) {
      const MaskBlock& block = memory_.key_blocks[list.begin + static_cast<int>(n)];
      EXPECT_EQ(block.bits, expected[n].bits);
      EXPECT_EQ(block.data, expected[n].data);
    }
  }
  // A kernel reads the ranges of a whole tile.
  void check_rows_after_the_last() const {
    const MaskShape& s = memory_.shape;
    for (int r = 0; r < s.ranges; ++r)
      for (Index b = 0; b < s.batch; ++b)
        for (Index h = 0; h < s.heads; ++h)
          for (Index i = 0; i < s.rows(); ++i) {
            const MaskRange range = *memory_.range(r, b, h, i);
            ASSERT_GE(range.begin, 0);
            ASSERT_LE(range.end, s.seq_k);
            ASSERT_TRUE(i < sequences_[b].q.length || range.begin >= range.end);
          }
  }

  const MaskMemory memory_;
  const MaskPairs& pairs_;
  const cases::CaseSequences sequences_;
};

// All sources, bands and sizes of one length, and all ways to pack and pad unequal ones.
std::vector<cases::Case> list_cases() {
  const auto table = [](cases::Level level) {
    return cases::mask_case_table(level, cases::dtypes_of(FLASH3_BACKEND_CPU), false);
  };
  const auto is_ragged = [](const cases::Case& c) {
    return c.packed_q || c.packed_k || c.used_q || c.used_k;
  };
  std::vector<cases::Case> all = table(cases::Level::kQuick);
  std::erase_if(all, is_ragged);
  for (const cases::Case& c : table(cases::Level::kFull))
    if (is_ragged(c)) all.push_back(c);
  return all;
}

TEST(DataMask, ListsAreWhatTheSourceShows) {
  int kinds[4] = {};
  for (const cases::Case& c : list_cases()) {
    SCOPED_TRACE(to_id(c));
    const auto host = cases::make_host_mask(c);
    ListCheck(c, *host).run();
    const MaskMemory memory = memory_of(host->mask);
    for (int n = 0; n < memory.counts->blocks; ++n) ++kinds[memory.blocks[n].kind()];
  }
  for (const int kind : kinds) EXPECT_GT(kind, 100);  // the table has many of each
}

// The bits of a block lie as threads hold it: each pair has a place of its own.
TEST(DataMask, EveryPairHasABitOfItsOwn) {
  std::vector<int> taken(static_cast<size_t>(kMaskBlock * kMaskBlock));
  for (int row = 0; row < kMaskBlock; ++row)
    for (int key = 0; key < kMaskBlock; ++key) {
      const MaskBit at = mask_bit(row, key);
      ASSERT_TRUE(at.word >= 0 && at.word < kMaskWords && at.bit >= 0 && at.bit < 32);
      ++taken[static_cast<size_t>(at.word * 32 + at.bit)];
    }
  for (const int times : taken) ASSERT_EQ(times, 1);
}

// The mask of bits, as its pairs: a byte for each.
std::vector<uint8_t> seen_of(const flash3_mask_params& p) {
  size_t bytes = 0;
  EXPECT_EQ(flash3_mask_size(&p, &bytes), FLASH3_OK) << flash3_last_error();
  std::shared_ptr<void> memory(std::aligned_alloc(256, round_up(bytes, size_t{256})), std::free);
  flash3_mask mask{};
  mask.data = memory.get(), mask.size = bytes;
  EXPECT_EQ(flash3_mask_make(&p, &mask), FLASH3_OK) << flash3_last_error();
  MaskLists lists;
  lists.given = true, lists.shape = shape_of(mask), lists.data = mask.data;
  const cpu::MaskReader reader(lists, 0);
  std::vector<uint8_t> seen;
  for (Index i = 0; i < p.seq_q; ++i)
    for (Index j = 0; j < p.seq_k; ++j) {
      const cpu::SeenKeys keys = reader.seen(i, 0, j / kMaskBlock);
      seen.push_back(keys.keys.begin <= j && j < keys.keys.end && !keys.hides(j));
    }
  return seen;
}

// As mask.h says: bit j mod 8 of byte ⌊j / 8⌋, the lowest bit first, and none after the last key.
TEST(DataMask, PairsArePackedInTheOrderOfTheHeader) {
  flash3_mask_params p{};
  p.struct_size = sizeof p;
  p.batch = p.heads_q = 1, p.seq_q = 2, p.seq_k = 11, p.backend = FLASH3_BACKEND_CPU;
  const uint8_t bytes[2][2] = {{0b00000001, 0b11111100}, {0b10000010, 0b00000110}};
  p.bits = {const_cast<uint8_t*>(bytes[0]), FLASH3_UINT8, 4, {1, 1, 2, 2}, {4, 4, 2, 1}};
  EXPECT_EQ(seen_of(p), (std::vector<uint8_t>{1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1,  //
                                              0, 1, 0, 0, 0, 0, 0, 1, 0, 1, 1}));
}

// Blocks by their numbers: bits, all, and what is neither; two places may have the same block.
TEST(DataMask, PackedBlocksHaveNumbers) {
  constexpr int64_t kKeys = 5 * kMaskBlock + 3;
  flash3_mask_params p{};
  p.struct_size = sizeof p;
  p.batch = p.heads_q = 1, p.seq_q = 1, p.seq_k = kKeys, p.backend = FLASH3_BACKEND_CPU;
  std::vector<uint8_t> bytes(2 * kMaskBlock * 16);
  bytes[kMaskBlock * 16 + 15] = 0x80;  // block 1, query 0, key 127
  bytes[kMaskBlock * 16] = 2;          // key 1
  const int32_t which[6] = {1, FLASH3_MASK_ALL_SEEN, 2, 0, -2, 1};
  p.bits = {bytes.data(), FLASH3_UINT8, 3, {2, 128, 16}, {128 * 16, 16, 1}};
  p.bit_blocks = {const_cast<int32_t*>(which), FLASH3_INT32, 4, {1, 1, 1, 6}, {6, 6, 6, 1}};
  std::vector<uint8_t> expected(kKeys);
  expected[1] = expected[127] = expected[5 * kMaskBlock + 1] = 1;
  std::fill_n(expected.begin() + kMaskBlock, kMaskBlock, uint8_t{1});
  EXPECT_EQ(seen_of(p), expected);
}

// Any number of threads makes the same bytes.
TEST(DataMask, ThreadsMakeTheSame) {
  const cases::Case c = parse("fp32/b2/q700/k900/h4/d8/causal/mask:dense.b.h");
  const auto host = cases::make_host_mask(c);
  for (const int threads : {1, 3, 8}) {
    std::shared_ptr<void> memory(std::aligned_alloc(256, round_up(host->mask.size, size_t{256})),
                                 std::free);
    flash3_mask_params p = host->sources.params(c);
    p.num_threads = threads, p.backend = FLASH3_BACKEND_CPU;
    flash3_mask mask{};
    mask.data = memory.get(), mask.size = host->mask.size;
    ASSERT_EQ(flash3_mask_make(&p, &mask), FLASH3_OK) << flash3_last_error();
    const MaskMemory a = memory_of(host->mask), b = memory_of(mask);
    ASSERT_EQ(a.counts->blocks, b.counts->blocks);
    EXPECT_TRUE(std::equal(a.lists, a.lists + a.shape.lists(), b.lists, [](MaskList x, MaskList y) {
      return x.begin == y.begin && x.count == y.count;
    }));
    const size_t words = static_cast<size_t>(a.counts->partial_blocks) * kMaskWords;
    EXPECT_TRUE(std::equal(a.words, a.words + words, b.words));
  }
}

}  // namespace
}  // namespace flash3::test
