// SPDX-License-Identifier: Apache-2.0
// What the forward kernels run of calls on a KV cache: prompts, and sequences that decode beside
// them. Needs no GPU: a plan launches nothing.
#include <gtest/gtest.h>

#include <map>
#include <numeric>

#include "cases/cache_tensors.hpp"
#include "cases/table.hpp"
#include "cuda/sm90/host/tensor_map.hpp"
#include "planned_steps.hpp"

namespace flash3::cuda::sm90 {
namespace {

PlannedForward plan_of(const ForwardProblem& problem) {
  PlannedForward plan;
  const Status status = cuda::sm90::plan(problem, kDevice, &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_FALSE(is_decode(problem));
  return plan;
}
PlannedForward plan_of(const std::string& id) { return plan_of(problem_of(id)); }

// Kernels that look keys up in a table, under any mask, and ordinary ones where there is none; with
// so many heads that no split kernel takes the call (key_schedule_test.cpp).
TEST(CachePlan, TakesPagedKernelsWhereATableLeadsToTheKeys) {
  const auto kernel = [](const std::string& rest) {
    return plan_of("bf16/b2/q200/k300/h64x16/" + rest).kernel->id;
  };
  EXPECT_EQ(kernel("d128/causal/usedk/paged16"), "fwd_bf16_d128_paged_128x128");
  EXPECT_EQ(kernel("d128/full/usedk/paged16"), "fwd_bf16_d128_paged_128x128");
  EXPECT_EQ(kernel("d128/w20:3/usedk/batchidx"), "fwd_bf16_d128_paged_128x128");
  EXPECT_EQ(kernel("d64/causal/usedk/batchidx/leftpad"), "fwd_bf16_d64_paged_192x128");
  EXPECT_EQ(kernel("d96/causal/usedk/paged256"), "fwd_bf16_d128_paged_128x128");
  EXPECT_EQ(kernel("d160x80/causal/usedk/paged64"), "fwd_bf16_d192x128_paged_128x128");
  EXPECT_EQ(kernel("d192/causal/usedk/paged64"), "fwd_bf16_d256_paged_128x64");
  EXPECT_EQ(kernel("d128/full/usedk/paged64/softcap20"), "fwd_bf16_d128_paged_softcap_128x128");
  EXPECT_EQ(kernel("d192x128/full/usedk/paged64/softcap20"), "fwd_bf16_d256_paged_softcap_128x64");
  for (const char* cache : {"usedk/leftpad", "usedk/append3", "usedk/leftpad/append3/rotary"})
    EXPECT_FALSE(
        plan_of(std::string("bf16/b2/q200/k300/h64x16/d128/causal/") + cache).kernel->config.paged)
        << cache;
}

// Kernels that walk lists over pages, whatever a mask is made of, however few the queries are.
TEST(CachePlan, WalksListsOverPages) {
  const auto kernel = [](const std::string& rest) {
    return plan_of("fp16/b2/q200/k300/h4x2/" + rest).kernel->id;
  };
  EXPECT_EQ(kernel("d64/causal/usedk/paged16/mask:documents"), "fwd_fp16_d64_lists_paged_128x128");
  EXPECT_EQ(kernel("d128/full/usedk/paged48/mask:dense"), "fwd_fp16_d128_lists_paged_128x128");
  EXPECT_EQ(kernel("d128/full/usedk/paged64/mask:blocks64x64"),
            "fwd_fp16_d128_lists_paged_128x128");
  EXPECT_EQ(kernel("d192x128/full/usedk/batchidx/mask:ranges2"),
            "fwd_fp16_d256_lists_paged_128x64");
  EXPECT_EQ(kernel("d64/full/usedk/paged16/mask:bits/softcap20"),
            "fwd_fp16_d64_lists_paged_softcap_128x128");
  EXPECT_EQ(kernel("d72/full/usedk/paged16/mask:bits/softcap20"),
            "fwd_fp16_d128_lists_paged_softcap_128x128");
  EXPECT_EQ(kernel("d256/full/usedk/paged16/mask:bits/softcap20"),
            "fwd_fp16_d256_lists_paged_softcap_128x64");
  EXPECT_EQ(plan_of("bf16/b2/q1/k300/h8x1/d128/causal/usedk/paged16/mask:band").kernel->id,
            "fwd_bf16_d128_lists_paged_128x128");
  // Without a table keys lie one after the other.
  EXPECT_EQ(kernel("d128/full/usedk/mask:dense"), "fwd_fp16_d128_lists_128x128");

  const auto refusal = [](const std::string& id) {
    PlannedSteps steps;
    return std::string(plan(problem_of(id), kDevice, &steps.workspace_bytes, &steps).message());
  };
  const std::string takes =
      "; the hopper backend takes them with float16 and bfloat16 keys only, and plain scores or a "
      "softcap; the cpu backend takes all";
  const std::string call = "/b2/q200/k300/h4x2/d128/causal/usedk/";
  EXPECT_EQ(refusal("e4m3" + call + "paged16/mask:dense"),
            "mask is given and page_table is given but k and v are FP8" + takes);
  EXPECT_EQ(refusal("bf16" + call + "batchidx/mask:dense/alibi_slopes=heads"),
            "mask is given and cache_batch_idx is given but alibi_slopes is given" + takes);
  EXPECT_EQ(refusal("bf16" + call + "paged1/mask:dense"),
            "mask is given but pages have too few rows in common with a key tile for TMA to load "
            "them at once");
}

// FP8 caches under queries in FP8: in tiles that have one scale each, or else in the decode
// kernels.
TEST(CachePlan, TakesFp8KernelsWhereAllIsFp8) {
  const auto kernel = [](const std::string& rest) {
    return plan_of("e4m3/b2/q200/k300/h64x16/" + rest).kernel->id;
  };
  EXPECT_EQ(kernel("d128/causal/usedk/paged16"), "fwd_e4m3_d128_paged_128x128");
  EXPECT_EQ(kernel("d128/full/usedk/paged48/headscales"), "fwd_e4m3_d128_paged_128x128");
  EXPECT_EQ(kernel("d64/causal/usedk/paged128/blockscales"), "fwd_e4m3_d64_paged_192x128");
  EXPECT_EQ(kernel("d192x128/causal/usedk/paged64"), "fwd_e4m3_d192x128_paged_128x128");
  EXPECT_EQ(kernel("d256/causal/usedk/batchidx/blockscales"), "fwd_e4m3_d256_paged_128x64");
  EXPECT_EQ(kernel("d64/full/usedk/batchidx/leftpad/onescale"), "fwd_e4m3_d64_paged_192x128");
  EXPECT_EQ(kernel("d128/full/usedk/paged64/softcap20"), "fwd_e4m3_d128_paged_softcap_128x128");
  for (const char* cache : {"usedk/leftpad", "usedk/append3/headscales"})
    EXPECT_FALSE(
        plan_of(std::string("e4m3/b2/q200/k300/h64x16/d128/causal/") + cache).kernel->config.paged)
        << cache;
  // Tiles of 96 keys may lie in two blocks of scales; packed heads win over those of 128.
  EXPECT_EQ(kernel("d128/causal/usedk/append3/blockscales"), "fwd_e4m3_d128_paged_128x128");
  for (const char* id : {"e4m3/b2/q200/k300/h8/d128/causal/usedk/paged64/blockscales",
                         "e4m3/b2/q200/k300/h8/d128/causal/usedk/batchidx/leftpad/blockscales",
                         "e4m3/b2/q200/k300/h8/d128/causal/usedk/leftpad/append1/blockscales",
                         "bf16/b2/q200/k300/h8/d128/causal/usedk/paged64/kv8/blockscales"})
    EXPECT_TRUE(is_decode(problem_of(id))) << id;
}

// Each row of a paged FP8 kernel has a scale, so that it packs heads as others do; for short
// prompts on a cache without a table as well, where it is faster than a kernel without a look-up.
TEST(CachePlan, PacksHeadsOfFp8OnACache) {
  const auto plan_with = [](const std::string& sizes, const std::string& rest) {
    return plan_of("e4m3/b64/" + sizes + rest);
  };
  const auto heads = [&](const std::string& sizes, const std::string& rest) {
    return plan_with(sizes, rest).pack.heads;
  };
  for (const char* scales : {"", "/onescale", "/headscales", "/blockscales"}) {
    const std::string cache = std::string("/usedk/paged128") + scales;
    EXPECT_EQ(heads("q32/k4096/h32x8/d128/causal", cache), 4) << scales;
    EXPECT_EQ(heads("q64/k4096/h32x8/d128/causal", cache), 2) << scales;
    EXPECT_EQ(heads("q24/k4096/h24x8/d128/causal", cache), 3) << "63 of 64 rows" << scales;
    EXPECT_EQ(heads("q32/k4096/h32x8/d64/causal", cache), 4) << scales;
    EXPECT_EQ(heads("q17/k4096/h32x8/d192x128/full", cache), 4) << scales;
    EXPECT_EQ(heads("q32/k4096/h32x8/d256/causal", cache + "/softcap20"), 4) << scales;
    EXPECT_EQ(heads("q32/k4096/h8/d128/causal", cache), 1) << "no heads to pack";
    EXPECT_EQ(heads("q4096/k4096/h32x8/d128/causal", cache), 1) << "long prompts";
  }
  for (const char* cache : {"/usedk", "/usedk/append32", "/packedq/usedk/append32/blockscales",
                            "/usedk/leftpad/headscales"}) {
    const PlannedForward packs = plan_with("q32/k4096/h128x32/d128/causal", cache);
    EXPECT_EQ(packs.kernel->id, "fwd_e4m3_d128_paged_128x128") << cache;
    EXPECT_EQ(packs.pack.heads, 4) << cache;
    EXPECT_EQ(packs.box_keys, 128) << cache;
    const PlannedForward plain = plan_with("q4096/k4096/h32x8/d128/causal", cache);
    EXPECT_FALSE(plain.kernel->config.paged) << cache;
    EXPECT_EQ(plain.pack.heads, 1) << cache;
  }
}

// Beside a cache FP8 packs none, nor in kernels whose warpgroups have one scale of q.
TEST(CachePlan, OnlyPagedKernelsPackHeadsOfFp8) {
  for (const char* sizes : {"q32/k4096/h32x8/d128/causal", "q32/k4096/h128x32/d128/causal",
                            "q32/k4096/h32x8/d64/full", "q20/k300/h8x1/d192/causal"})
    for (const char* keys : {"", "/packed", "/packedq/usedk", "/usedq/usedk", "/usedk/append20",
                             "/usedk/paged128", "/usedk/batchidx"}) {
      const std::string id = std::string("e4m3/b3/") + sizes + keys;
      const ForwardProblem problem = problem_of(id);
      const bool is_cache = problem.has_cache() || id.find("/packedq") != std::string::npos;
      int packed = 0;
      for (const ForwardChoice& choice : forward_choices(problem)) {
        const ForwardConfig& c = choice.kernel->config;
        EXPECT_EQ(choice.slot_rows, 0) << id;
        if (choice.pack.heads == 1) {
          EXPECT_EQ(c.paged, c.split || problem.cache.paged || problem.cache.has_batch_idx) << id;
          continue;
        }
        ++packed;
        EXPECT_TRUE(c.paged && c.row_scales()) << id << ", " << choice.kernel->id;
      }
      // A row of 192 dims has a kernel of its own width without a table.
      const bool narrow = problem.head_dim == 192 && !problem.cache.given();
      EXPECT_EQ(packed > 0, is_cache && !narrow) << id;
    }
}

// So that `flash3 verify --decode` runs them on a GPU.
TEST(CachePlan, TheCaseTablePacksHeadsInEveryFp8Kernel) {
  std::map<std::string, int> packed;
  int idle = 0, without_table = 0, blocks = 0;
  for (const cases::Case& c :
       cases::cache_case_table(cases::Level::kQuick, cases::dtypes_of(FLASH3_BACKEND_HOPPER))) {
    if (c.dtype != FLASH3_FLOAT8_E4M3) continue;
    const ForwardProblem problem = problem_of(to_id(c));
    if (is_decode(problem)) continue;
    const PlannedForward plan = plan_of(problem);
    if (plan.pack.heads == 1) continue;
    if (problem.q_scale.kind == ScaleKind::kBlock) ++packed[plan.kernel->id];
    idle += plan.pack.rows() < HeadPack::kRows;
    without_table += !problem.cache.paged && !problem.cache.has_batch_idx;
    blocks += problem.q_scale.kind == ScaleKind::kBlock && problem.seq_q > kScaleBlock;
  }
  EXPECT_EQ(packed.size(), 11u);
  for (const auto& [id, count] : packed) EXPECT_GE(count, 2) << id;
  EXPECT_GE(idle, 5);
  EXPECT_GE(without_table, 5);
  EXPECT_GE(blocks, 5);
}

// FP8 caches under queries of 16 bits, in pages and without; with so many heads that no split
// kernel takes the call.
TEST(CachePlan, WidensFp8KeysUnderOtherQueries) {
  const auto kernel = [](const std::string& rest) { return plan_of(rest).kernel->id; };
  EXPECT_EQ(kernel("bf16/b2/q200/k300/h64x16/d128/causal/usedk/paged16/kv8"),
            "fwd_bf16_d128_kv8_128x128");
  EXPECT_EQ(kernel("fp16/b1/q17/k9000/h128x1/d64/w9:4/usedk/batchidx/leftpad/kv8/headscales"),
            "fwd_fp16_d64_kv8_192x128");
  EXPECT_EQ(kernel("bf16/b2/q40/k300/h128/d160x80/full/usedk/kv8/blockscales"),
            "fwd_bf16_d192x128_kv8_128x64");
  EXPECT_EQ(kernel("bf16/b2/q200/k300/h64/d208/causal/usedk/append3/rotary/kv8"),
            "fwd_bf16_d256_kv8_128x64");
  const auto boxes = [](const std::string& cache) {
    return plan_of("bf16/b2/q200/k300/h8x2/d128/causal/usedk/kv8" + cache).box_keys;
  };
  EXPECT_EQ(boxes("/paged16"), 16);
  EXPECT_EQ(boxes("/paged256"), 64) << "half a tile";
  EXPECT_EQ(boxes(""), 64);
  EXPECT_EQ(plan_of("bf16/b2/q20/k300/h16x2/d128/causal/usedk/paged64/kv8").pack.heads, 4);
}

// A key tile of a kernel whose keys lie in pages has one scale.
TEST(CachePlan, PagedFp8TilesLieInOneBlockOfScales) {
  int kernels = 0;
  for (const ForwardKernel& kernel : forward_kernels()) {
    const ForwardConfig& c = kernel.config;
    if (!c.paged || !c.fp8()) continue;
    ++kernels;
    EXPECT_EQ(kScaleBlock % c.tile_n, 0) << kernel.id;
  }
  EXPECT_EQ(kernels, 17);
}

// Calls without a cache never run in a paged kernel, nor do other tiles than these; of few tiles
// all calls on a cache run in split kernels.
TEST(CachePlan, ChoicesAreOfOneKind) {
  for (const char* cache : {"", "/usedk", "/usedk/leftpad", "/usedk/paged16", "/usedk/batchidx"})
    for (const char* heads : {"h64x16", "h8x2"}) {
      const std::string id = std::string("fp16/b2/q200/k300/") + heads + "/d64/causal" + cache;
      const ForwardProblem problem = problem_of(id);
      const bool split = *cache && problem.heads_q == 8;
      const bool paged = split || problem.cache.paged || problem.cache.has_batch_idx;
      const auto choices = forward_choices(problem);
      EXPECT_FALSE(choices.empty()) << id;
      for (const ForwardChoice& choice : choices) {
        EXPECT_EQ(choice.kernel->config.paged, paged) << id << ", " << choice.kernel->id;
        EXPECT_EQ(choice.kernel->config.split, split) << id << ", " << choice.kernel->id;
        EXPECT_EQ(choice.slot_rows, 0) << id;
      }
    }
}

// The rows of a box: no page ends inside of one, and the swizzle of a tile goes on in the next.
TEST(CachePlan, BoxesLieInPages) {
  for (const ForwardKernel& kernel : forward_kernels()) {
    const ForwardConfig& c = kernel.config;
    if (!c.paged) continue;
    for (int page_size = 1; page_size <= 1200; ++page_size) {
      KvCache cache;
      cache.paged = true, cache.page_size = page_size;
      const int rows = cache_box_rows(cache, c.tile_n);
      cache.has_leftpad = true;
      EXPECT_EQ(cache_box_rows(cache, c.tile_n), 0);
      if (rows == 0) {
        EXPECT_LT(std::gcd(page_size, c.tile_n), 16) << page_size;
        continue;
      }
      EXPECT_EQ(page_size % rows, 0);
      EXPECT_EQ(c.tile_n % rows, 0);
      EXPECT_EQ(rows % 8, 0);
      EXPECT_LE(c.tile_n / rows, 32) << "a lane for each box";
    }
    KvCache cache;
    cache.has_batch_idx = cache.has_leftpad = true;
    EXPECT_EQ(cache_box_rows(cache, c.tile_n), c.tile_n);
  }
  // Tiles that no paged kernel has: rows that are no multiple of 8 have none.
  KvCache cache;
  cache.paged = true, cache.page_size = 36;
  EXPECT_EQ(cache_box_rows(cache, 144), 0);
  cache.page_size = 48;
  EXPECT_EQ(cache_box_rows(cache, 144), 48);

  const auto boxes = [](const std::string& cache_and_size) {
    return plan_of("bf16/b2/q200/k300/h8x2/d128/causal/usedk/" + cache_and_size).box_keys;
  };
  EXPECT_EQ(boxes("paged16"), 16);
  EXPECT_EQ(boxes("paged48"), 16);
  EXPECT_EQ(boxes("paged64"), 64);
  EXPECT_EQ(boxes("paged256"), 128);
  EXPECT_EQ(boxes("batchidx/leftpad"), 128);
}

// What runs a call follows from max_seqlen_q, heads and mask: not from the batch, nor from how many
// keys a sequence can have, nor from the device's load.
TEST(CachePlan, NeighboursDoNotMatter) {
  for (const char* id : {"bf16/b2/q512/k900/h32x4/d128/causal/packedq/usedk/paged16",
                         "bf16/b2/q40/k900/h8x1/d64/causal/usedk/paged64",
                         "fp16/b2/q200/k300/h28x4/d256/w100:/usedk/batchidx",
                         "bf16/b2/q300/k300/h8x2/d128/causal/packedq/usedk/append3",
                         "bf16/b2/q300/k300/h8x2/d128/causal/packedq/nomax/usedk/paged16"}) {
    const ForwardProblem problem = problem_of(id);
    const PlannedForward expected = plan_of(problem);
    for (const int64_t batch : {1, 7, 5000})
      for (const int64_t keys : {16, 4096, 1 << 20})
        for (const int multiprocessors : {78, 132}) {
          ForwardProblem other = problem;
          other.batch = batch;
          other.seq_k = other.sequences_k.max_length = keys;
          if (!other.sequences_q.bounded)  // as many as there are rows
            other.seq_q = other.sequences_q.rows = other.sequences_q.max_length = 300 * batch;
          PlannedForward plan;
          ASSERT_TRUE(cuda::sm90::plan(other, {0, multiprocessors}, &plan).ok()) << id;
          EXPECT_EQ(plan.kernel, expected.kernel) << id << ", " << batch << ", " << keys;
          EXPECT_EQ(plan.pack.heads, expected.pack.heads) << id << ", " << batch << ", " << keys;
        }
  }
}

// Sequences of few queries do not run here: prompts alone decide.
TEST(CachePlan, PacksHeadsOfShortPromptsAlone) {
  for (const char* queries : {"", "/packedq"}) {
    const auto heads = [&](const std::string& sizes) {
      return plan_of("bf16/b1/" + sizes + "/d128/causal" + queries + "/usedk/paged16").pack.heads;
    };
    EXPECT_EQ(heads("q20/k20/h32x4"), 4) << queries;
    EXPECT_EQ(heads("q512/k20/h32x4"), 1) << queries;
    EXPECT_EQ(heads("q2048/k20/h8x1"), 1) << queries;
  }
}

TEST(CachePlan, AppendsFirstAndRotatesQInTheWorkspace) {
  const std::string id = "bf16/b4/q200/k300/h8x2/d128/causal/packedq/usedk/paged64";
  const PlannedForward plain = plan_of(id), appends = plan_of(id + "/append5"),
                       rotates = plan_of(id + "/append5/rotary");
  EXPECT_FALSE(plain.append.launches());
  EXPECT_TRUE(appends.append.blocks > 0 && appends.append.q_blocks == 0);
  EXPECT_TRUE(rotates.append.blocks > 0 && rotates.append.q_blocks > 0);
  EXPECT_EQ(appends.workspace_bytes, plain.workspace_bytes);
  const ForwardProblem problem = problem_of(id + "/append5/rotary");
  const size_t q = size_t(problem.sequences_q.rows) * 8 * 128 * 2;
  EXPECT_EQ(rotates.workspace_bytes, plain.workspace_bytes + round_up(q, kWorkspaceAlignment));
  EXPECT_FALSE(rotates.q.needed || rotates.k.needed || rotates.v.needed);

  // What the device lists: the lengths of the cache, and what is added to them.
  const VarlenScheduleParams list = varlen_schedule_params(problem, rotates);
  EXPECT_TRUE(list.cache.paged);
  EXPECT_EQ(list.cache.page_size, 64);
  EXPECT_EQ(list.added.max_length, 5);
  EXPECT_EQ(varlen_schedule_params(problem_of(id), plain).added.max_length, 0);
}

// Rows of q that TMA cannot address are copied after the rotation; k and v never are.
TEST(CachePlan, CopiesNoCache) {
  for (const char* id : {"bf16/b2/q200/k300/h4x2/d128/causal/usedk/paged16",
                         "bf16/b2/q200/k300/h4x2/d72x40/causal/usedk/batchidx/append1/rotary"}) {
    const PlannedForward plan = plan_of(id);
    EXPECT_FALSE(plan.k.needed || plan.v.needed) << id;
  }
  for (const char* id : {"bf16/b2/q200/k300/h4x2/d128/causal/odd/usedk/paged16",
                         "bf16/b2/q200/k300/h4x2/d128/causal/padded/usedk/paged16",
                         "bf16/b2/q200/k300/h4x2/d33/causal/usedk/append1"})
    EXPECT_TRUE(is_decode(problem_of(id))) << id;
}

// A rotation brings q into the workspace, also where nothing is appended and there is no cache.
TEST(CachePlan, RotatedQueriesLieInTheWorkspace) {
  for (const char* const id :
       {"bf16/b3/q200/k300/h8x2/d128/causal/usedk/paged64", "fp16/b3/q200/k300/h4/d80/full"}) {
    const ForwardProblem plain = problem_of(id);
    EXPECT_FALSE(plan_of(plain).append.launches()) << id;
    const ForwardProblem problem = problem_of(std::string(id) + "/rotate");
    const PlannedForward plan = plan_of(problem);
    EXPECT_EQ(plan.append.blocks, 0) << id;
    EXPECT_GT(plan.append.q_blocks, 0) << id;
    const int64_t bytes = 3 * 200 * problem.heads_q * problem.head_dim * 2;
    EXPECT_GE(plan.workspace_bytes, plan_of(plain).workspace_bytes + size_t(bytes)) << id;
    const TensorView q = transformed_q(problem, plan.append);
    EXPECT_EQ(q.stride_head, problem.head_dim) << id;
    EXPECT_EQ(q.stride_batch, 200 * problem.heads_q * problem.head_dim) << id;
  }
}

TEST(CachePlan, IsExplained) {
  const auto explained = [](const std::string& id) {
    return cuda::sm90::explained(problem_of(id));
  };
  const std::string pages =
      explained("bf16/b2/q200/k300/h64x16/d128/causal/packedq/usedk/paged64/append1/rotary");
  for (const char* line :
       {"kernel: fwd_bf16_d128_paged_128x128",
        "first: a kernel of its own: the new keys and values go into the cache, q with its "
        "embedding goes into the workspace",
        "k and v: TMA, in boxes of 64 rows; a warp looks each up in page_table before it loads"})
    EXPECT_NE(pages.find(line), std::string::npos) << line << "\n" << pages;
  const std::string rotated =
      explained("bf16/b2/q200/k300/h8x2/d128/causal/packedq/usedk/paged64/append1/rotary/rotate");
  EXPECT_NE(rotated.find("q with its embedding and rotation goes into the workspace"),
            std::string::npos)
      << rotated;
  const std::string indices = explained("bf16/b2/q200/k300/h64x16/d128/causal/usedk/batchidx");
  EXPECT_NE(indices.find("in boxes of 128 rows; a warp looks each up in cache_batch_idx"),
            std::string::npos)
      << indices;
  const std::string own = explained("bf16/b2/q200/k300/h64x16/d128/causal/usedk/append1");
  EXPECT_EQ(own.find("k and v:"), std::string::npos) << own;
}

}  // namespace
}  // namespace flash3::cuda::sm90
