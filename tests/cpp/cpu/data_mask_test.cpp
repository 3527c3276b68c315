// SPDX-License-Identifier: Apache-2.0
// Masks as data: the lists against the pairs that mask.h's words let through, and attention that
// reads them on every instruction set against the oracle.
#include <algorithm>
#include <limits>

#include "cases/mask.hpp"
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
  explicit ListCheck(const cases::HostMask& host)
      : memory_(memory_of(host.mask)), pairs_(host.pairs()) {}

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
  // Calls what(query, key) for the pairs of a block inside of the sequences.
  template <class What>
  void for_each_pair(Index q, Index k, const What& what) const {
    const MaskShape& s = memory_.shape;
    for (Index i = q * kMaskBlock; i < std::min<Index>((q + 1) * kMaskBlock, s.seq_q); ++i)
      for (Index j = k * kMaskBlock; j < std::min<Index>((k + 1) * kMaskBlock, s.seq_k); ++j)
        what(i, j);
  }
  Expected expected_of(Index b, Index h, Index q, Index k) const {
    Expected expected;
    int whole = kAllQuarters;  // quarters without a pair that is hidden
    for_each_pair(q, k, [&](Index i, Index j) {
      const int quarter = 1 << (j % kMaskBlock / 64 * 2 + i % kMaskBlock / 64);
      if (seen(b, h, i, j))
        expected.quarters |= quarter;
      else
        whole &= ~quarter;
    });
    for (int half = 0; half < 2; ++half)  // of the keys
      if (k * kMaskBlock + 64 * (half + 1) > memory_.shape.seq_k) whole &= ~(3 << 2 * half);
    if (whole == kAllQuarters) return expected;
    expected.kind = kMaskQuarters;
    if ((expected.quarters & ~whole) == 0) return expected;
    expected.kind = kMaskRange;
    for (; expected.range < memory_.shape.ranges; ++expected.range) {
      bool same = true;
      for_each_pair(q, k, [&](Index i, Index j) {
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
        const bool inside = i < memory_.shape.seq_q && j < memory_.shape.seq_k;
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
            ASSERT_TRUE(i < s.seq_q || range.begin >= range.end);
          }
  }

  const MaskMemory memory_;
  const MaskPairs& pairs_;
};

TEST(DataMask, ListsAreWhatTheSourceShows) {
  int kinds[3] = {};
  for (const cases::Case& c :
       cases::mask_case_table(cases::Level::kFull, cases::dtypes_of(FLASH3_BACKEND_CPU), false)) {
    SCOPED_TRACE(to_id(c));
    const auto host = cases::make_host_mask(c);
    ListCheck(*host).run();
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

// ---- attention ----

struct MaskedBackward {
  cases::Case c;
  cases::BackwardTensors tensors;
  BackwardProblem problem;
  explicit MaskedBackward(const cases::Case& of)
      : c(of), tensors(cases::make_backward_tensors(of)) {
    const auto params = cases::make_backward_params(c, tensors.views());
    const Status status = make_backward_problem(&params, Pointers::kRequired, &problem);
    EXPECT_TRUE(status.ok()) << status.message();
  }
  void run(const TestTarget& target, int threads) {
    for (auto* t : {&tensors.dq, &tensors.dk, &tensors.dv}) t->fill_pattern();
    problem.num_threads = threads;
    const BackwardPlan plan = plan_backward_on(target, problem);
    std::shared_ptr<void> workspace(
        std::aligned_alloc(256, round_up(plan.workspace_size + 1, size_t{256})), std::free);
    BackwardProblem with_workspace = problem;
    with_workspace.workspace = workspace.get();
    with_workspace.workspace_size = plan.workspace_size;
    const Status status = run_backward(with_workspace, plan);
    EXPECT_TRUE(status.ok()) << status.message();
  }
};

const std::vector<std::string>& attention_ids() {
  static const std::vector<std::string> ids = {
      "/b2/q129/k257/h4x2/d64/full/mask:ranges1.h",
      "/b1/q128/k128/h2/d128/causal/mask:ranges3.b",
      "/b2/q127/k300/h6x2/d72/w100:20/mask:ranges8.b.h/sink",
      "/b3/q200/k200/h2/d64x96/full/mask:documents.b",
      "/b1/q300/k300/h3x1/d64/causal/mask:documents/softcap20/scale0.5",
      "/b2/q260/k390/h4x2/d64/full/mask:dense.b.h",
      "/b2/q260/k390/h8x1/d256/causal/mask:dense.h/sink",
      "/b1/q513/k640/h2/d64/full/mask:blocks128x128.h",
      "/b2/q260/k390/h4x2/d64/full/mask:bits.b.h",
      "/b1/q300/k260/h2/d64/full/mask:sinks20x60",
      "/b2/q300/k400/h2/d64/full/mask:share40of64x64.b.h",
      "/b2/q300/k301/h4x1/d72/causal/mask:bitblocks.h/sink",
      "/b2/q200/k500/h4x1/d40/causal+w100:/mask:blocks64x64.b.h",
      "/b1/q130/k700/h2/d128/full/mask:blocks8x40/softcap20/scale0.5",
      "/b2/q140/k140/h2/d64/causal/chunk50/mask:band",
      "/b2/q1/k400/h8x2/d64/full/mask:dense.b.h",
      "/b1/q3/k200/h2/d33/full/mask:ranges2.h",
      "/b2/q200/k1/h2/d64/full/mask:dense.h",
      "/b0/q10/k10/h2/d64/full/mask:ranges2",
      "/b1/q0/k10/h2/d64/full/mask:documents",
      "/b1/q10/k0/h2/d64/full/mask:dense"};
  return ids;
}

TEST(DataMask, ForwardMatchesTheOracle) {
  for (const char* dtype : {"fp32", "bf16", "fp16"})
    for (const std::string& rest : attention_ids())
      for (const int threads : {1, 5}) {
        SCOPED_TRACE(threads);
        check_case(dtype + rest, threads);
      }
  for (const char* rest : {"/b2/q260/k390/h4x2/d64/full/mask:dense.b.h/blockscales",
                           "/b2/q3/k300/h4x2/d64/causal/mask:ranges3.h/onescale"})
    check_case(std::string("e4m3") + rest, 2);
}

// A few rows before many keys, which threads share: the parts that see nothing too.
TEST(DataMask, SplitKeysMatchTheOracle) {
  for (const char* rest :
       {"/b1/q2/k9000/h2x1/d64/full/mask:ranges2.h", "/b1/q1/k12000/h1/d64/full/mask:dense",
        "/b1/q3/k9000/h4x1/d64/causal/mask:blocks8x128.h"})
    check_case(std::string("fp32") + rest, 8);
}

TEST(DataMask, BackwardMatchesTheOracle) {
  for (const char* dtype : {"fp32", "bf16", "fp16"})
    for (const std::string& rest : attention_ids())
      for (const int threads : {1, 5}) {
        MaskedBackward backward(parse(dtype + rest + "/bwd/dlse"));
        const ReferenceBackward ref =
            attention_backward_ref(backward.problem, 1, backward.tensors.extra.mask_pairs());
        for (const TestTarget& target : backward_targets(backward.problem.dtype)) {
          SCOPED_TRACE(to_id(backward.c) + " on " + target.name() + ", " + std::to_string(threads));
          backward.run(target, threads);
          EXPECT_EQ(check_gradients(backward.c, backward.tensors.views(), ref).failure(), "");
        }
      }
}

// Not one row sees a key: out and gradients are 0, and lse is −∞.
TEST(DataMask, RowsThatSeeNothing) {
  cases::Case c = parse("fp32/b1/q256/k256/h1/d64/full/mask:dense/bwd/dlse");
  MaskedBackward backward(c);
  flash3_mask mask = backward.tensors.extra.mask->mask;
  flash3_mask_params p = backward.tensors.extra.mask->sources.params(c);
  p.backend = FLASH3_BACKEND_CPU;
  std::vector<uint8_t> hidden(256 * 256);
  p.dense.data = hidden.data();
  ASSERT_EQ(flash3_mask_make(&p, &mask), FLASH3_OK) << flash3_last_error();
  EXPECT_EQ(memory_of(mask).counts->blocks, 0);
  auto views = backward.tensors.views();
  auto forward =
      cases::make_params(c, views.q, views.k, views.v, views.out, views.lse, views.extra);
  forward.mask = &mask;
  ForwardProblem problem = to_problem(forward);
  for (const TestTarget& target : test_targets(FLASH3_FLOAT32)) {
    backward.tensors.out.fill_pattern(), backward.tensors.lse.fill_pattern();
    run_on(target, problem);
    for (Index i = 0; i < 256; ++i) {
      EXPECT_EQ(static_cast<const float*>(views.lse.data)[i],
                -std::numeric_limits<float>::infinity());
      for (Index d = 0; d < 64; ++d)
        ASSERT_EQ(static_cast<const float*>(views.out.data)[i * 64 + d], 0.f);
    }
    for (const TestTarget& on : backward_targets(FLASH3_FLOAT32)) {
      backward.problem.mask_lists.data = mask.data;
      backward.run(on, 2);
      for (const flash3_tensor& t : {views.dq, views.dk, views.dv})
        for (Index i = 0; i < 256 * 64; ++i) ASSERT_EQ(static_cast<const float*>(t.data)[i], 0.f);
    }
  }
}

// Without the room that it needs a mask is empty, and says what it takes.
TEST(DataMask, OverflowLeavesItEmpty) {
  const cases::Case c = parse("fp32/b1/q300/k400/h2/d64/full/mask:dense.h");
  const auto host = cases::make_host_mask(c);
  const MaskCounts needed = *memory_of(host->mask).counts;
  ASSERT_GT(needed.partial_blocks, 1);
  const auto made_with = [&](int blocks, int partial) {
    flash3_mask_params p = host->sources.params(c);
    p.backend = FLASH3_BACKEND_CPU;
    p.max_blocks = blocks, p.max_partial_blocks = partial;
    flash3_mask mask{};
    mask.data = host->mask.data, mask.size = host->mask.size;
    EXPECT_EQ(flash3_mask_make(&p, &mask), FLASH3_OK) << flash3_last_error();
    return mask;
  };
  for (const auto& [blocks, partial] :
       {std::pair{needed.blocks - 1, 0}, {needed.blocks, needed.partial_blocks - 1}}) {
    const flash3_mask mask = made_with(blocks, partial);
    const MaskMemory memory = memory_of(mask);
    EXPECT_EQ(memory.counts->overflow, 1);
    EXPECT_EQ(memory.counts->blocks, needed.blocks);
    EXPECT_EQ(memory.counts->partial_blocks, needed.partial_blocks);
    for (Index i = 0; i < memory.shape.lists(); ++i) EXPECT_EQ(memory.lists[i].count, 0);
    for (Index i = 0; i < memory.shape.key_lists(); ++i) EXPECT_EQ(memory.key_lists[i].count, 0);
  }
  const flash3_mask exact = made_with(needed.blocks, needed.partial_blocks);
  EXPECT_EQ(memory_of(exact).counts->overflow, 0);
  EXPECT_LT(exact.partial_blocks, host->mask.partial_blocks);
}

// A key that a row does not see does not reach it, whatever its value is.
TEST(DataMask, HiddenInfinitiesStayHidden) {
  constexpr float kBad[] = {std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()};
  for (const char* dtype : {"fp32", "bf16", "fp16"})
    for (const char* rest : {"/b1/q140/k260/h2x1/d64/full/mask:dense.h/bwd",
                             "/b1/q2/k260/h2x1/d64/full/mask:dense.h/bwd",
                             "/b1/q200/k300/h2/d64/full/mask:ranges2.h/bwd"}) {
      const cases::Case c = parse(dtype + std::string(rest));
      SCOPED_TRACE(to_id(c));
      MaskedBackward backward(c);
      const MaskPairs& pairs = *backward.tensors.extra.mask_pairs();
      auto views = backward.tensors.views();
      const Index key = 70;
      for (const flash3_tensor& t : {views.k, views.v})
        for (Index h = 0; h < c.heads_k; ++h)
          store_float(t.data, t.dtype, key * t.stride[1] + h * t.stride[2] + h, kBad[h % 2]);
      const auto params =
          cases::make_params(c, views.q, views.k, views.v, views.out, views.lse, views.extra);
      for (const TestTarget& target : test_targets(c.dtype)) {
        SCOPED_TRACE(target.name());
        run_on(target, to_problem(params));
        for (const TestTarget& on : backward_targets(c.dtype)) {
          SCOPED_TRACE(on.name());
          backward.run(on, 2);
          int hidden = 0;
          for (Index h = 0; h < c.heads_q; ++h)
            for (Index i = 0; i < c.seq_q; ++i) {
              if (pairs.of(0, h)[i * c.seq_k + key] != 0) continue;
              ++hidden;
              for (const flash3_tensor& t : {views.out, views.dq})
                for (Index d = 0; d < 64; ++d)
                  ASSERT_TRUE(std::isfinite(
                      load_float(t.data, t.dtype, i * t.stride[1] + h * t.stride[2] + d)))
                      << "row " << i << " of head " << h;
            }
          EXPECT_GT(hidden, 0);
        }
      }
    }
}

// Memory that something else has been written to lists nothing, and is read inside alone.
TEST(DataMask, ReadsNoNonsense) {
  const cases::Case c = parse("fp32/b1/q300/k300/h2/d64/full/mask:dense.h/bwd");
  MaskedBackward backward(c);
  const flash3_mask& mask = backward.tensors.extra.mask->mask;
  const MaskMemory memory = memory_of(mask);
  const auto views = backward.tensors.views();
  const auto params =
      cases::make_params(c, views.q, views.k, views.v, views.out, views.lse, views.extra);
  const auto run = [&] {
    run_on({CpuTarget::kBaseline}, to_problem(params));
    backward.run({CpuTarget::kBaseline}, 2);
  };
  for (const int begin : {-5, 1 << 30, 7})
    for (const int count : {-1, 1 << 30, 3}) {
      for (Index i = 0; i < memory.shape.lists(); ++i) memory.lists[i] = {begin, count};
      run();
    }
  for (Index i = 0; i < memory.shape.lists(); ++i) memory.lists[i] = {0, 3};
  for (const int data : {-1, 1 << 30})
    for (const MaskKind kind : {kMaskRange, kMaskBits}) {
      for (int n = 0; n < 3; ++n) memory.blocks[n] = MaskBlock::make(n, kAllQuarters, kind, data);
      run();
    }
  for (int n = 0; n < 3; ++n) memory.blocks[n] = MaskBlock::make(n, kAllQuarters, kMaskRange, 0);
  for (Index i = 0; i < memory.shape.rows(); ++i) *memory.range(0, 0, 0, i) = {-1000, 1 << 30};
  run();
  for (int n = 0; n < 3; ++n)
    memory.blocks[n] = MaskBlock::make((1 << 25) - 1, kAllQuarters, kMaskFull, 0);
  run();
  for (int quarters = 0; quarters < 16; ++quarters) {
    for (int n = 0; n < 3; ++n) memory.blocks[n] = MaskBlock::make(n, quarters, kMaskQuarters, -1);
    run();
  }
}

}  // namespace
}  // namespace flash3::test
