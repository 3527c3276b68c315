// SPDX-License-Identifier: Apache-2.0
#include "cases/runner.hpp"

#include <utility>

#include "cases/cache_runner.hpp"
#include "cases/checked_call.hpp"
#include "cases/quantize_runner.hpp"
#include "oracle/yardsticks/naive.hpp"

namespace flash3::cases {
namespace {

// Empty if the library calls the case invalid; then *failure says why.
ExpectedForward expect(const Case& c, const ForwardTensors& t, const RunOptions& options,
                       std::string* failure) {
  ExpectedForward e;
  GuardedTensor out = clone(t.out), lse = clone(t.lse);
  ExtraTensors extra = clone(t.extra);
  auto params = make_params(c, t.q.view, t.k.view, t.v.view, out.view, lse.view, extra.views());
  params.backend = options.backend;  // whose arithmetic the bounds and a plain implementation have
  ForwardProblem problem;
  if (const Status s = make_forward_problem(&params, Pointers::kRequired, &problem); !s.ok()) {
    *failure = s.message();
    return e;
  }
  e.ref = attention_ref(problem, options.oracle_threads, t.extra.mask_pairs());
  if (!options.naive && !needs_naive(c)) return e;
  if (problem.quantizes)
    attention_naive_fp8(problem, options.oracle_threads);
  else
    attention_naive(problem, options.oracle_threads, t.extra.mask_pairs());
  e.naive_out = std::move(out), e.naive_lse = std::move(lse), e.naive_extra = std::move(extra);
  return e;
}

}  // namespace

CheckResult run_case(const Case& c, Memory& memory, const RunOptions& options) {
  if (c.backward) return run_backward_case(c, memory, options);
  if (c.quantize) return run_quantize_case(c, memory, options);
  if (c.has_cache()) return run_cache_case(c, memory, options);
  CheckResult result;
  CheckedCall<flash3_forward_params> call(memory, options, &result);
  if (!call.ask(make_question(c))) return result;

  const ForwardTensors host = make_forward_tensors(c);
  Upload q(memory, host.q), k(memory, host.k), v(memory, host.v), out(memory, host.out),
      lse(memory, host.lse);
  ExtraUploads extra(memory, host.extra);
  if (!call.prepare(
          make_params(c, q.view(), k.view(), v.view(), out.view(), lse.view(), extra.views())))
    return result;

  const NamedUploads inputs = {{"q", &q}, {"k", &k}, {"v", &v}};
  Outputs outputs;
  outputs.add("out", out), outputs.add("lse", lse), outputs.add(extra);
  for (int run = 0; run < options.repeat; ++run) {
    if (run > 0) outputs.restore(), call.workspace().restore();
    if (!call.run()) return result;
    if (run > 0) {
      result.failure = find_difference(run, outputs.uploads(), call.workspace(), inputs, extra);
      if (!result.passed()) return result;
      continue;
    }
    outputs.download();
    result.failure = find_damage(outputs.got(), call.downloaded_workspace(), inputs, extra);
    if (!result.passed()) return result;
    if (options.repeat > 1) outputs.keep();
  }

  const Stopwatch oracle_time;
  const ExpectedForward expected = expect(c, host, options, &result.failure);
  result.oracle_seconds = oracle_time.seconds();
  if (!result.passed()) return result;
  check_forward(c, outputs.got(), expected, &result);
  return result;
}

}  // namespace flash3::cases
