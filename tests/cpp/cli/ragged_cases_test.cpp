// SPDX-License-Identifier: Apache-2.0
// Ragged cases: their lengths, their tensors, and a check that must pass what is right and fail
// what is wrong. The oracle takes the backend's place.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "../parsed.hpp"
#include "cases/check.hpp"
#include "cases/table.hpp"
#include "core/convert.hpp"
#include "core/padding.hpp"
#include "cpu/rows.hpp"
#include "faulty_memory.hpp"

namespace flash3::cases {
namespace {

std::vector<int64_t> lengths(const SequenceLengths& rows, int64_t batch) {
  std::vector<int64_t> all;
  for (int64_t b = 0; b < batch; ++b) all.push_back(rows_of(rows.view(), b).length);
  return all;
}

TEST(CaseSequences, HaveTheLengthsThatTheirNameSays) {
  const Case random = parsed("bf16/b1000/q40/k40/h1/d8/full/random");
  const CaseSequences s = make_sequences(random);
  const std::vector<int64_t> q = lengths(s.q, random.batch);
  for (const int64_t length : {0, 1, 2, 39, 40})
    EXPECT_NE(std::find(q.begin(), q.end(), length), q.end()) << length;
  EXPECT_LE(*std::max_element(q.begin(), q.end()), 40);
  EXPECT_EQ(q, lengths(s.k, random.batch));  // self-attention
  Case other = random;
  other.seq_k = 41;
  EXPECT_NE(q, lengths(make_sequences(other).k, other.batch));
  other = random;
  other.seed = 2;
  EXPECT_NE(q, lengths(make_sequences(other).q, other.batch));

  const Case giant = parsed("bf16/b9/q5000/k5000/h1/d8/full/giant");
  std::vector<int64_t> g = lengths(make_sequences(giant).q, giant.batch);
  EXPECT_EQ(g[4], 5000);
  g.erase(g.begin() + 4);
  EXPECT_LE(*std::max_element(g.begin(), g.end()), 40);

  const Case equal = parsed("bf16/b3/q50/k70/h1/d8/full/packed");
  EXPECT_EQ(lengths(make_sequences(equal).q, 3), (std::vector<int64_t>{50, 50, 50}));
  EXPECT_EQ(make_sequences(equal).k.rows, 210);
}

TEST(CaseSequences, LongTailedOnesAreACommittedDraw) {
  const std::vector<int64_t> second = log_normal_lengths(65536, 2);
  EXPECT_EQ(std::vector<int64_t>(second.begin(), second.begin() + 6),
            (std::vector<int64_t>{508, 576, 179, 479, 386, 100}));
  for (const int64_t tokens : {0, 1, 100, 65536})
    for (const int64_t draw : {1, 2, 20}) {
      const std::vector<int64_t> all = log_normal_lengths(tokens, draw);
      EXPECT_EQ(std::accumulate(all.begin(), all.end(), int64_t{0}), tokens);
      EXPECT_TRUE(std::all_of(all.begin(), all.end(), [](int64_t n) { return n >= 1; }));
    }

  const std::vector<int64_t> drawn = log_normal_lengths(4096, 1);
  const Case c = parsed("bf16/b3/q40/k40/h1/d8/causal/lognormal4096:1");
  EXPECT_TRUE(c.packed_q && c.packed_k);
  EXPECT_EQ(to_id(c), "bf16/b3/q40/k40/h1/d8/causal/lognormal4096:1/packed");
  EXPECT_EQ(parsed("bf16/b3/q40/k40/h1/d8/causal/lognormal4096:1/giant"),
            parsed("bf16/b3/q40/k40/h1/d8/causal/giant"));
  const std::vector<int64_t> cut = lengths(make_sequences(c).q, 3);
  for (size_t b = 0; b < 3; ++b) EXPECT_EQ(cut[b], std::min<int64_t>(40, drawn[b]));
  EXPECT_EQ(cut, lengths(make_sequences(c).k, 3));
  Case other = c;
  other.batch = 1000;  // more than there are
  EXPECT_EQ(lengths(make_sequences(other).q, 1000).back(), 0);
  other.draw = 2;
  EXPECT_NE(lengths(make_sequences(other).q, 3), cut);
  std::string error;
  for (const char* bad :
       {"lognormal", "lognormal4096", "lognormal:1", "lognormal4096:", "lognormal4096:-1"})
    EXPECT_FALSE(parse_id(std::string("bf16/b3/q40/k40/h1/d8/causal/") + bad, &error)) << bad;
}

TEST(CaseSequences, MixedOnesAreOfQueriesAlone) {
  const Case c = parsed("bf16/b5/q30/k40/h1/d8/causal/mixed/packedq/usedk");
  EXPECT_EQ(to_id(c), "bf16/b5/q30/k40/h1/d8/causal/mixed/packedq/usedk");
  const CaseSequences s = make_sequences(c);
  EXPECT_EQ(lengths(s.q, 5), (std::vector<int64_t>{1, 30, 1, 30, 1}));
  EXPECT_EQ(lengths(s.k, 5), std::vector<int64_t>(5, 40));
  Case square = c;
  square.seq_k = 30;
  EXPECT_EQ(lengths(make_sequences(square).k, 5), std::vector<int64_t>(5, 30));
  square.seq_q = 0;
  EXPECT_EQ(lengths(make_sequences(square).q, 5), std::vector<int64_t>(5, 0));
}

TEST(CaseSequences, LogUniformOnesHaveTheSameShareOfEachPowerOfTwo) {
  const Case c = parsed("bf16/b6000/q1/k6400/h1/d8/causal/loguniform/usedk");
  EXPECT_EQ(to_id(c), "bf16/b6000/q1/k6400/h1/d8/causal/loguniform/usedk");
  const std::vector<int64_t> k = lengths(make_sequences(c).k, c.batch);
  EXPECT_GE(*std::min_element(k.begin(), k.end()), 100);
  EXPECT_LE(*std::max_element(k.begin(), k.end()), 6400);
  for (int64_t least = 100; least < 6400; least *= 2) {
    const auto count =
        std::count_if(k.begin(), k.end(), [&](int64_t n) { return n >= least && n < 2 * least; });
    EXPECT_GT(count, 850) << least;
    EXPECT_LT(count, 1150) << least;
  }
  Case other = c;
  other.seed = 2;
  EXPECT_NE(lengths(make_sequences(other).k, c.batch), k);
  for (const int64_t longest : {0, 1, 2}) {
    other.seq_k = longest;
    for (const int64_t n : lengths(make_sequences(other).k, c.batch))
      EXPECT_TRUE(n <= longest && n >= std::min<int64_t>(longest, 1)) << n;
  }
}

TEST(CaseSequences, EveryRowHasOneUse) {
  for (const char* id : {"bf16/b9/q30/k30/h1/d8/full/random/packed/used",
                         "bf16/b9/q30/k30/h1/d8/full/random/used"}) {
    const Case c = parsed(id);
    const SequenceLengths rows = make_sequences(c).q;
    const std::vector<RowUse> uses = row_uses(rows, c.batch);
    int64_t tokens = 0, capacity = 0;
    for (int64_t b = 0; b < c.batch; ++b) {
      tokens += rows_of(rows.view(), b).length;
      capacity += rows_of(rows.view(), b).capacity;
    }
    EXPECT_EQ(std::count(uses.begin(), uses.end(), RowUse::kCounts), tokens);
    EXPECT_EQ(std::count(uses.begin(), uses.end(), RowUse::kUnused), capacity - tokens);
    EXPECT_EQ(std::count(uses.begin(), uses.end(), RowUse::kOutside), c.packed_q ? 3 : 0);
    EXPECT_GT(capacity, tokens);
  }
}

TEST(CaseSequences, CountsAreSums) {
  const Case c = parsed("bf16/b5/q30/k40/h2/d8/causal/random/packed");
  int64_t pairs = 0, tokens = 0;
  const CaseSequences s = make_sequences(c);
  for (int64_t b = 0; b < c.batch; ++b) {
    Case alone = parsed("bf16/b1/q1/k1/h2/d8/causal");
    alone.seq_q = s[b].q.length, alone.seq_k = s[b].k.length;
    pairs += visible_pairs(alone);
    tokens += alone.seq_q;
  }
  EXPECT_EQ(visible_pairs(c), pairs);
  EXPECT_EQ(queries(c), tokens);
}

// A forward case whose out and lse are the oracle's.
struct ForwardRun {
  explicit ForwardRun(const Case& of) : c(of), got(make_forward_tensors(of)) {
    ref = attention_ref(problem(got), 0);
    fill_with(ref.out, &got.out);
    if (c.want_lse) fill_with(ref.lse, &got.lse);
    if (c.fill) cpu::fill_padding(padding_of(problem(got)));
  }
  ForwardProblem problem(const ForwardTensors& t) const {
    const auto params = make_params(c, got.q.view, got.k.view, got.v.view, t.out.view, t.lse.view,
                                    got.extra.views());
    ForwardProblem p;
    const Status status = make_forward_problem(&params, Pointers::kRequired, &p);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(check_lengths(p).message(), "");
    return p;
  }
  std::string failure() const {
    const std::vector<RowRule> rules = output_rules(c, make_sequences(c));
    std::string text = check_out(got.out.view, ref, rules).failure;
    if (c.want_lse && text.empty()) text = check_lse(got.lse.view, ref, rules).failure;
    if (text.empty()) text = got.out.damage();
    return c.want_lse && text.empty() ? got.lse.damage() : text;
  }

