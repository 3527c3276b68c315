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

}  // namespace
}  // namespace flash3::test
