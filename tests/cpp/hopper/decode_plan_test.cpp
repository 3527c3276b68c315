// SPDX-License-Identifier: Apache-2.0
// With what the decode kernels run calls, and how they cut them; decode_calls_test.cpp has which
// calls they run. Needs no GPU: a plan launches nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "cases/cache_tensors.hpp"
#include "cases/table.hpp"
#include "cuda/sm90/decode/block_splits.hpp"
#include "cuda/varlen/lengths.hpp"
#include "planned_steps.hpp"

namespace flash3::cuda::sm90 {
namespace {

PlannedDecode plan_of(const ForwardProblem& problem) {
  PlannedDecode plan;
  const Status status = cuda::sm90::plan(problem, kDevice, &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  return plan;
}

TEST(DecodePlan, HasNoCacheOfFloat32) {
  PlannedDecode plan;
  const Status status =
      cuda::sm90::plan(problem_of("fp32/b2/q1/k300/h4/d64/causal/usedk/paged16"), kDevice, &plan);
  EXPECT_EQ(status.code(), FLASH3_UNSUPPORTED);
  EXPECT_EQ(status.message(),
            "q.dtype = float32 but the hopper backend has a KV cache in float16, bfloat16 and "
            "float8_e4m3 only");
}

TEST(DecodePlan, WritesFloat32ByTheSameKernel) {
  for (const char* id : {"bf16/b1/q1/k512/h1/d128/causal", "bf16/b1/q1/k64/h1/d128/causal/usedk"}) {
    ForwardProblem problem = problem_of(id);
    const PlannedDecode rounded = plan_of(problem);
    problem.out_dtype = FLASH3_FLOAT32;
    const PlannedDecode plan = plan_of(problem);
    EXPECT_EQ(plan.kernel, rounded.kernel) << id;
    EXPECT_EQ(plan.workspace_bytes, rounded.workspace_bytes) << id;
  }
}

TEST(DecodePlan, TakesTheNarrowestKernelThatHoldsTheRows) {
  const auto kernel = [](const char* id) { return plan_of(problem_of(id)).kernel->id; };
  EXPECT_EQ(kernel("bf16/b1/q1/k300/h8x1/d128/causal"), "decode_bf16_d128_8x128");
  EXPECT_EQ(kernel("bf16/b1/q1/k300/h9x1/d100/causal"), "decode_bf16_d128_16x128");
  EXPECT_EQ(kernel("fp16/b1/q2/k300/h16x1/d64/causal"), "decode_fp16_d64_32x128");
  EXPECT_EQ(kernel("fp16/b1/q2/k300/h4x1/d192x128/full/softcap20"),
            "decode_fp16_d192x128_softcap_8x64");
  EXPECT_EQ(kernel("bf16/b1/q1/k300/h4x1/d192/full"), "decode_bf16_d256_8x64");
  EXPECT_EQ(kernel("bf16/b1/q5/k300/h4x1/d128/causal"), "decode_bf16_d128_32x128");
  EXPECT_EQ(kernel("bf16/b1/q16/k300/h32x8/d128/causal"), "decode_bf16_d128_64x128");
  EXPECT_EQ(kernel("bf16/b1/q16/k300/h32x8/d64/causal"), "decode_bf16_d64_64x128");
  EXPECT_EQ(kernel("bf16/b1/q8/k300/h32x8/d128/causal/kv8"), "decode_e4m3_d128_32x64");
  EXPECT_EQ(kernel("bf16/b1/q1/k300/h71x1/d128/causal"), "decode_bf16_d128_8x128") << "a prime";
  // More rows than any has: several tiles.
  EXPECT_EQ(kernel("bf16/b1/q100/k300/h8x1/d128/causal/usedk/paged16"), "decode_bf16_d128_64x128");
}

// A step of up to sixteen drafts reads the keys once.
TEST(DecodePlan, DraftsOfAKvHeadAreOneTile) {
  for (const char* dims : {"d64", "d128"})
    for (const int queries : {1, 2, 4, 8, 16}) {
      const std::string id =
          "bf16/b1/q" + std::to_string(queries) + "/k5000/h32x8/" + dims + "/full/usedk/tree";
      const PlannedDecode plan = plan_of(problem_of(id));
      EXPECT_EQ(plan.heads, 4) << id;
      EXPECT_EQ(plan.most_items, 8) << id;
    }
}

// With a tree mask any call runs here, and tiles with a draft's key are masked.
TEST(DecodePlan, RunsTreesOfDrafts) {
  for (const char* id : {"bf16/b2/q1/k3/h8/d128/full/tree", "bf16/b2/q64/k300/h8/d128/full/tree",
                         "fp16/b2/q40/k300/h8/d64/full/packedq/usedk/paged64/tree",
                         "e4m3/b2/q40/k300/h8/d64/full/tree"}) {
    const ForwardProblem problem = problem_of(id);
    EXPECT_TRUE(is_decode(problem)) << id;
    EXPECT_NE(explained(problem).find("why: a tree mask, of drafts that are to be verified\n"),
              std::string::npos)
        << id;
    EXPECT_TRUE(plan_of(problem).rule.tree) << id;
  }
  DecodeRule rule = plan_of(problem_of("bf16/b1/q16/k300/h8/d128/full/tree")).rule;
  const auto unmasked = [&](int queries, int keys) {
    DecodeSequence s{};
    s.q_length = queries, s.k_length = keys;
    return unmasked_tiles(rule, s, {0, queries}).end;
  };
  EXPECT_EQ(unmasked(16, 300), 2);
  EXPECT_EQ(unmasked(16, 271), 1);
  EXPECT_EQ(unmasked(16, 256), 1);
  EXPECT_EQ(unmasked(16, 3), 0);
  rule.tree = false;
  EXPECT_EQ(unmasked(16, 256), 2);
}

// K and V by TMA in the largest boxes that no page cuts.
TEST(DecodePlan, LoadsPagesInBoxes) {
  const auto rows = [](const std::string& options) {
    return plan_of(problem_of("bf16/b2/q1/k300/h8x1/d128/causal/usedk/" + options)).box_rows;
  };
  EXPECT_EQ(rows("batchidx"), 128);
  EXPECT_EQ(rows("batchidx/leftpad"), 128);
  EXPECT_EQ(rows("paged256"), 128);
  EXPECT_EQ(rows("paged64"), 64);
  EXPECT_EQ(rows("paged32"), 32);
  EXPECT_EQ(rows("paged96"), 32);
  EXPECT_EQ(rows("paged16"), 0) << "gathered: faster";
  EXPECT_EQ(rows("paged48"), 0);
  EXPECT_EQ(rows("paged3"), 0);
  EXPECT_EQ(rows("paged64/leftpad"), 0);

  // TMA has no map of a tensor without rows.
  ForwardProblem problem = problem_of("bf16/b2/q1/k300/h8x1/d128/causal/usedk/batchidx");
  problem.k.seq = problem.v.seq = 0;
  EXPECT_EQ(plan_of(problem).box_rows, 0);
  problem = problem_of("bf16/b1/q1/k3/h1/d128/full/seed762718/empty/packedk/usedk/nomax");
  EXPECT_EQ(plan_of(problem).box_rows, 0);
}

// Splits follow from a sequence's length and the heads: not from the batch, nor from the device.
TEST(DecodePlan, CutsASequenceTheSameWayInAnyBatch) {
  const auto rule = [](int batch, int multiprocessors) {
    PlannedDecode plan;
    ForwardProblem problem = problem_of("bf16/b2/q1/k5000/h8x2/d128/causal/usedk/paged16");
    problem.batch = batch;
    EXPECT_TRUE(cuda::sm90::plan(problem, {0, multiprocessors}, &plan).ok());
    const DecodeRule& r = plan.rule;
    return std::tuple(plan.kernel, r.tile_n, r.least_tiles, r.splits, r.long_splits, r.long_tiles,
                      r.most_tiles, plan.heads);
  };
  for (const int batch : {2, 64, 1000})
    for (const int multiprocessors : {1, 114, 132})
      EXPECT_EQ(rule(batch, multiprocessors), rule(1, 132));
}

TEST(DecodePlan, LongSequencesHaveMoreSplits) {
  const auto splits_of = [](const char* heads, int keys) {
    PlannedDecode plan;
    const std::string id = "bf16/b1/q1/k" + std::to_string(keys) + "/" + heads + "/d128/causal";
    EXPECT_TRUE(cuda::sm90::plan(problem_of(id), kDevice, &plan).ok());
    return ceil_div(ceil_div(keys, plan.rule.tile_n), split_tiles_of(plan.rule, keys));
  };
  EXPECT_EQ(splits_of("h32x8", 1024), 4) << "of two key tiles each";
  EXPECT_EQ(splits_of("h32x8", 8192), 8);
  EXPECT_EQ(splits_of("h32x8", 16384), 16);
  EXPECT_EQ(splits_of("h32x8", 65536), 16);
  EXPECT_EQ(splits_of("h8x1", 8192), 32);
  EXPECT_EQ(splits_of("h8x1", 16384), 32) << "merging takes longer the more there are";
}

TEST(DecodePlan, AMarginLeavesMultiprocessorsFree) {
  ForwardProblem problem = problem_of("bf16/b64/q1/k4096/h64x8/d128/causal");
  EXPECT_EQ(plan_of(problem).grid, 132);
  EXPECT_EQ(plan_of(problem).mergers, 132) << "after them";
  for (const int margin : {1, 32, 100, 129}) {
    problem.sm_margin = margin;
    const PlannedDecode plan = plan_of(problem);
    EXPECT_EQ(plan.grid + plan.mergers, 132 - margin);
    EXPECT_GT(plan.mergers, 0);
  }
  problem.sm_margin = 5000;
  EXPECT_EQ(plan_of(problem).grid, 1);
  EXPECT_EQ(plan_of(problem).mergers, 0) << "nothing is shared";
}

TEST(DecodePlan, BlocksMergeWhatOthersShare) {
  const auto mergers = [](const char* id) { return plan_of(problem_of(id)).mergers; };
  EXPECT_EQ(mergers("bf16/b1/q1/k4096/h32x8/d128/causal"), 11) << "two folds of eight items";
  EXPECT_EQ(mergers("bf16/b1/q4/k4096/h32x8/d128/causal"), 43);
  EXPECT_EQ(mergers("bf16/b1/q1/k256/h32x8/d128/causal"), 0) << "one split";
  EXPECT_EQ(mergers("bf16/b16/q16/k4096/h32x8/d128/causal"), 132);
}

// What the device reads of the lengths is what core/kv_cache.hpp says, whatever they hold.
TEST(DecodeWork, SequencesAreThoseOfTheCore) {
  std::mt19937_64 random(3);
  const auto draw = [&](int most) {
    switch (random() % 6) {
      case 0: return -int(random() % 100);
      case 1: return most + int(random() % 100);
      case 2: return int(random());
      default: return int(random() % uint64_t(most + 1));
    }
  };
  for (int i = 0; i < 20000; ++i) {
    ForwardProblem p;
    p.batch = 1, p.seq_q = 5;
    const int rows = 1 + int(random() % 300), used = draw(rows), pad = draw(rows);
    const int cu[] = {draw(80), draw(80)};
    p.sequences_q = {.rows = 5, .max_length = 5};
    p.sequences_k = {.has_used = true, .used = &used, .rows = rows};
    p.sequences_k.max_length = random() % 2 ? rows : 1 + int(random() % uint64_t(rows));
    if (random() % 2) p.cache.has_leftpad = true, p.cache.leftpad = &pad;
    if (random() % 2) {
      p.append.given = true;
      p.append.sequences = {.packed = true, .cu = cu, .rows = 80, .max_length = 80};
      if (random() % 2) p.append.sequences = {.rows = 7, .max_length = 7};
    }
    p.cache.has_batch_idx = true;  // so that it is a cache in any case
    DecodeRule rule{};
    rule.q = lengths_of(p.sequences_q), rule.k = lengths_of(p.sequences_k);
    rule.leftpad = p.cache.leftpad;
    if (p.append.given) rule.added = lengths_of(p.append.sequences);
    rule.tile_n = 128, rule.tile_queries = 1, rule.head_groups = 1, rule.splits = 8;
    rule.long_splits = 16, rule.long_tiles = 100, rule.least_tiles = 1, rule.most_tiles = 64;
    rule.mask = {-1, -1, 0};
    const DecodeSequence s = decode_sequence(rule, 0);
    const CacheKeys keys = p.keys_in_cache(0);
    ASSERT_EQ(s.k_first, keys.first) << "used " << used << ", padding " << pad;
    ASSERT_EQ(s.k_length, keys.length()) << "used " << used << ", padding " << pad;
  }
}

// Sixteen sequences of eight KV heads, eight tiles each: 128 blocks have one item, none is shared.
TEST(DecodeWork, BlocksHaveWholeItemsWhereThatIsNearlyEven) {
  constexpr DecodeRule kRule{};
  const DecodeCut even_items = cut_of(kRule, 128 * 11, 128, 11, 132);
  for (int block = 0; block <= 132; ++block)
    EXPECT_EQ(even_items.begin_of(block), 11u * unsigned(std::min(block, 128)));
  EXPECT_EQ(cut_of(kRule, 128 * 11, 128, 0, 132).unit, 0u) << "items differ";
  EXPECT_EQ(cut_of(kRule, 80 * 43, 80, 43, 132).unit, 0u) << "52 blocks would have nothing";
}

// The same with two blocks a multiprocessor, and items of 32 tiles in eight splits: each is two
// blocks' half, though 264 blocks would have a little less each.
TEST(DecodeWork, BlocksHaveEqualPartsOfItemsWhereThatIsNearlyEven) {
  constexpr DecodeRule kRule{};
  DecodeSequence s{};
  s.split_tiles = 4;
  s.split_end = 8;
  const DecodeCost cost = item_cost(kRule, s);
  const DecodeCut halves = cut_of(kRule, 128 * cost, 128, cost, 264);
  for (int item = 0; item < 128; ++item) {
    EXPECT_EQ(halves.begin_of(2 * item), item * cost);
    EXPECT_EQ(split_at(kRule, s, halves, halves.begin_of(2 * item + 1) - item * cost), 4);
  }
  EXPECT_EQ(halves.begin_of(256), 128 * cost);
  // Sixteen blocks for each of eight items have a split of two tiles.
  s.split_tiles = 2;
  s.split_end = 16;
  const DecodeCut few = cut_of(kRule, 8 * cost, 8, cost, 132);
  for (int block = 0; block < 128; ++block)
    EXPECT_EQ(split_at(kRule, s, few, few.begin_of(block) - block / 16 * cost), block % 16);
}

// Any cut reaches from 0 to the end, every block is found, and none has much more than its share.
TEST(DecodeWork, CutsAreEven) {
  std::mt19937 random(7);
  const auto draw = [&](unsigned least, unsigned most) {
    return std::uniform_int_distribution<unsigned>(least, most)(random);
  };
  DecodeSequence s{};
  for (int i = 0; i < 2000; ++i) {
    DecodeRule rule{};
    rule.cost_shift = int(draw(0, 2));
    s.split_tiles = int(draw(1, 16));
    s.split_end = int(draw(1, 64));
    const unsigned items = draw(1, 600), cost = item_cost(rule, s), total = items * cost;
    const int blocks = int(draw(1, 264));
    const DecodeCut cut = cut_of(rule, total, items, draw(0, 1) ? cost : 0, blocks);
    EXPECT_EQ(cut.begin_of(0), 0u);
    EXPECT_EQ(cut.begin_of(blocks), total);
    for (int block = 0; block < blocks; ++block) {
      const unsigned begin = cut.begin_of(block), end = cut.begin_of(block + 1);
      ASSERT_LE(begin, end);
      EXPECT_LE(end - begin, total / blocks * 17 / 16 + kSnap + kItemCost + 2);
    }
    const unsigned place = draw(0, total - 1);
    EXPECT_LE(cut.begin_of(cut.block_at(place)), place);
    EXPECT_GE(cut.begin_of(cut.block_at(place) + 1), place);
    const unsigned at = draw(0, cost), split = unsigned(split_at(rule, s, cut, at));
    EXPECT_LE(split, unsigned(s.split_end));
    const unsigned moved = split * unsigned(s.split_tiles) >> rule.cost_shift,
                   most = cut.snap + unsigned(s.split_tiles) + kItemCost + 2;  // of rounding
    EXPECT_LE(moved, at + most);
    EXPECT_LE(at, moved + most);
  }
}

// What blocks leave in their slots, as the consumers do it (consume.cuh): which splits of the item.
std::map<int, std::pair<int, int>> stored_slots(const BlockSplits& own, int splits, int slots) {
  std::map<int, std::pair<int, int>> stored;
  if (own.begin == own.end) return stored;
  const int last = own.end == splits ? own.end : own.end / kSplitsPerFold * kSplitsPerFold;
  if (own.is_first) {
    if (last > 0) stored[slots - kFirstFoldsSlot] = {0, last};
    if (last < own.end) stored[slots - kBegunFoldSlot] = {last, own.end};
    return stored;
  }
  int slot = 0, at = own.begin;
  for (; at < own.end && at % kSplitsPerFold != 0; ++at) stored[slot++] = {at, at + 1};
  for (; at < own.end; at += kSplitsPerFold)
    stored[slot++] = {at, std::min(at + kSplitsPerFold, own.end)};
  return stored;
}

// However blocks cut an item: each merges what lies in order one after the other, what is stored
// is read once, by a block that is not an earlier one, and the item is the whole of it.
TEST(DecodeWork, BlocksMergeAllPartialsInOrder) {
  std::mt19937 random(9);
  const auto draw = [&](int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random);
  };
  for (int i = 0; i < 20000; ++i) {
    // The sequence has splits around those of the item.
    const int before = draw(0, 3), splits = draw(1, kMostDecodeSplits), after = draw(0, 3),
              all = before + splits + after, slots = slots_of_block(splits);
    std::vector<int> cuts{0, all};
    for (int n = draw(1, draw(0, 1) ? 3 : 40); n > 0; --n) cuts.push_back(draw(0, all));
    std::ranges::sort(cuts);
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    std::vector<BlockSplits> of_blocks;
    std::map<int, std::pair<int, int>> stored;  // number among all slots
    for (size_t b = 0; b + 1 < cuts.size(); ++b) {
      of_blocks.push_back(BlockSplits::of({before, before + splits}, b == 0, cuts[b], cuts[b + 1]));
      for (const auto& [slot, of] : stored_slots(of_blocks.back(), splits, slots))
        EXPECT_TRUE(stored.emplace(int(b) * slots + slot, of).second);
    }
    if (of_blocks.size() == 1) continue;
    // Takes the slots that a block merges, and returns what they hold together.
    const auto take = [&](int reader, const auto& slots_of) {
      std::pair<int, int> whole{-1, -1};
      for (int b = 0; b < int(of_blocks.size()); ++b) {
        const BlockSlots own = slots_of(of_blocks[size_t(b)]);
        std::vector<int> list;
        if (own.lone >= 0) list.push_back(own.lone);
        for (int n = 0; n < own.count; ++n) list.push_back(own.first + n);
        for (const int slot : list) {
          EXPECT_LE(b, reader);
          const auto found = stored.extract(b * slots + slot);
          if (found.empty()) {
            ADD_FAILURE() << "block " << b << " leaves nothing in slot " << slot;
            continue;
          }
          const auto [first, end] = found.mapped();
          if (whole.first < 0) whole = {first, first};
          EXPECT_EQ(whole.second, first);
          whole.second = end;
        }
      }
      return whole;
    };
    const int folds = ceil_div(splits, kSplitsPerFold), last = int(of_blocks.size()) - 1;
    int merged_folds = folds;
    for (int b = 0; b <= last; ++b) {
      const BlockSplits& own = of_blocks[size_t(b)];
      if (own.is_first || !own.ends_shared_fold(splits)) continue;
      const int fold = own.begin / kSplitsPerFold, begin = fold * kSplitsPerFold;
      const std::pair<int, int> whole{begin, std::min(begin + kSplitsPerFold, splits)};
      EXPECT_EQ(take(b, [&](const BlockSplits& s) { return s.slots_of_fold(fold, slots); }), whole);
      if (b == last && fold + 1 == folds)
        merged_folds = fold;
      else
        stored[b * slots + slots - kMergedFoldSlot] = whole;
    }
    const std::pair<int, int> item =
        merged_folds == 0 ? std::pair{-1, -1}
                          : std::pair{0, std::min(merged_folds * kSplitsPerFold, splits)};
    EXPECT_EQ(
        take(last,
             [&](const BlockSplits& s) { return s.slots_of_folds(merged_folds, splits, slots); }),
        item);
    EXPECT_TRUE(stored.empty()) << stored.size() << " partials are left";
    if (HasFailure()) break;
  }
}

// So that `flash3 verify --decode` on a GPU runs them.
TEST(DecodePlan, TheCaseTableReachesEveryKernel) {
  std::map<std::string, int> cases_of;
  for (const cases::Case& c :
       cases::cache_case_table(cases::Level::kFull, cases::dtypes_of(FLASH3_BACKEND_HOPPER))) {
    const ForwardProblem problem = problem_of(c);
    if (is_decode(problem) && problem.has_output()) ++cases_of[plan_of(problem).kernel->id];
  }
  for (const DecodeKernel& kernel : decode_kernels())
    EXPECT_GE(cases_of[kernel.id], 1) << kernel.id;
}

TEST(DecodePlan, IsExplained) {
  const auto explained = [](const std::string& id) {
    return cuda::sm90::explained(problem_of(id));
  };
  const std::string cached =
      explained("bf16/b2/q1/k9000/h8x1/d128/causal/usedk/paged32/append1/rotary");
  for (const char* line :
       {"kernel: decode_bf16_d128_8x128",
        "why: at most 16 queries a sequence, and k and v are a cache",
        "first: a kernel of its own: the new keys and values go into the cache, q with its "
        "embedding goes into the workspace",
        "k and v: TMA, in boxes of 32 rows", "8 of the 8 query heads of a KV head share a tile"})
    EXPECT_NE(cached.find(line), std::string::npos) << line << "\n" << cached;
  const std::string rotated = explained("bf16/b2/q1/k9000/h8x1/d128/causal/usedk/kv8/rotate");
  for (const char* line :
       {"first: a kernel of its own: q with its rotation goes into the workspace",
        "workspace: the schedule, parts of shared tiles, q with its rotation"})
    EXPECT_NE(rotated.find(line), std::string::npos) << line << "\n" << rotated;
  const std::string appended =
      explained("bf16/b2/q0/k9000/h8x1/d128/causal/usedk/append1/kv8/rotate");
  EXPECT_NE(appended.find("kernel: append_bf16_e4m3_rotated\n"), std::string::npos) << appended;
  const std::string dense = explained("bf16/b2/q1/k300/h8x1/d128/causal");
  EXPECT_NE(dense.find("why: at most 16 queries a sequence, and 256 keys or more"),
            std::string::npos)
      << dense;
}

}  // namespace
}  // namespace flash3::cuda::sm90
