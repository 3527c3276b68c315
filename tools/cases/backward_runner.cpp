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
  bool operator==(const Gradients& other) const {
    return dq.bytes == other.dq.bytes && dk.bytes == other.dk.bytes && dv.bytes == other.dv.bytes &&
           dsink.bytes == other.dsink.bytes;
  }
};

Gradients poisoned_gradients(const BackwardTensors& t) {
  return {clone(t.dq), clone(t.dk), clone(t.dv), clone(t.dsink)};
}

BackwardViews with_gradients(BackwardViews views, const Gradients& g) {
  views.dq = g.dq.view, views.dk = g.dk.view, views.dv = g.dv.view;
  views.dsink = g.dsink.view;
  return views;
}

std::string damage(const Uploads& device, const Gradients& got, const GuardedTensor& workspace) {
  return find_damage({{"dq", &got.dq},
                      {"dk", &got.dk},
                      {"dv", &got.dv},
                      {"dsink", &got.dsink},
                      {"workspace", &workspace}},
                     {{"q", &device.q},
                      {"k", &device.k},
                      {"v", &device.v},
                      {"out", &device.out},
                      {"lse", &device.lse},
                      {"dout", &device.dout},
                      {"dlse", &device.dlse}},
                     device.extra);
}

ReferenceBackward expect(const Case& c, const BackwardTensors& t, const RunOptions& options) {
  auto params = make_backward_params(c, t.views());
  params.backend = options.backend;  // whose arithmetic the bounds have
  BackwardProblem problem;
  if (const Status s = make_backward_problem(&params, Pointers::kRequired, &problem); !s.ok())
    throw std::logic_error("case " + to_id(c) + " was supported: " + s.message());
  return attention_backward_ref(problem, options.oracle_threads);
}

// Of two runs, what is worse.
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

  Gradients first;
  for (int run = 0; run < options.repeat; ++run) {
    if (run > 0)
      for (Upload* written : {&device.dq, &device.dk, &device.dv, &device.dsink, &workspace})
        written->reset();
    start = Clock::now();
    if (flash3_backward(&params) != FLASH3_OK) {
      result.failure = last_error("flash3_backward");
      return result;
    }
    memory.finish();
    result.seconds = seconds_since(start);

    Gradients now = poisoned_gradients(host);
    device.dq.download(&now.dq);
    device.dk.download(&now.dk);
    device.dv.download(&now.dv);
    device.dsink.download(&now.dsink);
    GuardedTensor after = clone(scratch);
    workspace.download(&after);
    result.failure = damage(device, now, after);
    if (!result.passed()) return result;
    if (run > 0 && c.deterministic) {
      if (now == first) continue;
      result.failure = "run " + std::to_string(run + 1) + " gave other bits than run 1";
      return result;
    }
    keep_worse(check_gradients(c, with_gradients(host.views(), now), ref), &result);
    if (!result.passed()) return result;
    if (run == 0) first = std::move(now);
  }
  return result;
}

}  // namespace flash3::cases
