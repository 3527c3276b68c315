// SPDX-License-Identifier: Apache-2.0
// Attention under masks as data: on every instruction set against the oracle, and what the oracles
// and yardsticks make of a mask from its pairs.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "../parsed.hpp"
#include "cases/backward_tensors.hpp"
#include "cases/mask.hpp"
#include "cases/table.hpp"
#include "core/mask_problem.hpp"
#include "harness.hpp"
#include "oracle/attention_ref.hpp"
#include "oracle/yardsticks/yardsticks.hpp"

namespace flash3::test {
namespace {

MaskMemory memory_of(const flash3_mask& m) {
  return MaskMemory::of(
      {m.batch, m.heads, m.seq_q, m.seq_k, m.ranges, m.blocks, m.partial_blocks, m.granularity},
      m.data);
}

// A backward of a mask as data.
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
  const MaskPairs* pairs() const { return tensors.extra.mask_pairs(); }
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

// Calls what(case's id, threads) for each dtype: each id on one thread and on several, in turns.
template <class What>
void for_each_case(const What& what) {
  size_t calls = 0;
  for (const char* dtype : {"fp32", "bf16", "fp16"})
    for (const std::string& rest : attention_ids()) {
      const int threads = calls++ % 2 == 0 ? 1 : 5;
      SCOPED_TRACE(threads);
      what(dtype + rest, threads);
    }
}

TEST(DataMask, ForwardMatchesTheOracle) {
  ASSERT_EQ(attention_ids().size() % 2, 1u);  // so that the turns change from dtype to dtype
  for_each_case([](const std::string& id, int threads) { check_case(id, threads); });
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
  for_each_case([](const std::string& id, int threads) {
    MaskedBackward backward(cases::parsed(id + "/bwd/dlse"));
    const ReferenceBackward ref =
        attention_backward_ref(backward.problem, 1, backward.tensors.extra.mask_pairs());
    for (const TestTarget& target : backward_targets(backward.problem.dtype)) {
      SCOPED_TRACE(to_id(backward.c) + " on " + target.name());
      backward.run(target, threads);
      EXPECT_EQ(check_gradients(backward.c, backward.tensors.views(), ref).failure(), "");
    }
  });
}

// Not one row sees a key: out and gradients are 0, and lse is −∞.
TEST(DataMask, RowsThatSeeNothing) {
  cases::Case c = cases::parsed("fp32/b1/q256/k256/h1/d64/full/mask:dense/bwd/dlse");
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
  const cases::Case c = cases::parsed("fp32/b1/q300/k400/h2/d64/full/mask:dense.h");
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
      const cases::Case c = cases::parsed(dtype + std::string(rest));
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
  const cases::Case c = cases::parsed("fp32/b1/q300/k300/h2/d64/full/mask:dense.h/bwd");
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

// ---- the oracles ----

// The yardstick in float32.
TEST(MaskOracle, NaiveBackwardIsNear) {
  for (const char* rest : {"/b2/q129/k257/h4x2/d64/full/mask:ranges1.h",
                           "/b2/q127/k300/h6x2/d72/w100:20/mask:ranges8.b.h/sink",
                           "/b1/q300/k300/h3x1/d64/causal/mask:documents/softcap20/scale0.5",
                           "/b2/q260/k390/h4x2/d64x40/full/mask:dense.b.h",
                           "/b2/q200/k500/h4x1/d40/causal+w100:/mask:blocks64x64.b.h",
                           "/b2/q140/k140/h2/d64/causal/chunk50/mask:band"}) {
    MaskedBackward call(cases::parsed(std::string("fp32") + rest + "/bwd/dlse"));
    for (auto* t : {&call.tensors.dq, &call.tensors.dk, &call.tensors.dv}) t->fill_pattern();
    attention_backward_naive(call.problem, 1, call.pairs());
    const ReferenceBackward ref = attention_backward_ref(call.problem, 1, call.pairs());
    EXPECT_EQ(check_gradients(call.c, call.tensors.views(), ref).failure(), "") << rest;
  }
}

// What a query does not see does not touch it, not even a NaN times zero.
TEST(MaskOracle, NaiveBackwardLeavesOutWhatIsHidden) {
  MaskedBackward call(cases::parsed("fp32/b1/q200/k300/h1/d8/full/mask:dense/bwd"));
  const BackwardProblem& p = call.problem;
  constexpr int64_t kKey = 70;
  std::fill_n(static_cast<float*>(p.k.data) + kKey * p.k.stride_seq, 8,
              std::numeric_limits<float>::quiet_NaN());
  attention_backward_naive(p, 1, call.pairs());
  int64_t hidden = 0;
  for (int64_t i = 0; i < p.seq_q; ++i) {
    const bool sees = call.pairs()->of(0, 0)[i * p.seq_k + kKey] != 0;
    hidden += !sees;
    EXPECT_EQ(std::isnan(static_cast<const float*>(p.dq.data)[i * p.dq.stride_seq]), sees) << i;
  }
  EXPECT_GT(hidden, 0);
  EXPECT_LT(hidden, p.seq_q);
}

// Without its pairs a mask would count as its band alone.
TEST(MaskOracle, AMaskNeedsItsPairs) {
  MaskedBackward call(cases::parsed("fp32/b1/q9/k12/h2/d16/full/mask:dense/bwd"));
  const auto views = call.tensors.views();
  const ForwardProblem forward = to_problem(
      cases::make_params(call.c, views.q, views.k, views.v, views.out, views.lse, views.extra));
  EXPECT_THROW(attention_ref(forward), std::invalid_argument);
  EXPECT_THROW(attention_naive(forward), std::invalid_argument);
  EXPECT_THROW(attention_backward_ref(call.problem), std::invalid_argument);
  EXPECT_THROW(attention_backward_naive(call.problem), std::invalid_argument);
}

}  // namespace
}  // namespace flash3::test
