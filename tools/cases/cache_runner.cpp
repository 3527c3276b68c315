// SPDX-License-Identifier: Apache-2.0
#include "cases/cache_runner.hpp"

#include <vector>

#include "cases/cache_tensors.hpp"
#include "cases/checked_call.hpp"
#include "oracle/gathered_cache.hpp"
#include "oracle/yardsticks/naive.hpp"

namespace flash3::cases {
namespace {

// What the call must leave behind.
struct Expected {
  ExpectedForward call;
  GuardedTensor k, v;
};

std::string expect(const Case& c, const CacheTensors& before, const RunOptions& options,
                   Expected* expected) {
  CacheTensors t = before;
  for (GuardedTensor* copy : {&t.call.k, &t.call.v, &t.call.out, &t.call.lse}) *copy = clone(*copy);
  t.call.extra = clone(t.call.extra);
  flash3_forward_params params = make_cache_params(c, t);
  params.backend = options.backend;
  ForwardProblem problem;
  if (const Status s = make_forward_problem(&params, Pointers::kRequired, &problem); !s.ok())
    return s.message();
  expected->call.ref = attention_ref(problem, options.oracle_threads);
  if (options.naive || needs_naive(c)) attention_naive(problem, options.oracle_threads);
  append_ref(problem);
  expected->k = std::move(t.call.k), expected->v = std::move(t.call.v);
  if (!options.naive && !needs_naive(c)) return "";
  expected->call.naive_out = std::move(t.call.out),
  expected->call.naive_lse = std::move(t.call.lse);
  expected->call.naive_extra = std::move(t.call.extra);
  return "";
}

// Where two copies of a tensor first differ, in words; "" if nowhere.
std::string difference(const char* name, const GuardedTensor& got, const GuardedTensor& want) {
  const auto at = std::mismatch(got.bytes.begin(), got.bytes.end(), want.bytes.begin());
  if (at.first == got.bytes.end()) return "";
  const auto byte = at.first - got.bytes.begin() - static_cast<ptrdiff_t>(got.offset);
  return std::string(name) + ": byte " + std::to_string(byte) +
         " from its start is not what the reference leaves in the cache";
}

}  // namespace

CheckResult run_cache_case(const Case& c, Memory& memory, const RunOptions& options) {
  CheckResult result;
  CheckedCall<flash3_forward_params> call(memory, options, &result);
  const CacheTensors host = make_cache_tensors(c);
  if (!call.ask(make_cache_question(c))) return result;

  Upload q(memory, host.call.q), k(memory, host.call.k), v(memory, host.call.v),
      out(memory, host.call.out), lse(memory, host.call.lse);
  ExtraUploads extra(memory, host.call.extra);
  std::vector<Upload> fields;
  std::array<flash3_tensor, kCacheFieldCount> views{};
  NamedUploads inputs = {{"q", &q}};
  fields.reserve(kCacheFieldCount);
  for (size_t i = 0; i < kCacheFieldCount; ++i) {
    fields.emplace_back(memory, host.fields[i]);
    views[i] = fields.back().view();
    inputs.emplace_back(kCacheFields[i].name, &fields.back());
  }
  if (!call.prepare(make_cache_params(c, q.view(), k.view(), v.view(), out.view(), lse.view(),
                                      extra.views(), views)))
    return result;

  const Stopwatch oracle_time;
  Expected expected;
  result.failure = expect(c, host, options, &expected);
  result.oracle_seconds = oracle_time.seconds();
  if (!result.passed()) return result;

  Outputs outputs;
  outputs.add("out", out), outputs.add("lse", lse), outputs.add(extra);
  GuardedTensor got_k = clone(host.call.k), got_v = clone(host.call.v);
  for (int run = 0; run < options.repeat; ++run) {
    if (run > 0) outputs.restore(), k.restore(), v.restore(), call.workspace().restore();
    if (!call.run()) return result;
    k.download(&got_k), v.download(&got_v);
    result.failure = difference("k", got_k, expected.k) + difference("v", got_v, expected.v);
    if (!result.passed()) return result;
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

  check_forward(c, outputs.got(), expected.call, &result);
  return result;
}

}  // namespace flash3::cases
