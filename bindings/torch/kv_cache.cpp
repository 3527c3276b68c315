// SPDX-License-Identifier: Apache-2.0
// torch.ops.flash3.attention_with_kv_cache and its forms that write: _append into the cache, _out
// into memory for the results too. torch must know what an operator writes from its schema, so that
// a call that appends is an operator of its own. kv_cache_schedule makes what calls may share, and
// merge one result of attention over parts.
#include <algorithm>

#include "call.hpp"
#include "flash3/schedule.h"

namespace flash3_torch {
namespace {

// In the schema's order, the frequent ones first.
struct CacheOptions {
  double softmax_scale;
  bool causal;
  MaybeTensor seqused_k, page_table;
  int64_t window_left, window_right;
  double softcap;
  int64_t chunk;
  MaybeTensor sink, cache_batch_idx, leftpad_k, cu_seqlens_q, seqused_q;
  int64_t max_seqlen_q, max_seqlen_k, sm_margin;
  MaybeTensor q_scale, k_scale, v_scale;

  explicit CacheOptions(Arguments& a)
      : softmax_scale(a.next<double>()),
        causal(a.next<bool>()),
        seqused_k(a.maybe_tensor()),
        page_table(a.maybe_tensor()),
        window_left(a.next<int64_t>()),
        window_right(a.next<int64_t>()),
        softcap(a.next<double>()),
        chunk(a.next<int64_t>()),
        sink(a.maybe_tensor()),
        cache_batch_idx(a.maybe_tensor()),
        leftpad_k(a.maybe_tensor()),
        cu_seqlens_q(a.maybe_tensor()),
        seqused_q(a.maybe_tensor()),
        max_seqlen_q(a.next<int64_t>()),
        max_seqlen_k(a.next<int64_t>()),
        sm_margin(a.next<int64_t>()),
        q_scale(a.maybe_tensor()),
        k_scale(a.maybe_tensor()),
        v_scale(a.maybe_tensor()) {}
};
#define FLASH3_CACHE_OPTIONS                                                                     \
  "float softmax_scale=0., bool causal=False, Tensor? seqused_k=None, Tensor? page_table=None, " \
  "SymInt window_left=-1, SymInt window_right=-1, float softcap=0., SymInt chunk=0, "            \
  "Tensor? sink=None, Tensor? cache_batch_idx=None, Tensor? leftpad_k=None, "                    \
  "Tensor? cu_seqlens_q=None, Tensor? seqused_q=None, SymInt max_seqlen_q=0, "                   \
  "SymInt max_seqlen_k=0, SymInt sm_margin=0, Tensor? q_scale=None, Tensor? k_scale=None, "      \
  "Tensor? v_scale=None"

// A schedule that was made before, and what it is for.
struct GivenSchedule {
  MaybeTensor data;
  int64_t key;

  explicit GivenSchedule(Arguments& a) : data(a.maybe_tensor()), key(a.next<int64_t>()) {}
};
#define FLASH3_GIVEN_SCHEDULE "Tensor? schedule=None, SymInt schedule_key=0"

// What is written into the cache first. The library says which of these need which.
struct Append {
  MaybeTensor k_new, v_new, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_offsets;
  bool rotary_interleaved = false;

  Append() = default;
  explicit Append(Arguments& a)
      : k_new(a.maybe_tensor()),
        v_new(a.maybe_tensor()),
        cu_seqlens_k_new(a.maybe_tensor()),
        rotary_cos(a.maybe_tensor()),
        rotary_sin(a.maybe_tensor()),
        rotary_offsets(a.maybe_tensor()),
        rotary_interleaved(a.next<bool>()) {}
};
#define FLASH3_APPEND                                                               \
  "Tensor? k_new, Tensor? v_new, Tensor? cu_seqlens_k_new=None, Tensor? rotary_cos" \
  "=None, Tensor? rotary_sin=None, Tensor? rotary_offsets=None, bool rotary_interleaved=False"

// What every operator takes last.
struct More {
  MaybeTensor qv, tree_mask;
  bool rotate;
  int64_t rotation_seed;

