// SPDX-License-Identifier: Apache-2.0
#include "cases/normal_tensors.hpp"

#include <cstddef>

#include "cases/sequences.hpp"
#include "cases/tensors.hpp"

namespace flash3::cases {

NormalTensors::NormalTensors(const Case& c, Memory& memory) : params(make_question(c)) {
  uint64_t seed = 1;
  for (flash3_tensor* t : {&params.q, &params.k, &params.v, &params.out, &params.lse}) {
    if (t->ndim == 0) continue;
    std::vector<std::byte> host(static_cast<size_t>(span_of(*t) * element_size(t->dtype)));
    fill_normal(host.data(), t->dtype, span_of(*t), seed++);
    buffers_.push_back(memory.allocate(host.size()));
    t->data = buffers_.back().get();
    memory.copy_in(t->data, host.data(), host.size());
  }
  const ExtraTensors extra = make_extra_tensors(c, make_sequences(c));
  ExtraViews views;
  const auto place = [&](const ParamField&, flash3_tensor& view, const GuardedTensor& host) {
    if (host.bytes.empty()) return;
    buffers_.push_back(memory.allocate(host.bytes.size()));
    memory.copy_in(buffers_.back().get(), host.bytes.data(), host.bytes.size());
    view = host.at(buffers_.back().get());
  };
  ExtraViews::visit(place, views, extra);
  set_options(c, views, &params);
  params.stream = memory.stream();
}

}  // namespace flash3::cases
