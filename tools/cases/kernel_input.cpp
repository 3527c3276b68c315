// SPDX-License-Identifier: Apache-2.0
#include "cases/kernel_input.hpp"

#include <cstddef>

#include "cases/sequences.hpp"
#include "cases/tensors.hpp"
#include "flash3/flash3.hpp"

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

Fp8Input::Fp8Input(Memory& memory, const flash3_forward_params& params, Scales scales,
                   bool rotate) {
  const auto take = [&](int64_t bytes) {
    buffers_.push_back(memory.allocate(static_cast<size_t>(bytes)));
    return buffers_.back().get();
  };
  flash3_quantize_params& p = call_;
  p.struct_size = sizeof p;
  p.rotate = rotate;
  p.rotation_seed = params.rotation_seed;
  p.cu_seqlens_q = params.cu_seqlens_q, p.cu_seqlens_k = params.cu_seqlens_k;
  p.seqused_q = params.seqused_q, p.seqused_k = params.seqused_k;
  p.max_seqlen_q = params.max_seqlen_q, p.max_seqlen_k = params.max_seqlen_k;
  p.backend = params.backend;
  p.num_threads = params.num_threads;
  p.stream = params.stream;

  const int64_t heads_k = params.k.shape[params.k.ndim - 2];
  const auto add = [&](const flash3_tensor& from, const flash3_tensor& cu, flash3_tensor* in,
                       flash3_tensor* out, flash3_tensor* scale) {
    *in = *out = from;
    out->dtype = FLASH3_FLOAT8_E4M3;
    out->data = take(span_of(from));
    const bool packed = cu.ndim > 0;
    const int64_t batch = packed ? cu.shape[0] - 1 : from.shape[0];
    const int64_t heads = from.shape[from.ndim - 2], rows = from.shape[from.ndim - 3];
    if (scales == Scales::kTensor)
      *scale = scale_tensor(nullptr);
    else if (scales == Scales::kHead)
      *scale = scale_tensor(nullptr, batch, heads_k);
    else
      *scale = scale_tensor(nullptr, packed ? 1 : batch, heads,
                            packed ? scale_blocks_packed(rows, batch) : scale_blocks(rows));
    scale->data = take(span_of(*scale) * static_cast<int64_t>(sizeof(float)));
  };
  add(params.q, params.cu_seqlens_q, &p.q, &p.q_out, &p.q_scale);
  add(params.k, params.cu_seqlens_k, &p.k, &p.k_out, &p.k_scale);
  add(params.v, params.cu_seqlens_k, &p.v, &p.v_out, &p.v_scale);
  status_ = flash3_quantize_workspace(&p, &p.workspace_size);
  if (status_ == FLASH3_OK && p.workspace_size > 0)
    p.workspace = take(static_cast<int64_t>(p.workspace_size));
}

flash3_status Fp8Input::quantize() const {
  return status_ == FLASH3_OK ? flash3_quantize(&call_) : flash3_quantize_supported(&call_);
}

void Fp8Input::apply(flash3_forward_params* params) const {
  params->q = call_.q_out, params->k = call_.k_out, params->v = call_.v_out;
  params->q_scale = call_.q_scale, params->k_scale = call_.k_scale;
  params->v_scale = call_.v_scale;
  params->compute = FLASH3_COMPUTE_AS_GIVEN;
}

}  // namespace flash3::cases
