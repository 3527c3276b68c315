// SPDX-License-Identifier: Apache-2.0
// torch.ops.flash3: the C interface as torch operators, on torch's stable ABI. One binary for every
// Python and every torch from 2.10 on: it links libtorch_cpu alone, and finds what only a torch
// with CUDA has when a CUDA tensor comes.
//
// Here tensors become flash3_tensors and results are allocated; the library checks the call. Fake
// kernels, autograd and autocast are registered in flash3/_torch.py.
#include "call.hpp"

namespace flash3_torch {
namespace {

// What every call has, in the schema's order: what is given most often comes first, as each
// argument that is given costs time.
struct PlainOptions {
  double softmax_scale;
  bool causal;
  bool heads_first;  // [batch, heads, seq, dim], as torch's own attention has its tensors
  int64_t window_left, window_right;
  double softcap;

  explicit PlainOptions(Arguments& a)
      : softmax_scale(a.next<double>()),
        causal(a.next<bool>()),
        heads_first(a.next<bool>()),
        window_left(a.next<int64_t>()),
        window_right(a.next<int64_t>()),
        softcap(a.next<double>()) {}
};
#define FLASH3_PLAIN_OPTIONS                                            \
  "float softmax_scale=0., bool causal=False, bool heads_first=False, " \
  "SymInt window_left=-1, SymInt window_right=-1, float softcap=0."

// What forward and backward have in common.
struct Options : PlainOptions {
  int64_t chunk;
  MaybeTensor sink;
  Sequences sequences;
  bool deterministic;

  explicit Options(Arguments& a)
      : PlainOptions(a),
        chunk(a.next<int64_t>()),
        sink(a.maybe_tensor()),
        sequences(a),
        deterministic(a.next<bool>()) {}
};
#define FLASH3_OPTIONS                                                          \
  FLASH3_PLAIN_OPTIONS ", SymInt chunk=0, Tensor? sink=None, " FLASH3_SEQUENCES \
                       ", bool deterministic=False"

// What a forward call alone has.
struct ForwardOptions {
  MaybeTensor q_scale, k_scale, v_scale;
  bool compute_fp8;
  int64_t rotation_seed, sm_margin, fp8_sums;

  explicit ForwardOptions(Arguments& a)
      : q_scale(a.maybe_tensor()),
        k_scale(a.maybe_tensor()),
        v_scale(a.maybe_tensor()),
        compute_fp8(a.next<bool>()),
        rotation_seed(a.next<int64_t>()),
        sm_margin(a.next<int64_t>()),
        fp8_sums(a.next<int64_t>()) {}
};
#define FLASH3_FORWARD_OPTIONS                                         \
  "Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, " \
  "bool compute_fp8=False, SymInt rotation_seed=0, SymInt sm_margin=0, int fp8_sums=0"

// A call of forward or backward.
template <class Params>
class AttentionCall : public Call<Params> {
 public:
  AttentionCall(const Device& device, const PlainOptions& o)
      : Call<Params>("q", device), heads_first_(o.heads_first) {
    this->scores(o.softmax_scale, o.causal, o.window_left, o.window_right, o.softcap);
  }
  AttentionCall(const Device& device, const Options& o)
      : AttentionCall(device, static_cast<const PlainOptions&>(o)) {
    this->optional_input("sink", &this->params.sink, o.sink);
    this->sequences(o.sequences);
    this->params.chunk = o.chunk;
  }

  // Tensors with rows: q, k, v, out and their gradients.
  void rows(const char* name, flash3_tensor* field, const Tensor& t) {
    this->input(name, field, t);
    order(field);
  }
  void output_rows(const char* name, flash3_tensor* field, const Tensor& t) {
    this->output(name, field, t);
    order(field);
  }

 private:
  void order(flash3_tensor* field) const {
    if (!heads_first_ || field->ndim < 3) return;
    const int32_t heads = field->ndim - 3;
    std::swap(field->shape[heads], field->shape[heads + 1]);
    std::swap(field->stride[heads], field->stride[heads + 1]);
  }

