// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/convert.hpp"
#include "core/rotation.hpp"
#include "oracle/one_sequence.hpp"

namespace flash3 {
namespace {

// The keys of one sequence: [first, used) of its places in the cache count, and then the new ones.
struct Places {
  int64_t first = 0, used = 0, added = 0;
  int64_t keys() const { return used - first + added; }
};

Places places_of(const ForwardProblem& p, int64_t b) {
  Places places;
  places.used = p.sequences_k.used ? p.sequences_k.used[b] : p.sequences_k.rows;
  if (p.cache.leftpad) places.first = p.cache.leftpad[b];
  if (!p.append.given) return places;
  const Sequences& added = p.append.sequences;
  places.added = added.packed ? added.cu[b + 1] - added.cu[b] : added.rows;
  return places;
}

std::byte* at(const TensorView& t, flash3_dtype dtype, int64_t offset) {
  return static_cast<std::byte*>(t.data) + offset * dtype_size(dtype);
}

// Where one of a sequence's places lies in k and v.
struct Row {
  int64_t element, row;
};
Row row_of(const ForwardProblem& p, int64_t b, int64_t place) {
  if (p.cache.paged)
    return {p.cache.page_table[b * p.cache.stride_table + place / p.cache.page_size],
            place % p.cache.page_size};
  return {p.cache.batch_idx ? p.cache.batch_idx[b] : b, place};
}

// The row of k or v there, and its scale.
std::byte* cache_row_at(const ForwardProblem& p, const TensorView& t, int64_t b, int64_t place,
                        int64_t head) {
  const Row r = row_of(p, b, place);
  return at(t, p.kv_dtype,
            r.element * t.stride_batch + r.row * t.stride_seq + head * t.stride_head);
}
float scale_at(const ForwardProblem& p, const ScaleView& scale, int64_t b, int64_t place,
               int64_t head) {
  if (!scale.data) return 1;
  const Row r = row_of(p, b, place);
  return scale.kind == ScaleKind::kBlock
             ? scale.data[r.element * scale.stride_batch + head * scale.stride_head +
                          r.row / kScaleBlock * scale.stride_block]
             : scale.data[b * scale.stride_batch + head * scale.stride_head];
}

// The row of token n of sequence b in k_new or v_new.
const std::byte* new_row_at(const ForwardProblem& p, const TensorView& t, int64_t b, int64_t n,
                            int64_t head) {
  const Sequences& s = p.append.sequences;
  const int64_t row = (s.packed ? s.cu[b] : 0) + n;
  return at(t, p.append.dtype, b * t.stride_batch + row * t.stride_seq + head * t.stride_head);
}

// The embedding of a position, in float32.
void embed(const RotaryView& r, int64_t position, float* row) {
  for (int i = 0; i < r.dim / 2; ++i) {
    const int first = r.interleaved ? 2 * i : i, second = r.interleaved ? 2 * i + 1 : i + r.dim / 2;
    const float x = row[first], y = row[second];
    const float cos = load_float(r.cos, r.dtype, position * r.stride_cos + i);
    const float sin = load_float(r.sin, r.dtype, position * r.stride_sin + i);
    row[first] = x * cos - y * sin;
    row[second] = x * sin + y * cos;
  }
}

// x·H of n = 2^k dimensions, which is [x + y, x − y] of the products x and y of its halves.
void hadamard(float* x, int64_t n) {
  if (n == 1) return;
  hadamard(x, n / 2), hadamard(x + n / 2, n / 2);
  for (int64_t i = 0; i < n / 2; ++i) {
    const float a = x[i], b = x[i + n / 2];
    x[i] = a + b, x[i + n / 2] = a - b;
  }
}

// x·D·H/√n in float32, of each power of two in `dim`.
void rotate(uint64_t seed, int64_t dim, float* row) {
  for (int64_t begin = 0; begin < dim;) {
    const auto n = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(dim - begin)));
    const float factor = 1 / std::sqrt(static_cast<float>(n));
    for (int64_t i = begin; i < begin + n; ++i)
      row[i] *= rotation_negates(seed, static_cast<int>(i)) ? -factor : factor;
    hadamard(row + begin, n);
    begin += n;
  }
}

