// SPDX-License-Identifier: Apache-2.0
// Which calls run in split kernels, where they split the keys of a work tile, and the ring of slots
// in which the parts lie. Needs no GPU: a plan launches nothing, and the ring is emulated.
#include "hopper/device/key_parts.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "cases/cache_tensors.hpp"
#include "cases/table.hpp"
#include "forward_problem.hpp"
#include "hopper/decode/plan.hpp"
#include "hopper/forward/plan.hpp"
#include "hopper/mixed/plan.hpp"

namespace flash3::hopper {
namespace {

ForwardPlan plan_of(const ForwardProblem& problem, int multiprocessors = 132) {
  ForwardPlan plan;
  const Status status = hopper::plan(problem, {0, multiprocessors}, &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  return plan;
}
ForwardPlan plan_of(const std::string& id) { return plan_of(problem_of(id)); }

// As many parts as fill the 132 multiprocessors of an H100 or H200 in whole rounds, and no more
// than are merged in no time.
TEST(KeyParts, FillAGpuWhereTilesDoNot) {
  EXPECT_EQ(most_key_parts(32), 4);
  EXPECT_EQ(most_key_parts(64), 2);
  EXPECT_EQ(most_key_parts(66), 2);
  EXPECT_EQ(most_key_parts(1), 16);
  EXPECT_EQ(most_key_parts(8), 16);
  EXPECT_EQ(most_key_parts(16), 8);
  for (const int64_t tiles : {67, 80, 96, 100}) {  // a round and a half would take two
    const int64_t blocks = tiles * most_key_parts(tiles), rounds = (blocks + 131) / 132;
    EXPECT_GT(most_key_parts(tiles), 1) << tiles;
    EXPECT_GT(double(blocks), 0.8 * 132 * double(rounds)) << tiles;
  }
  for (const int64_t tiles : {126, 128, 132, 133, 200, 100000})
    EXPECT_EQ(most_key_parts(tiles), 1) << tiles;
}

// The parts of a work tile are all of its keys, each once, in order.
TEST(KeyParts, AreTheKeysOfTheTile) {
  std::mt19937_64 random(5);
  const auto below = [&](int n) { return int(random() % uint64_t(n)); };
  int split = 0, short_tiles = 0;
  for (int i = 0; i < 20000; ++i) {
    ListedSequence s{};
    s.q_length = 1 + below(700), s.k_length = below(i % 3 == 0 ? 100000 : 12000);
    TileMaskRule rule;
    if (i % 2 == 0) rule.window_right = below(2) * below(8000);
    if (i % 4 == 0) rule.window_left = below(15000);
    if (i % 7 == 0) rule.chunk = 1 + below(15000);
    const TileMask mask = TileMask::make(s.q_length, s.k_length, rule);
    const int tile_n = i % 2 == 0 ? 64 : 128, tile_queries = i % 5 == 0 ? 24 : 128;
    const int most = key_parts(s.k_length, 1 + below(kMostKeyParts));
    EXPECT_LE(most, std::max(1, s.k_length / kLeastPartKeys));
    for (int m_tile = 0; m_tile * tile_queries < s.q_length; ++m_tile) {
      const WorkTile whole = work_tile(s, mask, tile_queries, m_tile, 0, tile_n, true);
      int next = whole.key_tile_begin, parts = 0;
      for (int p = 0; p < most; ++p) {
        WorkTile work = whole;
        KeyPart part{p, most, 0, 0};
        take_key_part(work, tile_n, part);
        if (!part.exists()) continue;
        ASSERT_EQ(p, parts) << "those that exist come first";
        ++parts;
        ASSERT_EQ(work.key_tile_begin, next);
        next = work.key_tile_end;
        if (part.count > 1) {
          ASSERT_GE((work.key_tile_end - work.key_tile_begin) * tile_n, kLeastPartKeys);
        }
        EXPECT_EQ(work.query, whole.query);
        if (p == 0) {
          split += part.count > 1;
          short_tiles += part.count < most;
        } else {
          EXPECT_LE(work.hidden_keys(tile_n), 0) << "what no query sees lies in the first part";
        }
      }
      ASSERT_GE(parts, 1);
      ASSERT_EQ(next, whole.key_tile_end);
    }
  }
  EXPECT_GT(split, 1000);
  EXPECT_GT(short_tiles, 1000) << "windows leave some tiles fewer parts than the list has";
}

// A causal mask leaves the first tiles fewer keys, and they have as many parts as the last.
TEST(KeyParts, AllTilesOfAPromptHaveAsMany) {
  for (const int tile_n : {64, 128}) {
    ListedSequence s{};
    s.q_length = 512, s.k_length = 16384;
    TileMaskRule rule;
    rule.window_right = 0;
    const TileMask mask = TileMask::make(s.q_length, s.k_length, rule);
    for (int m_tile = 0; m_tile < 4; ++m_tile) {
      WorkTile work = work_tile(s, mask, 128, m_tile, 0, tile_n, true);
      KeyPart part{0, key_parts(s.k_length, 4), 0, 0};
      take_key_part(work, tile_n, part);
      EXPECT_EQ(part.count, 4) << m_tile;
    }
  }
  for (const int keys : {4096, 7167}) EXPECT_EQ(key_parts(keys, kMostKeyParts), 1);
}

// The ring of slots as the schedulers and consumers use it (forward/split.cuh), one step of one
// block at a time: nobody writes where parts still lie, everybody ends, and all tiles are merged.
class Ring {
 public:
  Ring(int bits, int warpgroups, uint64_t seed)
      : bits_(bits), warpgroups_(warpgroups), random_(seed) {
    freed_.resize(size_t(1) << bits), arrived_.resize(freed_.size()), holder_.resize(freed_.size());
  }

  // tiles: how many parts the list has for each, and how many exist.
  void run(const std::vector<std::pair<int, int>>& tiles, int blocks, bool counted) {
    for (const auto& [most, count] : tiles)
      for (int p = 0; p < most; ++p) parts_.push_back({p, count, most});
    int next = blocks;
    std::vector<Block> all;
    for (int b = 0; b < blocks; ++b) all.push_back({b, false, 0});
    int running = blocks;
    for (int64_t step = 0; running > 0; ++step) {
      ASSERT_LT(step, 20'000'000) << "stuck";
      Block& block = all[random_() % all.size()];
      if (block.part >= int(parts_.size())) {
        if (!block.ended) --running;
        block.ended = true;
        continue;
      }
      if (!block.holds) {
        if (!begin(block)) continue;
      } else {
        if (++block.worked < int(random_() % 7)) continue;
        for (int w = 0; w < warpgroups_; ++w) finish(block.part);
      }
      if (block.holds && block.worked == 0) continue;
      block.part = counted ? next++ : block.part + blocks;
      block.holds = false, block.worked = 0;
    }
    EXPECT_EQ(merged_, std::ssize(tiles) * warpgroups_);
  }

 private:
  struct Part {
    int index, count, most;
  };
  struct Block {
    int part;
    bool holds;
    int worked;
    bool ended = false;
  };

  int slot(int i) const { return i & ((1 << bits_) - 1); }
  bool is_free(int i) const { return freed_[size_t(slot(i))] >= (i >> bits_) * warpgroups_; }

  // False: it waits.
  bool begin(Block& block) {
    const int i = block.part;
    const Part& part = parts_[size_t(i)];
    if (!is_free(i) || !is_free(i - part.index)) return false;
    if (part.index >= part.count) {
      freed_[size_t(slot(i))] += warpgroups_;
      return true;
    }
    EXPECT_EQ(holder_[size_t(slot(i))], 0) << "part " << i << " overwrites another";
    holder_[size_t(slot(i))] = warpgroups_;
    block.holds = true;
    return true;
  }

  void finish(int i) {
    const Part& part = parts_[size_t(i)];
    const int first = i - part.index;
    if (++arrived_[size_t(slot(first))] % part.count != 0) return;
    ++merged_;
    for (int p = 0; p < part.count; ++p) {
      --holder_[size_t(slot(first + p))];
      ++freed_[size_t(slot(first + p))];
    }
    // Each warpgroup has a counter; here they share one, which is 0 when the last has merged.
    if (arrived_[size_t(slot(first))] == part.count * warpgroups_)
      arrived_[size_t(slot(first))] = 0;
  }

  int bits_, warpgroups_;
  std::mt19937_64 random_;
  std::vector<int> freed_, arrived_, holder_;
  std::vector<Part> parts_;
  int64_t merged_ = 0;
};

TEST(KeyParts, TheRingHoldsThem) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<std::pair<int, int>> tiles(40 + random() % 200);
    for (auto& [most, count] : tiles) {
      most = 1 + int(random() % kMostKeyParts);
      count = 1 + int(random() % uint64_t(most));
    }
    const int blocks = 1 + int(random() % 20);
    Ring(5, 1, seed).run(tiles, blocks, seed % 2 == 0);
    if (HasFatalFailure()) return;
  }
}

std::string kernel(const std::string& id) { return plan_of(id).kernel->id; }

// Few query tiles in front of a cache; whole kernels wherever tiles fill a GPU, and for what is no
// cache.
TEST(KeyParts, PlanSplitsCallsOfFewTilesOnACache) {
  for (const char* cache :
       {"usedk", "usedk/paged64", "usedk/batchidx", "usedk/leftpad", "usedk/append5",
        "packedq/usedk/paged16", "packedq/usedk", "used/paged16"}) {
    const std::string rest = std::string("/causal/") + cache;
    EXPECT_EQ(kernel("bf16/b1/q512/k16384/h8x1/d128" + rest), "fwd_bf16_d128_split_128x128")
        << cache;
    EXPECT_EQ(kernel("fp16/b1/q512/k16384/h16x2/d64" + rest), "fwd_fp16_d64_split_192x128")
        << cache;
    const ForwardPlan filled = plan_of("bf16/b1/q512/k16384/h32x8/d128" + rest),
                      tall = plan_of("bf16/b1/q2048/k16384/h8x1/d128" + rest);
    EXPECT_FALSE(filled.kernel->config.split || tall.kernel->config.split) << cache;
    EXPECT_EQ(filled.parts.most, 1);
  }
  EXPECT_EQ(kernel("bf16/b1/q512/k16384/h8x1/d192x128/full/usedk/paged64"),
            "fwd_bf16_d192x128_split_128x128");
  EXPECT_EQ(kernel("bf16/b1/q512/k16384/h8x1/d256/w500:/usedk"), "fwd_bf16_d256_split_128x64");
  EXPECT_EQ(kernel("bf16/b1/q512/k16384/h8x1/d128/causal/usedk/softcap20"),
            "fwd_bf16_d128_split_softcap_128x128");
  for (const char* id : {"bf16/b1/q512/k16384/h8x1/d128/causal",         // one length, no cache
                         "bf16/b1/q512/k16384/h8x1/d128/causal/packed",  // packed keys
                         "bf16/b1/q512/k16384/h8x1/d128/causal/used",    // a padded batch
                         "bf16/b1/q512/k16384/h8x1/d128/causal/packedq/nomax/usedk/paged64",
                         "bf16/b9/q50/k60/h8x1/d128/causal/usedk",      // shares tiles
                         "bf16/b1/q512/k16384/h8x1/d96/causal/usedk"})  // has narrower kernels
    EXPECT_FALSE(plan_of(id).kernel->config.split) << id;
  EXPECT_EQ(kernel("bf16/b1/q512/k16384/h8x1/d96/causal/usedk/paged64"),
            "fwd_bf16_d128_split_128x128")
      << "pages have no narrower kernel";
}

// FP8 caches, under queries in FP8 and in 16 bits.
TEST(KeyParts, PlanSplitsCallsOnFp8Caches) {
  for (const char* cache :
       {"usedk", "usedk/paged64", "usedk/batchidx/headscales", "usedk/leftpad/onescale",
        "usedk/append5/blockscales", "packedq/usedk/paged16", "usedk/paged128/blockscales"}) {
    const std::string rest = std::string("/causal/") + cache;
    EXPECT_EQ(kernel("e4m3/b1/q512/k16384/h8x1/d128" + rest), "fwd_e4m3_d128_split_128x128")
        << cache;
    EXPECT_EQ(kernel("e4m3/b1/q512/k16384/h16x2/d64" + rest), "fwd_e4m3_d64_split_192x128")
        << cache;
    EXPECT_EQ(kernel("bf16/b1/q512/k16384/h8x1/d128" + rest + "/kv8"),
              "fwd_bf16_d128_kv8_split_128x128")
        << cache;
    for (const char* filled : {"e4m3/b1/q512/k16384/h32x8/d128", "e4m3/b1/q2048/k16384/h8x1/d128"})
      EXPECT_FALSE(plan_of(filled + rest).kernel->config.split) << filled << cache;
    EXPECT_EQ(kernel("bf16/b1/q512/k16384/h32x8/d128" + rest + "/kv8"), "fwd_bf16_d128_kv8_128x128")
        << cache;
  }
  const std::string few = "/b1/q512/k16384/h8x1/";
  EXPECT_EQ(kernel("e4m3" + few + "d192x128/full/usedk/paged64"),
            "fwd_e4m3_d192x128_split_128x128");
  EXPECT_EQ(kernel("e4m3" + few + "d256/w500:/usedk"), "fwd_e4m3_d256_split_128x64");
  EXPECT_EQ(kernel("fp16" + few + "d64/full/usedk/kv8"), "fwd_fp16_d64_kv8_split_192x128");
  EXPECT_EQ(kernel("fp16" + few + "d160x80/full/usedk/kv8"), "fwd_fp16_d192x128_kv8_split_128x64");
  EXPECT_EQ(kernel("bf16" + few + "d256/causal/usedk/paged16/kv8"),
            "fwd_bf16_d256_kv8_split_128x64");
  for (const std::string& id : {"e4m3" + few + "d128/causal",         // no cache
                                "e4m3" + few + "d128/causal/packed",  // packed keys
                                "e4m3" + few + "d192/causal/usedk",   // has narrower kernels
                                "e4m3" + few + "d128/causal/usedk/softcap20",
                                "e4m3" + few + "d128/causal/usedk/paged64/softcap20"})
    EXPECT_FALSE(plan_of(id).kernel->config.split) << id;
  EXPECT_EQ(plan_of("e4m3/b1/q17/k16384/h8x1/d128/causal/usedk/blockscales").pack.heads, 4);
  EXPECT_EQ(plan_of("bf16/b1/q17/k16384/h8x1/d128/causal/usedk/kv8").pack.heads, 4);
}

// A split kernel is the one that does not split, with another scheduler and another epilogue: the
// bits of a sequence in one part are the same.
TEST(KeyParts, SplitKernelsHaveTheTilesOfOthers) {
  int split = 0;
  for (const ForwardKernel& kernel : forward_kernels()) {
    const ForwardConfig& c = kernel.config;
    if (!c.split) continue;
    ++split;
    const auto is_whole = [&](const ForwardKernel& other) {
      const ForwardConfig& o = other.config;
      return other.element == kernel.element && o.operands == c.operands && o.score == c.score &&
             o.head_dim == c.head_dim && o.head_dim_v == c.head_dim_v && o.paged && !o.split;
    };
    const auto whole = std::ranges::find_if(forward_kernels(), is_whole);
    ASSERT_NE(whole, forward_kernels().end()) << kernel.id;
    const ForwardConfig& o = whole->config;
    EXPECT_TRUE(o.tile_n == c.tile_n && o.warpgroups == c.warpgroups && o.stages == c.stages)
        << kernel.id;
    EXPECT_TRUE(o.two_level == c.two_level && o.sums_in_shared() == c.sums_in_shared())
        << kernel.id << ": sums of O lie elsewhere";
    if (o.q_stages == c.q_stages) {
      EXPECT_EQ(c.shared_bytes() - o.shared_bytes(), 16 * (4 + 4 * c.warpgroups)) << kernel.id;
    }
  }
  EXPECT_EQ(split, 2 * 7 + 4 + 2 * 4);
}

TEST(KeyParts, FollowFromQueriesHeadsAndKeysAlone) {
  const auto most = [](const std::string& id) { return plan_of(id).parts.most; };
  EXPECT_EQ(most("bf16/b1/q512/k16384/h8x1/d128/causal/usedk/paged64"), 4);
  EXPECT_EQ(most("bf16/b1/q512/k8000/h8x1/d128/causal/usedk/paged64"), 2);
  EXPECT_EQ(most("bf16/b1/q512/k7000/h8x1/d128/causal/usedk/paged64"), 1);
  EXPECT_EQ(most("bf16/b1/q512/k16384/h16x2/d128/causal/usedk/paged64"), 2);
  EXPECT_EQ(most("bf16/b1/q30/k131072/h8x1/d128/causal/usedk/paged64"), 16);

  // A table may be wider than a sequence needs, which gets the same parts: it runs in the same
  // kernel and the list splits it by its own keys.
  for (const int keys : {3000, 7168, 9000, 14336}) {
    const auto parts = [&](const char* capacity) {
      const std::string id = std::string("bf16/b1/q30/k") + capacity + "/h8x1/d128/causal/usedk";
      EXPECT_EQ(kernel(id), "fwd_bf16_d128_split_128x128");
      return key_parts(keys, most(id));
    };
    const int expected = std::max(1, keys / kLeastPartKeys);
    EXPECT_EQ(parts("131072"), expected);
    EXPECT_EQ(parts("14336"), expected);
    if (keys <= 7168) {
      EXPECT_EQ(parts("7168"), expected);
    }
    if (keys < 7168) {
      EXPECT_EQ(parts("7167"), expected);
    }
  }
  for (const char* id : {"bf16/b1/q512/k16384/h8x1/d128/causal/usedk/paged64",
                         "bf16/b1/q100/k16384/h8x2/d256/causal/packedq/usedk",
                         "e4m3/b1/q100/k16384/h8x2/d256/causal/packedq/usedk/blockscales",
                         "bf16/b1/q512/k16384/h8x1/d128/causal/usedk/paged64/kv8"}) {
    const ForwardProblem problem = problem_of(id);
    const ForwardPlan expected = plan_of(problem);
    for (const int64_t batch : {2, 300})
      for (const int multiprocessors : {78, 132}) {
        ForwardProblem other = problem;
        other.batch = batch;
        const ForwardPlan plan = plan_of(other, multiprocessors);
        EXPECT_EQ(plan.kernel, expected.kernel) << id;
        EXPECT_EQ(plan.parts.most, expected.parts.most) << id;
      }
  }
}

// Slots for all parts of a small call, and for two rounds of blocks of any other.
TEST(KeyParts, TheWorkspaceDoesNotGrowWithTheBatch) {
  const std::string rest = "/q512/k16384/h8x1/d128/causal/usedk/paged64";
  const ForwardPlan one = plan_of("bf16/b1" + rest), many = plan_of("bf16/b64" + rest);
  EXPECT_EQ(one.tiles, 128);
  EXPECT_EQ(one.grid, 128);
  EXPECT_FALSE(one.dynamic);
  EXPECT_EQ(one.parts.slot_bits, 7);
  EXPECT_EQ(many.tiles, 64 * 128);
  EXPECT_TRUE(many.dynamic);
  EXPECT_EQ(many.parts.slot_bits, 8);
  ForwardProblem wide = problem_of("bf16/b64" + rest);
  wide.batch = 4000;
  EXPECT_EQ(plan_of(wide).parts.slot_bits, 8);
  for (const int multiprocessors : {1, 2, 20})
    EXPECT_GE(1 << plan_of(wide, multiprocessors).parts.slot_bits, kMostKeyParts);

  for (const ForwardPlan& plan : {one, many}) {
    const ForwardConfig& c = plan.kernel->config;
    const size_t slots = size_t(1) << plan.parts.slot_bits;
    EXPECT_EQ(plan.parts.sums_offset, plan.parts.out_offset + slots * 128 * 128 * 4);
    EXPECT_EQ(plan.parts.counters_offset, plan.parts.sums_offset + slots * 128 * 2 * 16);
    EXPECT_EQ(c.part_counters(), 3);
    EXPECT_GE(plan.list_offset, plan.parts.counters_offset + slots * 3 * 4);
    EXPECT_GT(plan.workspace_bytes, plan.list_offset);
    EXPECT_LT(plan.workspace_bytes, size_t(20) << 20);
  }
  const VarlenScheduleParams list = varlen_schedule_params(problem_of("bf16/b64" + rest), many);
  EXPECT_EQ(list.most_parts, 4);
  EXPECT_EQ(list.counter_count, 256 * 3);
  // Nor are there slots where no sequence can have keys for two parts.
  const ForwardProblem few_keys = problem_of("bf16/b64/q512/k7000/h8x1/d128/causal/usedk/paged64");
  const ForwardPlan undivided = plan_of(few_keys);
  EXPECT_TRUE(undivided.kernel->config.split);
  EXPECT_EQ(undivided.tiles, 64 * 32);
  EXPECT_LT(undivided.workspace_bytes, size_t(64) << 10);
  EXPECT_EQ(varlen_schedule_params(few_keys, undivided).most_parts, 1);
  EXPECT_EQ(varlen_schedule_params(few_keys, undivided).counter_count, 0);
  const std::string whole = "bf16/b1/q512/k16384/h32x8/d128/causal/usedk/paged64";
  EXPECT_EQ(varlen_schedule_params(problem_of(whole), plan_of(whole)).counter_count, 0);
}

// Sums of O in two levels lie beside the parts, and belong to the block and not to the part.
TEST(KeyParts, PartsAndSumsOfFp8LieApart) {
  using Range = std::pair<size_t, size_t>;  // offset, bytes
  for (const char* batch : {"b1", "b64"})
    for (const char* rest : {"/q512/k16384/h8x1/d64", "/q512/k16384/h8x1/d128",
                             "/q40/k30000/h8x1/d192x128", "/q512/k16384/h8x1/d256"}) {
      const std::string id = std::string("e4m3/") + batch + rest + "/causal/usedk/paged128";
      const ForwardPlan plan = plan_of(id);
      const ForwardConfig& c = plan.kernel->config;
      ASSERT_GT(plan.parts.most, 1) << id;
      EXPECT_NE(plan.flush_tiles, kNeverFlush) << id;
      const size_t slots = size_t(1) << plan.parts.slot_bits;
      std::vector<Range> ranges = {
          {plan.parts.out_offset, slots * size_t(c.part_out_bytes())},
          {plan.parts.sums_offset, slots * size_t(c.part_sum_bytes())},
          {plan.parts.counters_offset, slots * size_t(c.part_counters()) * 4},
          {plan.list_offset, size_t(problem_of(id).batch) * sizeof(ListedSequence)},
          {plan.workspace_bytes, 0}};
      if (!c.sums_in_shared())
        ranges.emplace_back(plan.sums_offset, size_t(plan.grid) * size_t(c.sums_bytes()));
      std::ranges::sort(ranges);
      for (size_t i = 1; i < ranges.size(); ++i)
        EXPECT_GE(ranges[i].first, ranges[i - 1].first + ranges[i - 1].second) << id << ", " << i;
    }
  EXPECT_FALSE(
      plan_of("e4m3/b1/q512/k16384/h8x1/d256/causal/usedk").kernel->config.sums_in_shared())
      << "one of them has sums in the workspace";
}

// So that `flash3 verify --decode` runs them on a GPU: with scales of V that differ from part to
// part, and heads packed.
TEST(KeyParts, TheCaseTableHasThoseOfFp8) {
  std::map<std::string, int> scaled, packed;
  for (const cases::Case& c :
       cases::cache_case_table(cases::Level::kQuick, cases::dtypes_of(FLASH3_BACKEND_HOPPER))) {
    if (c.dtype_of_kv() != FLASH3_FLOAT8_E4M3) continue;
    const ForwardProblem problem = problem_of(c);
    if (is_decode(problem)) continue;
    const ForwardPlan plan = plan_of(problem);
    if (plan.parts.most == 1) continue;
    scaled[plan.kernel->id] += problem.v_scale.kind == ScaleKind::kBlock;
    packed[plan.kernel->id] += plan.pack.heads > 1;
  }
  for (const ForwardKernel& kernel : forward_kernels()) {
    if (!kernel.config.split || kernel.config.operands == Operands::k16Bit) continue;
    EXPECT_GE(scaled[kernel.id], 2) << kernel.id;
    EXPECT_GE(packed[kernel.id], 1) << kernel.id;
  }
}

// The prompts of a mixed call.
TEST(KeyParts, AreThoseOfTheForwardOfAMixedCall) {
  for (const char* const dtype : {"bf16", "e4m3"}) {
    const ForwardProblem problem =
        problem_of(std::string(dtype) + "/b4/q200/k9000/h8x1/d128/causal/packedq/usedk/paged64");
    ASSERT_TRUE(is_mixed(problem));
    MixedPlan mixed;
    ASSERT_TRUE(hopper::plan(problem, kDevice, &mixed).ok());
    EXPECT_EQ(mixed.forward.kernel->id, std::string("fwd_") + dtype + "_d128_split_128x128");
    EXPECT_EQ(mixed.forward.parts.most, 2);
    EXPECT_GE(mixed.decode.schedule_offset, mixed.forward.workspace_bytes);
  }
}

TEST(KeyParts, AreExplained) {
  const auto explained = [](const std::string& id) {
    const ForwardProblem problem = problem_of(id);
    Explanation lines;
    hopper::explain(problem, plan_of(problem), &lines);
    return lines.text();
  };
  const std::string rest = "/h8x1/d128/causal/usedk/paged64";
  const std::string split = explained("bf16/b1/q512/k16384" + rest);
  for (const char* line :
       {"parts: the keys of a query tile in at most 4, of 3584 at least, one block each; 32 query "
        "tiles of a sequence do not fill a GPU; the last one merges them",
        "persistent over at most 128 parts of tiles, dealt out round robin"})
    EXPECT_NE(split.find(line), std::string::npos) << line << "\n" << split;
  const std::string few_keys = explained("bf16/b1/q512/k7000" + rest);
  EXPECT_NE(few_keys.find("parts: none: a part has 3584 keys at least"), std::string::npos)
      << few_keys;
  const std::string fp8 = explained("e4m3/b1/q512/k16384" + rest);
  for (const char* line :
       {"kernel: fwd_e4m3_d128_split_128x128", "parts: the keys of a query tile in at most 4, of",
        "sums: of O in two levels: float32 sums in shared memory take over every 1024 keys"})
    EXPECT_NE(fp8.find(line), std::string::npos) << line << "\n" << fp8;
}

}  // namespace
}  // namespace flash3::hopper