  bool heads_first_;
};

using ForwardCall = AttentionCall<flash3_forward_params>;

void run_forward(ForwardCall& call, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Tensor& out) {
  flash3_forward_params& p = call.params;
  call.rows("q", &p.q, q);
  call.rows("k", &p.k, k);
  call.rows("v", &p.v, v);
  call.output_rows("out", &p.out, out);
  call.run(flash3_forward_plan, flash3_forward_run);
}

void run_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                 const MaybeTensor& lse, const Options& o, const ForwardOptions& f,
                 const MaybeTensor& qv, bool fill_padding) {
  ForwardCall call(device_of("q", q), o);
  flash3_forward_params& p = call.params;
  call.optional_output("lse", &p.lse, lse);
  call.optional_input("q_scale", &p.q_scale, f.q_scale);
  call.optional_input("k_scale", &p.k_scale, f.k_scale);
  call.optional_input("v_scale", &p.v_scale, f.v_scale);
  p.compute = f.compute_fp8 ? FLASH3_COMPUTE_FP8 : FLASH3_COMPUTE_AS_GIVEN;
  p.rotation_seed = static_cast<uint64_t>(f.rotation_seed);
  p.sm_margin = int32_of("sm_margin", f.sm_margin);
  if (qv) call.rows("qv", &p.qv, *qv);
  p.fp8_sums = int32_of("fp8_sums", f.fp8_sums);
  p.fill_padding = fill_padding;
  run_forward(call, q, k, v, out);
}

struct Gradients {
  Tensor dq, dk, dv;
  MaybeTensor dsink;
};

struct BackwardInputs {
  Tensor dout;
  MaybeTensor dlse;
  Tensor q, k, v, out, lse;

  explicit BackwardInputs(Arguments& a)
      : dout(a.tensor()),
        dlse(a.maybe_tensor()),
        q(a.tensor()),
        k(a.tensor()),
        v(a.tensor()),
        out(a.tensor()),
        lse(a.tensor()) {}
};

void run_backward(const BackwardInputs& in, const Gradients& gradients, const Options& o,
                  bool fill_padding) {
  AttentionCall<flash3_backward_params> call(device_of("q", in.q), o);
  flash3_backward_params& p = call.params;
  p.deterministic = o.deterministic;
  p.fill_padding = fill_padding;
  call.rows("dout", &p.dout, in.dout);
  call.optional_input("dlse", &p.dlse, in.dlse);
  call.rows("q", &p.q, in.q);
  call.rows("k", &p.k, in.k);
  call.rows("v", &p.v, in.v);
  call.rows("out", &p.out, in.out);
  call.input("lse", &p.lse, in.lse);
  call.output_rows("dq", &p.dq, gradients.dq);
  call.output_rows("dk", &p.dk, gradients.dk);
  call.output_rows("dv", &p.dv, gradients.dv);
  call.optional_output("dsink", &p.dsink, gradients.dsink);
  call.run(flash3_backward_plan, flash3_backward_run);
}

Tensor empty_of_shape(const Tensor& like, const Device& device) {
  const auto sizes = like.sizes();
  return empty(Sizes(sizes.begin(), sizes.end()), torch_dtype_of(like), device);
}

// forward(q, k, v, options, a forward's options, out_dtype, qv) -> (out, lse)
void forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  const Tensor q = a.tensor(), k = a.tensor(), v = a.tensor();
  const Options o(a);
  const ForwardOptions f(a);
  const std::optional<int32_t> out_dtype = a.maybe_dtype();
  const MaybeTensor qv = a.maybe_tensor();
  const Device device = device_of("q", q);
  const Attended made = empty_results(q, v, o.heads_first, out_dtype, device);
  run_forward(q, k, v, made.out, made.lse, o, f, qv, true);
  stack[0] = torch::stable::detail::from(made.out);
  stack[1] = torch::stable::detail::from(made.lse);
}

// inference(q, k, v, plain options) -> out. Beside forward since of a call without gradients the
// lse would be thrown away, and torch takes time for each argument of a schema, given or not.
void inference(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  const Tensor q = a.tensor(), k = a.tensor(), v = a.tensor();
  const PlainOptions o(a);
  const Device device = device_of("q", q);
  const Tensor out = empty_out(q, v, o.heads_first, {}, device);
  ForwardCall call(device, o);
  run_forward(call, q, k, v, out);
  stack[0] = torch::stable::detail::from(out);
}

