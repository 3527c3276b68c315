// SPDX-License-Identifier: Apache-2.0
#include "cases/runner.hpp"

#include <stdexcept>
#include <utility>
#include <vector>

#include "cases/backward_tensors.hpp"
#include "cases/cache_tensors.hpp"
#include "cases/checked_call.hpp"
#include "oracle/one_sequence.hpp"
#include "oracle/yardsticks/yardsticks.hpp"

namespace flash3::cases {
namespace {

// What the call must leave.
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
  const MaskPairs* const pairs = t.call.extra.mask_pairs();
  expected->call.ref = attention_ref(problem, options.oracle_threads, pairs);
  if (options.naive || needs_naive(c)) attention_naive(problem, options.oracle_threads, pairs);
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

// out and lse are held to the oracle's bounds, as of any forward; what the cache holds afterwards
// must be the reference's bit for bit, and so every row that nothing is appended to is as it was.
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

}  // namespace

namespace {

// The tensors of a case on the memory that the call runs on.
struct Uploads {
  Uploads(Memory& memory, const BackwardTensors& host)
      : q(memory, host.q),
        k(memory, host.k),
        v(memory, host.v),
        out(memory, host.out),
        lse(memory, host.lse),
        dout(memory, host.dout),
        dlse(memory, host.dlse),
        dq(memory, host.dq),
        dk(memory, host.dk),
        dv(memory, host.dv),
        dsink(memory, host.dsink),
        extra(memory, host.extra) {
    added.reserve(host.added.all.size());
    for (const GuardedTensor& tensor : host.added.all) added.emplace_back(memory, tensor);
  }
  NamedUploads inputs() const {
    return {{"q", &q},     {"k", &k},       {"v", &v},      {"out", &out},
            {"lse", &lse}, {"dout", &dout}, {"dlse", &dlse}};
  }
  BackwardViews views() const {
    BackwardViews views{q.view(),    k.view(),  v.view(),  out.view(), lse.view(),   dout.view(),
                        dlse.view(), dq.view(), dk.view(), dv.view(),  dsink.view(), extra.views()};
    for (size_t i = 0; i < added.size(); ++i) views.added.all[i] = added[i].view();
    return views;
  }
  // In this order.
  Outputs outputs() {
    Outputs outputs;
    outputs.add("dq", dq), outputs.add("dk", dk), outputs.add("dv", dv);
    outputs.add("dsink", dsink);
    size_t i = 0;
    AddedGradients<GuardedTensor> names;
    names.visit(
        [&](const ParamField& field, GuardedTensor&) {
          Upload& upload = added[i++];
          if (!upload.host().bytes.empty()) outputs.add(field.name, upload);
        },
        names);
    return outputs;
  }
  Upload q, k, v, out, lse, dout, dlse, dq, dk, dv, dsink;
  ExtraUploads extra;
  std::vector<Upload> added;  // gradients
};

// The views with the gradients that a call left.
BackwardViews with_gradients(BackwardViews views, const NamedTensors& got) {
  for (const auto& [name, tensor] : got) {
    const auto take = [&, of = name](std::string_view field, flash3_tensor& view) {
      if (field == of) view = tensor->view;
    };
    take("dq", views.dq), take("dk", views.dk), take("dv", views.dv), take("dsink", views.dsink);
    views.added.visit([&](const ParamField& field, flash3_tensor& view) { take(field.name, view); },
                      views.added);
  }
  return views;
}

ReferenceBackward expect(const Case& c, const BackwardTensors& t, const RunOptions& options) {
  auto params = make_backward_params(c, t.views());
  params.backend = options.backend;  // whose arithmetic the bounds have
  BackwardProblem problem;
  if (const Status s = make_backward_problem(&params, Pointers::kRequired, &problem); !s.ok())
    throw std::logic_error("case " + to_id(c) + " was supported: " + s.message());
  return attention_backward_ref(problem, options.oracle_threads, t.extra.mask_pairs());
}

// Keeps the worse of two runs.
void keep_worse(const GradientChecks& now, CheckResult* result) {
  const auto keep = [](const TensorCheck& part, TensorCheck* worst) {
    if (!part.failure.empty() || part.fraction >= worst->fraction) *worst = part;
  };
  keep(now.dq, &result->dq);
  keep(now.dk, &result->dk);
  keep(now.dv, &result->dv);
  keep(now.dsink, &result->dsink);
  result->added.resize(now.added.size());
  for (size_t i = 0; i < now.added.size(); ++i) {
    result->added[i].first = now.added[i].first;
    keep(now.added[i].second, &result->added[i].second);
  }
  result->failure = now.failure();
}

}  // namespace

CheckResult run_backward_case(const Case& c, Memory& memory, const RunOptions& options) {
  CheckResult result;
  CheckedCall<flash3_backward_params> call(memory, options, &result);
  if (!call.ask(make_backward_question(c))) return result;

  const Stopwatch oracle_time;
  const BackwardTensors host = make_backward_tensors(c, options.oracle_threads);
  const ReferenceBackward ref = expect(c, host, options);
  result.oracle_seconds = oracle_time.seconds();

  Uploads device(memory, host);
  if (!call.prepare(make_backward_params(c, device.views()))) return result;

  Outputs outputs = device.outputs();
  for (int run = 0; run < options.repeat; ++run) {
    if (run > 0) {
      outputs.restore();
      call.workspace().restore();
    }
    if (!call.run()) return result;
    if (run > 0 && c.deterministic) {
      result.failure =
          find_difference(run, outputs.uploads(), call.workspace(), device.inputs(), device.extra);
      if (!result.passed()) return result;
      continue;
    }

    outputs.download();
    result.failure =
        find_damage(outputs.got(), call.downloaded_workspace(), device.inputs(), device.extra);
    if (!result.passed()) return result;
    keep_worse(check_gradients(c, with_gradients(host.views(), outputs.got()), ref), &result);
    if (!result.passed()) return result;
    if (c.deterministic && options.repeat > 1) outputs.keep();
  }
  return result;
}

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
  if (c.dropout > 0) result.failure = check_dropout_mask(c, memory, options);
  if (!result.passed()) return result;
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
