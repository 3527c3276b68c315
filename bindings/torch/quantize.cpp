// SPDX-License-Identifier: Apache-2.0
// torch.ops.flash3.quantize and quantize_out: 16-bit tensors to FP8.
#include "call.hpp"

namespace flash3_torch {
namespace {

struct Options {
  MaybeTensor rotary_cos, rotary_sin;
  bool rotary_interleaved;
  int64_t rotary_offset_q, rotary_offset_k;
  bool rotate;
  int64_t rotation_seed;
  Sequences sequences;

  explicit Options(Arguments& a)
      : rotary_cos(a.maybe_tensor()),
        rotary_sin(a.maybe_tensor()),
        rotary_interleaved(a.next<bool>()),
        rotary_offset_q(a.next<int64_t>()),
        rotary_offset_k(a.next<int64_t>()),
        rotate(a.next<bool>()),
        rotation_seed(a.next<int64_t>()),
        sequences(a) {}
};
#define FLASH3_QUANTIZE_OPTIONS                                                       \
  "Tensor? rotary_cos=None, Tensor? rotary_sin=None, bool rotary_interleaved=False, " \
  "SymInt rotary_offset_q=0, SymInt rotary_offset_k=0, bool rotate=False, "           \
  "SymInt rotation_seed=0, " FLASH3_SEQUENCES

// One of q, k and v with its results.
struct Part {
  const char *name, *out_name, *scale_name;
  MaybeTensor in, out, scale;
};

struct Parts {
  Part q{"q", "q_out", "q_scale", {}, {}, {}}, k{"k", "k_out", "k_scale", {}, {}, {}},
      v{"v", "v_out", "v_scale", {}, {}, {}};

