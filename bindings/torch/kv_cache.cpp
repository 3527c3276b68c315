// SPDX-License-Identifier: Apache-2.0
// torch.ops.flash3.attention_with_kv_cache and its forms that write: _append into the cache, _out
// into memory for the results too. torch must know what an operator writes from its schema, so that
// a call that appends is an operator of its own. kv_cache_schedule makes what calls may share, and
// merge one result of attention over parts.
#include <algorithm>

#include "call.hpp"
#include "flash3/schedule.h"
#include "operators.hpp"

namespace flash3_torch {
namespace {

using CacheCall = Call<flash3_forward_params>;

// The bytes of a schedule's tensor, as they are.
flash3_schedule schedule_of(const Tensor& t, int64_t key, const Device& device) {
  const Device own = device_of("schedule.data", t);
  if (own != device)
    fail(FLASH3_INVALID_ARGUMENT, "schedule.data.device = " + own.name() + " but q.device = " +
                                      device.name() + "; all tensors must be on one device");
  if (torch_dtype_of(t) != aoti_torch_dtype_uint8() || t.dim() != 1 || !t.is_contiguous())
    fail(FLASH3_INVALID_ARGUMENT,
         "schedule.data is no contiguous uint8 tensor of 1 dimension but it must be as "
         "kv_cache_schedule gives it");
  return {t.data_ptr(), static_cast<size_t>(t.numel()), static_cast<uint64_t>(key)};
}

// Runs the call, whose results are described, with the schedule that is given.
void run(CacheCall* call) {
  flash3_schedule schedule{};
  if (call->extras.schedule) {
    schedule = schedule_of(*call->extras.schedule, call->extras.schedule_key, call->device);
    call->params.schedule = &schedule;
  }
  call->run(flash3_forward_allocating);
}

void check_cache_dims(const Tensor& v_cache) {
  if (v_cache.dim() == 4) return;
  fail(FLASH3_INVALID_ARGUMENT, "v_cache.ndim = " + std::to_string(v_cache.dim()) +
                                    " but it must be 4, [batch, rows, heads, dim] or [pages, "
                                    "page_size, heads, dim]");
}

// (out, lse)
void return_results(CacheCall call, StableIValue* stack) {
  check_cache_dims(call["v_cache"]);
  const Attended made = empty_results(call["q"], call["v_cache"], false, {}, call.device);
  call.describe_tensors();
  call.result("out", made.out);
  call.result("lse", made.lse);
  call.params.fill_padding = 1;
  run(&call);
  stack[0] = torch::stable::detail::from(made.out);
  stack[1] = torch::stable::detail::from(made.lse);
}

// A call whose schedule is made. Its result is described, and there is none.
void describe_for_schedule(CacheCall* call) {
  call->describe_tensors();
  check_dims("q", (*call)["q"]);
  check_cache_dims((*call)["v_cache"]);
  flash3_tensor& out = call->params.out;
  out = call->params.q;
  out.data = nullptr;
  out.shape[out.ndim - 1] = (*call)["v_cache"].size(3);
  out.dtype = dtype_of("out", *flash3::find_field<flash3_forward_params>("out"),
                       out_dtype_of((*call)["q"], call->extras.out_dtype));
  int64_t step = 1;
  for (int32_t d = out.ndim; d-- > 0; step *= std::max<int64_t>(out.shape[d], 1))
    out.stride[d] = step;
}

void run_merge(Call<flash3_merge_params>* call) { call->run(flash3_merge_allocating); }

}  // namespace

void attention_with_kv_cache(StableIValue* stack, uint64_t, uint64_t) {
  return_results({kAttentionWithKvCache, stack}, stack);
}

void attention_with_kv_cache_append(StableIValue* stack, uint64_t, uint64_t) {
  return_results({kAttentionWithKvCacheAppend, stack}, stack);
}

void attention_with_kv_cache_out(StableIValue* stack, uint64_t, uint64_t) {
  CacheCall call(kAttentionWithKvCacheOut, stack);
  call.describe_tensors();
  run(&call);
}

// (the schedule's memory, its key)
void kv_cache_schedule(StableIValue* stack, uint64_t, uint64_t) {
  CacheCall call(kKvCacheSchedule, stack);
  describe_for_schedule(&call);
  const auto guard = call.on_device();
  size_t bytes = 0;
  check(flash3_forward_schedule_size(&call.params, &bytes));
  const Tensor made = empty_aligned(bytes, call.device);
  flash3_schedule schedule = schedule_of(made, 0, call.device);
  check(flash3_forward_schedule(&call.params, &schedule));
  stack[0] = torch::stable::detail::from(made);
  stack[1] = torch::stable::detail::from(static_cast<int64_t>(schedule.key));
}

void kv_cache_schedule_out(StableIValue* stack, uint64_t, uint64_t) {
  CacheCall call(kKvCacheScheduleOut, stack);
  describe_for_schedule(&call);
  flash3_schedule schedule =
      schedule_of(*call.extras.schedule, call.extras.schedule_key, call.device);
  const auto guard = call.on_device();
  check(flash3_forward_schedule(&call.params, &schedule));
}

// (out, lse)
void merge(StableIValue* stack, uint64_t, uint64_t) {
  Call<flash3_merge_params> call(kMerge, stack);
  const Tensor& out_parts = call["out_parts"];
  if (out_parts.dim() != 4)
    fail(FLASH3_INVALID_ARGUMENT, "out_parts.ndim = " + std::to_string(out_parts.dim()) +
                                      " but it must be 4, [parts, rows, heads, head_dim_v]");
  const auto sizes = out_parts.sizes();
  const Tensor out = empty(Sizes(sizes.begin() + 1, sizes.end()),
                           call.extras.out_dtype.value_or(torch_dtype_of(out_parts)), call.device);
  const Tensor lse = empty({sizes[2], sizes[1]}, aoti_torch_dtype_float32(), call.device);
  call.describe_tensors();
  call.result("out", out);
  call.result("lse", lse);
  run_merge(&call);
  stack[0] = torch::stable::detail::from(out);
  stack[1] = torch::stable::detail::from(lse);
}

void merge_out(StableIValue* stack, uint64_t, uint64_t) {
  Call<flash3_merge_params> call(kMergeOut, stack);
  call.describe_tensors();
  run_merge(&call);
}

}  // namespace flash3_torch
