// SPDX-License-Identifier: Apache-2.0
// What the forward kernels' plan decides: which kernel, which heads share a tile, and why. Needs no
// GPU: a plan launches nothing.
#include "cuda/sm90/forward/plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "cases/table.hpp"
#include "planned_steps.hpp"

namespace flash3::cuda::sm90 {
namespace {

PlannedForward plan_of(const std::string& id) {
  PlannedForward plan;
  const Status status = cuda::sm90::plan(problem_of(id), kDevice, &plan);
  EXPECT_TRUE(status.ok()) << id << ": " << status.message();
  return plan;
}

// What the device does with a plan, but for the arithmetic: each row of each warpgroup of each tile
// is one query of one head, every one is there once, and its key tiles hold every key that it sees.
TEST(Schedule, ReachesEveryQueryOfEveryHeadOnce) {
  for (const char* id :
       {"bf16/b2/q1/k50/h24x2/d128/full", "bf16/b2/q65/k300/h24x2/d64/causal",
        "bf16/b1/q200/k150/h64x1/d128/causal", "bf16/b3/q333/k333/h14x2/d256/w40:7",
        "bf16/b1/q500/k2000/h8x2/d64/causal+w100:", "bf16/b2/q300/k400/h8x2/d64/causal/chunk150",
        "bf16/b2/q130/k130/h40x4/d192x128/full"}) {
    const ForwardProblem problem = problem_of(id);
    for (const ForwardChoice& choice : forward_choices(problem)) {
      PlannedForward plan;
      ASSERT_TRUE(plan_choice(problem, kDevice, choice, &plan).ok());
      const TileSchedule schedule = tile_schedule(problem, plan);
      const ForwardConfig& config = choice.kernel->config;
      std::vector<int> seen(static_cast<size_t>(problem.batch * problem.heads_q * problem.seq_q));
      for (int index = 0; index < plan.tiles; ++index) {
        const WorkTile work = work_tile_at(schedule, config.tile_n, config.band, index);
        ASSERT_TRUE(work.valid);
        for (int row = 0; row < config.warpgroups * HeadPack::kRows; ++row) {
          const int warpgroup = row / HeadPack::kRows, in_warpgroup = row % HeadPack::kRows;
          const int64_t query =
              work.query + warpgroup * choice.pack.queries + choice.pack.query_of(in_warpgroup);
          const int64_t head =
              work.head_group * choice.pack.heads + choice.pack.head_of(in_warpgroup);
          if (in_warpgroup >= choice.pack.rows() || query >= problem.seq_q) continue;
          ASSERT_LT(head, problem.heads_q);
          ++seen[static_cast<size_t>(
              (work.sequence.batch * problem.heads_q + head) * problem.seq_q + query)];
          const Range keys = problem.mask().keys({query, query + 1}, problem.seq_k);
          if (keys.empty()) continue;
          EXPECT_LE(work.key_tile_begin * config.tile_n, keys.begin) << id << ", query " << query;
          EXPECT_GE(work.key_tile_end * config.tile_n, keys.end) << id << ", query " << query;
        }
      }
      EXPECT_FALSE(work_tile_at(schedule, config.tile_n, config.band, plan.tiles).valid);
      EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), std::ssize(seen))
          << id << ", " << choice.pack.heads << " heads packed";
    }
  }
}

