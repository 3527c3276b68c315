// SPDX-License-Identifier: Apache-2.0
#include "cases/runner.hpp"

#include <utility>

#include "cases/cache_runner.hpp"
#include "cases/checked_call.hpp"
#include "cases/quantize_runner.hpp"
#include "oracle/yardsticks/naive.hpp"

namespace flash3::cases {
namespace {

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
  e.ref = attention_ref(problem, options.oracle_threads, t.extra.mask_pairs());
  if (!options.naive && !needs_naive(c)) return e;
  if (problem.quantizes)
    attention_naive_fp8(problem, options.oracle_threads);
  else
    attention_naive(problem, options.oracle_threads, t.extra.mask_pairs());
  e.naive_out = std::move(out), e.naive_lse = std::move(lse);
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
  const ExtraUploads extra(memory, c, host.extra);
  if (!call.prepare(
          make_params(c, q.view(), k.view(), v.view(), out.view(), lse.view(), extra.views())))
    return result;

  const NamedUploads inputs = {{"q", &q}, {"k", &k}, {"v", &v}};
  GuardedTensor got_out = clone(host.out), got_lse = clone(host.lse);
  for (int run = 0; run < options.repeat; ++run) {
    if (run > 0) out.restore(), lse.restore(), call.workspace().restore();
    if (!call.run()) return result;
    if (run > 0) {
      result.failure =
          find_difference(run, {{"out", &out}, {"lse", &lse}}, call.workspace(), inputs, extra);
      if (!result.passed()) return result;
      continue;
    }
    out.download(&got_out);
    lse.download(&got_lse);
    const GuardedTensor scratch = call.downloaded_workspace();
    result.failure =
        find_damage({{"out", &got_out}, {"lse", &got_lse}, {"workspace", &scratch}}, inputs, extra);
    if (!result.passed()) return result;
    if (options.repeat > 1) out.keep(), lse.keep();
  }

  const Stopwatch oracle_time;
  const Expected expected = expect(c, host, options, &result.failure);
  result.oracle_seconds = oracle_time.seconds();
  if (!result.passed()) return result;
  const std::vector<RowRule> rules = output_rules(c, make_sequences(c));
  result.out = check_out(c, got_out.view, expected.ref, rules, expected.naive_out.view);
  result.failure = result.out.failure;
  if (c.want_lse) {
    result.lse = check_lse(c, got_lse.view, expected.ref, rules, expected.naive_lse.view);
    if (result.passed()) result.failure = result.lse.failure;
  }
  return result;
}

}  // namespace flash3::cases
