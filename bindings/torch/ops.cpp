// SPDX-License-Identifier: Apache-2.0
// torch.ops.flash3: the C interface as torch operators, on torch's stable ABI. One binary for every
// Python and every torch from 2.10 on: it links libtorch_cpu alone, and finds what only a torch
// with CUDA has when a CUDA tensor comes.
//
// Here tensors become flash3_tensors and results are allocated; the library checks the call. Fake
// kernels, autograd and autocast are registered in flash3/_torch.py.
#include "call.hpp"
#include "operators.hpp"

namespace flash3_torch {
namespace {

Tensor empty_of_shape(const Tensor& like, const Device& device) {
  const auto sizes = like.sizes();
  return empty(Sizes(sizes.begin(), sizes.end()), torch_dtype_of(like), device);
}

using ForwardCall = Call<flash3_forward_params>;
using BackwardCall = Call<flash3_backward_params>;

// (out, lse)
void forward(StableIValue* stack, uint64_t, uint64_t) {
  ForwardCall call(kForward, stack);
  const Attended made = empty_results(call["q"], call["v"], call.extras.heads_first,
                                      call.extras.out_dtype, call.device);
  call.describe_tensors();
  call.result("out", made.out);
  call.result("lse", made.lse);
  call.params.fill_padding = 1;
  call.run(flash3_forward_allocating);
  stack[0] = torch::stable::detail::from(made.out);
  stack[1] = torch::stable::detail::from(made.lse);
}

// out. Beside forward since of a call without gradients the lse would be thrown away, and torch
// takes time for each argument of a schema, given or not.
void inference(StableIValue* stack, uint64_t, uint64_t) {
  ForwardCall call(kInference, stack);
  const Tensor out = empty_out(call["q"], call["v"], call.extras.heads_first, {}, call.device);
  call.describe_tensors();
  call.result("out", out);
  call.run(flash3_forward_allocating);
  stack[0] = torch::stable::detail::from(out);
}

void forward_out(StableIValue* stack, uint64_t, uint64_t) {
  ForwardCall call(kForwardOut, stack);
  call.describe_tensors();
  call.run(flash3_forward_allocating);
}

// (dq, dk, dv, dsink); no sink: dsink is empty
void backward(StableIValue* stack, uint64_t, uint64_t) {
  BackwardCall call(kBackward, stack);
  call.describe_tensors();
  const Device& device = call.device;
  const Tensor dq = empty_of_shape(call["q"], device), dk = empty_of_shape(call["k"], device),
               dv = empty_of_shape(call["v"], device);
  const MaybeTensor& sink = call.given("sink");
  const Tensor dsink =
      sink ? empty_of_shape(*sink, device) : empty({0}, aoti_torch_dtype_float32(), device);
  call.result("dq", dq);
  call.result("dk", dk);
  call.result("dv", dv);
  if (sink) call.result("dsink", dsink);
  call.params.fill_padding = 1;
  call.run(flash3_backward_allocating);
  stack[0] = torch::stable::detail::from(dq);
  stack[1] = torch::stable::detail::from(dk);
  stack[2] = torch::stable::detail::from(dv);
  stack[3] = torch::stable::detail::from(dsink);
}

void backward_out(StableIValue* stack, uint64_t, uint64_t) {
  BackwardCall call(kBackwardOut, stack);
  call.describe_tensors();
  call.run(flash3_backward_allocating);
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
  for (const char* schema : flash3_torch::kSchemas) m.def(schema);
  m.def("mask_used(Tensor mask, int[] mask_fields) -> (int, int, int)");
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
  library.impl("mask_make", flash3_torch::mask_make);
  library.impl("mask_data", flash3_torch::mask_data);
  library.impl("mask_used", flash3_torch::mask_used);
}

}  // namespace

FLASH3_TORCH_LIBRARY_IMPL(FLASH3_TORCH_NAME, CPU, m) { add_kernels(m); }

FLASH3_TORCH_LIBRARY_IMPL(FLASH3_TORCH_NAME, CUDA, m) { add_kernels(m); }