TEST(Plan, PacksTheHeadsOfShortSequences) {
  const struct {
    const char* id;
    int heads;
  } expected[] = {
      {"bf16/b64/q5/k255/h64x8/d128/causal", 8},
      {"bf16/b64/q9/k255/h28x4/d128/causal", 7},    // 63 of 64 rows
      {"bf16/b64/q12/k255/h40x8/d128/causal", 5},   // 60 of 64 rows
      {"bf16/b64/q1/k255/h128x1/d128/causal", 64},  // two groups of 64
      {"bf16/b1/q17/k4096/h32x8/d128/causal", 4},   // no round less, but fewer tiles
      {"bf16/b64/q17/k4096/h32x4/d64/causal", 8},
      {"bf16/b64/q64/k4096/h32x8/d128/causal", 2},  // half a tile each
      {"bf16/b32/q130/k4096/h32x8/d128/full", 4},   // two tiles each, one nearly empty
  };
  for (const auto& [id, heads] : expected) {
    EXPECT_FALSE(is_decode(problem_of(id))) << id;
    const PlannedForward plan = plan_of(id);
    EXPECT_EQ(plan.pack.heads, heads) << id;
    const EstimatedChoice rival = best_rival(problem_of(id), plan);
    ASSERT_TRUE(rival.choice.kernel) << id;
    EXPECT_EQ(rival.choice.pack.heads, 1) << id;
    EXPECT_LT(plan.tiles, rival.estimate.tiles) << id;
  }
}

TEST(Plan, LeavesLongSequencesAlone) {
  for (const char* id :
       {"bf16/b1/q4096/k4096/h32x8/d128/full", "bf16/b2/q8192/k8192/h32x4/d64/full",
        "bf16/b2/q8192/k8192/h16x4/d256/causal", "bf16/b1/q4100/k4100/h32x8/d128/full",
        "bf16/b2/q8192/k8192/h16x4/d192/causal"}) {
    const PlannedForward plan = plan_of(id);
    EXPECT_EQ(plan.pack.heads, 1) << id;
    const EstimatedChoice rival = best_rival(problem_of(id), plan);
    ASSERT_TRUE(rival.choice.kernel) << id;
    EXPECT_GT(rival.choice.pack.heads, 1) << id;
  }
  const char* no_heads_to_pack = "bf16/b64/q17/k4096/h8/d128/causal";
  EXPECT_FALSE(best_rival(problem_of(no_heads_to_pack), plan_of(no_heads_to_pack)).choice.kernel);
}

// The rows of a tile of three warpgroups then end together, not 128 keys apart.
TEST(Plan, PacksLongCausalSequencesInHighTiles) {
  for (const char* id :
       {"bf16/b2/q4096/k4096/h32x8/d128/causal", "bf16/b2/q8192/k8192/h32x8/d128/causal"}) {
    const PlannedForward plan = plan_of(id);
    EXPECT_EQ(plan.pack.heads, 4) << id;
    EXPECT_EQ(plan.kernel->config.tile_m(), 192) << id;
  }
}

// Fewer queries a tile see fewer keys together: at any length.
TEST(Plan, PacksUnderANarrowWindow) {
  const char* id = "bf16/b1/q8192/k8192/h32x8/d128/causal+w64:";
  const PlannedForward plan = plan_of(id);
  const EstimatedChoice rival = best_rival(problem_of(id), plan);
  EXPECT_GT(plan.pack.heads, 1);
  EXPECT_NEAR(double(plan.tiles), double(rival.estimate.tiles), 0.01 * double(plan.tiles));
  EXPECT_LT(plan.estimate.us, rival.estimate.us);
}

