// SPDX-License-Identifier: Apache-2.0
// Which calls run in split kernels, with which splits and workspace. Needs no GPU: a plan launches
// nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "cases/cache_tensors.hpp"
#include "cases/table.hpp"
#include "cuda/device/key_splits.hpp"
#include "planned_steps.hpp"

namespace flash3::cuda::sm90 {
namespace {

PlannedForward plan_of(const ForwardProblem& problem, int multiprocessors = 132) {
  PlannedForward plan;
  const Status status = cuda::sm90::plan(problem, {0, multiprocessors}, &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  return plan;
}
PlannedForward plan_of(const std::string& id) { return plan_of(problem_of(id)); }

std::string kernel(const std::string& id) { return plan_of(id).kernel->id; }

// Few query tiles on a cache; whole kernels wherever tiles fill a GPU, and for what is no
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
    const PlannedForward filled = plan_of("bf16/b1/q512/k16384/h32x8/d128" + rest),
                         tall = plan_of("bf16/b1/q2048/k16384/h8x1/d128" + rest);
    EXPECT_FALSE(filled.kernel->config.split || tall.kernel->config.split) << cache;
    EXPECT_EQ(filled.splits.most, 1);
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
// bits of a sequence in one split are the same.
TEST(KeyParts, SplitKernelsHaveTheTilesOfOthers) {
  int split = 0;
  for (const ForwardKernel& kernel : forward_kernels()) {
    const ForwardConfig& c = kernel.config;
    if (!c.split) continue;
    ++split;
    const auto is_whole = [&](const ForwardKernel& other) {
      const ForwardConfig& o = other.config;
      return other.element == kernel.element && o.operands == c.operands && o.score == c.score &&
             o.terms == c.terms && o.head_dim == c.head_dim && o.head_dim_v == c.head_dim_v &&
             o.paged && !o.split;
    };
    const auto whole = std::ranges::find_if(forward_kernels(), is_whole);
    ASSERT_NE(whole, forward_kernels().end()) << kernel.id;
    const ForwardConfig& o = whole->config;
    EXPECT_TRUE(o.tile_n == c.tile_n && o.warpgroups == c.warpgroups && o.stages == c.stages)
        << kernel.id;
    EXPECT_TRUE(o.two_level == c.two_level && sums_in_shared(o) == sums_in_shared(c))
        << kernel.id << ": sums of O lie elsewhere";
    if (o.q_stages == c.q_stages) {
      EXPECT_EQ(shared_memory_bytes(c) - shared_memory_bytes(o), 16 * (4 + 4 * c.warpgroups))
          << kernel.id;
    }
  }
  EXPECT_EQ(split, 2 * 10 + 7 + 2 * 4);
}

TEST(KeyParts, FollowFromQueriesHeadsAndKeysAlone) {
  const auto most = [](const std::string& id) { return plan_of(id).splits.most; };
  EXPECT_EQ(most("bf16/b1/q512/k16384/h8x1/d128/causal/usedk/paged64"), 4);
  EXPECT_EQ(most("bf16/b1/q512/k8000/h8x1/d128/causal/usedk/paged64"), 2);
  EXPECT_EQ(most("bf16/b1/q512/k7000/h8x1/d128/causal/usedk/paged64"), 1);
  EXPECT_EQ(most("bf16/b1/q512/k16384/h16x2/d128/causal/usedk/paged64"), 2);
  EXPECT_EQ(most("bf16/b1/q30/k131072/h8x1/d128/causal/usedk/paged64"), 16);

  // A table may be wider than a sequence needs, which gets the same splits: it runs in the same
  // kernel and the list splits it by its own keys.
  for (const int keys : {3000, 7168, 9000, 14336}) {
    const auto splits = [&](const char* capacity) {
      const std::string id = std::string("bf16/b1/q30/k") + capacity + "/h8x1/d128/causal/usedk";
      EXPECT_EQ(kernel(id), "fwd_bf16_d128_split_128x128");
      return key_splits(keys, most(id));
    };
    const int expected = std::max(1, keys / kLeastSplitKeys);
    EXPECT_EQ(splits("131072"), expected);
    EXPECT_EQ(splits("14336"), expected);
    if (keys <= 7168) {
      EXPECT_EQ(splits("7168"), expected);
    }
    if (keys < 7168) {
      EXPECT_EQ(splits("7167"), expected);
    }
  }
  for (const char* id : {"bf16/b1/q512/k16384/h8x1/d128/causal/usedk/paged64",
                         "bf16/b1/q100/k16384/h8x2/d256/causal/packedq/usedk",
                         "e4m3/b1/q100/k16384/h8x2/d256/causal/packedq/usedk/blockscales",
                         "bf16/b1/q512/k16384/h8x1/d128/causal/usedk/paged64/kv8"}) {
    const ForwardProblem problem = problem_of(id);
    const PlannedForward expected = plan_of(problem);
    for (const int64_t batch : {2, 300})
      for (const int multiprocessors : {78, 132}) {
        ForwardProblem other = problem;
        other.batch = batch;
        const PlannedForward plan = plan_of(other, multiprocessors);
        EXPECT_EQ(plan.kernel, expected.kernel) << id;
        EXPECT_EQ(plan.splits.most, expected.splits.most) << id;
      }
  }
}

// Slots for all splits of a small call, and for two rounds of blocks of any other.
TEST(KeyParts, TheWorkspaceDoesNotGrowWithTheBatch) {
  const std::string rest = "/q512/k16384/h8x1/d128/causal/usedk/paged64";
  const PlannedForward one = plan_of("bf16/b1" + rest), many = plan_of("bf16/b64" + rest);
  EXPECT_EQ(one.tiles, 128);
  EXPECT_EQ(one.grid, 128);
  EXPECT_FALSE(one.dynamic);
  EXPECT_EQ(one.splits.slot_bits, 7);
  EXPECT_EQ(many.tiles, 64 * 128);
  EXPECT_TRUE(many.dynamic);
  EXPECT_EQ(many.splits.slot_bits, 8);
  ForwardProblem wide = problem_of("bf16/b64" + rest);
  wide.batch = 4000;
  EXPECT_EQ(plan_of(wide).splits.slot_bits, 8);
  for (const int multiprocessors : {1, 2, 20})
    EXPECT_GE(1 << plan_of(wide, multiprocessors).splits.slot_bits, kMostKeySplits);

  for (const PlannedForward& plan : {one, many}) {
    const ForwardConfig& c = plan.kernel->config;
    const size_t slots = size_t(1) << plan.splits.slot_bits;
    EXPECT_EQ(plan.splits.sums_offset, plan.splits.out_offset + slots * 128 * 128 * 4);
    EXPECT_EQ(plan.splits.counters_offset, plan.splits.sums_offset + slots * 128 * 2 * 16);
    EXPECT_EQ(split_counters(c), 3);
    EXPECT_GE(plan.list_offset, plan.splits.counters_offset + slots * 3 * 4);
    EXPECT_GT(plan.workspace_bytes, plan.list_offset);
    EXPECT_LT(plan.workspace_bytes, size_t(20) << 20);
  }
  const VarlenScheduleParams list = varlen_schedule_params(problem_of("bf16/b64" + rest), many);
  EXPECT_EQ(list.most_splits, 4);
  EXPECT_EQ(list.counter_count, 256 * 3);
  // Nor are there slots where no sequence can have keys for two splits.
  const ForwardProblem few_keys = problem_of("bf16/b64/q512/k7000/h8x1/d128/causal/usedk/paged64");
  const PlannedForward undivided = plan_of(few_keys);
  EXPECT_TRUE(undivided.kernel->config.split);
  EXPECT_EQ(undivided.tiles, 64 * 32);
  EXPECT_LT(undivided.workspace_bytes, size_t(64) << 10);
  EXPECT_EQ(varlen_schedule_params(few_keys, undivided).most_splits, 1);
  EXPECT_EQ(varlen_schedule_params(few_keys, undivided).counter_count, 0);
  const std::string whole = "bf16/b1/q512/k16384/h32x8/d128/causal/usedk/paged64";
  EXPECT_EQ(varlen_schedule_params(problem_of(whole), plan_of(whole)).counter_count, 0);
}

// Sums of O in two levels lie beside the splits, and belong to the block and not to the split.
TEST(KeyParts, PartsAndSumsOfFp8LieApart) {
  using Range = std::pair<size_t, size_t>;  // offset, bytes
  for (const char* batch : {"b1", "b64"})
    for (const char* rest : {"/q512/k16384/h8x1/d64", "/q512/k16384/h8x1/d128",
                             "/q40/k30000/h8x1/d192x128", "/q512/k16384/h8x1/d256"}) {
      const std::string id = std::string("e4m3/") + batch + rest + "/causal/usedk/paged128";
      const PlannedForward plan = plan_of(id);
      const ForwardConfig& c = plan.kernel->config;
      ASSERT_GT(plan.splits.most, 1) << id;
      EXPECT_NE(plan.flush_tiles, kNeverFlush) << id;
      const size_t slots = size_t(1) << plan.splits.slot_bits;
      std::vector<Range> ranges = {
          {plan.splits.out_offset, slots * size_t(split_out_bytes(c))},
          {plan.splits.sums_offset, slots * size_t(split_sum_bytes(c))},
          {plan.splits.counters_offset, slots * size_t(split_counters(c)) * 4},
          {plan.list_offset, size_t(problem_of(id).batch) * sizeof(ListedSequence)},
          {plan.workspace_bytes, 0}};
      if (!sums_in_shared(c))
        ranges.emplace_back(plan.sums_offset, size_t(plan.grid) * size_t(c.sums_bytes()));
      std::ranges::sort(ranges);
      for (size_t i = 1; i < ranges.size(); ++i)
        EXPECT_GE(ranges[i].first, ranges[i - 1].first + ranges[i - 1].second) << id << ", " << i;
    }
  EXPECT_FALSE(sums_in_shared(plan_of("e4m3/b1/q512/k16384/h8x1/d256/causal/usedk").kernel->config))
      << "one of them has sums in the workspace";
}

// So that `flash3 verify --decode` runs them on a GPU: with scales of V that differ from split to
// split, and heads packed.
TEST(KeyParts, TheCaseTableHasThoseOfFp8) {
  std::map<std::string, int> scaled, packed;
  for (const cases::Case& c :
       cases::cache_case_table(cases::Level::kQuick, cases::dtypes_of(FLASH3_BACKEND_HOPPER))) {
    if (c.dtype_of_kv() != FLASH3_FLOAT8_E4M3) continue;
    const ForwardProblem problem = problem_of(c);
    if (is_decode(problem)) continue;
    const PlannedForward plan = plan_of(problem);
    if (plan.splits.most == 1) continue;
    scaled[plan.kernel->id] += problem.v_scale.kind == ScaleKind::kBlock;
    packed[plan.kernel->id] += plan.pack.heads > 1;
  }
  for (const ForwardKernel& kernel : forward_kernels()) {
    if (!kernel.config.split || kernel.config.operands == Operands::k16Bit) continue;
    EXPECT_GE(scaled[kernel.id], 2) << kernel.id;
    // A bias is of one head.
    EXPECT_EQ(packed[kernel.id] > 0, kernel.config.terms == BiasTerms::kNone) << kernel.id;
  }
}

// The prompts of a mixed call.
TEST(KeyParts, AreThoseOfTheForwardOfAMixedCall) {
  for (const char* const dtype : {"bf16", "e4m3"}) {
    const ForwardProblem problem =
        problem_of(std::string(dtype) + "/b4/q200/k9000/h8x1/d128/causal/packedq/usedk/paged64");
    ASSERT_TRUE(is_mixed(problem));
    const PlannedSteps mixed = steps_of(problem);
    EXPECT_EQ(mixed.forward->kernel->id, std::string("fwd_") + dtype + "_d128_split_128x128");
    EXPECT_EQ(mixed.forward->splits.most, 2);
    EXPECT_GE(mixed.decode->schedule_offset, plan_of(problem).workspace_bytes);
  }
}

TEST(KeyParts, AreExplained) {
  const auto explained = [](const std::string& id) {
    return cuda::sm90::explained(problem_of(id));
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
}  // namespace flash3::cuda::sm90
