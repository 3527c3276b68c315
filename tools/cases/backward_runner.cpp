// SPDX-License-Identifier: Apache-2.0
// Runs one backward case through the C interface and checks it against the oracle.
#include <stdexcept>

#include "cases/backward_tensors.hpp"
#include "cases/checked_call.hpp"

namespace flash3::cases {
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

Gradients unwritten_gradients(const BackwardTensors& t) {
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

  Upload* const outputs[] = {&device.dq, &device.dk, &device.dv, &device.dsink};
  for (int run = 0; run < options.repeat; ++run) {
    if (run > 0) {
      for (Upload* output : outputs) output->restore();
      call.workspace().restore();
    }
    if (!call.run()) return result;
    if (run > 0 && c.deterministic) {
      result.failure =
          find_difference(run, device.gradients(), call.workspace(), device.inputs(), device.extra);
      if (!result.passed()) return result;
      continue;
    }

    Gradients now = unwritten_gradients(host);
    device.dq.download(&now.dq);
    device.dk.download(&now.dk);
    device.dv.download(&now.dv);
    device.dsink.download(&now.dsink);
    result.failure =
        find_damage({{"dq", &now.dq}, {"dk", &now.dk}, {"dv", &now.dv}, {"dsink", &now.dsink}},
                    call.downloaded_workspace(), device.inputs(), device.extra);
    if (!result.passed()) return result;
    keep_worse(check_gradients(c, with_gradients(host.views(), now), ref), &result);
    if (!result.passed()) return result;
    if (c.deterministic && options.repeat > 1)
      for (Upload* output : outputs) output->keep();
  }
  return result;
}

}  // namespace flash3::cases
