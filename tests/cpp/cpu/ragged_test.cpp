// SPDX-License-Identifier: Apache-2.0
// Ragged batches, sinks, caps and chunks in the CPU forward: every sequence as if it were alone.

#include <cmath>
#include <limits>

#include "ragged_batch.hpp"

namespace flash3::test {
namespace {

// What a sequence alone computes, on one thread.
struct Alone {
  cases::GuardedTensor out, lse;

  Alone(const TestTarget& target, ForwardProblem p)
      : out(like(p.out, p.dtype)),
        lse(cases::make_lse(1, p.heads_q, p.seq_q, cases::Layout::kBatchSeq)) {
    write_to(out, &p.out);
    write_to(lse, &p.lse);
    p.num_threads = 1;
    run_on(target, p);
  }
};

void check_alone(const Alone& alone, const ReferenceForward& ref) {
  EXPECT_EQ(cases::check_out(alone.out.view, ref).failure, "");
  EXPECT_EQ(cases::check_lse(alone.lse.view, ref).failure, "");
}

// out and lse are those of the sequences alone, which are right; nothing else was written.
void check_against_alone(RaggedBatch& batch, const TestTarget& target, int threads,
                         const std::vector<ReferenceForward>& refs) {
  SCOPED_TRACE(target.name());
  batch.out.fill_pattern(), batch.lse.fill_pattern();
  ForwardProblem p = batch.forward();
  p.num_threads = threads;
  run_on(target, p);
  EXPECT_EQ(batch.out.damage() + batch.lse.damage(), "");

  std::vector<Alone> alone;
  for (int64_t b = 0; b < p.batch; ++b) {
    SCOPED_TRACE(testing::Message() << "sequence " << b);
    alone.emplace_back(target, one_sequence(p, b));
    if (!refs.empty()) check_alone(alone.back(), refs[static_cast<size_t>(b)]);
  }
  check_rows(
      "out", p.sequences_q, p.batch, Unused::kUntouched,
      [&](int64_t b, int64_t row) { return row_bytes(p.out, p.dtype, b, row); },
      [&](int64_t b, int64_t row) {
        TensorView view = one_sequence(p, b).out;
        write_to(alone[static_cast<size_t>(b)].out, &view);
        return row_bytes(view, p.dtype, 0, row);
      });
  check_rows(
      "lse", p.sequences_q, p.batch, Unused::kUntouched,
      [&](int64_t b, int64_t row) { return row_bytes(p.lse, p.heads_q, b, row); },
      [&](int64_t b, int64_t row) {
        LseView view = one_sequence(p, b).lse;
        write_to(alone[static_cast<size_t>(b)].lse, &view);
        return row_bytes(view, p.heads_q, 0, row);
      });
}

TEST(Ragged, EachSequenceIsAsAlone) {
  for_each_spec([](const RaggedSpec& spec, int threads) {
    RaggedBatch batch(spec);
    const ForwardProblem p = batch.forward();
    std::vector<ReferenceForward> refs;
    for (int64_t b = 0; b < p.batch; ++b) refs.push_back(attention_ref(one_sequence(p, b), 1));
    for (const TestTarget& target : test_targets(spec.dtype))
      check_against_alone(batch, target, threads, refs);
  });
}

// Lengths from a fixed sequence of numbers.
std::vector<int64_t> lengths(int64_t count, int64_t most, uint64_t seed) {
  std::vector<int64_t> all;
  for (int64_t i = 0; i < count; ++i) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    all.push_back(static_cast<int64_t>((seed >> 33) % static_cast<uint64_t>(most + 1)));
  }
  return all;
}

TEST(Ragged, OneGiantAmongAThousandSmallOnes) {
  RaggedSpec spec;
  spec.lengths_q = lengths(1000, 40, 1);
  spec.lengths_q[700] = 2500;
  spec.lengths_k = spec.lengths_q;
  spec.causal = true;
  spec.heads_q = 4, spec.heads_k = 2;
  RaggedBatch batch(spec);
  check_against_alone(batch, test_targets(spec.dtype).back(), 3, {});
}

TEST(Ragged, TenThousandSequencesOfAtMostThreeTokens) {
  RaggedSpec spec;
  spec.dtype = FLASH3_BFLOAT16;
  spec.lengths_q = lengths(10000, 3, 2);
  spec.lengths_k = lengths(10000, 3, 3);
  spec.dim = spec.dim_v = 8;
  spec.sink = FLASH3_FLOAT32;
  RaggedBatch batch(spec);
  check_against_alone(batch, test_targets(spec.dtype).back(), 2, {});
}

// Also where infinities and NaNs make the kernel take other ways.
TEST(Ragged, BitsDependOnNeitherNeighboursNorThreads) {
  for (const flash3_dtype dtype : {FLASH3_FLOAT32, FLASH3_BFLOAT16, FLASH3_FLOAT16})
    for (const bool spoilt : {false, true}) {
      const auto run = [&](const TestTarget& target, std::vector<int64_t> lengths,
                           std::vector<uint64_t> contents, size_t at, int threads) {
        RaggedSpec spec;
        spec.dtype = dtype;
        spec.lengths_q = lengths, spec.lengths_k = lengths;
        spec.contents = contents;
        spec.causal = true;
        spec.heads_q = 3, spec.heads_k = 1;
        spec.dim = spec.dim_v = 16;
        RaggedBatch batch(spec);
        ForwardProblem p = batch.forward();
        const SeqInfo own = p.sequence(static_cast<int64_t>(at));
        if (spoilt)
          for (const Index j : {Index{100}, Index{411}, Index{800}})
            store_float(p.v.data, dtype, (own.k.first + j) * p.v.stride_seq + 5,
                        j == 411 ? std::numeric_limits<float>::quiet_NaN()
                                 : std::numeric_limits<float>::infinity());
        p.num_threads = threads;
        run_on(target, p);
        std::vector<std::vector<std::byte>> rows;
        for (Index i = 0; i < own.q.length; ++i) {
          rows.push_back(row_bytes(p.out, dtype, 0, own.q.first + i));
          rows.push_back(row_bytes(p.lse, p.heads_q, 0, own.q.first + i));
        }
        return rows;
      };
      for (const TestTarget& target : test_targets(dtype)) {
        SCOPED_TRACE(testing::Message() << target.name() << " " << dtype << " " << spoilt);
        const auto alone = run(target, {900}, {7}, 0, 1);
        EXPECT_EQ(alone, run(target, {900}, {7}, 0, 7));
        EXPECT_EQ(alone, run(target, {31, 900, 500, 0}, {1, 7, 2, 3}, 1, 2));
        EXPECT_EQ(alone, run(target, {1, 1, 1, 1, 900}, {1, 2, 3, 4, 7}, 4, 16));
      }
    }
}

TEST(Ragged, LongSequencesHaveManyBlocks) {
  RaggedSpec spec;
  spec.lengths_q = {7000, 1, 900}, spec.lengths_k = {600, 5, 900};
  spec.dim = spec.dim_v = 16;
  spec.sink = FLASH3_FLOAT32;
  spec.heads_q = 1;
  RaggedBatch batch(spec);
  check_against_alone(batch, test_targets(spec.dtype).back(), 2, {});
}

// The sink joins once, whatever the number of parts.
TEST(Ragged, SplitKeysWithSinkAndCap) {
  RaggedSpec spec;
  spec.lengths_q = {2}, spec.lengths_k = {9000};
  spec.packed_q = spec.packed_k = false;
  spec.heads_q = 2, spec.heads_k = 1;
  spec.dim = spec.dim_v = 64;
  spec.softcap = 2;
  for (const int64_t chunk : {int64_t{0}, int64_t{5000}})
    for (const flash3_dtype sink : {FLASH3_DTYPE_NONE, FLASH3_FLOAT32}) {
      spec.sink = sink, spec.chunk = chunk;
      RaggedBatch batch(spec);
      ForwardProblem p = batch.forward();
      ASSERT_FALSE(p.is_ragged());
      const ReferenceForward ref = attention_ref(one_sequence(p, 0), 1);
      for (const TestTarget& target : test_targets(spec.dtype)) {
        SCOPED_TRACE(target.name());
        p.num_threads = 8;
        EXPECT_GT(run_on(target, p).splits, 1);
        EXPECT_EQ(cases::check_out(batch.out.view, ref).failure, "");
        EXPECT_EQ(cases::check_lse(batch.lse.view, ref).failure, "");
      }
    }
}

// One key, so that lse is its score.
TEST(Softcap, TanhIsAccurate) {
  std::vector<float> q;
  for (float x = 1e-12f; x < 300; x *= 1.003f) q.push_back(x), q.push_back(-x);
  const auto n = static_cast<int64_t>(q.size());
  std::vector<float> one{1.f}, out(q.size()), lse(q.size());
  flash3_forward_params params{};
  params.struct_size = sizeof params;
  params.q = {q.data(), FLASH3_FLOAT32, 4, {1, n, 1, 1}, {n, 1, 1, 1}};
  params.k = params.v = {one.data(), FLASH3_FLOAT32, 4, {1, 1, 1, 1}, {1, 1, 1, 1}};
  params.out = {out.data(), FLASH3_FLOAT32, 4, {1, n, 1, 1}, {n, 1, 1, 1}};
  params.lse = {lse.data(), FLASH3_FLOAT32, 3, {1, 1, n}, {n, n, 1}};
  params.softmax_scale = 1.f;
  params.softcap = 4.f;
  for (const TestTarget& target : test_targets(FLASH3_FLOAT32)) {
    run_on(target, to_problem(params));
    for (size_t i = 0; i < q.size(); ++i) {
      const double want = 4 * std::tanh(double{q[i]} / 4);
      ASSERT_NEAR(lse[i], want, 6e-7 * std::abs(want)) << target.name() << " x = " << q[i];
      ASSERT_EQ(out[i], 1.f);
    }
  }
}

// Infinite scores have a finite cap, and NaN stays NaN.
TEST(Softcap, SpecialScores) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::vector<float> q{1.f, -1.f, std::numeric_limits<float>::quiet_NaN()}, k{kInf}, v{3.f}, out(3),
      lse(3);
  flash3_forward_params params{};
  params.struct_size = sizeof params;
  params.q = {q.data(), FLASH3_FLOAT32, 4, {1, 3, 1, 1}, {3, 1, 1, 1}};
  params.k = {k.data(), FLASH3_FLOAT32, 4, {1, 1, 1, 1}, {1, 1, 1, 1}};
  params.v = {v.data(), FLASH3_FLOAT32, 4, {1, 1, 1, 1}, {1, 1, 1, 1}};
  params.out = {out.data(), FLASH3_FLOAT32, 4, {1, 3, 1, 1}, {3, 1, 1, 1}};
  params.lse = {lse.data(), FLASH3_FLOAT32, 3, {1, 1, 3}, {3, 3, 1}};
  params.softcap = 5.f;
  for (const TestTarget& target : test_targets(FLASH3_FLOAT32)) {
    SCOPED_TRACE(target.name());
    run_on(target, to_problem(params));
    EXPECT_NEAR(lse[0], 5.f, 1e-6);
    EXPECT_NEAR(lse[1], -5.f, 1e-6);
    EXPECT_EQ(out[0], 3.f);
    EXPECT_EQ(out[1], 3.f);
    EXPECT_TRUE(std::isnan(out[2]) && std::isnan(lse[2]));
  }
}

