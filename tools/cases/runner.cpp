// SPDX-License-Identifier: Apache-2.0
#include "cases/runner.hpp"

#include <chrono>
#include <utility>

#include "cases/quantize_runner.hpp"
#include "cases/upload.hpp"
#include "oracle/yardsticks/naive.hpp"

namespace flash3::cases {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Expected {
  ReferenceForward ref;
  GuardedTensor naive_out, naive_lse;  // without data: not computed
};

// Empty if the library calls the case invalid; then *failure says why.
Expected expect(const Case& c, const ForwardTensors& t, const RunOptions& options,
                std::string* failure) {
  Expected e;
  GuardedTensor out = clone(t.out), lse = clone(t.lse);
  auto params = make_params(c, t.q.view, t.k.view, t.v.view, out.view, lse.view, t.extra.views());
  params.backend = options.backend;  // whose arithmetic the bounds and a plain implementation have
  ForwardProblem problem;
  if (const Status s = make_forward_problem(&params, Pointers::kRequired, &problem); !s.ok()) {
    *failure = s.message();
    return e;
  }
  e.ref = attention_ref(problem, options.oracle_threads);
  if (!options.naive && !needs_naive(c)) return e;
  if (problem.quantizes)
    attention_naive_fp8(problem, options.oracle_threads);
  else
    attention_naive(problem, options.oracle_threads);
  e.naive_out = std::move(out), e.naive_lse = std::move(lse);
  return e;
}

std::string last_error(const char* call) { return std::string(call) + ": " + flash3_last_error(); }

}  // namespace

CheckResult run_case(const Case& c, Memory& memory, const RunOptions& options) {
  if (c.backward) return run_backward_case(c, memory, options);
  if (c.quantize) return run_quantize_case(c, memory, options);
  CheckResult result;
  // The library is asked first: no tensors and no oracle for a call that it refuses.
  const auto on_backend = [&](flash3_forward_params params) {
    params.backend = options.backend;
    params.num_threads = options.num_threads;
    params.stream = memory.stream();
    return params;
  };
  auto params = on_backend(make_question(c));
  if (const auto status = flash3_forward_supported(&params); status != FLASH3_OK) {
    result.failure = last_error("flash3_forward_supported");
    return result;
  }

  const ForwardTensors host = make_forward_tensors(c);
  Upload q(memory, host.q), k(memory, host.k), v(memory, host.v), out(memory, host.out),
      lse(memory, host.lse);
  const ExtraUploads extra(memory, host.extra);
  params = on_backend(
      make_params(c, q.view(), k.view(), v.view(), out.view(), lse.view(), extra.views()));
  size_t workspace_bytes = 0;
  if (flash3_forward_workspace(&params, &workspace_bytes) != FLASH3_OK) {
    result.failure = last_error("flash3_forward_workspace");
    return result;
  }
  const GuardedTensor scratch = make_workspace(workspace_bytes);
  Upload workspace(memory, scratch);
  params.workspace = workspace_bytes > 0 ? workspace.view().data : nullptr;
  params.workspace_size = workspace_bytes;

  const NamedUploads inputs = {{"q", &q}, {"k", &k}, {"v", &v}};
  GuardedTensor got_out = clone(host.out), got_lse = clone(host.lse);
  for (int run = 0; run < options.repeat; ++run) {
    if (run > 0) out.restore(), lse.restore(), workspace.restore();
    const auto start = Clock::now();
    if (flash3_forward(&params) != FLASH3_OK) {
      result.failure = last_error("flash3_forward");
      return result;
    }
    memory.finish();
    result.seconds = seconds_since(start);

    if (run > 0) {
      result.failure =
          find_difference(run, {{"out", &out}, {"lse", &lse}}, workspace, inputs, extra);
      if (!result.passed()) return result;
      continue;
    }
    GuardedTensor scratch_now = clone(scratch);
    out.download(&got_out);
    lse.download(&got_lse);
    workspace.download(&scratch_now);
    result.failure = find_damage(
        {{"out", &got_out}, {"lse", &got_lse}, {"workspace", &scratch_now}}, inputs, extra);
    if (!result.passed()) return result;
    if (options.repeat > 1) out.keep(), lse.keep();
  }

  const auto start = Clock::now();
  const Expected expected = expect(c, host, options, &result.failure);
  result.oracle_seconds = seconds_since(start);
  if (!result.passed()) return result;
  const std::vector<RowRule> rules = output_rules(make_sequences(c), c.batch);
  result.out = check_out(c, got_out.view, expected.ref, rules, expected.naive_out.view);
  result.failure = result.out.failure;
  if (c.want_lse) {
    result.lse = check_lse(c, got_lse.view, expected.ref, rules, expected.naive_lse.view);
    if (result.passed()) result.failure = result.lse.failure;
  }
  return result;
}

}  // namespace flash3::cases
