// SPDX-License-Identifier: Apache-2.0
#include "cases/tensors.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <thread>

#include "cases/added_tensors.hpp"
#include "cases/cache_tensors.hpp"
#include "cases/internals.hpp"
#include "cases/mask.hpp"
#include "cases/memory.hpp"
#include "cases/sequences.hpp"

namespace flash3::cases {
namespace {

constexpr size_t kGuardBytes = 512;  // a multiple of every alignment that TMA asks for

TensorLayout all_of(Layout layout) {
  return {.layout = layout, .offset = layout == Layout::kOdd ? 1 : 0};
}

flash3_tensor rows_view(const Case& c, TensorName name, const SequenceLengths& rows, int64_t heads,
                        int64_t dim, flash3_dtype dtype) {
  const TensorLayout layout = c.layout_of(name);
  return rows.cu.empty() ? view_of(dtype, c.batch, rows.rows, heads, dim, layout)
                         : packed(view_of(dtype, 1, rows.rows, heads, dim, layout));
}

flash3_tensor scales_view(const Case& c, TensorName name, const SequenceLengths& rows,
                          int64_t heads) {
  const bool is_packed = !rows.cu.empty();
  const int64_t blocks = scale_blocks(rows.view(), c.batch);
  switch (c.scales_of(name)) {
    case Scales::kNone: return {};
    case Scales::kTensor: return {nullptr, FLASH3_FLOAT32, 1, {1, 0, 0, 0}, {1, 0, 0, 0}};
    case Scales::kHead:
      return {nullptr, FLASH3_FLOAT32, 2, {c.batch, c.heads_k, 0, 0}, {c.heads_k, 1, 0, 0}};
    case Scales::kBlock:
      return lse_view_of(is_packed ? 1 : c.batch, heads, blocks, c.layout_of(TensorName::kLse));
  }
  return {};
}

// Box–Muller: two values from 64 random bits.
std::array<float, 2> normal_pair(uint64_t seed, uint64_t pair) {
  const uint64_t bits = mix(mix(seed) ^ pair);
  const float u = (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f;
  const float angle =
      static_cast<float>(bits & 0xFFFFFF) * (0x1p-24f * 2 * std::numbers::pi_v<float>);
  const float radius = std::sqrt(-2 * std::log(u));
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

// x: value i of the normal sequence.
float value_at(Distribution distribution, uint64_t seed, uint64_t i, float x) {
  if (distribution != Distribution::kOutliers) return x;
  const uint64_t coin = mix(mix(~seed) ^ i);
  const bool outlier = static_cast<double>(coin >> 11) * 0x1p-53 < 0.001;
  return outlier ? x + 10 * normal_value(seed ^ 0x5EED, i) : x;
}

void set(const flash3_tensor& t, int64_t b, int64_t s, int64_t h, int64_t d, float x) {
  store_float(t.data, t.dtype, b * t.stride[0] + s * t.stride[1] + h * t.stride[2] + d, x);
}

// A NaN in q spoils one row; an infinite k sends one key's scores to ±∞ in one KV head; infinities
// and a NaN in v reach single output columns. A key that some rows do not see gets no special v: 0
// · ∞ is NaN in every implementation that multiplies a masked tile, the naive one too.
void place_specials(const Case& c, const ForwardTensors& t) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  if (c.batch == 0 || c.seq_q == 0 || c.seq_k < 8 || c.heads_q == 0 || c.heads_k == 0) return;
  const int64_t b = c.batch - 1;
  set(t.q.view, 0, c.seq_q / 2, 0, 0, kNaN);
  set(t.k.view, b, c.seq_k / 3, c.heads_k - 1, c.head_dim - 1, kInf);

  const Band band = mask_of(c, c.seq_q, c.seq_k).band;
  const int64_t first = std::max<int64_t>(0, c.seq_q - 1 + band.lo);  // seen by the last row
  const int64_t last = std::min<int64_t>(c.seq_k - 1, band.hi);       // seen by the first row
  if (first > last) return;
  set(t.v.view, 0, first, 0, 0, kInf);
  set(t.v.view, 0, last, 0, c.head_dim_v / 2, -kInf);
  set(t.v.view, b, first, c.heads_k - 1, c.head_dim_v - 1, kNaN);
}

}  // namespace

flash3_tensor rows_lse_view(const Case& c, TensorName name, const SequenceLengths& rows) {
  const TensorLayout layout = c.layout_of(name);
  return rows.cu.empty() ? lse_view_of(c.batch, c.heads_q, rows.rows, layout)
                         : packed(lse_view_of(1, c.heads_q, rows.rows, layout));
}

flash3_tensor vector_view(flash3_dtype dtype, int64_t size) {
  return {nullptr, dtype, 1, {size, 0, 0, 0}, {1, 0, 0, 0}};
}

int64_t element_size(flash3_dtype dtype) { return dtype_size(dtype); }

int64_t span_of(const flash3_tensor& t) {
  int64_t last = 0;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] == 0) return 0;
    last += (t.shape[i] - 1) * t.stride[i];
  }
  return last + 1;
}