// Every head dim and mask has both: a kernel of two levels that never flushes has one.
TEST(Plan, SumsUpAsTheCallSays) {
  for (const std::string dim : {"d64", "d128", "d192x128", "d192", "d256"})
    for (const std::string mask : {"full", "causal", "causal/softcap30"})
      for (const std::string keys : {"300", "9000"}) {
        const std::string id = "e4m3/b1/q300/k" + keys + "/h2/" + dim + "/" + mask;
        EXPECT_EQ(plan_of(id + "/sums1").flush_tiles, kNeverFlush) << id;
        const PlannedForward two = plan_of(id + "/sums2");
        EXPECT_LT(two.flush_tiles, kNeverFlush) << id;
        EXPECT_TRUE(two.kernel->config.two_level) << id;
        const PlannedForward chosen = plan_of(id),
                             same = plan_of(id + (keys == "300" ? "/sums1" : "/sums2"));
        EXPECT_EQ(chosen.kernel, same.kernel) << id;
        EXPECT_EQ(chosen.flush_tiles, same.flush_tiles) << id;
        EXPECT_EQ(chosen.workspace_bytes, same.workspace_bytes) << id;
      }
  const auto sums = [](const std::string& id) {
    Explanation text;
    explain(problem_of(id), plan_of(id), &text);
    const std::string all = text.text();
    const size_t begin = all.find("sums: ");
    return begin == std::string::npos ? "" : all.substr(begin, all.find('\n', begin) - begin);
  };
  const std::string call = "e4m3/b1/q300/k300/h2/d128/full";
  EXPECT_EQ(sums(call),
            "sums: of O in one level, in the tensor cores; no query sees more than 2048 keys");
  EXPECT_EQ(sums(call + "/sums1"),
            "sums: of O in one level, in the tensor cores; fp8_sums says so");
  EXPECT_EQ(sums("e4m3/b1/q300/k9000/h2/d256/full"),
            "sums: of O in two levels: float32 sums in the workspace take over every 4096 keys; a "
            "query may see more than 2048 keys");
  EXPECT_EQ(sums("bf16/b1/q300/k9000/h2/d256/full"), "");
}

// So that `flash3 verify` on a GPU runs them.
TEST(Plan, TheCaseTablePacksInEveryWay) {
  std::map<int, int> cases_with;
  for (const cases::Case& c :
       cases::case_table(cases::Level::kQuick, cases::dtypes_of(FLASH3_BACKEND_HOPPER)))
    if (!is_decode(problem_of(to_id(c)))) ++cases_with[plan_of(to_id(c)).pack.heads];
  for (const int heads : {2, 3, 4, 7, 8, 16, 24, 32, 64}) EXPECT_GE(cases_with[heads], 2) << heads;
}

TEST(Plan, TakesWhatIsExpectedToBeFastest) {
  for (const char* id : {"bf16/b3/q17/k900/h32x4/d128/causal", "fp16/b9/q200/k200/h12x2/d64/full",
                         "bf16/b1/q333/k4000/h64x1/d192x128/w100:"}) {
    const ForwardProblem problem = problem_of(id);
    const PlannedForward plan = plan_of(id);
    for (const ForwardChoice& choice : forward_choices(problem)) {
      const Estimate e = estimate_forward(problem, choice.kernel->config, choice.pack, 0, 132);
      EXPECT_FALSE(is_better(e, plan.estimate, kPackMargin))
          << id << ", " << choice.pack.heads << " heads";
    }
  }
}

// Which tile rows a length gets: where each was measured to be the fastest.
TEST(Plan, TakesTheRowOfTheLength) {
  const auto tile = [](const std::string& id) {
    const ForwardConfig& c = plan_of(id).kernel->config;
    return std::pair(c.tile_m(), c.tile_n);
  };
  using Tile = std::pair<int, int>;
  // At d 64 four warpgroups pay for longer under a band: each passes by what only others see.
  for (const char* sizes : {"b8/q2048/k2048", "b4/q4096/k4096"}) {
    const std::string id = std::string("bf16/") + sizes + "/h32/d64/";
    EXPECT_EQ(tile(id + "full"), Tile(192, 128)) << id;
    EXPECT_EQ(tile(id + "causal"), Tile(256, 64)) << id;
  }
  // Between short and long at d 128 it is the mask that decides.
  EXPECT_EQ(tile("bf16/b4/q4096/k4096/h16/d128/full"), Tile(192, 80));
  EXPECT_EQ(tile("bf16/b4/q4096/k4096/h16/d128/causal"), Tile(128, 128));
  for (const std::string mask : {"full", "causal"})
    EXPECT_EQ(tile("bf16/b4/q4096/k4096/h21/d96/" + mask), Tile(192, 112)) << mask;
  constexpr struct {
    const char* dims;
    Tile of_short, of_long;
  } kDims[] = {{"h32/d64/", {256, 64}, {192, 128}},
               {"h21/d96/", {128, 128}, {192, 112}},
               {"h16/d128/", {128, 128}, {192, 80}}};
  for (const auto& [dims, of_short, of_long] : kDims)
    for (const std::string mask : {"full", "causal"}) {
      const std::string call = dims + mask;
      for (const std::string sizes : {"bf16/b32/q512/k512/", "bf16/b16/q1024/k1024/"})
        EXPECT_EQ(tile(sizes + call), of_short) << sizes << call;
      for (const std::string sizes : {"bf16/b2/q8192/k8192/", "bf16/b1/q16384/k16384/"})
        EXPECT_EQ(tile(sizes + call), of_long) << sizes << call;
    }
}

