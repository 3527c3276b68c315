// SPDX-License-Identifier: Apache-2.0
// The rules of a call that is given a mask (flash3/mask.h): what breaks each, and the exact
// sentence that the user reads.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "call.hpp"
#include "core/mask_checks.hpp"
#include "core/problem.hpp"
#include "data_mask_call.hpp"
#include "flash3/plan.hpp"

namespace flash3::test {
namespace {

template <class Params>
struct CallRule {
  const char* name;
  void (*breaks)(Params&, flash3_mask&);
  std::string message;
  flash3_status status = FLASH3_INVALID_ARGUMENT;
};

template <class Params>
std::vector<CallRule<Params>> call_rules() {
  static const int32_t lengths[3] = {};
  return {
      {"SeqQ", [](Params&, flash3_mask& m) { m.seq_q = 4; },
       "mask->seq_q = 4 but q.shape[1] = 3; the mask was made for calls of another size"},
      {"SeqK", [](Params&, flash3_mask& m) { m.seq_k = 4; },
       "mask->seq_k = 4 but k.shape[1] = 5; the mask was made for calls of another size"},
      {"Batch", [](Params&, flash3_mask& m) { m.batch = 3; },
       "mask->batch = 3 but q.shape[0] = 2; a mask is the same for all, 1, or has its own for "
       "each"},
      {"Heads", [](Params&, flash3_mask& m) { m.heads = 2; },
       "mask->heads = 2 but q.shape[2] = 4; a mask is the same for all, 1, or has its own for "
       "each"},
      {"Ranges", [](Params&, flash3_mask& m) { m.ranges = 9; },
       "mask->ranges = 9 but it must be from 1 to 8"},
      {"Blocks", [](Params&, flash3_mask& m) { m.blocks = -1; },
       "mask->blocks = -1 but it must be from 0 to 2147483647"},
      {"Causal", [](Params& p, flash3_mask&) { p.causal = 1; },
       "window_right (0: causal) = 0 but the mask was made with 2; the band of a call with a mask "
       "is none, or the mask's"},
      {"Window", [](Params& p, flash3_mask&) { p.window_left = 2; },
       "window_left = 2 but the mask was made with 3; the band of a call with a mask is none, or "
       "the mask's"},
      {"Chunk", [](Params& p, flash3_mask&) { p.chunk = 2; },
       "chunk = 2 but the mask was made with 0; the band of a call with a mask is none, or the "
       "mask's"},
      {"Alignment", [](Params& p, flash3_mask&) { p.mask_alignment = FLASH3_ALIGN_TOP_LEFT; },
       "mask_alignment = 1 but the mask was made with 0; the band of a call with a mask is none, "
       "or "
       "the mask's"},
      {"SeqUsed", [](Params& p, flash3_mask&) { p.seqused_k = index_tensor(lengths, 2); },
       "mask is given and seqused_k is given, but mask->lengths = 0 lacks 8; make the mask with "
       "seqused_k"},
      {"Lengths", [](Params&, flash3_mask& m) { m.lengths = FLASH3_MASK_SEQUSED_Q; },
       "mask->lengths = 4 has 4 but seqused_q is all zero; the mask was made with seqused_q"},
      {"Memory", [](Params&, flash3_mask& m) { m.data = nullptr; },
       "mask->data is null but this call needs 2304 bytes, as flash3_mask_size tells"},
      {"Size", [](Params&, flash3_mask& m) { m.size = 2303; },
       "mask->size = 2303 but this call needs 2304 bytes, as flash3_mask_size tells"},
  };
}

// Made with the band of the call, or without one in the call.
MaskArguments windowed() {
  MaskArguments args = DataMask::band();
  args.window_left = 3, args.window_right = 2;
  return args;
}

template <class TestCall>
void check_call_rules(TestCall& call, DataMask& m) {
  m.make(windowed());
  call.args.mask = &m.mask;
  call.args.backend = FLASH3_BACKEND_CPU;
  const flash3_mask made = m.mask;
  auto plain = call.args;
  plain.window_left.reset(), plain.window_right.reset();
  EXPECT_EQ(supported(plain).message(), "");
  call.args.window_left = 3, call.args.window_right = 2;
  using Params = decltype(call.args.params());
  for (const CallRule<Params>& rule : call_rules<Params>()) {
    SCOPED_TRACE(rule.name);
    m.mask = made;
    EXPECT_EQ(supported(call.args).message(), "");
    auto p = call.args.params();
    rule.breaks(p, m.mask);
    flash3_status status;
    if constexpr (std::same_as<Params, flash3_forward_params>)
      status = flash3_forward(&p);
    else
      status = flash3_backward(&p);
    EXPECT_EQ(error_of(status, rule.status), rule.message);
  }
  m.mask = made;
}

TEST(DataMaskRules, OfAForward) {
  Call call;
  DataMask m;
  check_call_rules(call, m);
  for (const float x : call.out) ASSERT_EQ(x, Call::kUntouched);
  m.mask.key += 2;
  auto p = call.args.params();
  EXPECT_EQ(error_of(flash3_forward(&p)),
            "mask->key = " + std::to_string(m.mask.key) + " but its fields make " +
                std::to_string(m.mask.key - 2) +
                " on the cpu backend; flash3_mask_make sets them all, for the backend and the "
                "device that it ran on");
  // Fields that fit the call and are not the mask's.
  m.mask.key -= 2;
  m.mask.blocks = 1;
  m.mask.partial_blocks = 1;
  EXPECT_NE(error_of(flash3_forward(&p)).find("but its fields make "), std::string::npos);
}

TEST(DataMaskRules, OfABackward) {
  BackwardCall call;
  DataMask m;
  check_call_rules(call, m);
}

TEST(DataMaskRules, OfWhatGoesWithoutOne) {
  Call call;
  DataMask m;
  call.args.mask = m.make(DataMask::band());
  const auto refusal = [&](void (*change)(Forward&), flash3_status status = FLASH3_UNSUPPORTED) {
    Forward args = call.args;
    change(args);
    const Result result = supported(args);
    EXPECT_EQ(result.code(), status) << result.message();
    return result.message();
  };
  static const int32_t index[4] = {0, 1, 2, 3};
  ForwardProblem problem;
  Forward cached = call.args;
  cached.cache_batch_idx = index_tensor(index, 2);
  const auto params = cached.params();
  ASSERT_EQ(make_forward_problem(&params, Pointers::kRequired, &problem).message(), "");
  static uint64_t words[6];
  EXPECT_EQ(refusal([](Forward& f) { f.leftpad_k = index_tensor(index, 2); }),
            "mask is given and leftpad_k is given; a mask counts keys from the first of k, and "
            "knows no new ones");
  EXPECT_EQ(refusal([](Forward& f) { f.qv = f.out; }),
            "mask is given and qv is given; latent attention knows the band alone");
  EXPECT_EQ(refusal([](Forward& f) { f.tree_mask = tree_mask_tensor(words, 2, 3); },
                    FLASH3_INVALID_ARGUMENT),
            "mask is given and tree_mask is given; tree_mask is the mask of the call");
  EXPECT_EQ(refusal([](Forward& f) { f.compute = FLASH3_COMPUTE_FP8; }),
            "mask is given and compute = 1 (fp8) is given; bring q, k and v to FP8 with "
            "flash3_quantize before, or leave it out");
  RaggedCall ragged;
  Forward f = ragged.forward();
  f.mask = &m.mask;
  EXPECT_EQ(supported(f).message(),
            "mask is given and cu_seqlens_q is given, but mask->lengths = 0 lacks 1; make the mask "
            "with cu_seqlens_q");
}

// What a call writes lies outside of its mask.
TEST(DataMaskRules, OfWhatLiesInIt) {
  Call call;
  DataMask m;
  call.args.mask = m.make(DataMask::band());
  call.args.backend = FLASH3_BACKEND_CPU;
  auto p = call.args.params();
  p.lse.data = m.memory.data() + 512;
  EXPECT_EQ(without_addresses(error_of(flash3_forward(&p))),
            "lse and mask->data share memory, but the call writes lse; what it writes must lie in "
            "no other tensor of the call");
  BackwardCall backward;
  backward.args.mask = &m.mask;
  auto b = backward.args.params();
  size_t bytes = 0;
  ASSERT_EQ(flash3_backward_workspace(&b, &bytes), FLASH3_OK) << flash3_last_error();
  ASSERT_LE(bytes, m.memory.size());
  b.workspace = m.memory.data(), b.workspace_size = m.memory.size();
  EXPECT_EQ(without_addresses(error_of(flash3_backward(&b))),
            "workspace and mask->data share memory, but the call writes workspace; what it writes "
            "must lie in no other tensor of the call");
}

// A kept plan takes masks of the same sizes and band, and no others.
TEST(DataMask, OfAKeptPlan) {
  Call call;
  auto dense = std::make_unique<DataMask>(), other = std::make_unique<DataMask>();
  call.args.backend = FLASH3_BACKEND_CPU;
  Forward args = call.args;
  dense->bytes.fill(1);
  args.mask = dense->make(dense->dense());
  const Plan<Forward> plan(args);
  ASSERT_TRUE(plan.try_run(args));
  const std::vector<float> all_seen = call.out;
  other->bytes.fill(0);
  args.mask = other->make(other->dense());
  ASSERT_TRUE(plan.try_run(args));
  for (const float x : call.out) EXPECT_EQ(x, 0.f);
  args.mask = nullptr;
  EXPECT_EQ(plan.try_run(args).message(),
            "mask = null but the plan was made for given; only addresses, stream and workspace may "
            "change");
  args.mask = other->make(DataMask::band());
  EXPECT_EQ(plan.try_run(args).message(),
            "mask->batch = 1 but the plan was made for 2; only addresses, stream and workspace may "
            "change");
  MaskArguments causal = other->dense();
  causal.causal = true;
  args.mask = other->make(causal);
  EXPECT_EQ(plan.try_run(args).message(),
            "mask->window_right = 0 but the plan was made for -1; only addresses, stream and "
            "workspace may change");
  const Plan<Forward> without(call.args);
  EXPECT_EQ(without.try_run(args).message(),
            "mask = given but the plan was made for null; only addresses, stream and workspace may "
            "change");
  ASSERT_TRUE(without.try_run(call.args));
  EXPECT_EQ(call.out, all_seen);
}

TEST(DataMask, IsExplained) {
  Call call;
  DataMask m;
  call.args.mask = m.make(m.documents());
  call.args.backend = FLASH3_BACKEND_CPU;
  EXPECT_NE(explain(call.args).find("mask: query i sees what its mask lists, in blocks of 128 x "
                                    "128, for each sequence and all heads, with room for 2 blocks "
                                    "and the bits of 0\n"),
            std::string::npos);
}

}  // namespace
}  // namespace flash3::test
