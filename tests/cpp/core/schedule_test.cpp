// SPDX-License-Identifier: Apache-2.0
// Schedules that the caller keeps: which calls take one, what is refused, and what one is made
// from.
#include "flash3/schedule.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "call.hpp"
#include "core/alias_checks.hpp"
#include "core/kept.hpp"
#include "flash3/plan.h"

namespace flash3::test {
namespace {

std::string sentence_of_forward(const Forward& args) {
  return try_forward(args) ? "" : flash3_last_error();
}

alignas(256) unsigned char workspace_memory[1024];

Forward with_workspace(Forward args) {
  args.workspace = workspace_memory, args.workspace_size = sizeof workspace_memory;
  return args;
}

TEST(Schedule, OfACallOnACpuTakesNoMemory) {
  CacheCall call;
  Forward args = with_workspace(call.args());
  EXPECT_EQ(schedule_size(args), 0u);
  const Schedule made = schedule(args, nullptr, 0);
  EXPECT_NE(made.key, 0u);
  EXPECT_EQ(schedule(args, nullptr, 0).key, made.key);

  const std::vector<float> k = call.k, v = call.v;
  forward(args);
  const std::vector<float> expected = call.out;
  call.k = k, call.v = v;
  std::fill(call.out.begin(), call.out.end(), Call::kUntouched);
  args.schedule = &made;
  forward(args);
  EXPECT_EQ(call.out, expected);
}

// Each makes another schedule necessary.
TEST(Schedule, IsForCallsOfTheSameSizesAndMaskAlone) {
  CacheCall call;
  const Schedule made = schedule(call.args(), nullptr, 0);
  const struct {
    const char* what;
    std::function<void(Forward&)> change;
  } changes[] = {
      {"causal", [](Forward& f) { f.causal = false; }},
      {"window", [](Forward& f) { f.window_left = 3; }},
      {"chunk", [](Forward& f) { f.chunk = 4; }},
      {"sm_margin", [](Forward& f) { f.sm_margin = 8; }},
      {"leftpad", [](Forward& f) { f.leftpad_k = {}; }},
      {"softcap", [](Forward& f) { f.softcap = 20.f; }},
      {"append",
       [](Forward& f) { f.k_new = f.v_new = f.rotary_cos = f.rotary_sin = f.rotary_offsets = {}; }},
      {"tree_mask",
       [](Forward& f) {
         static constexpr uint64_t kWords[4] = {};
         f.rotary_cos = f.rotary_sin = f.rotary_offsets = {};
         f.causal = false, f.tree_mask = tree_mask_tensor(kWords, 2, 2);
       }},
      {"queries", [](Forward& f) { f.q.shape[1] = f.out.shape[1] = 1; }},
  };
  for (const auto& [what, change] : changes) {
    Forward args = with_workspace(call.args());
    change(args);
    args.schedule = &made;
    const std::string said = sentence_of_forward(args);
    EXPECT_EQ(
        said.rfind("schedule->key = " + std::to_string(made.key) + " but this call needs ", 0), 0u)
        << what << ": " << said;
    const Schedule own = schedule(args, nullptr, 0);
    args.schedule = &own;
    EXPECT_EQ(sentence_of_forward(args), "") << what;
  }
}

TEST(Schedule, LooksAtNoAddressButThoseOfLengths) {
  CacheCall call;
  const Schedule made = schedule(call.args(), nullptr, 0);
  Forward question = call.args();
  question.backend = FLASH3_BACKEND_CPU;
  for (Tensor* t :
       {&question.q, &question.k, &question.v, &question.out, &question.page_table, &question.k_new,
        &question.v_new, &question.rotary_cos, &question.rotary_sin, &question.rotary_offsets})
    t->data = nullptr;
  EXPECT_EQ(schedule(question, nullptr, 0).key, made.key);

  question.leftpad_k.data = nullptr;
  const auto p = question.params();
  Schedule none{};
  EXPECT_EQ(flash3_forward_schedule(&p, &none), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(),
               "leftpad_k.data is null; a schedule is made from the lengths that it holds");
  EXPECT_EQ(none.key, 0u);
}

TEST(Schedule, RefusesWhatNobodyMade) {
  CacheCall call;
  Forward args = call.args();
  const Schedule empty{};
  args.schedule = &empty;
  const std::string said = sentence_of_forward(args);
  EXPECT_EQ(said.rfind("schedule->key = 0 but this call needs ", 0), 0u) << said;

  auto p = args.params();
  EXPECT_EQ(flash3_forward_schedule(&p, nullptr), FLASH3_INVALID_ARGUMENT);
  EXPECT_STREQ(flash3_last_error(), "schedule is null; it must point to where the result goes");
  EXPECT_EQ(flash3_forward_schedule_size(&p, nullptr), FLASH3_INVALID_ARGUMENT);
  p.struct_size = 8;
  Schedule none{};
  EXPECT_EQ(flash3_forward_schedule(&p, &none), FLASH3_INVALID_ARGUMENT);
}

TEST(Schedule, OfNoQueriesIsEmpty) {
  CacheCall call;
  Forward args = call.elements();
  args.q.shape[1] = args.out.shape[1] = 0;
  EXPECT_EQ(schedule_size(args), 0u);
  const Schedule made = schedule(args, nullptr, 0);
  EXPECT_NE(made.key, 0u);
  args.schedule = &made;
  EXPECT_EQ(sentence_of_forward(args), "");
  const Schedule other{nullptr, 0, made.key + 2};
  args.schedule = &other;
  const std::string refusal = "schedule->key = " + std::to_string(other.key) +
                              " but this call needs " + std::to_string(made.key);
  EXPECT_EQ(sentence_of_forward(args).rfind(refusal, 0), 0u) << sentence_of_forward(args);

  auto p = args.params();
  flash3_plan* plan = nullptr;
  ASSERT_EQ(flash3_forward_plan(&p, &plan), FLASH3_OK) << flash3_last_error();
  EXPECT_EQ(flash3_forward_run(plan, &p), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(flash3_last_error()).rfind(refusal, 0), 0u) << flash3_last_error();
  p.schedule = &made;
  EXPECT_EQ(flash3_forward_run(plan, &p), FLASH3_OK) << flash3_last_error();
  flash3_plan_destroy(plan);
}

TEST(Schedule, MayChangeFromRunToRunOfAPlan) {
  CacheCall call;
  Forward args = call.elements();
  auto p = args.params();
  flash3_plan* plan = nullptr;
  ASSERT_EQ(flash3_forward_plan(&p, &plan), FLASH3_OK) << flash3_last_error();
  const Schedule made = schedule(args, nullptr, 0), other{nullptr, 0, made.key + 2};
  p.schedule = &made;
  EXPECT_EQ(flash3_forward_run(plan, &p), FLASH3_OK) << flash3_last_error();
  p.schedule = &other;
  EXPECT_EQ(flash3_forward_run(plan, &p), FLASH3_INVALID_ARGUMENT);
  p.schedule = nullptr;
  EXPECT_EQ(flash3_forward_run(plan, &p), FLASH3_OK) << flash3_last_error();
  flash3_plan_destroy(plan);
}

TEST(Schedule, IsMadeAgainForTheSameCallAlone) {
  CacheCall call;
  Schedule made = schedule(call.args(), nullptr, 0);
  const uint64_t key = made.key;
  EXPECT_LE(key, uint64_t{INT64_MAX});
  auto p = call.args().params();
  EXPECT_EQ(flash3_forward_schedule(&p, &made), FLASH3_OK) << flash3_last_error();
  EXPECT_EQ(made.key, key);
  p.sm_margin = 8;
  EXPECT_EQ(flash3_forward_schedule(&p, &made), FLASH3_INVALID_ARGUMENT);
  const std::string refusal = "schedule->key = " + std::to_string(key) + " but this call needs ";
  EXPECT_EQ(std::string(flash3_last_error()).rfind(refusal, 0), 0u) << flash3_last_error();
  EXPECT_EQ(made.key, key);
  made.key = 0;
  EXPECT_EQ(flash3_forward_schedule(&p, &made), FLASH3_OK) << flash3_last_error();
  EXPECT_NE(made.key, key);
}

// A backend whose plans have schedules.
class ListingBackend : public Backend {
 public:
  flash3_backend id() const override { return FLASH3_BACKEND_HOPPER; }
  const char* name() const override { return "hopper"; }
  Status available() const override { return {}; }
  std::string describe() const override { return "listing"; }
  Status can_access(const void*, bool* accessible) const override {
    *accessible = true;
    return {};
  }
  Status plan(const ForwardProblem&, PlanPointer<ForwardProblem>*) const override { return {}; }
  Status plan(const BackwardProblem&, PlanPointer<BackwardProblem>*) const override { return {}; }
  Status plan(const QuantizeProblem&, PlanPointer<QuantizeProblem>*) const override { return {}; }
  Status plan(const MergeProblem&, PlanPointer<MergeProblem>*) const override { return {}; }
  Status make_mask(const MaskProblem&) const override { return {}; }
  Status read_mask_counts(const MaskShape&, const void*, void*, MaskCounts*) const override {
    return {};
  }
  Status fill_padding(const Padding&, void*) const override { return {}; }
  Status max_of_rows(const LseView&, int64_t, int64_t, const LseView&, void*) const override {
    return {};
  }
};

class ListingPlan : public Plan<ForwardProblem> {
 public:
  explicit ListingPlan(uint64_t variant) : variant_(variant) {}
  size_t workspace_bytes() const override { return 0; }
  void explain(const ForwardProblem&, Explanation*) const override {}
  Status launch(const ForwardProblem&) const override { return {}; }
  ScheduleNeeds schedule_needs() const override { return {512, variant_}; }
  Status make_schedule(const ForwardProblem&, void* data) const override {
    static_cast<unsigned char*>(data)[511] = 7;
    return {};
  }

