// SPDX-License-Identifier: Apache-2.0
// What the oracles and yardsticks make of a mask as data, from its pairs.
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "../parsed.hpp"
#include "cases/backward_tensors.hpp"
#include "cases/mask.hpp"
#include "harness.hpp"
#include "oracle/attention_ref.hpp"
#include "oracle/yardsticks/naive.hpp"

namespace flash3::test {
namespace {

struct MaskedCall {
  cases::Case c;
  cases::BackwardTensors tensors;
  BackwardProblem problem;

  explicit MaskedCall(const std::string& id)
      : c(cases::parsed(id)), tensors(cases::make_backward_tensors(c)) {
    const auto params = cases::make_backward_params(c, tensors.views());
    const Status status = make_backward_problem(&params, Pointers::kRequired, &problem);
    EXPECT_TRUE(status.ok()) << status.message();
  }
  const MaskPairs* pairs() const { return tensors.extra.mask_pairs(); }
};

// The yardstick in float32.
TEST(MaskOracle, NaiveBackwardIsNear) {
  for (const char* rest : {"/b2/q129/k257/h4x2/d64/full/mask:ranges1.h",
                           "/b2/q127/k300/h6x2/d72/w100:20/mask:ranges8.b.h/sink",
                           "/b1/q300/k300/h3x1/d64/causal/mask:documents/softcap20/scale0.5",
                           "/b2/q260/k390/h4x2/d64x40/full/mask:dense.b.h",
                           "/b2/q200/k500/h4x1/d40/causal+w100:/mask:blocks64x64.b.h",
                           "/b2/q140/k140/h2/d64/causal/chunk50/mask:band"}) {
    MaskedCall call(std::string("fp32") + rest + "/bwd/dlse");
    for (auto* t : {&call.tensors.dq, &call.tensors.dk, &call.tensors.dv}) t->fill_pattern();
    attention_backward_naive(call.problem, 1, call.pairs());
    const ReferenceBackward ref = attention_backward_ref(call.problem, 1, call.pairs());
    EXPECT_EQ(check_gradients(call.c, call.tensors.views(), ref).failure(), "") << rest;
  }
}

// What a query does not see does not touch it, not even a NaN times zero.
TEST(MaskOracle, NaiveBackwardLeavesOutWhatIsHidden) {
  MaskedCall call("fp32/b1/q200/k300/h1/d8/full/mask:dense/bwd");
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
  MaskedCall call("fp32/b1/q9/k12/h2/d16/full/mask:dense/bwd");
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
