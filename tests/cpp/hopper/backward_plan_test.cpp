// SPDX-License-Identifier: Apache-2.0
// What the Hopper backend plans for a backward: which kernel, how much workspace, and what it
// refuses. Needs no GPU: a plan launches nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "cases/table.hpp"
#include "core/arithmetic.hpp"
#include "core/message.hpp"
#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/backward/tile_table.hpp"
#include "cuda/sm90/host/kernel_kind.hpp"
#include "planned_steps.hpp"

namespace flash3::cuda::sm90 {
namespace {

std::string refusal(const BackwardProblem& problem) {
  PlannedBackward plan;
  const Status status = cuda::sm90::plan(problem, kDevice, &plan);
  EXPECT_EQ(status.code(), FLASH3_UNSUPPORTED);
  return status.message();
}

void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' in: " << text;
}

TEST(BackwardKernels, HaveNamesOfTheirOwnThatTellTheirRow) {
  std::set<std::string> ids;
  std::set<const void*> functions;
  for (const BackwardKernel& kernel : backward_kernels()) {
    EXPECT_TRUE(ids.insert(kernel.id).second) << kernel.id;
    EXPECT_TRUE(functions.insert(kernel.function).second) << kernel.id;
    const BackwardConfig& c = kernel.config;
    expect_part(kernel.id, kernel.element == Element::kFloat16 ? "bwd_fp16_d" : "bwd_bf16_d");
    expect_part(kernel.id, message("_d", c.head_dim));
    const std::string kind = c.score == ScoreKind::kSoftcap ? "_softcap"
                             : c.terms != BiasTerms::kNone  ? suffix_of(c.terms)
                             : c.lists                      ? "_lists"
                             : c.band                       ? "_band"
                                                            : "_full";
    expect_part(kernel.id, kind + "_");
    EXPECT_EQ(kernel.id.find("_lists_") != std::string::npos, c.lists) << kernel.id;
    expect_part(kernel.id, message("_", c.tile_m, "x", c.tile_n));
  }
  EXPECT_EQ(std::ssize(ids), 2 * std::ssize(kBackwardConfigs)) << "fp16 and bf16";
}

TEST(BackwardPlan, TakesTheNarrowestKernelThatHoldsTheHeadDims) {
  const auto cost = [](const BackwardConfig& c) { return c.head_dim + c.head_dim_v; };
  for (const char* mask : {"full", "causal"})
    for (int dim = 1; dim <= kMaxHeadDim; dim += 3)
      for (int dim_v = 1; dim_v <= kMaxHeadDim; dim_v += 3) {
        const BackwardProblem problem =
            backward_problem_of(message("bf16/b1/q300/k300/h2/d", dim, "x", dim_v, "/", mask));
        const BackwardConfig* narrowest = nullptr;
        for (const BackwardConfig& c : kBackwardConfigs)
          if (c.score == ScoreKind::kPlain && c.terms == BiasTerms::kNone && !c.lists &&
              c.head_dim >= dim && c.head_dim_v >= dim_v && c.band == (mask[0] == 'c') &&
              (!narrowest || cost(c) < cost(*narrowest)))
            narrowest = &c;
        if (!narrowest) {
          expect_part(refusal(problem), message("head_dim = ", dim, ", head_dim_v = ", dim_v));
          continue;
        }
        const BackwardConfig& taken = plan_of(problem).kernel->config;
        ASSERT_EQ(taken.head_dim, narrowest->head_dim) << dim << "x" << dim_v;
        ASSERT_EQ(taken.head_dim_v, narrowest->head_dim_v) << dim << "x" << dim_v;
        ASSERT_EQ(taken.band, narrowest->band);
      }
}

TEST(BackwardPlan, TakesTheKernelOfTheDtypeAndTheMask) {
  for (const char* dtype : {"fp16", "bf16"}) {
    const auto id = [&](const char* rest) {
      return plan_of(std::string(dtype) + "/b1/" + rest).kernel->id;
    };
    const std::string begin = std::string("bwd_") + dtype + "_d128_";
    EXPECT_EQ(id("q300/k300/h2/d128/full").find(begin + "full_"), 0u);
    EXPECT_EQ(id("q300/k300/h2/d128/causal").find(begin + "band_"), 0u);
    EXPECT_EQ(id("q300/k300/h2/d128/w300:300").find(begin + "full_"), 0u) << "hides no pair";
    EXPECT_EQ(id("q1/k300/h2/d128/causal").find(begin + "full_"), 0u) << "hides no pair";
    EXPECT_EQ(id("q300/k300/h2/d128/w300:298").find(begin + "band_"), 0u) << "hides one pair";
  }
}

TEST(BackwardPlan, TakesTallTilesForManyQueries) {
  const auto tile = [](const char* id) { return plan_of(id).kernel->config.tile_m; };
  EXPECT_EQ(tile("bf16/b1/q8191/k9000/h2/d128/causal"), 64);
  EXPECT_EQ(tile("bf16/b1/q8192/k9000/h2/d128/causal"), 80);
  EXPECT_EQ(tile("bf16/b1/q1023/k9000/h2/d128/full"), 64);
  EXPECT_EQ(tile("bf16/b1/q1024/k9000/h2/d128/full"), 80);
}

// Where few blocks add to a query tile, and not all of a head begin with the same one.
TEST(BackwardPlan, BeginsSumsAsZerosButUnderANarrowBand) {
  const auto zeroed = [](const char* id) { return plan_of(id).zeroed; };
  EXPECT_TRUE(zeroed("bf16/b1/q512/k512/h2/d64/full"));
  for (const char* dim : {"64", "128"}) {
    const auto id = [&](const char* begin, const char* mask) {
      return message("bf16/b1/", begin, "/h2/d", dim, "/", mask);
    };
    EXPECT_FALSE(zeroed(id("q2048/k2048", "causal").c_str()));
    EXPECT_TRUE(zeroed(id("q2048/k2049", "causal").c_str()));
    EXPECT_FALSE(zeroed(id("q16384/k16384", "causal+w127:").c_str()));
    EXPECT_FALSE(zeroed(id("q16384/k16384", "causal/chunk2048").c_str()));
    EXPECT_TRUE(zeroed(id("q16384/k16384", "w4096:0").c_str()));
  }
  EXPECT_TRUE(zeroed("bf16/b1/q512/k512/h2/d256/causal")) << "wide";
}

TEST(BackwardPlan, RefusesFloat32) {
  expect_part(refusal(backward_problem_of("fp32/b1/q64/k64/h1/d64/full")), "q.dtype = float32");
}

// Before anything is multiplied in 32 bits.
TEST(BackwardPlan, RefusesWhatItCannotCount) {
  constexpr int64_t kTooMany = int64_t{1} << 30;
  const BackwardProblem fits = backward_problem_of("bf16/b1/q64/k64/h1/d64/full");
  BackwardProblem p = fits;
  p.seq_q = kTooMany;
  expect_part(refusal(p), "seq_q = 1073741824");
  p = fits, p.seq_k = kTooMany;
  expect_part(refusal(p), "seq_k = 1073741824");
  p = fits, p.heads_q = kTooMany;
  expect_part(refusal(p), "heads_q = 1073741824");
  const BackwardConfig& c = plan_of(fits).kernel->config;
  p = fits, p.batch = 1 << 15, p.heads_k = p.heads_q = 1 << 14;
  p.seq_q = 0, p.seq_k = 2 * c.tile_n;
  expect_part(refusal(p), "1073741824 tiles of keys");
  p = fits, p.batch = 1 << 15, p.heads_q = 1 << 15, p.seq_q = c.tile_m;
  expect_part(refusal(p),
              message((int64_t{1} << 30) * (c.tile_m / c.dq_queries() * c.dq_columns() / 64),
                      " blocks of dq"));
}

// The inputs' copies, LSE, delta and the sums of dQ, counters of the blocks that add to them where
// that is counted, deterministic or persistent also a ticket; each part on a multiple of 256 bytes,
// and none over another.
TEST(BackwardPlan, WorkspaceHoldsRowsAndCopies) {
  for (const char* id :
       {"bf16/b2/q300/k500/h4x2/d128/causal", "fp16/b1/q1/k1/h1/d64/full",
        "bf16/b3/q129/k77/h3/d100x40/w10:5", "bf16/b2/q200/k300/h4/d64/full/odd",
        "fp16/b1/q65/k65/h2/d72/causal/padded", "bf16/b2/q300/k500/h4x2/d128/causal/deterministic",
        "bf16/b2/q200/k300/h4/d200/causal", "fp16/b2/q200/k300/h4/d200/full/odd/deterministic"}) {
    const BackwardProblem problem = backward_problem_of(id);
    const PlannedBackward plan = plan_of(problem);
    const BackwardConfig& c = plan.kernel->config;
    const int padded_q = plan.query_tiles.tiles * c.tile_m;
    const size_t rows = size_t(problem.batch * problem.heads_q * padded_q);
    EXPECT_GE(padded_q, problem.seq_q) << id;
    EXPECT_LT(padded_q - c.tile_m, problem.seq_q) << id;

    std::map<size_t, size_t> parts = {{plan.lse_offset, 4 * rows},
                                      {plan.delta_offset, 4 * rows},
                                      {plan.dq_offset, 4 * rows * size_t(c.dq_columns())}};
    size_t count = 3;
    EXPECT_EQ(plan.counted, problem.deterministic || !plan.zeroed) << id;
    if (plan.counted) {
      parts[plan.semaphores_offset] = rows / size_t(c.tile_m) * kDqParts * sizeof(int);
      ++count;
    }
    if (problem.deterministic || c.persistent) {
      parts[plan.ticket_offset] = sizeof(int);
      ++count;
    }
    ASSERT_EQ(parts.size(), count) << id;
    for (const auto& [copy, view] :
         {std::pair{&plan.q, &problem.q}, std::pair{&plan.k, &problem.k},
          std::pair{&plan.v, &problem.v}, std::pair{&plan.dout, &problem.dout}}) {
      if (!copy->needed) continue;
      EXPECT_GE(copy->row, view->dim) << id;
      parts[copy->offset] = size_t(view->batch * view->seq * view->heads * copy->row) * 2;
      EXPECT_EQ(parts.size(), ++count) << id;
    }
    size_t end = 0;
    for (const auto& [offset, bytes] : parts) {
      EXPECT_EQ(offset, end) << id << ": parts overlap, or leave a gap";
      end = round_up(offset + bytes, kWorkspaceAlignment);
    }
    EXPECT_EQ(plan.workspace_bytes, end) << id;
  }
}

TEST(BackwardPlan, WorkspaceIsLinearInTheLength) {
  const auto bytes = [](const char* length) {
    const std::string n = length;
    return plan_of("bf16/b1/q" + n + "/k" + n + "/h16/d128/causal").workspace_bytes;
  };
  EXPECT_EQ(bytes("81920") - bytes("40960"), bytes("122880") - bytes("81920"));
  EXPECT_LT(bytes("16384"), size_t{16384} * 16384 * 16 * 2 / 50) << "far below 16-bit scores";
}

TEST(BackwardPlan, StoresByTmaWhatEndsOn16Bytes) {
  const auto by_tma = [](const BackwardProblem& problem) {
    const PlannedBackward plan = plan_of(problem);
    return std::pair(plan.dk_by_tma, plan.dv_by_tma);
  };
  EXPECT_EQ(by_tma(backward_problem_of("bf16/b2/q64/k64/h2/d64/full")), std::pair(true, true));
  EXPECT_EQ(by_tma(backward_problem_of("bf16/b2/q64/k64/h2/d64/full/padded")),
            std::pair(true, true));
  EXPECT_EQ(by_tma(backward_problem_of("bf16/b2/q64/k64/h2/d64/full/odd")),
            std::pair(false, false));
  EXPECT_EQ(by_tma(backward_problem_of("bf16/b2/q64/k64/h2/d64x60/full")), std::pair(true, false));
  // Aligned rows of 60 elements: the last piece of 16 bytes holds four that are not dv's.
  BackwardProblem problem = backward_problem_of("bf16/b1/q64/k64/h1/d64x60/full");
  problem.dv.stride_seq = 64;
  EXPECT_EQ(by_tma(problem), std::pair(true, false));
  problem = backward_problem_of("bf16/b2/q64/k64/h2/d64/full");
  problem.gradient_dtype = FLASH3_FLOAT32;
  EXPECT_EQ(by_tma(problem), std::pair(false, false));
}

TEST(BackwardPlan, PersistentBlocksAreNoMoreThanMultiprocessors) {
  const auto blocks = [](const char* id) {
    const PlannedBackward plan = plan_of(id);
    EXPECT_EQ(plan.has_ticket(), plan.kernel->config.persistent || plan.deterministic) << id;
    return std::pair(plan.grid, plan.key_tiles);
  };
  const int all = kDevice.multiprocessors;
  EXPECT_EQ(blocks("bf16/b2/q1000/k1000/h16/d64/full"), std::pair(all, 2 * 16 * 8));
  EXPECT_EQ(blocks("fp16/b2/q1000/k1000/h16/d64/causal/deterministic"), std::pair(all, 2 * 16 * 8));
  EXPECT_EQ(blocks("bf16/b1/q1000/k1000/h16/d64/causal"), std::pair(16 * 8, 16 * 8));
  EXPECT_EQ(blocks("bf16/b2/q1000/k1000/h16/d256/full"), std::pair(2 * 16 * 16, 2 * 16 * 16));
  EXPECT_EQ(blocks("bf16/b9/q0/k1000/h16/d64/full"), std::pair(9 * 16 * 8, 9 * 16 * 8))
      << "no ticket without queries";
}

TEST(BackwardPlan, EmptyCallsHaveNoBlocks) {
  EXPECT_EQ(plan_of("bf16/b0/q64/k64/h2/d64/full").grid, 0);
  EXPECT_EQ(plan_of("bf16/b0/q64/k64/h2/d64/full").workspace_bytes, 0u);
  EXPECT_EQ(plan_of("bf16/b1/q64/k0/h2/d64/full").grid, 0);
  EXPECT_GT(plan_of("bf16/b1/q0/k64/h2/d64/full").grid, 0) << "dk and dv are zeros to write";
  EXPECT_EQ(plan_of("bf16/b1/q0/k64/h2/d64/full").workspace_bytes, 0u);
}

// So that `flash3 verify --backward` on a GPU runs each of them, and stores both ways.
TEST(BackwardPlan, TheCaseTableReachesEveryKernel) {
  std::map<std::string, int> cases_of;
  std::set<bool> by_tma;
  const auto dtypes = cases::dtypes_of(FLASH3_BACKEND_HOPPER);
  auto table = cases::backward_case_table(cases::Level::kQuick, dtypes);
  for (const cases::Case& c : cases::mask_case_table(cases::Level::kQuick, dtypes, true))
    table.push_back(c);
  for (const std::string dtype : {"fp16", "bf16"})
    for (const std::string dim : {"d64", "d128", "d256"})
      for (const std::string mask : {"causal", "full/mask:documents"})
        for (const std::string biases : {"alibi_slopes=heads", "bias_table=hd", "bias=hqk",
                                         "dropout0.1", "alibi_slopes=heads/bias_table=hd"})
          table.push_back(cases::parsed(dtype + "/b1/q640/k640/h2/" + dim + "/" + mask + "/" +
                                        biases + "/bwd"));
  for (const cases::Case& c : table) {
    const auto params = cases::make_backward_question(c);
    BackwardProblem problem;
    PlannedBackward plan;
    ASSERT_TRUE(make_backward_problem(&params, Pointers::kOptional, &problem).ok()) << to_id(c);
    if (!cuda::sm90::plan(problem, kDevice, &plan).ok()) continue;
    ++cases_of[plan.kernel->id];
    by_tma.insert(plan.dk_by_tma);
  }
  for (const BackwardKernel& kernel : backward_kernels())
    EXPECT_GE(cases_of[kernel.id], 1) << kernel.id;
  EXPECT_EQ(by_tma.size(), 2u);
}

// A bias and its gradient of 16 bits: [batch, heads, rows, keys], contiguous.
BackwardProblem biased_problem(const std::string& id, int64_t heads) {
  BackwardProblem problem = backward_problem_of(id);
  BiasView& bias = problem.bias;
  bias.given = true;
  bias.dtype = FLASH3_BFLOAT16;
  bias.batch = problem.batch, bias.heads = heads;
  bias.rows = problem.seq_q, bias.keys = problem.seq_k;
  bias.stride_key = 1, bias.stride_row = bias.keys;
  bias.stride_head = heads == 1 ? 0 : bias.rows * bias.keys;
  bias.stride_batch = heads * bias.rows * bias.keys;
  problem.dbias = bias;
  problem.dbias.sums_heads = heads == 1 && problem.heads_q > 1;
  return problem;
}

TEST(BackwardPlan, StoresTheGradientOfABiasOfEachPairAsItStands) {
  const auto planned = [](const BackwardProblem& problem) {
    PlannedBackward plan;
    EXPECT_TRUE(cuda::sm90::plan(problem, kDevice, &plan).ok());
    EXPECT_NE(plan.stores_dbias, plan.bias.pairs) << "one of the two writes dbias";
    return plan.stores_dbias;
  };
  const std::string id = "bf16/b2/q300/k320/h4/d64/full";
  EXPECT_TRUE(planned(biased_problem(id, 4)));
  EXPECT_TRUE(planned(biased_problem("bf16/b2/q300/k320/h4/d128/causal", 4)));
  EXPECT_FALSE(planned(biased_problem(id, 1))) << "a sum over heads";
  EXPECT_FALSE(planned(biased_problem("bf16/b2/q300/k321/h4/d64/full", 4))) << "rows of odd sizes";
  EXPECT_FALSE(planned(biased_problem("bf16/b2/q300/k320/h4/d256/full", 4))) << "no room for tiles";
  EXPECT_FALSE(planned(biased_problem("fp16/b2/q300/k320/h4/d64/full", 4))) << "dS is of float16";
  BackwardProblem with_float32 = biased_problem(id, 4), capped = with_float32, dropped = capped;
  BackwardProblem of_no_queries = biased_problem("bf16/b2/q0/k320/h4/d64/full", 4);
  of_no_queries.bias.rows = of_no_queries.dbias.rows = 1;
  EXPECT_FALSE(planned(of_no_queries)) << "no tile of dS has its row";
  with_float32.dbias.dtype = FLASH3_FLOAT32;
  EXPECT_FALSE(planned(with_float32));
  capped.softcap = 30.f;
  EXPECT_FALSE(planned(capped)) << "dS is the cap's, too";
  dropped.dropout.threshold = 1000;
  EXPECT_TRUE(planned(dropped));
  EXPECT_FALSE(planned(biased_problem("bf16/b2/q300/k320/h4/d64/full/usedq", 4))) << "ragged";
}

}  // namespace
}  // namespace flash3::cuda::sm90