flash3_tensor GuardedTensor::at(void* base) const {
  flash3_tensor moved = view;
  moved.data = static_cast<std::byte*>(base) + offset;
  return moved;
}

void GuardedTensor::fill_pattern() { std::fill(bytes.begin(), bytes.end(), kFillPattern); }

void GuardedTensor::fill_forbidden() {
  const int64_t size = element_size(view.dtype);
  for (const Range& run : forbidden)
    std::fill_n(bytes.begin() + static_cast<ptrdiff_t>(offset) + run.begin * size,
                run.size() * size, kFillPattern);
}

std::string GuardedTensor::damage() const {
  // What is left when all that may be written holds the pattern again.
  std::vector<std::byte> rest = bytes;
  const size_t size = static_cast<size_t>(element_size(view.dtype));
  const size_t row_bytes = static_cast<size_t>(view.shape[view.ndim - 1]) * size;
  std::byte* const data = rest.data() + offset;
  for_each_row(view, [&](int64_t element) {
    std::memset(data + static_cast<size_t>(element) * size, int(kFillPattern), row_bytes);
  });
  for (const Range& run : forbidden) {
    const size_t begin = offset + static_cast<size_t>(run.begin) * size;
    std::memcpy(rest.data() + begin, bytes.data() + begin, static_cast<size_t>(run.size()) * size);
  }
  if (rest[0] == kFillPattern && std::memcmp(rest.data(), rest.data() + 1, rest.size() - 1) == 0)
    return "";
  const auto wrong =
      std::find_if(rest.begin(), rest.end(), [](auto b) { return b != kFillPattern; });
  return "byte " + std::to_string(wrong - rest.begin() - static_cast<ptrdiff_t>(offset)) +
         " from its start was overwritten, outside its elements";
}

GuardedTensor guard(flash3_tensor view, int64_t offset) {
  GuardedTensor g;
  const size_t size = static_cast<size_t>(element_size(view.dtype));
  g.offset = kGuardBytes + static_cast<size_t>(offset) * size;
  g.bytes.assign(g.offset + static_cast<size_t>(span_of(view)) * size + kGuardBytes, kFillPattern);
  g.view = view;
  g.view.data = g.bytes.data() + g.offset;
  return g;
}

GuardedTensor clone(const GuardedTensor& tensor) {
  GuardedTensor copy = tensor;
  if (!copy.bytes.empty()) copy.view.data = copy.bytes.data() + copy.offset;
  return copy;
}

GuardedTensor make_tensor(flash3_dtype dtype, int64_t batch, int64_t seq, int64_t heads,
                          int64_t dim, Layout layout) {
  const TensorLayout all = all_of(layout);
  return guard(view_of(dtype, batch, seq, heads, dim, all), all.offset);
}

GuardedTensor make_lse(int64_t batch, int64_t heads, int64_t seq, Layout layout) {
  const TensorLayout all = all_of(layout);
  return guard(lse_view_of(batch, heads, seq, all), all.offset);
}

