// SPDX-License-Identifier: Apache-2.0
// torch.ops.flash3.attention_with_kv_cache and its forms that write: _append into the cache, _out
// into memory for the results too. torch must know what an operator writes from its schema, so that
// a call that appends is an operator of its own. merge makes one result of attention over parts.
#include "call.hpp"

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
        sm_margin(a.next<int64_t>()) {}
};
#define FLASH3_CACHE_OPTIONS                                                                     \
  "float softmax_scale=0., bool causal=False, Tensor? seqused_k=None, Tensor? page_table=None, " \
  "SymInt window_left=-1, SymInt window_right=-1, float softcap=0., SymInt chunk=0, "            \
  "Tensor? sink=None, Tensor? cache_batch_idx=None, Tensor? leftpad_k=None, "                    \
  "Tensor? cu_seqlens_q=None, Tensor? seqused_q=None, SymInt max_seqlen_q=0, "                   \
  "SymInt max_seqlen_k=0, SymInt sm_margin=0"

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

struct Tensors {
  Tensor q, k_cache, v_cache;

  explicit Tensors(Arguments& a) : q(a.tensor()), k_cache(a.tensor()), v_cache(a.tensor()) {}
};

void run(const Tensors& t, const Tensor& out, const MaybeTensor& lse, const Append& append,
         const CacheOptions& o, const Device& device) {
  Call<flash3_forward_params> call("q", device);
  flash3_forward_params& p = call.params;
  call.scores(o.softmax_scale, o.causal, o.window_left, o.window_right, o.softcap);
  call.input("q", &p.q, t.q);
  call.output("k_cache", &p.k, t.k_cache);  // a cache is never copied, also where it is only read
  call.output("v_cache", &p.v, t.v_cache);
  call.output("out", &p.out, out);
  call.optional_output("lse", &p.lse, lse);
  call.optional_input("seqused_k", &p.seqused_k, o.seqused_k);
  call.optional_input("page_table", &p.page_table, o.page_table);
  call.optional_input("sink", &p.sink, o.sink);
  call.optional_input("cache_batch_idx", &p.cache_batch_idx, o.cache_batch_idx);
  call.optional_input("leftpad_k", &p.leftpad_k, o.leftpad_k);
  call.optional_input("cu_seqlens_q", &p.cu_seqlens_q, o.cu_seqlens_q);
  call.optional_input("seqused_q", &p.seqused_q, o.seqused_q);
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
  call.run(flash3_forward_plan, flash3_forward_run);
}

void return_results(StableIValue* stack, const Tensors& t, const Append& append,
                    const CacheOptions& o) {
  const Device device = device_of("q", t.q);
  if (t.v_cache.dim() != 4)
    fail(FLASH3_INVALID_ARGUMENT, "v_cache.ndim = " + std::to_string(t.v_cache.dim()) +
                                      " but it must be 4, [batch, rows, heads, dim] or [pages, "
                                      "page_size, heads, dim]");
  const Attended made = empty_results(t.q, t.v_cache, false, {}, device);
  if (may_leave_rows(o.cu_seqlens_q, o.seqused_q, device)) made.fill();
  run(t, made.out, made.lse, append, o, device);
  stack[0] = torch::stable::detail::from(made.out);
  stack[1] = torch::stable::detail::from(made.lse);
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
  return_results(stack, t, {}, CacheOptions(a));
}

// attention_with_kv_cache_append(q, k_cache, v_cache, append, options) -> (out, lse)
void attention_with_kv_cache_append(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  const Tensors t(a);
  const Append append(a);
  return_results(stack, t, append, CacheOptions(a));
}

// attention_with_kv_cache_out(q, k_cache, v_cache, out, lse, append, options) -> ()
void attention_with_kv_cache_out(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  const Tensors t(a);
  const Tensor out = a.tensor();
  const MaybeTensor lse = a.maybe_tensor();
  const Append append(a);
  run(t, out, lse, append, CacheOptions(a), device_of("q", t.q));
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

const char* const kCacheSchemas[5] = {
    "attention_with_kv_cache(Tensor q, Tensor k_cache, Tensor v_cache, " FLASH3_CACHE_OPTIONS
    ") -> (Tensor, Tensor)",
    "attention_with_kv_cache_append(Tensor q, Tensor(a!) k_cache, Tensor(b!) "
    "v_cache, " FLASH3_APPEND ", " FLASH3_CACHE_OPTIONS ") -> (Tensor, Tensor)",
    "attention_with_kv_cache_out(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) out, "
    "Tensor(d!)? lse, " FLASH3_APPEND ", " FLASH3_CACHE_OPTIONS ") -> ()",
    "merge(Tensor out_parts, Tensor lse_parts, Tensor? sink=None, ScalarType? out_dtype=None) -> "
    "(Tensor, Tensor)",
    "merge_out(Tensor out_parts, Tensor lse_parts, Tensor(a!) out, Tensor(b!)? lse, Tensor? "
    "sink=None) -> ()"};

}  // namespace flash3_torch