// By hand: a row of one key whose score is 0, one that sees none, sinks of every size.
TEST(Sink, ByHand) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::vector<float> q{0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, k{1.f}, v{3.f}, out(10), lse(10),
      sink{0.f, 100.f, -100.f, -kInf, std::numeric_limits<float>::quiet_NaN()};
  flash3_forward_params params{};
  params.struct_size = sizeof params;
  params.q = {q.data(), FLASH3_FLOAT32, 4, {1, 2, 5, 1}, {10, 5, 1, 1}};
  params.k = {k.data(), FLASH3_FLOAT32, 4, {1, 1, 1, 1}, {1, 1, 1, 1}};
  params.v = {v.data(), FLASH3_FLOAT32, 4, {1, 1, 1, 1}, {1, 1, 1, 1}};
  params.out = {out.data(), FLASH3_FLOAT32, 4, {1, 2, 5, 1}, {10, 5, 1, 1}};
  params.lse = {lse.data(), FLASH3_FLOAT32, 3, {1, 5, 2}, {10, 2, 1}};
  params.sink = {sink.data(), FLASH3_FLOAT32, 1, {5}, {1}};
  params.causal = 1;  // the first row lies before the only key
  for (const TestTarget& target : test_targets(FLASH3_FLOAT32)) {
    SCOPED_TRACE(target.name());
    run_on(target, to_problem(params));
    for (size_t h = 0; h < 5; ++h) EXPECT_EQ(out[h], 0.f);
    for (size_t h = 0; h < 4; ++h) EXPECT_EQ(lse[2 * h], sink[h]);
    EXPECT_TRUE(std::isnan(lse[8]));
    EXPECT_FLOAT_EQ(out[5], 1.5f);
    EXPECT_FLOAT_EQ(lse[1], std::log(2.f));
    EXPECT_NEAR(out[6], 0.f, 1e-37);
    EXPECT_FLOAT_EQ(lse[3], 100.f);
    EXPECT_EQ(out[7], 3.f);
    EXPECT_NEAR(lse[5], 0.f, 1e-7);
    EXPECT_EQ(out[8], 3.f);
    EXPECT_EQ(lse[7], 0.f);
    EXPECT_TRUE(std::isnan(out[9]) && std::isnan(lse[9]));
  }
}