// forward_out(q, k, v, out, lse, options, a forward's options, qv, fill_padding) -> ()
void forward_out(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  const Tensor q = a.tensor(), k = a.tensor(), v = a.tensor(), out = a.tensor();
  const MaybeTensor lse = a.maybe_tensor();
  const Options o(a);
  const ForwardOptions f(a);
  const MaybeTensor qv = a.maybe_tensor();
  run_forward(q, k, v, out, lse, o, f, qv, a.next<bool>());
}

// backward(dout, dlse, q, k, v, out, lse, options) -> (dq, dk, dv, dsink); no sink: dsink is empty
void backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  const BackwardInputs in(a);
  const Options o(a);
  const Device device = device_of("q", in.q);
  Gradients made{
      empty_of_shape(in.q, device), empty_of_shape(in.k, device), empty_of_shape(in.v, device), {}};
  if (o.sink) made.dsink = empty_of_shape(*o.sink, device);
  run_backward(in, made, o, true);
  stack[0] = torch::stable::detail::from(made.dq);
  stack[1] = torch::stable::detail::from(made.dk);
  stack[2] = torch::stable::detail::from(made.dv);
  stack[3] = torch::stable::detail::from(
      made.dsink ? *made.dsink : empty({0}, aoti_torch_dtype_float32(), device));
}

// backward_out(dout, dlse, q, k, v, out, lse, dq, dk, dv, dsink, options, fill_padding) -> ()
void backward_out(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  const BackwardInputs in(a);
  const Gradients given{a.tensor(), a.tensor(), a.tensor(), a.maybe_tensor()};
  const Options o(a);
  run_backward(in, given, o, a.next<bool>());
}

}  // namespace
}  // namespace flash3_torch

// A build that is loaded beside another one has its own name in torch.ops (cmake/hub.cmake).
#ifndef FLASH3_TORCH_NAME
#define FLASH3_TORCH_NAME flash3
#endif
// torch's macros make a string of the name as it is given to them.
#define FLASH3_TORCH_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define FLASH3_TORCH_LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)

FLASH3_TORCH_LIBRARY(FLASH3_TORCH_NAME, m) {
  m.def("forward(Tensor q, Tensor k, Tensor v, " FLASH3_OPTIONS ", " FLASH3_FORWARD_OPTIONS
        ", ScalarType? out_dtype=None, Tensor? qv=None) -> (Tensor, Tensor)");
  m.def("inference(Tensor q, Tensor k, Tensor v, " FLASH3_PLAIN_OPTIONS ") -> Tensor");
  m.def("forward_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, " FLASH3_OPTIONS
        ", " FLASH3_FORWARD_OPTIONS ", Tensor? qv=None, bool fill_padding=False) -> ()");
  m.def(
      "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor lse, " FLASH3_OPTIONS ") -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "backward_out(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor lse, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dsink, " FLASH3_OPTIONS
      ", bool fill_padding=False) -> ()");
  m.def(flash3_torch::kQuantizeSchema);
  m.def(flash3_torch::kQuantizeOutSchema);
  for (const char* schema : flash3_torch::kCacheSchemas) m.def(schema);
}

namespace {

void add_kernels(auto& library) {
  library.impl("forward", flash3_torch::forward);
  library.impl("inference", flash3_torch::inference);
  library.impl("forward_out", flash3_torch::forward_out);
  library.impl("backward", flash3_torch::backward);
  library.impl("backward_out", flash3_torch::backward_out);
  library.impl("quantize", flash3_torch::quantize);
  library.impl("quantize_out", flash3_torch::quantize_out);
  library.impl("attention_with_kv_cache", flash3_torch::attention_with_kv_cache);
  library.impl("attention_with_kv_cache_append", flash3_torch::attention_with_kv_cache_append);
  library.impl("attention_with_kv_cache_out", flash3_torch::attention_with_kv_cache_out);
  library.impl("kv_cache_schedule", flash3_torch::kv_cache_schedule);
  library.impl("kv_cache_schedule_out", flash3_torch::kv_cache_schedule_out);
  library.impl("merge", flash3_torch::merge);
  library.impl("merge_out", flash3_torch::merge_out);
}

}  // namespace

FLASH3_TORCH_LIBRARY_IMPL(FLASH3_TORCH_NAME, CPU, m) { add_kernels(m); }

FLASH3_TORCH_LIBRARY_IMPL(FLASH3_TORCH_NAME, CUDA, m) { add_kernels(m); }
