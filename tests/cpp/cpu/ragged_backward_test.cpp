// SPDX-License-Identifier: Apache-2.0
// Ragged batches, sinks, caps and chunks in the CPU backward: every sequence as if it were alone,
// and the sink's gradient over all of them.
#include <cmath>
#include <limits>

#include "ragged_batch.hpp"

namespace flash3::test {
namespace {

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