GuardedTensor make_vector(flash3_dtype dtype, int64_t size) {
  return guard(vector_view(dtype, size), 0);
}

GuardedTensor make_rows(const Case& c, TensorName name, const SequenceLengths& rows, int64_t heads,
                        int64_t dim, flash3_dtype dtype) {
  return guard(rows_view(c, name, rows, heads, dim, dtype), c.layout_of(name).offset);
}

GuardedTensor make_scales(const Case& c, TensorName name, const SequenceLengths& rows,
                          int64_t heads) {
  if (c.scales_of(name) == Scales::kNone) return {};
  return guard(scales_view(c, name, rows, heads), c.layout_of(TensorName::kLse).offset);
}

GuardedTensor make_lse(const Case& c, TensorName name, const SequenceLengths& rows) {
  return guard(rows_lse_view(c, name, rows), c.layout_of(name).offset);
}

void forbid_rows(GuardedTensor* tensor, const SequenceLengths& rows, int64_t batch,
                 std::initializer_list<RowUse> uses, bool is_lse) {
  const flash3_tensor& t = tensor->view;
  const bool packed = !rows.cu.empty();
  const int seq_dim = is_lse ? t.ndim - 1 : t.ndim - 3, head_dim = t.ndim - 2;
  const int64_t width = is_lse ? 1 : t.shape[t.ndim - 1];
  const std::vector<RowUse> all = row_uses(rows, batch);
  // Rows that share their memory with one that counts may be read.
  const auto shared = [&](int dim) { return t.shape[dim] > 1 && t.stride[dim] == 0; };
  if (shared(seq_dim) || (!packed && shared(0))) return;
  for (size_t row = 0; row < all.size(); ++row) {
    if (std::find(uses.begin(), uses.end(), all[row]) == uses.end()) continue;
    const int64_t b = packed ? 0 : int64_t(row) / rows.rows;
    const int64_t first =
        (packed ? 0 : b * t.stride[0]) + (int64_t(row) - b * rows.rows) * t.stride[seq_dim];
    for (int64_t h = 0; h < t.shape[head_dim]; ++h)
      tensor->forbidden.push_back(
          {first + h * t.stride[head_dim], first + h * t.stride[head_dim] + width});
  }
  tensor->fill_forbidden();
}

float normal_value(uint64_t seed, uint64_t i) { return normal_pair(seed, i / 2)[i % 2]; }

void fill_random(const flash3_tensor& t, Distribution distribution, uint64_t seed) {
  uint64_t i = 0;
  std::array<float, 2> pair{};
  for_each_row(t, [&](int64_t row) {
    for (int64_t d = 0; d < t.shape[t.ndim - 1]; ++d, ++i) {
      if (i % 2 == 0) pair = normal_pair(seed, i / 2);
      store_float(t.data, t.dtype, row + d, value_at(distribution, seed, i, pair[i % 2]));
    }
  });
}

void fill_normal(void* data, flash3_dtype dtype, int64_t count, uint64_t seed) {
  const auto threads = static_cast<int64_t>(std::max(1u, std::thread::hardware_concurrency()));
  const int64_t share = (count / threads + 2) / 2 * 2;  // even: pairs are never split
  const auto fill = [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += 2) {
      const auto pair = normal_pair(seed, static_cast<uint64_t>(i) / 2);
      store_float(data, dtype, i, pair[0]);
      if (i + 1 < end) store_float(data, dtype, i + 1, pair[1]);
    }
  };
  std::vector<std::jthread> workers;
  for (int64_t begin = 0; begin < count; begin += share)
    workers.emplace_back(fill, begin, std::min(begin + share, count));
}

ExtraViews ExtraTensors::views() const {
  ExtraViews views;
  visit([](const ParamField&, flash3_tensor& view,
           const GuardedTensor& tensor) { view = tensor.view; },
        views, *this);
  views.mask = mask ? &mask->mask : nullptr;
  return views;
}