  void take_inputs(Arguments& a) {
    q.in = a.maybe_tensor(), k.in = a.maybe_tensor(), v.in = a.maybe_tensor();
  }
  const Part& first() const {
    for (const Part* part : {&q, &k, &v})
      if (part->in) return *part;
    fail(FLASH3_INVALID_ARGUMENT, "q, k and v are None; at least one of them must be given");
  }
};

void run(const Parts& parts, const Options& o) {
  const Part& first = parts.first();
  Call<flash3_quantize_params> call(first.name, device_of(first.name, *first.in));
  flash3_quantize_params& p = call.params;
  call.optional_input("q", &p.q, parts.q.in);
  call.optional_input("k", &p.k, parts.k.in);
  call.optional_input("v", &p.v, parts.v.in);
  call.optional_output("q_out", &p.q_out, parts.q.out);
  call.optional_output("k_out", &p.k_out, parts.k.out);
  call.optional_output("v_out", &p.v_out, parts.v.out);
  call.optional_output("q_scale", &p.q_scale, parts.q.scale);
  call.optional_output("k_scale", &p.k_scale, parts.k.scale);
  call.optional_output("v_scale", &p.v_scale, parts.v.scale);
  call.optional_input("rotary_cos", &p.rotary_cos, o.rotary_cos);
  call.optional_input("rotary_sin", &p.rotary_sin, o.rotary_sin);
  p.rotary_interleaved = o.rotary_interleaved;
  p.rotary_offset_q = o.rotary_offset_q;
  p.rotary_offset_k = o.rotary_offset_k;
  p.rotate = o.rotate;
  p.rotation_seed = static_cast<uint64_t>(o.rotation_seed);
  call.sequences(o.sequences);
  call.run(flash3_quantize_plan, flash3_quantize_run);
}

// The scales' shape says what they are for: [1], [batch, heads_k] or [batch, heads, blocks].
Sizes scale_sizes(const Tensor& in, const MaybeTensor& cu_seqlens, int64_t ndim, int64_t heads_k) {
  const int64_t dims = in.dim(), rows = in.size(dims - 3), heads = in.size(dims - 2);
  const bool packed = dims == 3;
  int64_t batch = packed ? 1 : in.size(0);
  // Any other shape of cu_seqlens is refused by the library.
  if (packed && cu_seqlens && cu_seqlens->dim() == 1 && cu_seqlens->size(0) > 0)
    batch = cu_seqlens->size(0) - 1;
  if (ndim == 1) return {1};
  if (ndim == 2) return {batch, heads_k};
  if (packed) return {1, heads, rows / FLASH3_FP8_BLOCK + batch};
  return {batch, heads, (rows + FLASH3_FP8_BLOCK - 1) / FLASH3_FP8_BLOCK};
}

void allocate(Part* part, const MaybeTensor& cu_seqlens, const MaybeTensor& seqused, int64_t ndim,
              int64_t heads_k) {
  if (!part->in) return;
  const Tensor& in = *part->in;
  check_dims(part->name, in);
  const Device device = device_of(part->name, in);
  const auto sizes = in.sizes();
  part->out = empty(Sizes(sizes.begin(), sizes.end()), aoti_torch_dtype_float8_e4m3fn(), device);
  part->scale =
      empty(scale_sizes(in, cu_seqlens, ndim, heads_k), aoti_torch_dtype_float32(), device);
  // The library leaves the scales of no token as they are: they get that of zeros.
  if (cu_seqlens || seqused || in.numel() == 0) torch::stable::fill_(*part->scale, 1.0);
  // Nor does it write rows of no token. On a GPU only the device knows the lengths of packed
  // sequences, and what lies around them is no token's and stays as it is.
  if (seqused || (cu_seqlens && !device.is_cuda())) torch::stable::zero_(*part->out);
}

StableIValue result(const MaybeTensor& t, const Device& device) {
  return torch::stable::detail::from(t ? *t : empty({0}, aoti_torch_dtype_float32(), device));
}

}  // namespace

// quantize(q, k, v, scale_ndim, heads_k, options) -> (q_out, k_out, v_out, q_scale, k_scale,
// v_scale); of what is not given the results are empty
void quantize(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  Parts parts;
  parts.take_inputs(a);
  const int64_t ndim = a.next<int64_t>(), asked_heads_k = a.next<int64_t>();
  const Options o(a);
  if (ndim < 1 || ndim > 3)
    fail(FLASH3_INVALID_ARGUMENT,
         "scale_ndim = " + std::to_string(ndim) +
             " but it must be 1, [1], 2, [batch, heads_k], or 3, [batch, heads, blocks]");
  if (asked_heads_k < 0)
    fail(FLASH3_INVALID_ARGUMENT,
         "heads_k = " + std::to_string(asked_heads_k) + " but it must be at least 0");
  const Part& first = parts.first();
  const Device device = device_of(first.name, *first.in);
  const Part& heads_of = parts.k.in ? parts.k : parts.v.in ? parts.v : parts.q;
  check_dims(heads_of.name, *heads_of.in);
  const int64_t heads_k = &heads_of == &parts.q && asked_heads_k != 0
                              ? asked_heads_k
                              : heads_of.in->size(heads_of.in->dim() - 2);
  const Sequences& s = o.sequences;
  allocate(&parts.q, s.cu_seqlens_q, s.seqused_q, ndim, heads_k);
  allocate(&parts.k, s.cu_seqlens_k, s.seqused_k, ndim, heads_k);
  allocate(&parts.v, s.cu_seqlens_k, s.seqused_k, ndim, heads_k);
  run(parts, o);
  stack[0] = result(parts.q.out, device);
  stack[1] = result(parts.k.out, device);
  stack[2] = result(parts.v.out, device);
  stack[3] = result(parts.q.scale, device);
  stack[4] = result(parts.k.scale, device);
  stack[5] = result(parts.v.scale, device);
}

// quantize_out(q, k, v, q_out, k_out, v_out, q_scale, k_scale, v_scale, options) -> ()
void quantize_out(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  Parts parts;
  parts.take_inputs(a);
  for (Part* part : {&parts.q, &parts.k, &parts.v}) part->out = a.maybe_tensor();
  for (Part* part : {&parts.q, &parts.k, &parts.v}) part->scale = a.maybe_tensor();
  run(parts, Options(a));
}

const char* const kQuantizeSchema =
    "quantize(Tensor? q=None, Tensor? k=None, Tensor? v=None, int scale_ndim=3, SymInt "
    "heads_k=0, " FLASH3_QUANTIZE_OPTIONS ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)";
const char* const kQuantizeOutSchema =
    "quantize_out(Tensor? q, Tensor? k, Tensor? v, Tensor(a!)? q_out, Tensor(b!)? k_out, "
    "Tensor(c!)? v_out, Tensor(d!)? q_scale, Tensor(e!)? k_scale, Tensor(f!)? "
    "v_scale, " FLASH3_QUANTIZE_OPTIONS ") -> ()";

}  // namespace flash3_torch