  Case c;
  ForwardTensors got;
  ReferenceForward ref;
};

TEST(RaggedCheck, PassesWhatIsRight) {
  for (Case c : ragged_case_table(Level::kQuick, dtypes_of(FLASH3_BACKEND_CPU))) {
    if (c.batch > 9) continue;
    EXPECT_EQ(ForwardRun(c).failure(), "") << to_id(c);
  }
}

TEST(RaggedCheck, SeesAWrongTokenAndAWriteOutsideTheTokens) {
  for (const char* id : {"fp32/b5/q30/k30/h2/d8/causal/random/packed/used",
                         "fp32/b5/q30/k30/h2/d8/causal/odd/random/used/seed4",
                         "fp32/b5/q30/k30/h2/d8/causal/bhsd/random/packed/used/seed3",
                         "fp32/b5/q30/k30/h2/d8/causal/random/packed/used/fill"}) {
    ForwardRun run(parsed(id));
    ASSERT_EQ(run.failure(), "") << id;
    const SequenceLengths rows = make_sequences(run.c).q;
    const std::vector<RowUse> uses = row_uses(rows, run.c.batch);
    const int seq_dim = rows.cu.empty() ? 1 : 0;
    for (const RowUse use : {RowUse::kCounts, RowUse::kUnused, RowUse::kOutside}) {
      const auto found = std::find(uses.begin(), uses.end(), use);
      if (found == uses.end()) continue;
      const int64_t row = found - uses.begin(), b = rows.cu.empty() ? row / rows.rows : 0;
      for (const bool is_lse : {false, true}) {
        GuardedTensor& t = is_lse ? run.got.lse : run.got.out;
        const int dim = is_lse ? t.view.ndim - 1 : seq_dim;
        const int64_t at = (rows.cu.empty() ? b * t.view.stride[0] : 0) +
                           (row - b * rows.rows) * t.view.stride[dim];
        const auto before = t.bytes;
        store_float(t.view.data, t.view.dtype, at, 4096.f);
        const char* want = use == RowUse::kCounts ? "of its bound"
                           : run.c.fill           ? "was not filled"
                                                  : "outside its elements";
        EXPECT_NE(run.failure().find(want), std::string::npos)
            << id << " row " << row << " lse " << is_lse << ": " << run.failure();
        std::copy(before.begin(), before.end(), t.bytes.begin());
        ASSERT_EQ(run.failure(), "");
      }
    }
  }
}

// A backward case whose gradients are the oracle's, and 0 where a token does not count.
struct BackwardRun {
  explicit BackwardRun(const Case& of) : c(of), got(make_backward_tensors(of, 0)) {
    ref = attention_backward_ref(problem(got), 0);
    fill_with(ref.dq, &got.dq);
    fill_with(ref.dk, &got.dk);
    fill_with(ref.dv, &got.dv);
    if (c.sink != Sink::kNone) fill_with(ref.dsink, &got.dsink);
  }
  BackwardProblem problem(const BackwardTensors& t) const {
    const auto params = make_backward_params(c, t.views());
    BackwardProblem p;
    const Status status = make_backward_problem(&params, Pointers::kRequired, &p);
    EXPECT_TRUE(status.ok()) << status.message();
    return p;
  }
  std::string failure() const {
    std::string text = check_gradients(c, got.views(), ref).failure();
    for (const GuardedTensor* t : {&got.dq, &got.dk, &got.dv})
      if (text.empty()) text = t->damage();
    return text;
  }