// FP8 sums up long rows in two levels, the second in shared memory where there is room for it; how
// long they may be counts, not how long they are. Periods are powers of two, in key tiles.
TEST(Plan, SumsUpLongRowsInTwoLevels) {
  const auto flushed_keys = [](const std::string& id) {
    const PlannedForward plan = plan_of(id);
    return plan.flush_tiles == kNeverFlush ? 0 : plan.flush_tiles * plan.kernel->config.tile_n;
  };
  const auto expect_about = [&](int keys, const std::string& id) {
    const int flushed = flushed_keys(id);
    EXPECT_GT(flushed, keys * 3 / 4) << id;
    EXPECT_LE(flushed, keys * 3 / 2) << id;
    const PlannedForward plan = plan_of(id);
    const size_t far_bytes = size_t(plan.grid) * plan.kernel->config.sums_bytes();
    if (sums_in_shared(plan.kernel->config)) {
      EXPECT_EQ(plan.sums_offset, 0u) << id;
    } else {
      EXPECT_GE(plan.workspace_bytes, plan.sums_offset + far_bytes) << id;
    }
  };
  for (const std::string dim : {"d64", "d128", "d100"})
    for (const std::string mask : {"full", "causal", "causal/softcap30"}) {
      const std::string end = "/h8/" + dim + "/" + mask;
      EXPECT_EQ(flushed_keys("e4m3/b1/q500/k2048" + end), 0) << end;
      expect_about(1024, "e4m3/b1/q500/k2049" + end);
      expect_about(1024, "e4m3/b4/q16384/k16384" + end);
    }
  EXPECT_EQ(flushed_keys("e4m3/b1/q5000/k5000/h8/d128/w2000:47"), 0);
  expect_about(1024, "e4m3/b1/q5000/k5000/h8/d128/w2000:48");
  expect_about(1024, "e4m3/b1/q5000/k5000/h8/d128/w9223372036854775807:5");
  EXPECT_EQ(flushed_keys("e4m3/b1/q5000/k5000/h8/d128/causal/chunk1000"), 0);
  for (const std::string id :
       {"e4m3/b1/q5000/k5000/h8/d256/causal", "e4m3/b1/q5000/k5000/h8/d192/full"})
    expect_about(4096, id);
  EXPECT_EQ(flushed_keys("bf16/b1/q5000/k5000/h8/d128/causal"), 0);
}

// A key tile has one scale: where blocks of keys have their own it lies in one of them.
TEST(Plan, Fp8TilesLieInOneBlockOfScales) {
  const auto tile_n = [](const std::string& id) { return plan_of(id).kernel->config.tile_n; };
  for (const std::string dim : {"d64", "d128", "d192", "d256"})
    for (const std::string mask : {"full", "causal", "causal/softcap30"})
      for (const std::string keys : {"k100", "k1000", "k2000", "k5000", "k16384"}) {
        const std::string id = "e4m3/b2/q2000/" + keys + "/h8/" + dim + "/" + mask;
        EXPECT_EQ(int(kScaleBlock) % tile_n(id + "/blockscales"), 0) << id;
      }
  for (const std::string scales : {"", "/onescale", "/headscales"})
    EXPECT_EQ(tile_n("e4m3/b1/q16384/k16384/h16/d128/full" + scales), 192) << scales;
}

