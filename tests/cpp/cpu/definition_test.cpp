// SPDX-License-Identifier: Apache-2.0
// The oracle, which runs thousands of cases in good time, against the definition, which anybody can
// read: every option of a call.
#include "oracle/definition.hpp"

#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../parsed.hpp"
#include "cases/added_tensors.hpp"
#include "cases/backward_tensors.hpp"
#include "cases/mask.hpp"
#include "harness.hpp"
#include "oracle/attention_ref.hpp"
#include "oracle/one_sequence.hpp"

namespace flash3::test {
namespace {

using cases::parsed;

void expect_same(const char* name, const std::vector<double>& got,
                 const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size()) << name;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i]) continue;  // infinities too
    ASSERT_NEAR(got[i], want[i], 1e-12 * (1 + std::abs(want[i]))) << name << " element " << i;
  }
}

// The mask of the oracles and the library's, which share no code.
TEST(Definition, BothMasksAreTheSame) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const std::pair<int64_t, int64_t> lengths[] = {{9, 9}, {5, 12}, {12, 5}, {1, 30}, {30, 1}};
  for (const auto& [seq_q, seq_k] : lengths)
    for (const int64_t left : {int64_t{-1}, int64_t{0}, int64_t{3}, int64_t{40}, kMost})
      for (const int64_t right : {int64_t{-1}, int64_t{0}, int64_t{2}, int64_t{40}, kMost})
        for (const int64_t chunk : {int64_t{0}, int64_t{1}, int64_t{4}, int64_t{100}}) {
          const VisibleKeys visible{seq_q, seq_k, left, right, chunk};
          const Mask mask = Mask::make(seq_q, seq_k, {left, right, chunk});
          for (int64_t i = 0; i < seq_q; ++i)
            for (int64_t j = 0; j < seq_k; ++j)
              ASSERT_EQ(visible.sees(i, j), mask.sees(i, j))
                  << seq_q << " x " << seq_k << ", window " << left << ":" << right << ", chunk "
                  << chunk << ": " << i << " sees " << j;
        }
}

// What the case's mask was made of, where it has one.
std::optional<flash3_mask_params> source_of(const cases::Case& c,
                                            const cases::ExtraTensors& extra) {
  if (!extra.mask) return std::nullopt;
  return extra.mask->sources.params(c);
}
const flash3_mask_params* address_of(const std::optional<flash3_mask_params>& source) {
  return source ? &*source : nullptr;
}

void expect_forward(const std::string& id) {
  const cases::Case c = parsed(id);
  const auto t = cases::make_forward_tensors(c);
  const flash3_forward_params params =
      cases::make_params(c, t.q.view, t.k.view, t.v.view, t.out.view, t.lse.view, t.extra.views());
  const auto source = source_of(c, t.extra);
  const ReferenceForward oracle = attention_ref(to_problem(params), 0, t.extra.mask_pairs());
  const DefinedForward definition = define_forward(params, address_of(source));
  expect_same("out", oracle.out, definition.out);
  expect_same("lse", oracle.lse, definition.lse);
  size_t results = 0;
  cases::AddedOptions::visit(c.added, [&](const ParamField& field, int64_t shape) {
    if (!field.is_written || shape == 0) return;
    const std::string name(field.name);
    ++results;
    expect_same(name.c_str(), oracle.added.at(name).values, definition.added.at(name));
  });
  EXPECT_EQ(oracle.added.size(), results);
  EXPECT_EQ(definition.added.size(), results);
}

class Forward : public testing::TestWithParam<const char*> {};

TEST_P(Forward, OracleIsTheDefinition) { expect_forward(GetParam()); }

