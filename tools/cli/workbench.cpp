// SPDX-License-Identifier: Apache-2.0
#include "cli/workbench.hpp"

#include <algorithm>

#include "cases/backward_tensors.hpp"
#include "cases/upload.hpp"
#include "cli/environment.hpp"

namespace flash3::cli {

void PreparedCase::enqueue() const {
  if (round) return round();
  check(c.backward ? flash3_backward(&backward) : flash3_forward(&forward));
}

Workbench::Workbench(flash3_backend backend, int threads)
    : backend_(backend), threads_(threads), memory_(make_memory(backend)), gpu_(gpu_of(backend)) {
  if (gpu_) monitor_ = std::make_unique<device::Monitor>(gpu_->pci_bus_id);
}

PreparedCase Workbench::prepare(const cases::Case& c) {
  PreparedCase p;
  p.c = c;
  if (c.reads_cache())
    prepare_cache(&p);
  else if (c.backward)
    prepare_backward(&p);
  else
    prepare_forward(&p);
  return p;
}

void Workbench::ask(PreparedCase* p) const {
  flash3_forward_params& f = p->forward;
  f = cases::make_question(p->c);
  f.backend = backend_;
  f.num_threads = threads_;
  f.stream = memory_->stream();
  check(flash3_forward_supported(&f));
  p->kernel = value_of(explanation(f), "kernel");
}

void Workbench::prepare_forward(PreparedCase* p) {
  ask(p);
  flash3_forward_params& f = p->forward;
  check(flash3_forward_workspace(&f, &p->workspace_bytes));

  uint64_t seed = 3 * p->c.seed;
  for (flash3_tensor* t : {&f.q, &f.k}) add_normal(seed++, t, &p->buffers);
  if (!p->c.latent) add_normal(seed, &f.v, &p->buffers);
  f.v = view_of_v(p->c, f.k, f.v);
  f.out.data = add_buffer(f.out, &p->buffers);
  if (p->c.want_lse) f.lse.data = add_buffer(f.lse, &p->buffers);
  const cases::ExtraTensors extra = make_extra_tensors(p->c, make_sequences(p->c));
  p->mask = extra.mask;
  set_options(p->c, add_extra(extra, &p->buffers), &f);
  f.workspace = add_workspace(p->workspace_bytes, &p->buffers);
  f.workspace_size = p->workspace_bytes;
}

void Workbench::prepare_backward(PreparedCase* p) {
  flash3_backward_params& b = p->backward;
  b = cases::make_backward_question(p->c);
  b.backend = backend_;
  b.num_threads = threads_;
  b.stream = memory_->stream();
  check(flash3_backward_supported(&b));

  prepare_forward(p);
  check(flash3_forward(&p->forward));
  memory_->finish();
  const flash3_forward_params& f = p->forward;
  b.q = f.q, b.k = f.k, b.v = f.v, b.out = f.out, b.lse = f.lse;
  set_options(p->c, cases::extra_of(f), &b);
  if (b.dsink.ndim > 0) b.dsink.data = add_buffer(b.dsink, &p->buffers);

  uint64_t seed = 3 * p->c.seed + 3;
  add_normal(seed++, &b.dout, &p->buffers);
  if (p->c.want_dlse) add_normal(seed++, &b.dlse, &p->buffers);
  for (flash3_tensor* t : {&b.dq, &b.dk, &b.dv}) t->data = add_buffer(*t, &p->buffers);
  check(flash3_backward_workspace(&b, &p->workspace_bytes));
  b.workspace = add_workspace(p->workspace_bytes, &p->buffers);
  b.workspace_size = p->workspace_bytes;
  p->kernel = value_of(explanation(b), "kernel");
}

cases::ExtraViews Workbench::add_extra(const cases::ExtraTensors& host,
                                       std::vector<std::shared_ptr<void>>* buffers) {
  cases::ExtraViews views = host.views();
  const auto add = [&](const ParamField&, flash3_tensor& t) {
    if (t.ndim == 0) return;
    const void* values = t.data;
    t.data = add_buffer(t, buffers);
    memory_->copy_in(t.data, values,
                     static_cast<size_t>(cases::span_of(t) * cases::element_size(t.dtype)));
  };
  cases::ExtraViews::visit(add, views);
  if (host.mask) {
    const auto made = std::make_shared<cases::MaskUpload>(*memory_, host.mask);
    views.mask = &made->mask();
    buffers->push_back(made);
  }
  return views;
}

const void* Workbench::normal_values(flash3_dtype dtype, uint64_t seed, int64_t count) {
  for (const Values& v : values_)
    if (v.dtype == dtype && v.seed == seed && v.count >= count) return v.bytes.data();
  std::erase_if(values_, [&](const Values& v) { return v.dtype == dtype && v.seed == seed; });
  Values v{dtype, seed, count, {}};
  v.bytes.resize(static_cast<size_t>(count * cases::element_size(dtype)));
  cases::fill_normal(v.bytes.data(), dtype, count, seed);
  values_.push_back(std::move(v));
  return values_.back().bytes.data();
}

void Workbench::add_normal(uint64_t seed, flash3_tensor* t,
                           std::vector<std::shared_ptr<void>>* buffers) {
  t->data = add_buffer(*t, buffers);
  const int64_t count = cases::span_of(*t);
  memory_->copy_in(t->data, normal_values(t->dtype, seed, count),
                   static_cast<size_t>(count * cases::element_size(t->dtype)));
}

void* Workbench::add_workspace(size_t bytes, std::vector<std::shared_ptr<void>>* buffers) {
  if (bytes == 0) return nullptr;
  buffers->push_back(memory_->allocate(bytes));
  return buffers->back().get();
}

void* Workbench::add_buffer(const flash3_tensor& t, std::vector<std::shared_ptr<void>>* buffers) {
  buffers->push_back(
      memory_->allocate(static_cast<size_t>(cases::span_of(t) * cases::element_size(t.dtype))));
  return buffers->back().get();
}

}  // namespace flash3::cli
