#include "cli/workbench.hpp"

#include <algorithm>

#include "cases/tensors.hpp"
#include "cli/environment.hpp"

namespace flash3::cli {

void PreparedCase::call() const { check(flash3_forward(&params)); }

Workbench::Workbench(flash3_backend backend, int threads)
    : backend_(backend), threads_(threads), memory_(make_memory(backend)), gpu_(gpu_of(backend)) {
  if (gpu_) monitor_ = std::make_unique<device::Monitor>(gpu_->pci_bus_id);
}

PreparedCase Workbench::prepare(const cases::Case& c) {
  PreparedCase p;
  p.c = c;
  p.params = cases::make_question(c);
  p.params.backend = backend_;
  p.params.num_threads = threads_;
  p.params.stream = memory_->stream();
  check(flash3_forward_supported(&p.params));
  size_t workspace_bytes = 0;
  check(flash3_forward_workspace(&p.params, &workspace_bytes));
  p.kernel = value_of(explanation(p.params), "kernel");

  uint64_t seed = 3 * c.seed;
  for (flash3_tensor* t : {&p.params.q, &p.params.k, &p.params.v}) {
    t->data = add_buffer(*t, &p.buffers);
    const int64_t count = cases::span_of(*t);
    memory_->copy_in(t->data, normal_values(c.dtype, seed++, count),
                     static_cast<size_t>(count * cases::element_size(c.dtype)));
  }
  p.params.out.data = add_buffer(p.params.out, &p.buffers);
  if (c.want_lse) p.params.lse.data = add_buffer(p.params.lse, &p.buffers);
  p.buffers.push_back(memory_->allocate(workspace_bytes));
  p.params.workspace = workspace_bytes > 0 ? p.buffers.back().get() : nullptr;
  p.params.workspace_size = workspace_bytes;
  return p;
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

void* Workbench::add_buffer(const flash3_tensor& t, std::vector<std::shared_ptr<void>>* buffers) {
  buffers->push_back(
      memory_->allocate(static_cast<size_t>(cases::span_of(t) * cases::element_size(t.dtype))));
  return buffers->back().get();
}

}  // namespace flash3::cli
