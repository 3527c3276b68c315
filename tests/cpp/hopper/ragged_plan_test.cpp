// SPDX-License-Identifier: Apache-2.0
// What the Hopper backend plans for ragged batches, and the walk of the kernels over them, emulated
// from lengths that lie on the host. Needs no GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "cases/cache_tensors.hpp"
#include "cases/tensors.hpp"
#include "cuda/sm90/host/kernel_kind.hpp"
#include "device/planned_forward.hpp"
#include "planned_steps.hpp"

namespace flash3::cuda::sm90 {
namespace {

// A packed call with these lengths; the id's q and k are max_seqlen.
class Batch {
 public:
  Batch(const std::string& id, std::vector<int> q, std::vector<int> k) {
    std::string error;
    const auto c = cases::parse_id(id, &error);
    EXPECT_TRUE(c) << error;
    const auto params = cases::make_question(*c);
    const Status status = make_forward_problem(&params, Pointers::kOptional, &problem);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(problem.batch, std::ssize(q)) << id;
    for (auto* lengths : {&q, &k}) {
      std::vector<int>& cu = lengths == &q ? cu_q_ : cu_k_;
      cu.assign(1, 0);
      for (const int n : *lengths) cu.push_back(cu.back() + n);
    }
    problem.sequences_q.cu = cu_q_.data();
    problem.sequences_k.cu = cu_k_.data();
  }

  // As varlen/varlen_schedule.cu lists it, but in order.
  ListedSequence rows(int b, const VarlenScheduleParams& list) const {
    const SeqInfo s = problem.sequence(b);
    ListedSequence rows{};
    rows.batch = b;
    rows.q_first = int(s.q.first), rows.q_length = int(s.q.length);
    rows.k_first = int(s.k.first), rows.k_length = int(s.k.length);
    rows.tiles = (rows.q_length + list.tile_rows - 1) / list.tile_rows;
    rows.groups_at_a_time = std::min(3, list.groups);
    return rows;
  }

  ForwardProblem problem;

 private:
  std::vector<int> cu_q_, cu_k_;
};

// How often each query of each head has come, and whether its keys were there.
class Coverage {
 public:
  explicit Coverage(const Batch& batch)
      : batch_(batch), tokens_(batch.problem.sequences_q.cu[batch.problem.batch]) {
    seen_.resize(size_t(tokens_ * batch.problem.heads_q));
  }

  void count(const ListedSequence& s, int64_t head, int query, int64_t first_key, int64_t end_key) {
    ASSERT_LT(head, batch_.problem.heads_q);
    ++seen_[size_t(head * tokens_ + s.q_first + query)];
    const SeqInfo info = batch_.problem.sequence(s.batch);
    const Range keys = batch_.problem.mask(info).keys({query, query + 1}, info.k.length);
    if (keys.empty()) return;
    EXPECT_LE(first_key, keys.begin) << "sequence " << s.batch << ", query " << query;
    EXPECT_GE(end_key, keys.end) << "sequence " << s.batch << ", query " << query;
  }

  void expect_all_once(const std::string& what) const {
    EXPECT_EQ(std::count(seen_.begin(), seen_.end(), 1), std::ssize(seen_)) << what;
  }

