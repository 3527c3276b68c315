// Runs one backward case through the C interface and judges it against the oracle.
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

// Which tensor the call has written where it must not, in words; "" if none.
std::string damage(const BackwardTensors& host, const Uploads& device, const Gradients& got,
                   const GuardedTensor& workspace) {
  for (const auto& [name, tensor] :
       {std::pair{"dq", &got.dq}, std::pair{"dk", &got.dk}, std::pair{"dv", &got.dv},
        std::pair{"dsink", &got.dsink}, std::pair{"workspace", &workspace}})
    if (const std::string what = tensor->bytes.empty() ? "" : tensor->damage(); !what.empty())
      return std::string(name) + ": " + what;
  const struct {
    const char* name;
    const GuardedTensor& before;
    const Upload& after;
  } inputs[] = {{"q", host.q, device.q},         {"k", host.k, device.k},
                {"v", host.v, device.v},         {"out", host.out, device.out},
                {"lse", host.lse, device.lse},   {"dout", host.dout, device.dout},
                {"dlse", host.dlse, device.dlse}};
  for (const auto& [name, before, after] : inputs) {
    GuardedTensor now = before;
    after.download(&now);
    if (now.bytes != before.bytes) return std::string(name) + " is an input and was overwritten";
  }
  return "";
}

struct Expected {
  ReferenceBackward ref;
  Gradients naive;
};

Expected expect(const Case& c, const BackwardTensors& t, int threads) {
  Expected e{{}, poisoned_gradients(t)};
  const auto params = make_backward_params(c, with_gradients(t.views(), e.naive));
  BackwardProblem problem;
  if (const Status s = make_backward_problem(&params, Pointers::kRequired, &problem); !s.ok())
    throw std::logic_error("case " + to_id(c) + " was supported: " + s.message());
  e.ref = attention_backward_ref(problem, threads);
  attention_backward_naive(problem, threads);
  return e;
}

// The scores of the worse of two runs.
void keep_worse(const GradientScores& now, Verdict* verdict) {
  const auto keep = [](const Score& score, Score* worst) {
    if (!score.failure.empty() || score.error >= worst->error) *worst = score;
  };
  keep(now.dq, &verdict->dq);
  keep(now.dk, &verdict->dk);
  keep(now.dv, &verdict->dv);
  keep(now.dsink, &verdict->dsink);
  verdict->failure = now.failure();
}

}  // namespace

Verdict run_backward_case(const Case& c, Memory& memory, const RunOptions& options) {
  Verdict verdict;
  // The library is asked first: no oracle for a call that it refuses.
  const auto on_backend = [&](flash3_backward_params params) {
    params.backend = options.backend;
    params.num_threads = options.num_threads;
    params.stream = memory.stream();
    return params;
  };
  auto params = on_backend(make_backward_question(c));
  if (const auto status = flash3_backward_supported(&params); status != FLASH3_OK) {
    verdict.failure = last_error("flash3_backward_supported");
    return verdict;
  }

  auto start = Clock::now();
  const BackwardTensors host = make_backward_tensors(c, options.oracle_threads);
  const Expected expected = expect(c, host, options.oracle_threads);
  verdict.oracle_seconds = seconds_since(start);

  Uploads device(memory, host);
  params = on_backend(make_backward_params(c, device.views()));
  size_t workspace_bytes = 0;
  if (const auto status = flash3_backward_workspace(&params, &workspace_bytes);
      status != FLASH3_OK) {
    verdict.failure = last_error("flash3_backward_workspace");
    return verdict;
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
      verdict.failure = last_error("flash3_backward");
      return verdict;
    }
    memory.finish();
    verdict.seconds = seconds_since(start);

    Gradients now = poisoned_gradients(host);
    device.dq.download(&now.dq);
    device.dk.download(&now.dk);
    device.dv.download(&now.dv);
    device.dsink.download(&now.dsink);
    if (run > 0 && c.deterministic) {
      if (now == first) continue;
      verdict.failure = "run " + std::to_string(run + 1) + " gave other bits than run 1";
      return verdict;
    }
    GuardedTensor after = clone(scratch);
    workspace.download(&after);
    verdict.failure = damage(host, device, now, after);
    if (!verdict.passed()) return verdict;
    keep_worse(judge_gradients(c, with_gradients(host.views(), now),
                               with_gradients(host.views(), expected.naive), expected.ref),
               &verdict);
    if (!verdict.passed()) return verdict;
    if (run == 0) first = std::move(now);
  }
  return verdict;
}

}  // namespace flash3::cases