INSTANTIATE_TEST_SUITE_P(
    Definition, Forward,
    testing::Values("fp32/b2/q17/k29/h6x2/d24x40/full", "bf16/b1/q29/k17/h2/d64/causal/odd",
                    "fp16/b2/q40/k40/h2/d16/w5:3", "fp32/b1/q40/k33/h2/d16/causal+w7:",
                    "fp32/b1/q9/k40/h2/d16/w:4", "fp32/b1/q30/k41/h2/d16/full/chunk7",
                    "fp32/b1/q41/k30/h2/d16/causal/chunk7", "fp32/b2/q20/k30/h4/d16/full/sink",
                    "bf16/b2/q20/k30/h4x2/d16/causal/softcap20/sink", "fp32/b2/q9/k0/h2/d16/full",
                    "fp32/b5/q20/k30/h4x2/d16/causal/random/packed",
                    "fp32/b5/q20/k30/h2/d16/w3:9/random/used/sink",
                    "fp32/b4/q20/k30/h2/d16/causal/chunk5/random/packed/nomax",
                    "fp32/b2/q9/k30/h4x2/d24x40/causal/qv",
                    "bf16/b1/q9/k30/h4x1/d40x24/full/latent/softcap20",
                    "fp16/b4/q9/k30/h4x1/d24x40/causal/random/packed/qv/sink",
                    "fp32/b2/q9/k30/h4x2/d24x40/causal/rotate",
                    "bf16/b4/q9/k30/h4x2/d16/full/random/packed/rotate/seed4",
                    "fp16/b2/q9/k130/h4x2/d13/causal/kv8/blockscales/rotate",
                    "fp32/b3/q7/k30/h4x2/d16/full/tree", "fp32/b3/q9/k4/h2/d16/full/tree/sink",
                    "fp32/b5/q40/k60/h4x2/d16/full/random/packed/tree/softcap20",
                    "fp16/b5/q64/k70/h2/d16/full/random/used/tree",
                    "e4m3/b2/q30/k200/h4x2/d16/full/tree/blockscales",
                    "e4m3/b2/q140/k300/h4x2/d16/causal/blockscales",
                    "e4m3/b2/q40/k30/h4x2/d16/full/headscales",
                    "e4m3/b1/q40/k30/h2/d16/full/onescale",
                    "e4m3/b4/q150/k150/h2x1/d16/causal/random/packed/blockscales",
                    "fp32/b2/q17/k9/h6x2/d24x40/causal/max_logits=rows",
                    "bf16/b2/q9/k30/h6x2/d16/w5:3/softcap20/sink/max_logits=heads",
                    "fp16/b5/q20/k30/h4x2/d16/causal/random/packed/front3/max_logits=rows",
                    "fp32/b5/q20/k30/h4x2/d16/causal/random/used/sink/max_logits=heads",
                    "fp16/b4/q9/k30/h4x1/d24x40/causal/random/packed/qv/max_logits=heads",
                    "fp32/b5/q40/k60/h4x2/d16/full/random/packed/tree/max_logits=rows",
                    "fp32/b2/q9/k0/h2/d16/full/max_logits=heads",
                    "fp32/b2/q40/k133/h4x2/d16/full/mask:dense.b.h",
                    "bf16/b2/q140/k133/h2/d16/causal/mask:ranges2.h/sink",
                    "fp32/b2/q40/k50/h2/d16/w9:3/mask:documents.b/softcap20",
                    "fp16/b1/q60/k70/h2/d16/full/chunk7/mask:blocks16x8.h/max_logits=rows",
                    "e4m3/b2/q40/k133/h4x2/d16/causal/mask:dense/blockscales",
                    "fp32/b1/q40/k30/h2/d16/causal/mask:band/mask_alignment=1",
                    "e4m3/b2/q140/k300/h4x2/d16/causal/blockscales/max_logits=rows",
                    "fp32/b2/q37/k61/h6x2/d24x40/causal/dropout0.3",
                    "bf16/b5/q20/k30/h4x2/d16/w3:9/random/packed/softcap20/sink/dropout0.5",
                    "fp16/b5/q20/k30/h4x2/d16/full/random/used/dropout0.9/dropout_state=state",
                    "fp32/b2/q40/k133/h4x2/d16/full/mask:dense.b.h/dropout0.1/dropout_seed=7"));

// Calls of every kind with each tensor that flash3.h has gained, in each of its shapes.
std::vector<std::string> with_added(const std::vector<std::string>& ids) {
  std::vector<std::string> made;
  for (const std::string& id : ids)
    for (const ParamField& field : added_fields<flash3_forward_params>())
      for (int64_t i = 0; i < count_words(field.shapes); ++i) {
        const cases::Case c = parsed(id);
        if (!cases::goes_with(c, field)) continue;
        if (c.backward && !find_field<flash3_backward_params>(field.name)) continue;
        made.push_back(id + (c.backward ? "/dadded/" : "/") + std::string(field.name) + "=" +
                       std::string(word_at(field.shapes, i)));
      }
  return made;
}

class AddedForward : public testing::TestWithParam<std::string> {};

TEST_P(AddedForward, OracleIsTheDefinition) { expect_forward(GetParam()); }

INSTANTIATE_TEST_SUITE_P(
    Definition, AddedForward,
    testing::ValuesIn(with_added({"fp32/b2/q17/k29/h6x2/d24x40/causal",
                                  "fp16/b2/q29/k17/h4x2/d16/full/softcap20/sink",
                                  "fp32/b5/q20/k30/h4x2/d16/w3:9/random/packed",
                                  "fp32/b5/q20/k30/h4x1/d16/causal/chunk7/random/used",
                                  "fp32/b2/q9/k30/h4x2/d24x40/causal/qv/mask_alignment=1",
                                  "e4m3/b2/q30/k200/h4x2/d16/causal/blockscales",
                                  "fp32/b2/q40/k133/h4x2/d16/full/mask:dense.b.h",
                                  "fp32/b5/q20/k30/h4x2/d16/causal/random/packed/dropout0.3"})));