 private:
  const Batch& batch_;
  int64_t tokens_;
  std::vector<int> seen_;
};

void walk_sequences(const Batch& batch, const ForwardPlan& plan, Coverage* coverage) {
  const TileSchedule schedule = tile_schedule(batch.problem, plan);
  const VarlenScheduleParams list = varlen_schedule_params(batch.problem, plan);
  const ForwardConfig& c = plan.kernel->config;
  int tiles = 0;
  for (int b = 0; b < list.batch; ++b) {
    const ListedSequence s = batch.rows(b, list);
    for (int index = 0; index < s.tiles * list.groups; ++index, ++tiles) {
      const WorkTile work = work_tile_at(schedule, s, c.tile_n, c.band, index);
      ASSERT_TRUE(work.valid);
      for (int row = 0; row < c.tile_m(); ++row) {
        const int in_warpgroup = row % HeadPack::kRows;
        const int query = work.query + row / HeadPack::kRows * plan.pack.queries +
                          plan.pack.query_of(in_warpgroup);
        if (in_warpgroup >= plan.pack.rows() || query >= s.q_length) continue;
        coverage->count(s, work.head_group * plan.pack.heads + plan.pack.head_of(in_warpgroup),
                        query, work.key_tile_begin * c.tile_n, work.key_tile_end * c.tile_n);
      }
    }
  }
  EXPECT_LE(tiles, plan.tiles);
}

void walk_slots(const Batch& batch, const ForwardPlan& plan, Coverage* coverage) {
  const TileSchedule schedule = tile_schedule(batch.problem, plan);
  const VarlenScheduleParams list = varlen_schedule_params(batch.problem, plan);
  const ForwardConfig& c = plan.kernel->config;
  for (int index = 0; index < plan.tiles; ++index) {
    const WorkTile work = work_tile_at(schedule, c.tile_n, c.band, index);
    ASSERT_TRUE(work.valid);
    // The keys of a work tile are those of its own slots.
    ASSERT_EQ(work.key_tile_begin * c.tile_n, work.query);
    ASSERT_LE(work.key_tile_end * c.tile_n, work.query + c.tile_m());
    for (int row = 0; row < c.tile_m(); ++row) {
      const int b = (work.query + row) / plan.slot_rows, query = row % plan.slot_rows;
      if (b >= list.batch) continue;
      const ListedSequence s = batch.rows(b, list);
      if (query >= s.q_length) continue;
      ASSERT_LT(b * plan.slot_rows, work.key_tile_end * c.tile_n);
      coverage->count(s, work.head_group, query, 0, plan.slot_rows);
    }
  }
}

TEST(RaggedSchedule, ReachesEveryQueryOfEverySequenceOnce) {
  const std::vector<int> q = {0, 1, 300, 64, 129, 17}, k = {5, 300, 299, 0, 130, 40};
  for (const char* id :
       {"bf16/b6/q300/k300/h6x2/d64/full/packed", "bf16/b6/q300/k300/h6x2/d128/causal/packed",
        "bf16/b6/q300/k300/h6x2/d256/w40:7/packed",
        "bf16/b6/q300/k300/h6x2/d192x128/causal/chunk50/packed"}) {
    const Batch batch(id, q, k);
    for (const ForwardChoice& choice : forward_choices(batch.problem)) {
      PlannedForward plan;
      ASSERT_TRUE(plan_choice(batch.problem, kDevice, choice, &plan).ok());
      EXPECT_EQ(plan.slot_rows, 0) << "of 300 tokens";
      Coverage coverage(batch);
      walk_sequences(batch, plan, &coverage);
      coverage.expect_all_once(id);
    }
  }
}

TEST(RaggedSchedule, ShortSequencesShareTiles) {
  const std::vector<int> q = {0, 1, 16, 9, 11, 3, 7, 2, 16}, k = {5, 16, 3, 0, 11, 12, 7, 1, 16};
  for (const char* id :
       {"bf16/b9/q16/k16/h6x2/d64/full/packed", "bf16/b9/q16/k16/h6x2/d128/causal/packed",
        "bf16/b9/q16/k16/h6x2/d256/w:3/packed", "bf16/b9/q16/k16/h6x2/d96/causal/chunk16/packed",
        // These may hide keys from all queries, which then must not share a tile with others'.
        "bf16/b9/q16/k16/h6x2/d256/w5:3/packed", "bf16/b9/q16/k16/h6x2/d96/causal/chunk4/packed",
        "bf16/b9/q16/k16/h6x2/d192x128/full/packed"}) {
    const Batch batch(id, q, k);
    int with_slots = 0;
    for (const ForwardChoice& choice : forward_choices(batch.problem)) {
      PlannedForward plan;
      ASSERT_TRUE(plan_choice(batch.problem, kDevice, choice, &plan).ok());
      Coverage coverage(batch);
      if (plan.slot_rows > 0) {
        ++with_slots;
        EXPECT_EQ(plan.slot_rows, 16);
        walk_slots(batch, plan, &coverage);
      } else {
        walk_sequences(batch, plan, &coverage);
      }
      coverage.expect_all_once(id);
    }
    EXPECT_EQ(with_slots, may_hide_keys(batch.problem) ? 0 : 1) << id;
  }
}

PlannedForward plan_of(const std::string& id) {
  std::string error;
  const auto c = cases::parse_id(id, &error);
  EXPECT_TRUE(c) << error;
  const auto params = cases::make_question(*c);
  ForwardProblem problem;
  EXPECT_TRUE(make_forward_problem(&params, Pointers::kOptional, &problem).ok());
  PlannedForward plan;
  const Status status = cuda::sm90::plan(problem, kDevice, &plan);
  EXPECT_TRUE(status.ok()) << id << ": " << status.message();
  return plan;
}

TEST(RaggedPlan, SharesTilesWhereSequencesAreShort) {
  EXPECT_EQ(plan_of("bf16/b4096/q16/k16/h16/d128/full/packed").slot_rows, 16);
  EXPECT_EQ(plan_of("bf16/b1024/q64/k64/h16/d128/full/packed").slot_rows, 64);
  EXPECT_EQ(plan_of("bf16/b1024/q17/k33/h16/d64/causal/packed").slot_rows, 64);
  EXPECT_EQ(plan_of("bf16/b1024/q65/k65/h16/d128/full/packed").slot_rows, 0) << "too long";
  EXPECT_EQ(plan_of("bf16/b4096/q16/k16/h16/d128/full/packed/nomax").slot_rows, 0)
      << "nothing says that they are short";
  EXPECT_EQ(plan_of("bf16/b4096/q16/k16/h16/d128/full").slot_rows, 0) << "not ragged";
}

// A sequence's result may not depend on the others, so neither may its kernel.
TEST(RaggedPlan, OneKernelWhateverTheBatch) {
  for (const char* sizes :
       {"q16/k16", "q64/k64", "q3/k40", "q100/k100", "q512/k512", "q4096/k4096", "q40/k2000"})
    for (const char* options : {"h8x2/d64/causal/packed", "h8x2/d128/full/packed",
                                "h8/d128/causal/packed/nomax", "h4x2/d128/causal/packed"}) {
      const auto plan = [&](int batch) {
        return plan_of("bf16/b" + std::to_string(batch) + "/" + sizes + "/" + options);
      };
      const PlannedForward one = plan(1);
      for (const int batch : {2, 3, 6, 7, 100, 1000}) {
        EXPECT_EQ(plan(batch).kernel, one.kernel) << sizes << " " << options << " " << batch;
        EXPECT_EQ(plan(batch).pack.heads, one.pack.heads);
        EXPECT_EQ(plan(batch).slot_rows, one.slot_rows);
      }
    }
}

// TMA counts the rows of a padded batch in one go, which needs even steps; others are copied.
TEST(RaggedPlan, CopiesWhatHasNoEvenSteps) {
  Batch batch("bf16/b3/q50/k50/h4/d64/full/usedk", {1, 1, 1}, {1, 1, 1});
  ForwardProblem& problem = batch.problem;
  PlannedForward plan;
  ASSERT_TRUE(cuda::sm90::plan(problem, kDevice, &plan).ok());
  EXPECT_FALSE(plan.k.needed);
  problem.k.stride_batch += 8;
  ASSERT_TRUE(cuda::sm90::plan(problem, kDevice, &plan).ok());
  EXPECT_TRUE(plan.k.needed);
  EXPECT_FALSE(plan.q.needed);
  problem.out.stride_batch += 8;
  ASSERT_TRUE(cuda::sm90::plan(problem, kDevice, &plan).ok());
  EXPECT_FALSE(plan.out_by_tma);
}

// Which calls run their sequences in two kinds of kernels, and with what. Needs no GPU: a plan
// launches nothing.

PlannedSteps mixed_steps_of(const std::string& id) {
  const PlannedSteps steps = steps_of(problem_of(id));
  EXPECT_TRUE(steps.forward && steps.decode) << id;
  return steps;
}

TEST(MixedPlan, RunsCallsWhoseSequencesMayDiffer) {
  for (const char* id : {"bf16/b4/q17/k300/h8/d128/causal/packedq/usedk/paged16",
                         "bf16/b4/q17/k300/h8/d128/causal/packedq/nomax/usedk/paged16",
                         "fp16/b4/q200/k300/h8x2/d64/full/used/paged64",
                         "fp16/b4/q200/k20/h8x2/d64/full/packedq/usedk/batchidx",
                         "bf16/b4/q200/k300/h8x2/d256/causal/packedq/usedk/append3",
                         "bf16/b4/q200/k256/h8x2/d128/causal/packedq/usedk",
                         "e4m3/b4/q200/k300/h8/d128/causal/packedq/usedk",
                         "e4m3/b4/q200/k300/h8/d128/causal/packedq/usedk/paged16",
                         "e4m3/b4/q200/k300/h8/d128/causal/packedq/usedk/append3/headscales",
                         "bf16/b4/q200/k300/h8/d128/causal/packedq/usedk/paged16/kv8",
                         "bf16/b4/q200/k23/h8/d128/causal/packedq/usedk/kv8",
                         "fp16/b3/q63/k300/h1/d64/causal/usedq/kv8"})
    EXPECT_TRUE(is_mixed(problem_of(id))) << id;
}

// Sequences of one kind alone, and training batches: those pack both sides, or pad both.
TEST(MixedPlan, LeavesAllOthersAlone) {
  for (const char* id :
       {"bf16/b4/q16/k300/h8/d128/causal/packedq/usedk/paged16",
        "bf16/b4/q200/k300/h8/d128/causal/usedk/paged16",
        "bf16/b4/q200/k300/h8/d128/causal/packedq/usedk/paged3",
        "bf16/b4/q200/k255/h8/d128/causal/packedq/usedk", "bf16/b4/q200/k300/h8/d128/causal/used",
        "bf16/b4/q300/k300/h8/d128/causal/packed", "bf16/b4/q300/k300/h8/d128/causal",
        "e4m3/b4/q200/k300/h8/d128/causal/packedq/usedk/sums2",
        "bf16/b4/q200/k300/h8/d128/causal/packedq/usedk/paged64/kv8/blockscales"})
    EXPECT_FALSE(is_mixed(problem_of(id))) << id;
}

// The decode kernels' share follows from 16 queries, whatever the call's most are; but its kernel
// is the one for a few.
TEST(MixedPlan, PlansDecodingAsIfAlone) {
  const std::string rest = "/k3000/h32x8/d128/causal/packedq/usedk/paged64";
  const ForwardProblem decoding = problem_of("bf16/b4/q4" + rest);
  PlannedDecode alone;
  ASSERT_TRUE(cuda::sm90::plan(decoding, kDevice, &alone).ok());
  for (const char* most : {"17", "200", "2048"}) {
    const PlannedSteps plan = mixed_steps_of(std::string("bf16/b4/q") + most + rest);
    EXPECT_EQ(plan.decode->kernel, alone.kernel);
    EXPECT_EQ(plan.decode->rule.tile_queries, alone.rule.tile_queries);
    EXPECT_EQ(plan.decode->rule.splits, alone.rule.splits);
    EXPECT_EQ(plan.decode->rule.least_tiles, alone.rule.least_tiles);
    EXPECT_EQ(plan.decode->rule.most_queries, 16);
    EXPECT_EQ(plan.forward->least_queries, 17);
    EXPECT_LE(plan.decode->most_items,
              4 * 8 * int64_t{ceil_div(16, plan.decode->rule.tile_queries)});
  }
}

// Each sequence has work in one of the two.
TEST(MixedPlan, ASequenceHasWorkInOneKernel) {
  const ForwardProblem problem =
      problem_of("bf16/b4/q40/k300/h8/d128/causal/packedq/usedk/paged16");
  const PlannedSteps plan = mixed_steps_of("bf16/b4/q40/k300/h8/d128/causal/packedq/usedk/paged16");
  EXPECT_EQ(varlen_schedule_params(problem, *plan.forward).least_queries, 17);
  const int cu[] = {0, 16, 33, 34, 34}, used[] = {300, 300, 0, 10};
  DecodeRule rule = plan.decode->rule;
  rule.q = {cu, nullptr, 160, 40};
  rule.k = {nullptr, used, 300, 300};
  const int expected[] = {16, 0, 1, 0};
  for (int b = 0; b < 4; ++b) {
    const DecodeSequence s = decode_sequence(rule, b);
    EXPECT_EQ(s.q_length, expected[b]) << b;
    EXPECT_EQ(items_of(rule, s) > 0, expected[b] > 0) << b;
  }
}

// Padded queries lie where the whole tensor has them, the few of a decoding sequence too.
TEST(MixedPlan, BothReadTheRotatedQueries) {
  for (const char* id :
       {"fp16/b2/q135/k127/h1/d136/full/used/leftpad/append1/rotary",
        "fp16/b2/q135/k127/h4x2/d128/causal/packedq/usedk/paged16/append1/rotary"}) {
    const ForwardProblem problem = problem_of(id);
    const PlannedSteps plan = mixed_steps_of(id);
    EXPECT_GT(plan.append.q_blocks, 0) << id;
    EXPECT_EQ(transformed_q(problem, plan.append).stride_batch,
              problem.sequences_q.packed ? 0 : 135 * problem.heads_q * problem.head_dim)
        << id;
  }
}

// No part of the workspace is another's.
TEST(MixedPlan, TheWorkspaceHoldsBoth) {
  const std::string id = "bf16/b4/q200/k3000/h8x2/d128/causal/packedq/usedk/paged64/append1/rotary";
  const PlannedSteps plan = mixed_steps_of(id);
  PlannedForward forward;
  ASSERT_TRUE(cuda::sm90::plan(problem_of(id), kDevice, &forward).ok());
  EXPECT_GE(plan.decode->schedule_offset, forward.workspace_bytes);
  EXPECT_GE(plan.decode->partials_offset,
            plan.decode->schedule_offset + plan.decode->schedule_bytes);
  EXPECT_GT(plan.workspace_bytes, plan.decode->partials_offset);
  const ScheduleNeeds needs = needs_of(plan);
  EXPECT_EQ(needs.bytes, plan.decode->schedule_bytes);
  EXPECT_GT(needs.bytes, 0u);
}

TEST(MixedPlan, IsExplained) {
  const std::string id = "bf16/b2/q200/k300/h8x2/d128/causal/packedq/usedk/paged64/append1";
  const std::string text = explained(problem_of(id));
  for (const char* line :
       {"kernel: fwd_bf16_d128_split_128x128, decode_bf16_d128_16x128",
        "why: a sequence of at most 16 queries runs in the decode kernel",
        "forward kernel: fwd_bf16_d128_split_128x128",
        "forward first: a kernel of its own: the new keys and values go into the cache",
        "decode splits: of a sequence at most"})
    EXPECT_NE(text.find(line), std::string::npos) << line << "\n" << text;
}

}  // namespace
}  // namespace flash3::cuda::sm90