// Ragged batches, sinks, caps and chunks in the CPU backward: every sequence as if it were alone,
// and the sink's gradient over all of them.

void run(BackwardProblem p, const TestTarget& target) {
  const BackwardPlan plan = plan_backward_on(target, p);
  Workspace workspace(plan.workspace_size + 64);
  const auto address = reinterpret_cast<uintptr_t>(workspace.data());
  p.workspace = reinterpret_cast<void*>((address + 63) / 64 * 64);
  p.workspace_size = plan.workspace_size;
  const Status status = run_backward(p, plan);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(workspace.guard_is_intact());
}

// Memory for the gradients of one sequence alone.
struct Gradients {
  cases::GuardedTensor dq, dk, dv;

  explicit Gradients(BackwardProblem* p)
      : dq(like(p->dq, p->dtype)), dk(like(p->dk, p->dtype)), dv(like(p->dv, p->dtype)) {
    write_to(dq, &p->dq);
    write_to(dk, &p->dk);
    write_to(dv, &p->dv);
    p->num_threads = 1;
  }
};

// What is wrong with the gradients of one sequence; "" if nothing is.
std::string find_error(const RaggedSpec& spec, const BackwardProblem& p, const Gradients& got) {
  cases::Case c;
  c.dtype = p.dtype;
  c.seq_q = p.seq_q, c.seq_k = p.seq_k, c.heads_q = p.heads_q, c.heads_k = p.heads_k;
  c.head_dim = p.head_dim, c.head_dim_v = p.head_dim_v;
  c.causal = spec.causal, c.window = spec.left || spec.right;
  c.window_left = spec.left.value_or(-1), c.window_right = spec.right.value_or(-1);
  cases::BackwardViews got_views;
  got_views.dq = got.dq.view, got_views.dk = got.dk.view, got_views.dv = got.dv.view;
  return check_gradients(c, got_views, attention_backward_ref(p, 1)).failure();
}

