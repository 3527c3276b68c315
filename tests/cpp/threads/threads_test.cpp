// SPDX-License-Identifier: Apache-2.0
// Many threads in the library at once, with calls of every kind through both interfaces: each gives
// the bits that it gives alone, and its own error. Under ThreadSanitizer (threads_test_sanitized)
// also: no two of them touch the same memory without an order between them.

#include <gtest/gtest.h>

#include <functional>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "../cpu/harness.hpp"
#include "calls.hpp"
#include "cases/backward_tensors.hpp"

namespace flash3::test {
namespace {

constexpr int kCallers = 64, kMaxThreads = 4;

struct Kind {
  const char* name;
  std::function<Bytes(const How&)> run;
  bool shares;               // has work for four threads
  bool same_on_any_threads;  // the bits; else only those of calls on as many threads
};

std::vector<Kind> kinds_of(Calls* c) {
  const auto dense = [c](flash3_dtype dtype) {
    return [c, dtype](const How& how) { return c->dense(dtype, how); };
  };
  return {
      {"dense float32", dense(FLASH3_FLOAT32), true, false},
      // AMX makes it too short.
      {"dense bfloat16", dense(FLASH3_BFLOAT16), false, false},
      {"split keys", [c](const How& how) { return c->split(how); }, true, false},
      {"ragged", [c](const How& how) { return c->ragged(how); }, true, true},
      {"gradients", [c](const How& how) { return c->dense_gradients(how); }, true, true},
      {"ragged gradients", [c](const How& how) { return c->ragged_gradients(how); }, true, true},
      {"quantize", [c](const How& how) { return c->quantized(how); }, true, true},
      {"FP8", [c](const How& how) { return c->fp8(how); }, true, false},
      {"computed in FP8", [c](const How& how) { return c->computed_in_fp8(how); }, true, false},
      {"answers", [c](const How& how) { return c->answers(how); }, false, false},
  };
}

// Fails a call with a number that no other thread has in its message, through one interface and the
// other; "" if both tell it, also after a call that went well.
std::string wrong_error(int caller) {
  const int given = -1 - caller;
  const std::string want =
      "num_threads = " + std::to_string(given) + " but it must be at least 0 (0: one per core)";
  float x = 0;
  Forward args;
  args.q = args.k = args.v = args.out = tensor(&x, FLASH3_FLOAT32, {1, 1, 1, 1});
  args.num_threads = given;
  if (const Result result = try_forward(args); result.message() != want) return result.message();
  const auto params = args.params();
  if (flash3_forward(&params) != FLASH3_INVALID_ARGUMENT) return "not refused";
  std::this_thread::yield();
  if (flash3_backend_available(FLASH3_BACKEND_CPU) != FLASH3_OK) return "no CPU backend";
  return flash3_last_error() == want ? "" : flash3_last_error();
}

class MixedCalls : public testing::Test {
 protected:
  Calls calls_;
  const std::vector<Kind> kinds_ = kinds_of(&calls_);
};

// Or the next test would see threads beside each other alone, and none within a call.
TEST_F(MixedCalls, HaveWorkForTheirThreads) {
  for (const Kind& kind : kinds_) {
    std::string explained;
    kind.run({.num_threads = kMaxThreads, .explained = &explained});
    if (kind.shares) {
      EXPECT_NE(explained.find("on 4 threads"), std::string::npos) << kind.name << explained;
    }
  }
}

TEST_F(MixedCalls, GiveWhatTheyGiveAlone) {
  // [kind][threads - 1]
  std::vector<std::vector<Bytes>> alone;
  for (const Kind& kind : kinds_) {
    auto& of_kind = alone.emplace_back();
    for (int threads = 1; threads <= kMaxThreads; ++threads) {
      of_kind.push_back(kind.run({threads % 2 == 0, threads}));
      if (kind.same_on_any_threads) {
        EXPECT_EQ(of_kind.back(), of_kind.front()) << kind.name << " on " << threads;
      }
    }
  }

  // gtest's own checks stay out of the threads: it is not built for ThreadSanitizer.
  std::vector<std::string> wrong(kCallers);
  const auto call_all = [&](int caller) {
    for (size_t i = 0; i < kinds_.size(); ++i) {
      const size_t at = (i + static_cast<size_t>(caller)) % kinds_.size();
      const int threads = 1 + (caller / 10 + static_cast<int>(i)) % kMaxThreads;
      if (kinds_[at].run({caller % 2 == 0, threads}) != alone[at][static_cast<size_t>(threads - 1)])
        wrong[static_cast<size_t>(caller)] += std::string(kinds_[at].name) + " differs; ";
      wrong[static_cast<size_t>(caller)] += wrong_error(caller);
    }
  };

  std::latch together(kCallers);
  std::vector<std::thread> threads;
  threads.reserve(kCallers);
  for (int caller = 0; caller < kCallers; ++caller)
    threads.emplace_back([&, caller] {
      together.arrive_and_wait();
      try {
        call_all(caller);
      } catch (const Error& error) {
        wrong[static_cast<size_t>(caller)] += error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (int caller = 0; caller < kCallers; ++caller)
    EXPECT_EQ(wrong[static_cast<size_t>(caller)], "") << "thread " << caller;
}

// The CPU backward's blocks of rows, which threads sum up side by side, on every instruction set:
// strips of AMX are longer than a block's last rows, and must leave the next block's alone. That
// seldom changes a bit; ThreadSanitizer (threads_test_sanitized) sees it each time.

TEST(RowBlocks, BelongToOneThreadAtATime) {
  for (const std::string id :
       {"bf16/b1/q300/k1100/h1/d64/full/bwd", "bf16/b2/q70/k600/h2/d32/causal/bwd"}) {
    std::string error;
    const auto c = cases::parse_id(id, &error);
    ASSERT_TRUE(c) << error;
    cases::BackwardTensors tensors = cases::make_backward_tensors(*c);
    const flash3_backward_params params = cases::make_backward_params(*c, tensors.views());
    BackwardProblem problem;
    ASSERT_TRUE(make_backward_problem(&params, Pointers::kRequired, &problem).ok());
    for (const TestTarget& target : backward_targets(problem.dtype)) {
      std::vector<std::byte> alone;
      for (const int threads : {1, 2, 3, 5, 7, 16}) {
        problem.num_threads = threads;
        const BackwardPlan plan = plan_backward_on(target, problem);
        Workspace workspace(plan.workspace_size + 64);
        BackwardProblem run = problem;
        const auto address = reinterpret_cast<uintptr_t>(workspace.data());
        run.workspace = reinterpret_cast<void*>((address + 63) / 64 * 64);
        run.workspace_size = plan.workspace_size;
        ASSERT_TRUE(run_backward(run, plan).ok());
        if (threads == 1) alone.assign(tensors.dq.bytes.begin(), tensors.dq.bytes.end());
        EXPECT_TRUE(std::equal(alone.begin(), alone.end(), tensors.dq.bytes.begin()))
            << id << " on " << target.name() << ", " << threads << " threads";
      }
    }
  }
}

}  // namespace
}  // namespace flash3::test