// A row of q or k_new with what the call does to it, as float32. `position`: of the embedding.
std::vector<float> transformed(const ForwardProblem& p, const std::byte* row, flash3_dtype dtype,
                               int64_t position) {
  std::vector<float> x(static_cast<size_t>(p.head_dim));
  for (int64_t d = 0; d < p.head_dim; ++d) x[static_cast<size_t>(d)] = load_float(row, dtype, d);
  if (p.append.rotary.given) embed(p.append.rotary, position, x.data());
  if (p.rotates) rotate(p.rotation_seed, p.head_dim, x.data());
  return x;
}

// How many of a row's dimensions that changes; those after them keep their bits.
int64_t transformed_dims(const ForwardProblem& p) {
  return p.rotates ? p.head_dim : p.append.rotary.given ? p.append.rotary.dim : 0;
}

int64_t first_position(const ForwardProblem& p, int64_t b) {
  return p.append.rotary_offsets ? p.append.rotary_offsets[b] : places_of(p, b).used;
}

// Contiguous memory for rows of a view's heads, and the view of it.
TensorView contiguous(const TensorView& like, int64_t batches, int64_t rows, flash3_dtype dtype,
                      std::vector<std::byte>* memory) {
  TensorView made = like;
  made.stride_head = made.dim;
  made.stride_seq = made.dim * made.heads;
  made.stride_batch = made.stride_seq * rows;
  memory->resize(static_cast<size_t>(batches * made.stride_batch * dtype_size(dtype)));
  made.data = memory->data();
  return made;
}

void copy(const std::byte* from, std::byte* to, int64_t elements, flash3_dtype dtype) {
  std::memcpy(to, from, static_cast<size_t>(elements * dtype_size(dtype)));
}

// Token n of sequence b as the cache holds it, of k or of v.
void write_new(const ForwardProblem& p, bool is_k, int64_t b, int64_t n, int64_t head,
               std::byte* to) {
  const TensorView& from = is_k ? p.append.k : p.append.v;
  const flash3_dtype dtype = p.append.dtype;
  const std::byte* row = new_row_at(p, from, b, n, head);
  std::vector<float> x;
  if (is_k && transformed_dims(p) > 0) {
    x = transformed(p, row, dtype, first_position(p, b) + n);
  } else {
    for (int64_t d = 0; d < from.dim; ++d) x.push_back(load_float(row, dtype, d));
  }
  if (dtype == p.kv_dtype) {
    copy(row, to, from.dim, dtype);
    for (int64_t d = 0; is_k && d < transformed_dims(p); ++d)
      store_float(to, dtype, d, x[static_cast<size_t>(d)]);
    return;
  }
  const float own = scale_at(p, is_k ? p.k_scale : p.v_scale, b, places_of(p, b).used + n, head);
  for (int64_t d = 0; d < from.dim; ++d)
    store_float(to, p.kv_dtype, d, x[static_cast<size_t>(d)] / own);
}

// The scales of all gathered rows, [batch, heads_k, rows]; none if there are none.
ScaleView gather_scales(const ForwardProblem& p, const ScaleView& scale, int64_t rows,
                        std::vector<float>* memory) {
  if (!scale.data) return scale;
  memory->assign(static_cast<size_t>(p.batch * p.heads_k * rows), 1);
  ScaleView made{memory->data(), ScaleKind::kRow, 1, p.heads_k * rows, rows, 1};
  for (int64_t b = 0; b < p.batch; ++b) {
    const Places places = places_of(p, b);
    for (int64_t h = 0; h < p.heads_k; ++h)
      for (int64_t j = 0; j < places.keys(); ++j)
        made.data[made.offset(b, h, j)] = scale_at(p, scale, b, places.first + j, h);
  }
  return made;
}

}  // namespace