 private:
  uint64_t variant_;
};

TEST(Schedule, RulesOfItsMemory) {
  alignas(256) static unsigned char memory[768];
  ListingBackend backend;
  const PlannedCall<ForwardProblem> call{&backend, std::make_unique<ListingPlan>(1)},
      of_other_device{&backend, std::make_unique<ListingPlan>(2)};
  ForwardProblem problem;
  Schedule made{};
  const auto sentence = [&] { return make_schedule(problem, call, &made).message(); };
  const std::string rest = " but this call needs 512 bytes, as flash3_forward_schedule_size tells";
  EXPECT_EQ(sentence(), "schedule->data is null" + rest);
  made = {memory, 511, 0};
  EXPECT_EQ(sentence(), "schedule->size = 511" + rest);
  made = {memory + 16, 512, 0};
  EXPECT_NE(sentence().find("0 but it must be a multiple of 256"), std::string::npos);
  EXPECT_EQ(made.key, 0u);
  made = {memory, 512, 0};
  EXPECT_EQ(sentence(), "");
  EXPECT_EQ(memory[511], 7);
  memory[511] = 0;
  EXPECT_EQ(make_schedule(problem, of_other_device, &made).code(), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(memory[511], 0);

  const auto aliases = [&](const flash3_forward_params& p) {
    return without_addresses(check_schedule_aliases(&p, problem, call, made).message());
  };
  flash3_forward_params params{};
  params.struct_size = sizeof params;
  params.seqused_k = index_tensor(reinterpret_cast<int32_t*>(memory + 512), 2);
  problem.sequences_k.used = static_cast<const int*>(params.seqused_k.data);
  EXPECT_EQ(aliases(params), "");
  params.seqused_k.data = memory + 508;
  EXPECT_EQ(
      aliases(params),
      "schedule->data and seqused_k share memory, but the call writes schedule->data; what it "
      "writes must lie in no other tensor of the call");

  problem.schedule = &made;
  params.seqused_k.data = memory + 512;
  EXPECT_TRUE(check_scratch_aliases(&params, problem, call).ok());  // both are read
  params.out = tensor(memory + 504, FLASH3_FLOAT32, {1, 1, 1, 4});
  problem.out.data = params.out.data;
  EXPECT_EQ(without_addresses(check_aliases(params, problem).message()),
            "out and seqused_k share memory, but the call writes out; what it writes must lie in "
            "no other tensor of the call");
  EXPECT_NE(check_scratch_aliases(&params, problem, call).message().find("schedule->data at"),
            std::string::npos)
      << "tensors have been compared with each other by then";
  params.out = tensor(memory + 504, FLASH3_FLOAT32, {1, 1, 1, 2});
  EXPECT_EQ(without_addresses(check_scratch_aliases(&params, problem, call).message()),
            "out and schedule->data share memory, but the call writes out; what it writes must lie "
            "in no other tensor of the call");
  problem.sequences_k.used = nullptr, problem.out.data = nullptr;

  EXPECT_TRUE(check_workspace(problem, call).ok());
  EXPECT_EQ(check_workspace(problem, of_other_device).code(), FLASH3_INVALID_ARGUMENT);
  made.size = 256;
  EXPECT_EQ(check_workspace(problem, call).message(), "schedule->size = 256" + rest);
}

}  // namespace
}  // namespace flash3::test