ExtraTensors clone(const ExtraTensors& tensors) {
  ExtraTensors copies;
  ExtraTensors::visit([](const ParamField&, GuardedTensor& copy,
                         const GuardedTensor& tensor) { copy = clone(tensor); },
                      copies, tensors);
  copies.mask = tensors.mask;
  return copies;
}

const MaskPairs* ExtraTensors::mask_pairs() const { return mask ? &mask->pairs() : nullptr; }

uint64_t fill_scales(const Case& c, uint64_t first, const flash3_tensor& scales) {
  for_each_row(scales, [&](int64_t row) {
    for (int64_t i = 0; i < scales.shape[scales.ndim - 1]; ++i)
      store_float(scales.data, FLASH3_FLOAT32, row + i,
                  std::exp2(normal_value(c.seed, first++) / 2));
  });
  return first;
}

ExtraTensors make_extra_tensors(const Case& c, const CaseSequences& sequences) {
  ExtraTensors t;
  if (c.sink != Sink::kNone) {
    t.sink = make_vector(c.sink == Sink::kFloat32 ? FLASH3_FLOAT32 : c.dtype_of_out(), c.heads_q);
    const float middle = std::log(static_cast<float>(c.seq_k) + 1);
    for (int64_t h = 0; h < c.heads_q; ++h)
      store_float(t.sink.view.data, t.sink.view.dtype, h,
                  h == 2 ? -std::numeric_limits<float>::infinity()
                         : middle + normal_value(c.seed + (uint64_t{1} << 41), uint64_t(h)));
  }
  const auto index = [](const std::vector<int32_t>& values) {
    if (values.empty()) return GuardedTensor{};
    GuardedTensor made = make_vector(FLASH3_INT32, static_cast<int64_t>(values.size()));
    std::copy(values.begin(), values.end(), static_cast<int32_t*>(made.view.data));
    return made;
  };
  t.cu_seqlens_q = index(sequences.q.cu), t.cu_seqlens_k = index(sequences.k.cu);
  t.seqused_q = index(sequences.q.used), t.seqused_k = index(sequences.k.used);
  if (c.tree) t.tree_mask = make_tree_mask(c, sequences);
  t.mask = make_host_mask(c);
  add_added(c, sequences, &t);
  if (c.dtype_of_kv() == FLASH3_FLOAT8_E4M3) {
    t.q_scale = make_scales(c, TensorName::kQ, sequences.q, c.heads_q);
    t.k_scale = make_scales(c, TensorName::kK, sequences.k, c.heads_k);
    t.v_scale = make_scales(c, TensorName::kV, sequences.k, c.heads_k);
    uint64_t next = uint64_t{1} << 42;
    for (GuardedTensor* scales : {&t.q_scale, &t.k_scale, &t.v_scale})
      if (!scales->bytes.empty()) next = fill_scales(c, next, scales->view);
  }
  if (!c.qv) return t;
  t.qv = make_rows(c, TensorName::kQ, sequences.q, c.heads_q, c.head_dim_v, c.dtype);
  fill_random(t.qv.view, c.distribution, c.seed + (uint64_t{1} << 44));
  if (c.is_ragged()) forbid_rows(&t.qv, sequences.q, c.batch, {RowUse::kUnused, RowUse::kOutside});
  return t;
}