  Case c;
  BackwardTensors got;
  ReferenceBackward ref;
};

TEST(RaggedGradientCheck, PassesWhatIsRight) {
  int i = 0;
  for (Case c : ragged_backward_case_table(Level::kQuick, dtypes_of(FLASH3_BACKEND_CPU))) {
    if (c.batch > 9 || ++i % 3 != 0) continue;
    EXPECT_EQ(BackwardRun(c).failure(), "") << to_id(c);
  }
}

TEST(RaggedGradientCheck, WantsZerosForUnusedTokensAndNothingBehindTheLastSequence) {
  BackwardRun run(parsed("fp32/b5/q30/k30/h2/d8/causal/random/packed/used/sink/bwd"));
  ASSERT_EQ(run.failure(), "");
  const CaseSequences sequences = make_sequences(run.c);
  for (GuardedTensor* t : {&run.got.dq, &run.got.dk, &run.got.dv}) {
    const std::vector<RowUse> uses =
        row_uses(t == &run.got.dq ? sequences.q : sequences.k, run.c.batch);
    const auto set = [&](RowUse use, float x) {
      const int64_t row = std::find(uses.begin(), uses.end(), use) - uses.begin();
      store_float(t->view.data, t->view.dtype, row * t->view.stride[0], x);
    };
    const auto before = t->bytes;
    set(RowUse::kUnused, 1e-30f);
    EXPECT_NE(run.failure().find("must be exactly 0"), std::string::npos) << run.failure();
    std::copy(before.begin(), before.end(), t->bytes.begin());
    set(RowUse::kOutside, 0.f);
    EXPECT_NE(run.failure().find("outside its elements"), std::string::npos) << run.failure();
    std::copy(before.begin(), before.end(), t->bytes.begin());
  }
  const float dsink = load_float(run.got.dsink.view.data, FLASH3_FLOAT32, 1);
  store_float(run.got.dsink.view.data, FLASH3_FLOAT32, 1, dsink + 1);
  EXPECT_NE(run.failure().find("dsink[1]"), std::string::npos) << run.failure();
}

}  // namespace
}  // namespace flash3::cases
