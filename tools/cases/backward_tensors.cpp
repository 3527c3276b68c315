// SPDX-License-Identifier: Apache-2.0
#include "cases/backward_tensors.hpp"

#include <limits>
#include <stdexcept>

#include "cases/added_tensors.hpp"
#include "cases/internals.hpp"
#include "oracle/attention_ref.hpp"

namespace flash3::cases {
namespace {

// Far from the seeds of q, k and v, which are 3 · seed and its neighbours.
uint64_t gradient_seed(const Case& c) { return 3 * c.seed + (uint64_t{1} << 40); }

// The elements of a contiguous tensor, to one of the same shape.
void fill_with(const std::vector<double>& values, const flash3_tensor& to) {
  size_t next = 0;
  for_each_row(to, [&](int64_t row) {
    for (int64_t d = 0; d < to.shape[to.ndim - 1]; ++d)
      store_float(to.data, to.dtype, row + d, static_cast<float>(values[next++]));
  });
}

flash3_tensor added_gradient(const Case& c, const ParamField& field,
                             const CaseSequences& sequences) {
  return c.want_dadded ? added_view(c, field, sequences) : flash3_tensor{};
}

// out and lse as a forward call would have left them, but for its errors.
void fill_forward(const Case& c, BackwardTensors* t, int oracle_threads) {
  const auto params =
      make_params(c, t->q.view, t->k.view, t->v.view, t->out.view, t->lse.view, t->extra.views());
  ForwardProblem problem;
  if (const Status s = make_forward_problem(&params, Pointers::kRequired, &problem); !s.ok())
    throw std::logic_error("case " + to_id(c) + " has no forward: " + s.message());
  const ReferenceForward ref = attention_ref(problem, oracle_threads, t->extra.mask_pairs());
  fill_with(ref.out, t->out.view);
  t->out.fill_forbidden();
  if (!c.want_lse) return;
  fill_with(ref.lse, t->lse.view);
  t->lse.fill_forbidden();
}

void place_nan(const flash3_tensor& t, int64_t batch, int64_t seq, int64_t head, int64_t dim) {
  store_float(t.data, t.dtype, batch * t.stride[0] + seq * t.stride[1] + head * t.stride[2] + dim,
              std::numeric_limits<float>::quiet_NaN());
}

}  // namespace

BackwardViews BackwardTensors::views() const {
  BackwardViews views{q.view,    k.view,  v.view,  out.view, lse.view,   dout.view,
                      dlse.view, dq.view, dk.view, dv.view,  dsink.view, extra.views()};
  for (size_t i = 0; i < added.all.size(); ++i) views.added.all[i] = added.all[i].view;
  return views;
}

BackwardTensors make_backward_tensors(const Case& c, int oracle_threads) {
  Case plain = c;
  if (c.distribution == Distribution::kSpecial) plain.distribution = Distribution::kNormal;
  ForwardTensors forward = make_forward_tensors(plain);
  BackwardTensors t;
  const CaseSequences sequences = make_sequences(c);
  t.dq = make_rows(c, TensorName::kDq, sequences.q, c.heads_q, c.head_dim, c.dtype_of_gradients());
  t.dk = make_rows(c, TensorName::kDk, sequences.k, c.heads_k, c.head_dim, c.dtype_of_gradients());
  t.dv =
      make_rows(c, TensorName::kDv, sequences.k, c.heads_k, c.head_dim_v, c.dtype_of_gradients());
  t.dout = make_rows(c, TensorName::kDout, sequences.q, c.heads_q, c.head_dim_v, c.dtype_of_out());
  t.q = std::move(forward.q), t.k = std::move(forward.k), t.v = std::move(forward.v);
  t.out = std::move(forward.out), t.lse = std::move(forward.lse);
  t.extra = std::move(forward.extra);
  if (c.sink != Sink::kNone && c.want_dsink)
    t.dsink = make_vector(t.extra.sink.view.dtype, c.heads_q);

  t.added.visit(
      [&](const ParamField& field, GuardedTensor& to) {
        const flash3_tensor view = added_gradient(c, field, sequences);
        if (view.ndim > 0) to = guard(view, c.layout_of(TensorName::kLse).offset);
      },
      t.added);

  fill_random(t.dout.view, Distribution::kNormal, gradient_seed(c));
  if (c.want_dlse) {
    t.dlse = make_lse(c, TensorName::kDlse, sequences.q);
    fill_random(t.dlse.view, Distribution::kNormal, gradient_seed(c) + 1);
  }
  if (c.is_ragged()) {
    // Unused tokens have a gradient, 0, but are not read.
    if (!c.fill) {
      forbid_rows(&t.dq, sequences.q, c.batch, {RowUse::kOutside});
      for (GuardedTensor* rows : {&t.dk, &t.dv})
        forbid_rows(rows, sequences.k, c.batch, {RowUse::kOutside});
    }
    const auto dead = {RowUse::kUnused, RowUse::kOutside};
    forbid_rows(&t.dout, sequences.q, c.batch, dead);
    if (c.want_dlse) forbid_rows(&t.dlse, sequences.q, c.batch, dead, /*is_lse=*/true);
  }
  if (c.distribution == Distribution::kSpecial && c.batch * c.seq_q * c.heads_q > 0) {
    place_nan(t.q.view, 0, c.seq_q / 2, 0, 0);
    place_nan(t.dout.view, c.batch - 1, c.seq_q / 3, c.heads_q - 1, c.head_dim_v - 1);
  }
  fill_forward(c, &t, oracle_threads);
  return t;
}

flash3_backward_params make_backward_params(const Case& c, const BackwardViews& views) {
  flash3_backward_params p{};
  p.struct_size = sizeof p;
  p.dout = views.dout, p.dlse = views.dlse;
  p.q = views.q, p.k = views.k, p.v = views.v, p.out = views.out, p.lse = views.lse;
  p.dq = views.dq, p.dk = views.dk, p.dv = views.dv;
  p.dsink = views.dsink;
  set_options(c, views.extra, &p);
  views.added.visit(
      [&](const ParamField& field, const flash3_tensor& view) { *field.tensor(&p) = view; },
      views.added);
  p.deterministic = c.deterministic;
  return p;
}

flash3_backward_params make_backward_question(const Case& c) {
  const flash3_forward_params f = make_question(c);
  BackwardViews views{.q = f.q, .k = f.k, .v = f.v, .out = f.out, .lse = f.lse};
  // As what they are the gradients of, but with layouts of their own.
  Case gradients = c;
  gradients.dtype = c.dtype_of_gradients(), gradients.out_dtype = c.dtype_of_out();
  const auto lies_as = [&](TensorName name, TensorName other) {
    gradients.own_layouts[static_cast<size_t>(name)] = c.layout_of(other);
  };
  lies_as(TensorName::kQ, TensorName::kDq), lies_as(TensorName::kK, TensorName::kDk);
  lies_as(TensorName::kV, TensorName::kDv), lies_as(TensorName::kOut, TensorName::kDout);
  lies_as(TensorName::kLse, TensorName::kDlse);
  const flash3_forward_params g = make_question(gradients);
  views.dq = g.q, views.dk = g.k, views.dv = g.v, views.dout = g.out;
  if (c.want_dlse) views.dlse = g.lse;
  views.extra = extra_of(f);
  if (c.want_dsink) views.dsink = f.sink;
  const CaseSequences sequences = make_sequences(c);
  views.added.visit([&](const ParamField& field,
                        flash3_tensor& view) { view = added_gradient(c, field, sequences); },
                    views.added);
  return make_backward_params(c, views);
}

}  // namespace flash3::cases