// So that `flash3 verify` on a GPU runs them.
TEST(Plan, TheCaseTableReachesEveryKernel) {
  std::map<std::string, int> cases_of;
  auto table = cases::case_table(cases::Level::kFull, cases::dtypes_of(FLASH3_BACKEND_HOPPER));
  for (const cases::Case& c : cases::fp8_case_table(cases::Level::kFull, false)) table.push_back(c);
  for (const cases::Case& c : cases::with_added_tensors(
           cases::cache_case_table(cases::Level::kFull, cases::dtypes_of(FLASH3_BACKEND_HOPPER)),
           FLASH3_BACKEND_HOPPER))
    table.push_back(c);
  for (const cases::Case& c :
       cases::mask_case_table(cases::Level::kFull, cases::dtypes_of(FLASH3_BACKEND_HOPPER), false))
    table.push_back(c);
  for (const cases::Case& c : cases::fp8_mask_case_table()) table.push_back(c);
  for (const std::string dtype : {"fp16", "bf16"})
    for (const std::string dim : {"d64", "d128", "d256"})
      for (const std::string& keys :
           {"k640/h2/" + dim + "/causal", "k9000/h2/" + dim + "/causal/usedk/paged128",
            "k640/h2/" + dim + "/full/mask:documents"})
        for (const std::string biases : {"alibi_slopes=heads", "bias_table=hd", "bias=hqk",
                                         "dropout0.1", "alibi_slopes=heads/bias_table=hd"})
          for (const std::string queries : {"q640/", "q20/", "q8000/"})
            if (biases[4] != '=' || keys.find("paged") == std::string::npos)  // of a table's keys
              table.push_back(cases::parsed(dtype + "/b1/" + queries + keys + "/" + biases));
  for (const cases::Case& c : table) {
    const auto params = cases::make_question(c);
    ForwardProblem problem;
    PlannedForward plan;
    ASSERT_TRUE(make_forward_problem(&params, Pointers::kOptional, &problem).ok()) << to_id(c);
    if (is_decode(problem)) continue;
    if (cuda::sm90::plan(problem, kDevice, &plan).ok()) ++cases_of[plan.kernel->id];
  }
  for (const ForwardKernel& kernel : forward_kernels())
    EXPECT_GE(cases_of[kernel.id], 1) << kernel.id;
}

// Quarters that are seen apart have kernels of half blocks, where there is one.
TEST(Plan, MasksOfSmallBlocksTakeTilesOfHalfBlocks) {
  const auto tile_n = [](const std::string& id) { return plan_of(id).kernel->config.tile_n; };
  const std::string call = "/b1/q640/k640/h2/";
  for (const std::string dim : {"d64", "d128"}) {
    EXPECT_EQ(tile_n("bf16" + call + dim + "/full/mask:blocks64x64"), 64) << dim;
    EXPECT_EQ(tile_n("bf16" + call + dim + "/full/mask:blocks128x64"), 64) << dim;
    EXPECT_EQ(tile_n("bf16" + call + dim + "/full/mask:blocks128x128"), 128) << dim;
    EXPECT_EQ(tile_n("bf16" + call + dim + "/full/mask:dense"), 128) << dim;
    EXPECT_EQ(tile_n("bf16" + call + dim + "/full/softcap20/mask:blocks64x64"), 128) << dim;
    EXPECT_EQ(tile_n("e4m3" + call + dim + "/full/mask:blocks64x64"), 128) << dim;
  }
}

TEST(Plan, CountsHeadsInsideOf32Bits) {
  PlannedForward plan;
  ForwardProblem problem = problem_of("bf16/b1/q1/k1/h64x1/d64/full");
  problem.heads_q = problem.q.heads = problem.out.heads = int64_t{1} << 31;
  const Status status = cuda::sm90::plan(problem, kDevice, &plan);
  EXPECT_EQ(status.code(), FLASH3_UNSUPPORTED);
  EXPECT_NE(status.message().find("heads_q = 2147483648"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace flash3::cuda::sm90