ForwardTensors make_forward_tensors(const Case& c) {
  const CaseSequences sequences = make_sequences(c);
  ForwardTensors t;
  t.q = make_rows(c, TensorName::kQ, sequences.q, c.heads_q, c.head_dim, c.dtype);
  t.k = make_rows(c, TensorName::kK, sequences.k, c.heads_k, c.head_dim, c.dtype_of_kv());
  if (!c.latent)
    t.v = make_rows(c, TensorName::kV, sequences.k, c.heads_k, c.head_dim_v, c.dtype_of_kv());
  t.out = make_rows(c, TensorName::kOut, sequences.q, c.heads_q, c.head_dim_v, c.dtype_of_out());
  if (c.want_lse) t.lse = make_lse(c, TensorName::kLse, sequences.q);
  t.extra = make_extra_tensors(c, sequences);
  fill_random(t.q.view, c.distribution, 3 * c.seed);
  fill_random(t.k.view, c.distribution, 3 * c.seed + 1);
  if (!c.latent) fill_random(t.v.view, c.distribution, 3 * c.seed + 2);
  if (c.distribution == Distribution::kSpecial && !c.latent && !c.qv) place_specials(c, t);
  if (!c.is_ragged()) return t;
  const auto dead = {RowUse::kUnused, RowUse::kOutside};
  forbid_rows(&t.q, sequences.q, c.batch, dead);
  for (GuardedTensor* rows : {&t.k, &t.v})
    if (!rows->bytes.empty()) forbid_rows(rows, sequences.k, c.batch, dead);
  if (c.fill && !c.backward) return t;
  forbid_rows(&t.out, sequences.q, c.batch, dead);
  if (c.want_lse) forbid_rows(&t.lse, sequences.q, c.batch, dead, /*is_lse=*/true);
  return t;
}

flash3_tensor view_of_v(const Case& c, const flash3_tensor& k, const flash3_tensor& v) {
  if (!c.latent) return v;
  flash3_tensor part = k;
  part.shape[part.ndim - 1] = c.head_dim_v;
  return part;
}

flash3_forward_params make_params(const Case& c, const flash3_tensor& q, const flash3_tensor& k,
                                  const flash3_tensor& v, const flash3_tensor& out,
                                  const flash3_tensor& lse, const ExtraViews& extra) {
  flash3_forward_params p{};
  p.struct_size = sizeof p;
  p.q = q, p.k = k, p.v = view_of_v(c, k, v), p.out = out, p.lse = lse;
  set_options(c, extra, &p);
  return p;
}

flash3_forward_params make_question(const Case& c) {
  if (c.has_cache()) return make_cache_question(c);
  const CaseSequences s = make_sequences(c);
  const auto index = [](const std::vector<int32_t>& values) {
    return values.empty() ? flash3_tensor{}
                          : vector_view(FLASH3_INT32, static_cast<int64_t>(values.size()));
  };
  ExtraViews extra;
  extra.cu_seqlens_q = index(s.q.cu), extra.cu_seqlens_k = index(s.k.cu);
  extra.seqused_q = index(s.q.used), extra.seqused_k = index(s.k.used);
  ExtraViews::visit(
      [&](const ParamField& field, flash3_tensor& to) {
        if (const flash3_tensor view = added_view(c, field, s); view.ndim > 0) to = view;
      },
      extra);
  if (c.sink != Sink::kNone)
    extra.sink =
        vector_view(c.sink == Sink::kFloat32 ? FLASH3_FLOAT32 : c.dtype_of_out(), c.heads_q);
  if (c.qv) extra.qv = rows_view(c, TensorName::kQ, s.q, c.heads_q, c.head_dim_v, c.dtype);
  if (c.tree) extra.tree_mask = tree_mask_view(c, s);
  extra.mask = question_mask(c);
  if (c.dtype_of_kv() == FLASH3_FLOAT8_E4M3) {
    extra.q_scale = scales_view(c, TensorName::kQ, s.q, c.heads_q);
    extra.k_scale = scales_view(c, TensorName::kK, s.k, c.heads_k);
    extra.v_scale = scales_view(c, TensorName::kV, s.k, c.heads_k);
  }
  return make_params(c, rows_view(c, TensorName::kQ, s.q, c.heads_q, c.head_dim, c.dtype),
                     rows_view(c, TensorName::kK, s.k, c.heads_k, c.head_dim, c.dtype_of_kv()),
                     rows_view(c, TensorName::kV, s.k, c.heads_k, c.head_dim_v, c.dtype_of_kv()),
                     rows_view(c, TensorName::kOut, s.q, c.heads_q, c.head_dim_v, c.dtype_of_out()),
                     c.want_lse ? rows_lse_view(c, TensorName::kLse, s.q) : flash3_tensor{}, extra);
}

}  // namespace flash3::cases
