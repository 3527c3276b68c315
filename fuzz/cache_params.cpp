// SPDX-License-Identifier: Apache-2.0
// flash3_forward on a KV cache, its questions, and flash3_forward_schedule.
#include "call.hpp"

namespace flash3::fuzz {
namespace {

using Params = flash3_forward_params;

constexpr Functions<Params> kForward = {flash3_forward_supported, flash3_forward_workspace,
                                        flash3_forward, flash3_forward_explain};

// A cache in memory, and what its tensors tell; of one that is only asked about, the sizes.
struct Cache {
  int64_t page_size = 0;  // 0: not paged
  int64_t max_pages = 0;
  int64_t elements = 0, rows = 0;  // of k and v
  int64_t capacity = 0;            // keys of a sequence, in memory
  std::vector<int32_t> table, batch_idx, used, cu_new;
  int64_t seq_new = 0;
  bool packed_new = false;

  int64_t added(size_t b) const {
    return packed_new ? int64_t{cu_new[b + 1]} - cu_new[b] : seq_new;
  }
};

// Mostly in [0, most].
int32_t value(Bytes* bytes, int64_t most) {
  if (bytes->rarely()) return bytes->raw<int32_t>();
  return static_cast<int32_t>(bytes->between(0, std::max<int64_t>(most, 0)));
}

// One for each of so many, or none.
flash3_tensor index(Memory* memory, const std::vector<int32_t>& values, int64_t size) {
  return memory->exists() ? memory->index(values) : memory->index(size);
}

// A number of a cache: small if there is one.
int64_t number(Bytes* bytes, const Memory& memory, int64_t most) {
  return memory.exists() ? bytes->between(0, most) : std::max<int64_t>(bytes->odd(), 0);
}

void draw_places(Bytes* bytes, Memory* memory, const Sizes& s, Cache* cache, Params* p) {
  cache->elements = s.batch, cache->rows = s.seq_k;
  if (memory->exists()) cache->capacity = s.seq_k;
  const auto each = [&](int64_t count, int64_t most) {
    std::vector<int32_t> values;
    for (int64_t i = 0; i < count; ++i) values.push_back(value(bytes, most));
    return values;
  };
  if (bytes->flag()) {
    cache->rows = cache->page_size = number(bytes, *memory, 20);
    cache->max_pages = number(bytes, *memory, 5);
    cache->elements = number(bytes, *memory, 9);
    if (memory->exists()) {
      cache->capacity = cache->max_pages * cache->page_size;
      cache->table = each(s.batch * cache->max_pages, cache->elements - 1);
    }
    p->page_table = index(memory, cache->table, s.batch);
    p->page_table.ndim = 2;
    p->page_table.shape[0] = s.batch, p->page_table.shape[1] = cache->max_pages;
    p->page_table.stride[0] = memory->exists() ? cache->max_pages : bytes->odd();
    p->page_table.stride[1] = 1;
    if (bytes->between(0, 3) == 3) p->max_seqlen_k = number(bytes, *memory, cache->capacity + 1);
  }
  if (cache->page_size == 0 ? bytes->flag() : bytes->rarely()) {
    cache->elements = number(bytes, *memory, 6);
    if (memory->exists()) cache->batch_idx = each(s.batch, cache->elements - 1);
    p->cache_batch_idx = index(memory, cache->batch_idx, s.batch);
  }
}

// Lengths that leave room for what is appended.
void draw_lengths(Bytes* bytes, Memory* memory, const Sizes& s, Cache* cache, Params* p) {
  if (bytes->rarely()) return;
  std::vector<int32_t> padding;
  for (int64_t b = 0; memory->exists() && b < s.batch; ++b) {
    cache->used.push_back(value(bytes, cache->capacity - cache->added(static_cast<size_t>(b))));
    padding.push_back(value(bytes, cache->used.back()));
  }
  p->seqused_k = index(memory, cache->used, s.batch);
  if (bytes->flag()) p->leftpad_k = index(memory, padding, s.batch);
}

void draw_new(Bytes* bytes, Memory* memory, const Sizes& s, flash3_dtype dtype, Cache* cache,
              Params* p) {
  cache->seq_new = number(bytes, *memory, std::min<int64_t>(4, cache->capacity));
  cache->packed_new = bytes->flag();
  int64_t total = cache->seq_new;
  if (cache->packed_new) {
    cache->cu_new = {0};
    for (int64_t b = 0; memory->exists() && b < s.batch; ++b)
      cache->cu_new.push_back(cache->cu_new.back() +
                              static_cast<int32_t>(bytes->between(0, cache->seq_new)));
    if (memory->exists()) total = cache->cu_new.back() + bytes->between(0, 2);
    p->cu_seqlens_k_new = index(memory, cache->cu_new, s.batch + 1);
  }
  const auto shape = [&](int64_t dim) {
    return cache->packed_new ? Shape{total, s.heads_k, dim}
                             : Shape{s.batch, cache->seq_new, s.heads_k, dim};
  };
  p->k_new = memory->input(dtype, shape(s.dim));
  p->v_new = memory->input(dtype, shape(s.dim_v));
}

void draw_rotary(Bytes* bytes, Memory* memory, const Sizes& s, flash3_dtype dtype,
                 const Cache& cache, Params* p) {
  const int64_t pairs = bytes->rarely() ? bytes->between(0, 150) : bytes->between(0, s.dim / 2);
  const int64_t positions =
      number(bytes, *memory, memory->exists() ? cache.capacity + s.seq_q + 4 : 0);
  const auto of_table = bytes->flag() ? FLASH3_FLOAT32 : dtype;
  p->rotary_cos = memory->input(of_table, {positions, pairs});
  p->rotary_sin = memory->input(of_table, {positions, pairs});
  p->rotary_interleaved = bytes->rarely() ? bytes->raw<int32_t>() : bytes->flag();
  if (!bytes->flag()) return;
  std::vector<int32_t> offsets;
  for (int64_t b = 0; memory->exists() && b < s.batch; ++b) offsets.push_back(value(bytes, 4));
  p->rotary_offsets = index(memory, offsets, s.batch);
}

// The rows of k and v that a call which succeeds appends to. One whose places are outside of the
// cache must not succeed.
void allow_appended(Memory* memory, const Cache& cache, const Params& p) {
  for (size_t b = 0; b < cache.used.size(); ++b)
    for (int64_t n = 0; n < cache.added(b); ++n) {
      const int64_t place = int64_t{cache.used[b]} + n;
      if (place < 0 || place >= cache.capacity) continue;
      int64_t element = cache.batch_idx.empty() ? static_cast<int64_t>(b) : cache.batch_idx[b];
      if (cache.page_size > 0)
        element = cache.table[b * static_cast<size_t>(cache.max_pages) +
                              static_cast<size_t>(place / cache.page_size)];
      if (element < 0 || element >= cache.elements) continue;
      const int64_t row = cache.page_size > 0 ? place % cache.page_size : place;
      for (const flash3_tensor* t : {&p.k, &p.v}) memory->allow(*t, element, row);
    }
}

// Its own schedule, or one of another call, which must be refused.
void draw_schedule(Bytes* bytes, Memory* memory, Params* p) {
  const uint64_t wrong = bytes->flag() ? bytes->raw<uint64_t>() : 0;
  size_t size = 0;
  const flash3_status supported = flash3_forward_supported(p);
  const flash3_status told = flash3_forward_schedule_size(p, &size);
  check_status(told);
  FUZZ_CHECK(told == supported, flash3_last_error());
  flash3_schedule* made = memory->schedule();
  made->size = size;
  made->data = memory->exists() ? memory->workspace(size) : nullptr;
  const flash3_status status = flash3_forward_schedule(p, made);
  check_status(status);
  p->schedule = made;
  const uint64_t key = made->key;
  made->key ^= wrong;
  if (status != FLASH3_OK) return;
  FUZZ_CHECK(key != 0, "a schedule without a key");
  if (wrong != 0) memory->expect_refusal();
}

Params make(Bytes* bytes, Memory* memory, bool* whole) {
  Params p{};
  p.struct_size = sizeof p;
  Sizes s = draw_sizes(bytes, *memory);
  s.packed_k &= bytes->rarely();  // is refused
  draw_sequences(bytes, memory, &s, &p);
  if (!s.packed_k) p.seqused_k = {};
  const auto dtype = bytes->rarely()
                         ? FLASH3_FLOAT8_E4M3
                         : bytes->pick({FLASH3_FLOAT32, FLASH3_FLOAT16, FLASH3_BFLOAT16});
  p.q = memory->input(dtype, s.q(s.dim));
  p.out = memory->output(dtype == FLASH3_FLOAT8_E4M3 ? FLASH3_BFLOAT16 : dtype, s.q(s.dim_v));
  if (bytes->flag()) p.lse = memory->output(FLASH3_FLOAT32, s.lse());
  if (bytes->between(0, 3) == 3) p.sink = memory->input(FLASH3_FLOAT32, {s.heads_q});

  Cache cache;
  draw_places(bytes, memory, s, &cache, &p);
  const bool appends = bytes->flag();
  if (appends) draw_new(bytes, memory, s, dtype, &cache, &p);
  draw_lengths(bytes, memory, s, &cache, &p);
  if (appends ? bytes->flag() : bytes->rarely()) draw_rotary(bytes, memory, s, dtype, cache, &p);
  const auto rows = [&](int64_t dim) {
    return s.packed_k ? s.k(dim) : Shape{cache.elements, cache.rows, s.heads_k, dim};
  };
  p.k = appends ? memory->state(dtype, rows(s.dim)) : memory->input(dtype, rows(s.dim));
  p.v = appends ? memory->state(dtype, rows(s.dim_v)) : memory->input(dtype, rows(s.dim_v));
  if (appends && memory->exists() && !s.packed_k) allow_appended(memory, cache, p);

  draw_options(bytes, &p);
  draw_machine(bytes, &p);
  p.sm_margin = bytes->rarely() ? bytes->raw<int32_t>() : bytes->byte();
  if (bytes->between(0, 3) == 3) p.qv = memory->input(dtype, s.q(s.dim_v));
  if (bytes->between(0, 3) == 3) draw_schedule(bytes, memory, &p);
  if (bytes->between(0, 3) == 3) {
    p.rotate = bytes->rarely() ? bytes->raw<int32_t>() : 1;
    p.rotation_seed = bytes->raw<uint64_t>();
  }
  draw_added(bytes, memory, s, &p);
  *whole = !s.packed_q && p.seqused_q.ndim == 0;
  return p;
}

}  // namespace
}  // namespace flash3::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return flash3::fuzz::run_target(flash3::fuzz::kForward, data, size, flash3::fuzz::make);
}
