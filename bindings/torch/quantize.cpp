// SPDX-License-Identifier: Apache-2.0
// torch.ops.flash3.quantize and quantize_out: 16-bit tensors to FP8.
#include "call.hpp"
#include "operators.hpp"

namespace flash3_torch {
namespace {

using QuantizeCall = Call<flash3_quantize_params>;

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

// One of q, k and v, and what becomes of it.
struct Part {
  const char *name, *out_name, *scale_name, *cu_seqlens, *seqused;
  MaybeTensor out{}, scale{};
};

void allocate(const QuantizeCall& call, int64_t heads_k, Part* part) {
  const MaybeTensor &given = call.given(part->name), &cu_seqlens = call.given(part->cu_seqlens),
                    &seqused = call.given(part->seqused);
  if (!given) return;
  const Tensor& in = *given;
  check_dims(part->name, in);
  const Device device = device_of(part->name, in);
  const auto sizes = in.sizes();
  part->out = empty(Sizes(sizes.begin(), sizes.end()), aoti_torch_dtype_float8_e4m3fn(), device);
  part->scale = empty(scale_sizes(in, cu_seqlens, call.extras.scale_ndim, heads_k),
                      aoti_torch_dtype_float32(), device);
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

// (q_out, k_out, v_out, q_scale, k_scale, v_scale); of what is not given the results are empty
void quantize(StableIValue* stack, uint64_t, uint64_t) {
  QuantizeCall call(kQuantize, stack);
  const int64_t ndim = call.extras.scale_ndim, asked_heads_k = call.extras.heads_k;
  if (ndim < 1 || ndim > 3)
    fail(FLASH3_INVALID_ARGUMENT,
         "scale_ndim = " + std::to_string(ndim) +
             " but it must be 1, [1], 2, [batch, heads_k], or 3, [batch, heads, blocks]");
  if (asked_heads_k < 0)
    fail(FLASH3_INVALID_ARGUMENT,
         "heads_k = " + std::to_string(asked_heads_k) + " but it must be at least 0");
  const char* const heads_of = call.given("k") ? "k" : call.given("v") ? "v" : "q";
  const Tensor& with_heads = call[heads_of];
  check_dims(heads_of, with_heads);
  const int64_t heads_k = *heads_of == 'q' && asked_heads_k != 0
                              ? asked_heads_k
                              : with_heads.size(with_heads.dim() - 2);
  Part parts[] = {{"q", "q_out", "q_scale", "cu_seqlens_q", "seqused_q"},
                  {"k", "k_out", "k_scale", "cu_seqlens_k", "seqused_k"},
                  {"v", "v_out", "v_scale", "cu_seqlens_k", "seqused_k"}};
  for (Part& part : parts) allocate(call, heads_k, &part);
  call.describe_tensors();
  for (const Part& part : parts) {
    if (!part.out) continue;
    call.result(part.out_name, *part.out);
    call.result(part.scale_name, *part.scale);
  }
  call.run(flash3_quantize_allocating);
  for (int i = 0; i < 3; ++i) {
    stack[i] = result(parts[i].out, call.device);
    stack[3 + i] = result(parts[i].scale, call.device);
  }
}

void quantize_out(StableIValue* stack, uint64_t, uint64_t) {
  QuantizeCall call(kQuantizeOut, stack);
  call.describe_tensors();
  call.run(flash3_quantize_allocating);
}

}  // namespace flash3_torch
