// SPDX-License-Identifier: Apache-2.0
#include "cli/workbench.hpp"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "cases/backward_tensors.hpp"
#include "cases/cache_tensors.hpp"
#include "cases/upload.hpp"
#include "cli/environment.hpp"
#include "cli/timing.hpp"
#include "flash3/plan.h"
#include "flash3/schedule.h"

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
  for (const ParamField& field : added_fields<flash3_backward_params>()) {
    if (field.kind != FieldKind::kTensor || !field.is_written) continue;
    flash3_tensor& gradient = *field.tensor(&b);
    if (gradient.ndim > 0) gradient.data = add_buffer(gradient, &p->buffers);
  }

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

namespace {

// Calls on a KV cache on the workbench. What a model does between two calls on the same keys drives
// these out of the chip's caches; here other buffers do. As in a model, the plan is kept, the
// layers share a schedule, which is made outside of the timing, and a page table. Keys are appended
// at the same place each time, so that a call leaves the cache as the one before did.

// Bytes of k and v in all buffers: several times what a GPU's second-level cache holds. For a CPU,
// whose last level may hold more than is worth filling, twice that but no more than so many.
constexpr double kGpuBytes = 200e6, kMostCpuBytes = 32e6;
constexpr double kMostBuffers = 512;
constexpr int64_t kBlock = (1 << 22) - 3;  // values; prime, so that rows are not all alike

double last_level_bytes() {
  long most = 0;
  for (const int level : {_SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE, _SC_LEVEL4_CACHE_SIZE})
    most = std::max(most, sysconf(level));
  return static_cast<double>(most);
}

int count_buffers(const cases::Case& c, bool gpu) {
  const double all = gpu ? kGpuBytes : std::min(2 * last_level_bytes(), kMostCpuBytes);
  const double one = kv_bytes(c), least = gpu ? 1 : 2;
  if (one == 0) return static_cast<int>(least);
  return static_cast<int>(std::clamp(1 + std::floor(all / one), least, kMostBuffers));
}

// The calls of a round, with the plan and the schedule that they share.
struct Round {
  std::vector<flash3_forward_params> calls;
  flash3_schedule schedule{};
  std::shared_ptr<flash3_plan> plan;

  void enqueue() const {
    for (const flash3_forward_params& call : calls) check(flash3_forward_run(plan.get(), &call));
  }
};

std::shared_ptr<flash3_plan> make_plan(const flash3_forward_params& params) {
  flash3_plan* plan = nullptr;
  check(flash3_forward_plan(&params, &plan));
  return {plan, flash3_plan_destroy};
}

}  // namespace

void Workbench::prepare_cache(PreparedCase* p) {
  ask(p);
  flash3_forward_params& f = p->forward;
  const auto round = std::make_shared<Round>();
  add_cache_inputs(p);
  round->calls = add_cache_buffers(p);
  f = round->calls.front();

  check(flash3_forward_schedule_size(&f, &round->schedule.size));
  round->schedule.data = add_workspace(round->schedule.size, &p->buffers);
  check(flash3_forward_schedule(&f, &round->schedule));
  f.schedule = &round->schedule;
  round->plan = make_plan(f);
  check(flash3_plan_workspace(round->plan.get(), &p->workspace_bytes));
  f.workspace = add_workspace(p->workspace_bytes, &p->buffers);
  f.workspace_size = p->workspace_bytes;
  for (flash3_forward_params& call : round->calls) {
    call.schedule = f.schedule;
    call.workspace = f.workspace, call.workspace_size = f.workspace_size;
  }
  round->enqueue();  // what a first call loads is loaded before the recording
  memory_->finish();
  p->calls = static_cast<int>(round->calls.size());
  p->round = [round, recorded = memory_->record([round] { round->enqueue(); })] { recorded(); };
}

void Workbench::add_cache_inputs(PreparedCase* p) {
  flash3_forward_params& f = p->forward;
  const cases::Case& c = p->c;
  add_normal(3 * c.seed, &f.q, &p->buffers);
  f.out.data = add_buffer(f.out, &p->buffers);
  if (c.want_lse) f.lse.data = add_buffer(f.lse, &p->buffers);
  const cases::ExtraTensors besides = c.has_cache() ? make_cache_extra(c, cases::make_cache_plan(c))
                                                    : make_extra_tensors(c, make_sequences(c));
  set_extra(add_extra(besides, &p->buffers), &f);
  if (!c.has_cache()) return;
  const cases::CachePlan plan = cases::make_cache_plan(c);
  const auto fields = cases::make_cache_fields(c, plan, cases::make_cache_places(c, plan));
  for (size_t i = 0; i < fields.size(); ++i) {
    const cases::GuardedTensor& host = fields[i];
    if (host.bytes.empty()) continue;
    p->buffers.push_back(memory_->allocate(host.bytes.size()));
    memory_->copy_in(p->buffers.back().get(), host.bytes.data(), host.bytes.size());
    f.*cases::kCacheFields[i].member = host.at(p->buffers.back().get());
  }
}

std::vector<flash3_forward_params> Workbench::add_cache_buffers(PreparedCase* p) {
  flash3_forward_params f = p->forward;
  add_repeated(3 * p->c.seed + 1, &f.k, &p->buffers);
  if (!p->c.latent) add_repeated(3 * p->c.seed + 2, &f.v, &p->buffers);
  f.v = view_of_v(p->c, f.k, f.v);
  std::vector<flash3_forward_params> calls{f};
  const auto count = static_cast<size_t>(count_buffers(p->c, gpu_.has_value()));
  while (calls.size() < count) {
    flash3_forward_params& next = calls.emplace_back(f);
    for (flash3_tensor* t : {&next.k, &next.v}) {
      if (t == &next.v && p->c.latent) continue;
      const void* const first = t->data;
      t->data = add_buffer(*t, &p->buffers);
      memory_->copy(t->data, first,
                    static_cast<size_t>(cases::span_of(*t) * cases::element_size(t->dtype)));
    }
    next.v = view_of_v(p->c, next.k, next.v);
  }
  return calls;
}

void Workbench::add_repeated(uint64_t seed, flash3_tensor* t,
                             std::vector<std::shared_ptr<void>>* buffers) {
  t->data = add_buffer(*t, buffers);
  const int64_t count = cases::span_of(*t), block = std::min(count, kBlock);
  const auto size = static_cast<size_t>(cases::element_size(t->dtype));
  const size_t bytes = static_cast<size_t>(count) * size;
  size_t filled = static_cast<size_t>(block) * size;
  memory_->copy_in(t->data, normal_values(t->dtype, seed, block), filled);
  for (size_t more; filled < bytes; filled += more) {
    more = std::min(filled, bytes - filled);
    memory_->copy(static_cast<std::byte*>(t->data) + filled, t->data, more);
  }
}

double Workbench::measure_copy(int samples, double sample_seconds) {
  std::vector<std::shared_ptr<void>> buffers;
  flash3_tensor from{};
  from.dtype = FLASH3_FLOAT32, from.ndim = 1;
  from.shape[0] = kCopyBytes / sizeof(float), from.stride[0] = 1;
  flash3_tensor to = from;
  for (flash3_tensor* t : {&from, &to}) add_repeated(1, t, &buffers);
  const Timing timing = measure(
      *memory_, [&] { memory_->copy(to.data, from.data, kCopyBytes); }, samples, sample_seconds);
  return 2 * static_cast<double>(kCopyBytes) / timing.median;
}

}  // namespace flash3::cli