// The gradients are those of the sequences alone; unused tokens have 0, and nothing else was
// written.
void check_against_alone(RaggedBatch& batch, const TestTarget& target, int threads,
                         bool against_oracle) {
  SCOPED_TRACE(target.name());
  for (auto* t : {&batch.dq, &batch.dk, &batch.dv}) t->fill_pattern();
  BackwardProblem p = batch.backward();
  p.num_threads = threads;
  run(p, target);
  EXPECT_EQ(batch.dq.damage() + batch.dk.damage() + batch.dv.damage(), "");

  std::vector<Gradients> alone;
  for (int64_t b = 0; b < p.batch; ++b) {
    BackwardProblem one = one_sequence(p, b);
    alone.emplace_back(&one);
    run(one, target);
    if (against_oracle) {
      EXPECT_EQ(find_error(batch.spec, one, alone.back()), "") << "sequence " << b;
    }
  }
  const auto check = [&](const char* name, const Sequences& sequences, const TensorView& all,
                         cases::GuardedTensor Gradients::*member) {
    check_rows(
        name, sequences, p.batch, Unused::kZero,
        [&](int64_t b, int64_t row) { return row_bytes(all, p.dtype, b, row); },
        [&](int64_t b, int64_t row) {
          TensorView view = all;
          write_to(alone[static_cast<size_t>(b)].*member, &view);
          return row_bytes(view, p.dtype, 0, row);
        });
  };
  check("dq", p.sequences_q, p.dq, &Gradients::dq);
  check("dk", p.sequences_k, p.dk, &Gradients::dk);
  check("dv", p.sequences_k, p.dv, &Gradients::dv);
}