GatheredCache::GatheredCache(const ForwardProblem& p) : made_(p) {
  made_.cache = {}, made_.append = {}, made_.rotates = false;
  if (p.has_cache()) gather_keys(p);
  if (transformed_dims(p) > 0) transform_q(p);
}

void GatheredCache::gather_keys(const ForwardProblem& p) {
  int64_t most = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    lengths_.push_back(static_cast<int>(places_of(p, b).keys()));
    most = std::max<int64_t>(most, lengths_.back());
  }
  made_.seq_k = most;
  made_.sequences_k = {.has_used = true, .used = lengths_.data(), .rows = most, .max_length = most};
  made_.k = contiguous(p.k, p.batch, most, p.kv_dtype, &k_);
  made_.v = contiguous(p.v, p.batch, most, p.kv_dtype, &v_);
  for (TensorView* t : {&made_.k, &made_.v}) t->batch = p.batch, t->seq = most;
  made_.k_scale = gather_scales(p, p.k_scale, most, &k_scales_);
  made_.v_scale = gather_scales(p, p.v_scale, most, &v_scales_);

  for (int64_t b = 0; b < p.batch; ++b) {
    const Places places = places_of(p, b);
    for (int64_t j = 0; j < places.keys(); ++j)
      for (int64_t h = 0; h < p.heads_k; ++h) {
        const int64_t place = places.first + j, n = place - places.used;
        const auto to = [&](const TensorView& t) {
          return at(t, p.kv_dtype, b * t.stride_batch + j * t.stride_seq + h * t.stride_head);
        };
        if (n < 0) {
          copy(cache_row_at(p, p.k, b, place, h), to(made_.k), p.head_dim, p.kv_dtype);
          copy(cache_row_at(p, p.v, b, place, h), to(made_.v), p.head_dim_v, p.kv_dtype);
        } else {
          write_new(p, true, b, n, h, to(made_.k));
          if (p.append.has_v)
            write_new(p, false, b, n, h, to(made_.v));
          else  // v is a part of k's rows
            copy(to(made_.k) +
                     (static_cast<std::byte*>(p.v.data) - static_cast<std::byte*>(p.k.data)),
                 to(made_.v), p.head_dim_v, p.kv_dtype);
        }
      }
  }
}

void GatheredCache::transform_q(const ForwardProblem& p) {
  made_.q = contiguous(p.q, p.sequences_q.packed ? 1 : p.batch, p.sequences_q.rows, p.dtype, &q_);
  if (p.sequences_q.packed) made_.q.stride_batch = 0;
  const bool masked = !p.mask_rule.is_none();
  for (int64_t b = 0; b < p.batch; ++b) {
    const RowRange rows = rows_of(p.sequences_q, b);
    for (int64_t i = 0; i < rows.length; ++i)
      for (int64_t h = 0; h < p.heads_q; ++h) {
        const auto row = [&](const TensorView& t) {
          return at(t, p.dtype,
                    b * t.stride_batch + (rows.first + i) * t.stride_seq + h * t.stride_head);
        };
        copy(row(p.q), row(made_.q), p.head_dim, p.dtype);
        const int64_t position =
            p.append.rotary.given ? first_position(p, b) + (masked ? i : 0) : 0;
        const std::vector<float> x = transformed(p, row(p.q), p.dtype, position);
        for (int64_t d = 0; d < transformed_dims(p); ++d)
          store_float(row(made_.q), p.dtype, d, x[static_cast<size_t>(d)]);
      }
  }
}

void append_ref(const ForwardProblem& p) {
  if (!p.append.given) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Places places = places_of(p, b);
    for (int64_t n = 0; n < places.added; ++n)
      for (int64_t h = 0; h < p.heads_k; ++h) {
        const int64_t place = places.used + n;
        write_new(p, true, b, n, h, cache_row_at(p, p.k, b, place, h));
        if (p.append.has_v) write_new(p, false, b, n, h, cache_row_at(p, p.v, b, place, h));
      }
  }
}

}  // namespace flash3
