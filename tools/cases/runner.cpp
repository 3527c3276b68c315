#include "cases/runner.hpp"

#include <chrono>

#include "cases/quantize_runner.hpp"
#include "cases/upload.hpp"
#include "cpu/quantize_ref.hpp"

namespace flash3::cases {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Expected {
  ReferenceForward ref;
  GuardedTensor naive_out, naive_lse;
};

// Empty if the library calls the case invalid; then *failure says why.
Expected expect(const Case& c, const ForwardTensors& t, flash3_backend backend, int threads,
                std::string* failure) {
  Expected e;
  e.naive_out = clone(t.out);
  e.naive_lse = clone(t.lse);
  auto params = make_params(c, t.q.view, t.k.view, t.v.view, e.naive_out.view, e.naive_lse.view,
                            t.extra.views());
  params.backend = backend;  // whose sums a plain implementation has too
  ForwardProblem problem;
  if (const Status s = make_forward_problem(&params, Pointers::kRequired, &problem); !s.ok()) {
    *failure = s.message();
    return e;
  }
  e.ref = attention_ref(problem, threads);
  if (problem.quantizes)
    attention_naive_fp8(problem, threads);
  else
    attention_naive(problem, threads);
  return e;
}

std::string last_error(const char* call) { return std::string(call) + ": " + flash3_last_error(); }

}  // namespace

Verdict run_case(const Case& c, Memory& memory, const RunOptions& options) {
  if (c.backward) return run_backward_case(c, memory, options);
  if (c.quantize) return run_quantize_case(c, memory, options);
  Verdict verdict;
  // The library is asked first: no tensors and no oracle for a call that it refuses.
  const auto on_backend = [&](flash3_forward_params params) {
    params.backend = options.backend;
    params.num_threads = options.num_threads;
    params.stream = memory.stream();
    return params;
  };
  auto params = on_backend(make_question(c));
  if (const auto status = flash3_forward_supported(&params); status != FLASH3_OK) {
    verdict.failure = last_error("flash3_forward_supported");
    return verdict;
  }

  const ForwardTensors host = make_forward_tensors(c);
  Upload q(memory, host.q), k(memory, host.k), v(memory, host.v), out(memory, host.out),
      lse(memory, host.lse);
  const ExtraUploads extra(memory, host.extra);
  params = on_backend(
      make_params(c, q.view(), k.view(), v.view(), out.view(), lse.view(), extra.views()));
  size_t workspace_bytes = 0;
  if (flash3_forward_workspace(&params, &workspace_bytes) != FLASH3_OK) {
    verdict.failure = last_error("flash3_forward_workspace");
    return verdict;
  }
  const GuardedTensor scratch = make_workspace(workspace_bytes);
  Upload workspace(memory, scratch);
  params.workspace = workspace_bytes > 0 ? workspace.view().data : nullptr;
  params.workspace_size = workspace_bytes;

  GuardedTensor got_out = clone(host.out), got_lse = clone(host.lse), got_scratch = clone(scratch);
  for (int run = 0; run < options.repeat; ++run) {
    if (run > 0) out.reset(), lse.reset(), workspace.reset();
    const auto start = Clock::now();
    if (flash3_forward(&params) != FLASH3_OK) {
      verdict.failure = last_error("flash3_forward");
      return verdict;
    }
    memory.finish();
    verdict.seconds = seconds_since(start);

    GuardedTensor now_out = clone(host.out), now_lse = clone(host.lse);
    out.download(&now_out);
    lse.download(&now_lse);
    workspace.download(&got_scratch);
    if (run > 0 && (now_out.bytes != got_out.bytes || now_lse.bytes != got_lse.bytes)) {
      verdict.failure = "run " + std::to_string(run + 1) + " gave other bits than run 1";
      return verdict;
    }
    if (run > 0) continue;
    got_out = clone(now_out);
    got_lse = clone(now_lse);
    for (const auto& [name, tensor] : {std::pair{"out", &got_out}, std::pair{"lse", &got_lse},
                                       std::pair{"workspace", &got_scratch}}) {
      const std::string damage = tensor->bytes.empty() ? "" : tensor->damage();
      if (damage.empty()) continue;
      verdict.failure = std::string(name) + ": " + damage;
      return verdict;
    }
  }

  const auto start = Clock::now();
  const Expected expected =
      expect(c, host, options.backend, options.oracle_threads, &verdict.failure);
  verdict.oracle_seconds = seconds_since(start);
  if (!verdict.failure.empty()) return verdict;
  const std::vector<RowRule> rules = output_rules(make_sequences(c), c.batch);
  verdict.out =
      judge_out(c, options.backend, got_out.view, expected.naive_out.view, expected.ref, rules);
  verdict.failure = verdict.out.failure;
  if (c.want_lse) {
    verdict.lse = judge_lse(got_lse.view, expected.naive_lse.view, expected.ref, rules);
    if (verdict.failure.empty()) verdict.failure = verdict.lse.failure;
  }
  return verdict;
}

}  // namespace flash3::cases
