// SPDX-License-Identifier: Apache-2.0
// Runs one backward case through the C interface and checks it against the oracle.
#include <chrono>
#include <utility>

#include "cases/runner.hpp"
#include "cases/upload.hpp"

namespace flash3::cases {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string last_error(const char* call) { return std::string(call) + ": " + flash3_last_error(); }

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
        extra(memory, host.extra) {}
  NamedUploads inputs() const {
    return {{"q", &q},     {"k", &k},       {"v", &v},      {"out", &out},
            {"lse", &lse}, {"dout", &dout}, {"dlse", &dlse}};
  }
  NamedUploads gradients() const {
    return {{"dq", &dq}, {"dk", &dk}, {"dv", &dv}, {"dsink", &dsink}};
  }
  BackwardViews views() const {
    return {q.view(),    k.view(),  v.view(),  out.view(), lse.view(),   dout.view(),
            dlse.view(), dq.view(), dk.view(), dv.view(),  dsink.view(), extra.views()};
  }
  Upload q, k, v, out, lse, dout, dlse, dq, dk, dv, dsink;
  ExtraUploads extra;
};

// The gradients that a call left, with all that lies around them.
struct Gradients {
  GuardedTensor dq, dk, dv, dsink;
};

Gradients poisoned_gradients(const BackwardTensors& t) {
  return {clone(t.dq), clone(t.dk), clone(t.dv), clone(t.dsink)};
}

BackwardViews with_gradients(BackwardViews views, const Gradients& g) {
  views.dq = g.dq.view, views.dk = g.dk.view, views.dv = g.dv.view;
  views.dsink = g.dsink.view;
  return views;
}

ReferenceBackward expect(const Case& c, const BackwardTensors& t, const RunOptions& options) {
  auto params = make_backward_params(c, t.views());
  params.backend = options.backend;  // whose arithmetic the bounds have
  BackwardProblem problem;
  if (const Status s = make_backward_problem(&params, Pointers::kRequired, &problem); !s.ok())
    throw std::logic_error("case " + to_id(c) + " was supported: " + s.message());
  return attention_backward_ref(problem, options.oracle_threads);
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
  result->failure = now.failure();
}

}  // namespace

CheckResult run_backward_case(const Case& c, Memory& memory, const RunOptions& options) {
  CheckResult result;
  // The library is asked first: no oracle for a call that it refuses.
  const auto on_backend = [&](flash3_backward_params params) {
    params.backend = options.backend;
    params.num_threads = options.num_threads;
    params.stream = memory.stream();
    return params;
  };
  auto params = on_backend(make_backward_question(c));
  if (const auto status = flash3_backward_supported(&params); status != FLASH3_OK) {
    result.failure = last_error("flash3_backward_supported");
    return result;
  }

  auto start = Clock::now();
  const BackwardTensors host = make_backward_tensors(c, options.oracle_threads);
  const ReferenceBackward ref = expect(c, host, options);
  result.oracle_seconds = seconds_since(start);

  Uploads device(memory, host);
  params = on_backend(make_backward_params(c, device.views()));
  size_t workspace_bytes = 0;
  if (const auto status = flash3_backward_workspace(&params, &workspace_bytes);
      status != FLASH3_OK) {
    result.failure = last_error("flash3_backward_workspace");
    return result;
  }
  const GuardedTensor scratch = make_workspace(workspace_bytes);
  Upload workspace(memory, scratch);
  params.workspace = workspace_bytes > 0 ? workspace.view().data : nullptr;
  params.workspace_size = workspace_bytes;

  Upload* const outputs[] = {&device.dq, &device.dk, &device.dv, &device.dsink};
  for (int run = 0; run < options.repeat; ++run) {
    if (run > 0) {
      for (Upload* output : outputs) output->restore();
      workspace.restore();
    }
    start = Clock::now();
    if (flash3_backward(&params) != FLASH3_OK) {
      result.failure = last_error("flash3_backward");
      return result;
    }
    memory.finish();
    result.seconds = seconds_since(start);
    if (run > 0 && c.deterministic) {
      result.failure =
          find_difference(run, device.gradients(), workspace, device.inputs(), device.extra);
      if (!result.passed()) return result;
      continue;
    }

    Gradients now = poisoned_gradients(host);
    device.dq.download(&now.dq);
    device.dk.download(&now.dk);
    device.dv.download(&now.dv);
    device.dsink.download(&now.dsink);
    GuardedTensor after = clone(scratch);
    workspace.download(&after);
    result.failure = find_damage({{"dq", &now.dq},
                                  {"dk", &now.dk},
                                  {"dv", &now.dv},
                                  {"dsink", &now.dsink},
                                  {"workspace", &after}},
                                 device.inputs(), device.extra);
    if (!result.passed()) return result;
    keep_worse(check_gradients(c, with_gradients(host.views(), now), ref), &result);
    if (!result.passed()) return result;
    if (c.deterministic && options.repeat > 1)
      for (Upload* output : outputs) output->keep();
  }
  return result;
}

}  // namespace flash3::cases