  explicit More(Arguments& a)
      : qv(a.maybe_tensor()),
        tree_mask(a.maybe_tensor()),
        rotate(a.next<bool>()),
        rotation_seed(a.next<int64_t>()) {}
};
#define FLASH3_MORE \
  "Tensor? qv=None, Tensor? tree_mask=None, bool rotate=False, SymInt rotation_seed=0"

struct Tensors {
  Tensor q, k_cache, v_cache;

  explicit Tensors(Arguments& a) : q(a.tensor()), k_cache(a.tensor()), v_cache(a.tensor()) {}
};

using CacheCall = Call<flash3_forward_params>;

// All but out and lse.
void set(const Tensors& t, const Append& append, const CacheOptions& o, const More& more,
         CacheCall* made) {
  CacheCall& call = *made;
  flash3_forward_params& p = call.params;
  call.scores(o.softmax_scale, o.causal, o.window_left, o.window_right, o.softcap);
  call.input("q", &p.q, t.q);
  call.output("k_cache", &p.k, t.k_cache);  // a cache is never copied, also where it is only read
  call.output("v_cache", &p.v, t.v_cache);
  call.optional_input("qv", &p.qv, more.qv);
  call.optional_input("tree_mask", &p.tree_mask, more.tree_mask);
  call.optional_input("seqused_k", &p.seqused_k, o.seqused_k);
  call.optional_input("page_table", &p.page_table, o.page_table);
  call.optional_input("sink", &p.sink, o.sink);
  call.optional_input("cache_batch_idx", &p.cache_batch_idx, o.cache_batch_idx);
  call.optional_input("leftpad_k", &p.leftpad_k, o.leftpad_k);
  call.optional_input("cu_seqlens_q", &p.cu_seqlens_q, o.cu_seqlens_q);
  call.optional_input("seqused_q", &p.seqused_q, o.seqused_q);
  call.optional_input("q_scale", &p.q_scale, o.q_scale);
  call.optional_input("k_scale", &p.k_scale, o.k_scale);
  call.optional_input("v_scale", &p.v_scale, o.v_scale);
  call.optional_input("k_new", &p.k_new, append.k_new);
  call.optional_input("v_new", &p.v_new, append.v_new);
  call.optional_input("cu_seqlens_k_new", &p.cu_seqlens_k_new, append.cu_seqlens_k_new);
  call.optional_input("rotary_cos", &p.rotary_cos, append.rotary_cos);
  call.optional_input("rotary_sin", &p.rotary_sin, append.rotary_sin);
  call.optional_input("rotary_offsets", &p.rotary_offsets, append.rotary_offsets);
  p.rotary_interleaved = append.rotary_interleaved;
  p.chunk = o.chunk;
  p.max_seqlen_q = o.max_seqlen_q;
  p.max_seqlen_k = o.max_seqlen_k;
  p.sm_margin = int32_of("sm_margin", o.sm_margin);
  p.rotate = more.rotate;
  p.rotation_seed = static_cast<uint64_t>(more.rotation_seed);
}

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

void run(const Tensors& t, const Tensor& out, const MaybeTensor& lse, const Append& append,
         const CacheOptions& o, const GivenSchedule& given, const More& more, bool fill_padding,
         const Device& device) {
  CacheCall call("q", device);
  set(t, append, o, more, &call);
  call.output("out", &call.params.out, out);
  call.optional_output("lse", &call.params.lse, lse);
  call.params.fill_padding = fill_padding;
  flash3_schedule schedule{};
  if (given.data) {
    schedule = schedule_of(*given.data, given.key, device);
    call.params.schedule = &schedule;
  }
  call.run(flash3_forward_plan, flash3_forward_run);
}

void check_cache_dims(const Tensor& v_cache) {
  if (v_cache.dim() == 4) return;
  fail(FLASH3_INVALID_ARGUMENT, "v_cache.ndim = " + std::to_string(v_cache.dim()) +
                                    " but it must be 4, [batch, rows, heads, dim] or [pages, "
                                    "page_size, heads, dim]");
}

void return_results(StableIValue* stack, const Tensors& t, const Append& append,
                    const CacheOptions& o, const GivenSchedule& schedule, const More& more) {
  const Device device = device_of("q", t.q);
  check_cache_dims(t.v_cache);
  const Attended made = empty_results(t.q, t.v_cache, false, {}, device);
  run(t, made.out, made.lse, append, o, schedule, more, true, device);
  stack[0] = torch::stable::detail::from(made.out);
  stack[1] = torch::stable::detail::from(made.lse);
}

// A call whose schedule is made. Its result is described, and there is none.
void set_for_schedule(const Tensors& t, Arguments& a, CacheCall* call) {
  const Append append(a);
  const CacheOptions o(a);
  const std::optional<int32_t> out_dtype = a.maybe_dtype();
  const More more(a);
  set(t, append, o, more, call);
  check_dims("q", t.q);
  check_cache_dims(t.v_cache);
  flash3_tensor& out = call->params.out;
  out = call->params.q;
  out.data = nullptr;
  out.shape[out.ndim - 1] = t.v_cache.size(3);
  out.dtype = dtype_of("out", out_dtype_of(t.q, out_dtype));
  int64_t step = 1;
  for (int32_t d = out.ndim; d-- > 0; step *= std::max<int64_t>(out.shape[d], 1))
    out.stride[d] = step;
}

void run_merge(const Tensor& out_parts, const Tensor& lse_parts, const Tensor& out,
               const MaybeTensor& lse, const MaybeTensor& sink) {
  Call<flash3_merge_params> call("out_parts", device_of("out_parts", out_parts));
  flash3_merge_params& p = call.params;
  call.input("out_parts", &p.out_parts, out_parts);
  call.input("lse_parts", &p.lse_parts, lse_parts);
  call.output("out", &p.out, out);
  call.optional_output("lse", &p.lse, lse);
  call.optional_input("sink", &p.sink, sink);
  call.run(flash3_merge_plan, flash3_merge_run);
}

}  // namespace

// attention_with_kv_cache(q, k_cache, v_cache, options) -> (out, lse)
void attention_with_kv_cache(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  const Tensors t(a);
  const CacheOptions o(a);
  const GivenSchedule schedule(a);
  return_results(stack, t, {}, o, schedule, More(a));
}

// attention_with_kv_cache_append(q, k_cache, v_cache, append, options) -> (out, lse)
void attention_with_kv_cache_append(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  const Tensors t(a);
  const Append append(a);
  const CacheOptions o(a);
  const GivenSchedule schedule(a);
  return_results(stack, t, append, o, schedule, More(a));
}

// attention_with_kv_cache_out(q, k_cache, v_cache, out, lse, append, options, fill_padding) -> ()
void attention_with_kv_cache_out(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  const Tensors t(a);
  const Tensor out = a.tensor();
  const MaybeTensor lse = a.maybe_tensor();
  const Append append(a);
  const CacheOptions o(a);
  const GivenSchedule schedule(a);
  const More more(a);
  run(t, out, lse, append, o, schedule, more, a.next<bool>(), device_of("q", t.q));
}

// kv_cache_schedule(q, k_cache, v_cache, append, options, out_dtype) -> (schedule, its key)
void kv_cache_schedule(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  const Tensors t(a);
  const Device device = device_of("q", t.q);
  CacheCall call("q", device);
  set_for_schedule(t, a, &call);
  const auto guard = call.on_device();
  size_t bytes = 0;
  check(flash3_forward_schedule_size(&call.params, &bytes));
  // Only what is aligned is returned: a copy that lies otherwise is refused, and never misread.
  const auto size = static_cast<int64_t>(bytes);
  Tensor memory = empty({bytes > 0 ? static_cast<int64_t>(workspace_allocation(bytes)) : 0},
                        aoti_torch_dtype_uint8(), device);
  const auto* begin = static_cast<const char*>(memory.data_ptr());
  const auto* aligned = static_cast<const char*>(align_workspace(memory.data_ptr()));
  const Tensor made = torch::stable::narrow(memory, 0, bytes > 0 ? aligned - begin : 0, size);
  flash3_schedule schedule = schedule_of(made, 0, device);
  check(flash3_forward_schedule(&call.params, &schedule));
  stack[0] = torch::stable::detail::from(made);
  stack[1] = torch::stable::detail::from(static_cast<int64_t>(schedule.key));
}

// kv_cache_schedule_out(q, k_cache, v_cache, schedule, its key, append, options, out_dtype) -> ()
void kv_cache_schedule_out(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  const Tensors t(a);
  const Tensor memory = a.tensor();
  const auto key = a.next<int64_t>();
  const Device device = device_of("q", t.q);
  CacheCall call("q", device);
  set_for_schedule(t, a, &call);
  flash3_schedule schedule = schedule_of(memory, key, device);
  const auto guard = call.on_device();
  check(flash3_forward_schedule(&call.params, &schedule));
}

// merge(out_parts, lse_parts, sink, out_dtype) -> (out, lse)
void merge(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  const Tensor out_parts = a.tensor(), lse_parts = a.tensor();
  const MaybeTensor sink = a.maybe_tensor();
  const std::optional<int32_t> out_dtype = a.maybe_dtype();
  const Device device = device_of("out_parts", out_parts);
  if (out_parts.dim() != 4)
    fail(FLASH3_INVALID_ARGUMENT, "out_parts.ndim = " + std::to_string(out_parts.dim()) +
                                      " but it must be 4, [parts, rows, heads, head_dim_v]");
  const auto sizes = out_parts.sizes();
  const Tensor out = empty(Sizes(sizes.begin() + 1, sizes.end()),
                           out_dtype ? *out_dtype : torch_dtype_of(out_parts), device);
  const Tensor lse = empty({sizes[2], sizes[1]}, aoti_torch_dtype_float32(), device);
  run_merge(out_parts, lse_parts, out, lse, sink);
  stack[0] = torch::stable::detail::from(out);
  stack[1] = torch::stable::detail::from(lse);
}

// merge_out(out_parts, lse_parts, out, lse, sink) -> ()
void merge_out(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  const Tensor out_parts = a.tensor(), lse_parts = a.tensor(), out = a.tensor();
  const MaybeTensor lse = a.maybe_tensor();
  run_merge(out_parts, lse_parts, out, lse, a.maybe_tensor());
}

const char* const kCacheSchemas[7] = {
    "attention_with_kv_cache(Tensor q, Tensor k_cache, Tensor v_cache, " FLASH3_CACHE_OPTIONS
    ", " FLASH3_GIVEN_SCHEDULE ", " FLASH3_MORE ") -> (Tensor, Tensor)",
    "attention_with_kv_cache_append(Tensor q, Tensor(a!) k_cache, Tensor(b!) "
    "v_cache, " FLASH3_APPEND ", " FLASH3_CACHE_OPTIONS ", " FLASH3_GIVEN_SCHEDULE ", " FLASH3_MORE
    ") -> (Tensor, Tensor)",
    "attention_with_kv_cache_out(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) out, "
    "Tensor(d!)? lse, " FLASH3_APPEND ", " FLASH3_CACHE_OPTIONS ", " FLASH3_GIVEN_SCHEDULE
    ", " FLASH3_MORE ", bool fill_padding=False) -> ()",
    "kv_cache_schedule(Tensor q, Tensor k_cache, Tensor v_cache, " FLASH3_APPEND
    ", " FLASH3_CACHE_OPTIONS ", ScalarType? out_dtype=None, " FLASH3_MORE ") -> (Tensor, SymInt)",
    "kv_cache_schedule_out(Tensor q, Tensor k_cache, Tensor v_cache, Tensor(a!) schedule, "
    "SymInt schedule_key, " FLASH3_APPEND ", " FLASH3_CACHE_OPTIONS
    ", ScalarType? out_dtype=None, " FLASH3_MORE ") -> ()",
    "merge(Tensor out_parts, Tensor lse_parts, Tensor? sink=None, ScalarType? out_dtype=None) -> "
    "(Tensor, Tensor)",
    "merge_out(Tensor out_parts, Tensor lse_parts, Tensor(a!) out, Tensor(b!)? lse, Tensor? "
    "sink=None) -> ()"};

}  // namespace flash3_torch