// out and lse, which the backward reads.
void run_forward(RaggedBatch& batch) { run_on({CpuTarget::kBaseline}, batch.forward()); }

TEST(RaggedBackward, EachSequenceIsAsAlone) {
  for_each_spec([](const RaggedSpec& spec, int threads) {
    RaggedBatch batch(spec);
    run_forward(batch);
    for (const TestTarget& target : backward_targets(batch.spec.dtype)) {
      check_against_alone(batch, target, threads, true);
      if (spec.sink == FLASH3_DTYPE_NONE) continue;
      const ReferenceBackward ref = attention_backward_ref(batch.backward(), 1);
      const std::vector<float> dsink = batch.dsink();
      for (size_t h = 0; h < dsink.size(); ++h)
        EXPECT_NEAR(dsink[h], ref.dsink[h], ref.dsink_bound[h])
            << "dsink of head " << h << " on " << target.name();
    }
  });
}

TEST(RaggedBackward, OneGiantAmongManySmallOnes) {
  RaggedSpec spec;
  uint64_t seed = 5;
  for (int i = 0; i < 400; ++i) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    spec.lengths_q.push_back(static_cast<int64_t>((seed >> 33) % 41));
  }
  spec.lengths_q[333] = 1500;
  spec.lengths_k = spec.lengths_q;
  spec.causal = true;
  spec.heads_q = 4, spec.heads_k = 2;
  RaggedBatch batch(spec);
  run_forward(batch);
  for (const int threads : {1, 3, 16})
    check_against_alone(batch, backward_targets(batch.spec.dtype).back(), threads, false);
}

// Bits do not depend on threads, and the sink's sum over all sequences is among them.
TEST(RaggedBackward, SinkGradientHasTheSameBitsOnAnyNumberOfThreads) {
  for (const flash3_dtype sink : {FLASH3_FLOAT32, FLASH3_BFLOAT16}) {
    RaggedSpec spec;
    spec.dtype = FLASH3_BFLOAT16;
    spec.lengths_q = {300, 0, 1, 250, 64, 20}, spec.lengths_k = {100, 9, 0, 250, 33, 400};
    spec.causal = true;  // 200 rows of the first see no key
    spec.heads_q = 6, spec.heads_k = 2;
    spec.dim = spec.dim_v = 32;
    spec.sink = sink;
    RaggedBatch batch(spec);
    run_forward(batch);
    BackwardProblem p = batch.backward();
    for (const TestTarget& target : backward_targets(p.dtype)) {
      p.num_threads = 1;
      run(p, target);
      const std::vector<float> once = batch.dsink();
      for (const float x : once) EXPECT_NE(x, 0.f);
      for (const int threads : {1, 2, 3, 7, 16}) {
        p.num_threads = threads;
        run(p, target);
        EXPECT_EQ(once, batch.dsink()) << threads << " on " << target.name();
      }
    }
  }
}

// A row that sees no key has its sink alone, and so has dlse: by hand.
TEST(RaggedBackward, SinkOfBlindRowsByHand) {
  RaggedSpec spec;
  spec.lengths_q = {3, 2}, spec.lengths_k = {0, 0};
  spec.sink = FLASH3_FLOAT32;
  spec.heads_q = spec.heads_k = 1;
  RaggedBatch batch(spec);
  run_forward(batch);
  const BackwardProblem p = batch.backward();
  double want = 0;
  for (int64_t b = 0; b < 2; ++b)
    for (Index i = 0; i < p.sequence(b).q.length; ++i)
      want += double{p.dlse.data[p.sequence(b).q.first + i]};
  for (const TestTarget& target : backward_targets(p.dtype)) {
    run(p, target);
    EXPECT_NEAR(batch.dsink()[0], want, 1e-6) << target.name();
  }
}

TEST(RaggedBackward, NoSequencesLeaveAZeroSinkGradient) {
  RaggedSpec spec;
  spec.lengths_q = {0}, spec.lengths_k = {0};
  spec.sink = FLASH3_FLOAT32;
  RaggedBatch batch(spec);
  BackwardProblem p = batch.backward();
  store_float(p.dsink.data, p.dsink.dtype, 0, 7.f);
  run(p, {CpuTarget::kBaseline});
  EXPECT_EQ(batch.dsink(), (std::vector<float>{0.f, 0.f}));
}

}  // namespace
}  // namespace flash3::test