void expect_backward(const std::string& id) {
  const cases::Case c = parsed(id);
  const auto t = cases::make_backward_tensors(c);
  const flash3_backward_params params = cases::make_backward_params(c, t.views());
  BackwardProblem problem;
  const Status status = make_backward_problem(&params, Pointers::kRequired, &problem);
  ASSERT_TRUE(status.ok()) << status.message();
  const auto source = source_of(c, t.extra);
  const ReferenceBackward oracle = attention_backward_ref(problem, 0, t.extra.mask_pairs());
  const DefinedBackward definition = define_backward(params, address_of(source));
  expect_same("dq", oracle.dq, definition.dq);
  expect_same("dk", oracle.dk, definition.dk);
  expect_same("dv", oracle.dv, definition.dv);
  expect_same("dsink", oracle.dsink, definition.dsink);
  EXPECT_EQ(oracle.added.size(), definition.added.size());
  for (const auto& [name, values] : oracle.added)
    expect_same(std::string(name).c_str(), values.values, definition.added.at(std::string(name)));
}

class Backward : public testing::TestWithParam<const char*> {};

TEST_P(Backward, OracleIsTheDefinition) { expect_backward(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Definition, Backward,
                         testing::Values("fp32/b2/q17/k29/h6x2/d24x40/full/bwd",
                                         "bf16/b1/q29/k17/h2/d64/causal/odd/bwd",
                                         "fp16/b2/q40/k40/h2/d16/w5:3/dlse/bwd",
                                         "fp32/b1/q30/k41/h2/d16/full/chunk7/bwd",
                                         "fp32/b2/q20/k30/h4x2/d16/causal/softcap20/sink/dlse/bwd",
                                         "fp32/b5/q20/k30/h4x2/d16/causal/random/packed/sink/bwd",
                                         "fp32/b5/q20/k30/h2/d16/w3:9/random/used/dlse/bwd",
                                         "fp32/b2/q40/k133/h4x2/d16/full/mask:dense.b.h/dlse/bwd",
                                         "bf16/b2/q40/k50/h2/d16/causal/mask:ranges2.h/sink/bwd",
                                         "fp32/b2/q40/k50/h2/d16/full/softcap20/mask:documents/bwd",
                                         "fp16/b1/q60/k70/h4x2/d16/full/mask:blocks16x8.h/bwd",
                                         "fp32/b2/q37/k61/h6x2/d24/causal/dropout0.3/dlse/bwd",
                                         "fp32/b5/q20/k30/h4x2/d16/full/random/packed/softcap20/"
                                         "sink/dropout0.5/dropout_state=state/bwd",
                                         "fp16/b1/q60/k70/h4x2/d16/full/mask:blocks16x8.h/"
                                         "dropout0.2/dropout_offset=3/bwd"));

class AddedBackward : public testing::TestWithParam<std::string> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AddedBackward);  // while no gradient depends on one

TEST_P(AddedBackward, OracleIsTheDefinition) { expect_backward(GetParam()); }

INSTANTIATE_TEST_SUITE_P(
    Definition, AddedBackward,
    testing::ValuesIn(with_added({"fp32/b2/q17/k29/h6x2/d24x40/causal/dlse/bwd",
                                  "fp16/b2/q29/k17/h4x2/d16/full/softcap20/sink/dlse/bwd",
                                  "fp32/b5/q20/k30/h4x2/d16/w3:9/random/packed/bwd",
                                  "fp32/b5/q20/k30/h4x1/d16/causal/chunk7/random/used/bwd",
                                  "fp32/b2/q40/k133/h4x2/d16/full/mask:dense.b.h/bwd",
                                  "fp32/b5/q20/k30/h4x2/d16/causal/random/packed/softcap20/sink/"
                                  "dropout0.3/dlse/bwd"})));

// Neither takes a mask for none, nor a source for a mask.
TEST(Definition, AMaskGoesWithItsSource) {
  const cases::Case c = parsed("fp32/b1/q9/k12/h2/d16/full/mask:dense");
  const auto t = cases::make_forward_tensors(c);
  flash3_forward_params params =
      cases::make_params(c, t.q.view, t.k.view, t.v.view, t.out.view, t.lse.view, t.extra.views());
  const auto source = source_of(c, t.extra);
  EXPECT_THROW(define_forward(params), std::invalid_argument);
  EXPECT_NO_THROW(define_forward(params, address_of(source)));
  params.mask = nullptr;
  EXPECT_THROW(define_forward(params, address_of(source)), std::invalid_argument);

  const cases::Case b = parsed("fp32/b1/q9/k12/h2/d16/full/mask:dense/bwd");
  const auto tensors = cases::make_backward_tensors(b);
  EXPECT_THROW(define_backward(cases::make_backward_params(b, tensors.views())),
               std::invalid_argument);
}

}  // namespace
}  // namespace flash3::test
