// SPDX-License-Identifier: Apache-2.0
#include "cases/cache_tensors.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

#include "cases/internals.hpp"
#include "cases/mask.hpp"
#include "cases/memory.hpp"
#include "cases/sequences.hpp"

namespace flash3::cases {
namespace {

constexpr int64_t kMostPadding = 7, kSpareElements = 2, kMostOffset = 9;
constexpr int32_t kNoPage = 123456789;

std::vector<int32_t> shuffled(int64_t count, std::mt19937_64* random) {
  std::vector<int32_t> all(static_cast<size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  for (size_t i = all.size(); i > 1; --i) std::swap(all[i - 1], all[(*random)() % i]);
  return all;
}

}  // namespace

int64_t CachePlan::pages_of(const Case& c, int64_t b) const {
  const auto at = static_cast<size_t>(b);
  return ceil_div(int64_t{used[at]} + added[at], c.page_size);
}

CachePlan make_cache_plan(const Case& c) {
  CachePlan plan;
  std::mt19937_64 random(c.seed + 5000);
  const auto below = [&](int64_t n) { return static_cast<int32_t>(random() % uint64_t(n)); };
  const CaseSequences sequences = make_sequences(c);
  plan.cu_new.push_back(0);
  for (int64_t b = 0; b < c.batch; ++b) {
    plan.padding.push_back(c.leftpad ? below(kMostPadding + 1) : 0);
    plan.used.push_back(sequences.k.used[static_cast<size_t>(b)] + plan.padding.back());
    plan.added.push_back(c.append_packed ? below(c.append + 1) : static_cast<int32_t>(c.append));
    plan.cu_new.push_back(plan.cu_new.back() + plan.added.back());
    plan.offsets.push_back(below(kMostOffset + 1));
  }
  plan.capacity = c.seq_k + c.append + (c.leftpad ? kMostPadding : 0);
  plan.positions = std::max(plan.capacity, kMostOffset) + std::max({c.seq_q, c.append, int64_t{1}});
  plan.elements = c.batch + (c.batch_idx ? kSpareElements : 0), plan.rows = plan.capacity;
  if (c.page_size == 0) return plan;
  plan.max_pages = std::max<int64_t>(1, ceil_div(plan.capacity, c.page_size));
  plan.elements = kSpareElements, plan.rows = c.page_size;
  for (int64_t b = 0; b < c.batch; ++b) plan.elements += plan.pages_of(c, b);
  return plan;
}

CachePlaces make_cache_places(const Case& c, const CachePlan& plan) {
  CachePlaces places;
  std::mt19937_64 random(c.seed + 6000);
  if (c.page_size > 0) {
    const std::vector<int32_t> order = shuffled(plan.elements, &random);
    places.page_table.assign(static_cast<size_t>(c.batch * plan.max_pages), kNoPage);
    auto next = order.begin();
    for (int64_t b = 0; b < c.batch; ++b) {
      const int64_t pages = plan.pages_of(c, b);
      std::copy_n(next, pages, places.page_table.begin() + b * plan.max_pages);
      next += pages;
    }
  } else if (c.batch_idx) {
    places.batch_idx = shuffled(plan.elements, &random);
    places.batch_idx.resize(static_cast<size_t>(c.batch));
  }
  return places;
}

CacheRow CachePlaces::row_of(const Case& c, const CachePlan& plan, int64_t b, int64_t place) const {
  if (c.page_size > 0)
    return {page_table[static_cast<size_t>(b * plan.max_pages + place / c.page_size)],
            place % c.page_size};
  return {c.batch_idx ? batch_idx[static_cast<size_t>(b)] : b, place};
}

namespace {

using Fields = std::array<flash3_tensor, kCacheFieldCount>;

enum Which : size_t {
  kUsed,
  kPageTable,
  kBatchIdx,
  kLeftpad,
  kKNew,
  kVNew,
  kCuNew,
  kCos,
  kSin,
  kOffsets
};

flash3_tensor vector_view(int64_t size) {
  return {nullptr, FLASH3_INT32, 1, {size, 0, 0, 0}, {1, 0, 0, 0}};
}

flash3_tensor matrix_view(flash3_dtype dtype, int64_t rows, int64_t columns) {
  return {nullptr, dtype, 2, {rows, columns, 0, 0}, {columns, 1, 0, 0}};
}

int64_t offset_of(Layout layout) { return layout == Layout::kOdd ? 1 : 0; }
TensorLayout layout_of(const Case& c) {
  return {.layout = c.layout, .offset = offset_of(c.layout)};
}

flash3_tensor cache_view(const Case& c, const CachePlan& plan, int64_t dim) {
  return view_of(c.dtype_of_kv(), plan.elements, plan.rows, c.heads_k, dim, layout_of(c));
}

flash3_tensor new_view(const Case& c, const CachePlan& plan, int64_t dim) {
  if (c.append_packed)
    return packed(view_of(c.dtype_of_new(), 1, plan.cu_new.back(), c.heads_k, dim, layout_of(c)));
  return view_of(c.dtype_of_new(), c.batch, c.append, c.heads_k, dim, layout_of(c));
}

// The scales of k or v, without data: those by blocks are of the cache's own rows.
flash3_tensor scales_view(const Case& c, const CachePlan& plan, TensorName name) {
  if (c.dtype_of_kv() != FLASH3_FLOAT8_E4M3) return {};
  switch (c.scales_of(name)) {
    case Scales::kNone: return {};
    case Scales::kTensor: return {nullptr, FLASH3_FLOAT32, 1, {1, 0, 0, 0}, {1, 0, 0, 0}};
    case Scales::kHead: return matrix_view(FLASH3_FLOAT32, c.batch, c.heads_k);
    case Scales::kBlock:
      return lse_view_of(plan.elements, c.heads_k, ceil_div(plan.rows, kScaleBlock), layout_of(c));
  }
  return {};
}

// Without data; all zero: not given.
Fields field_views(const Case& c, const CachePlan& plan) {
  Fields views{};
  views[kUsed] = vector_view(c.batch);
  if (c.page_size > 0) views[kPageTable] = matrix_view(FLASH3_INT32, c.batch, plan.max_pages);
  if (c.batch_idx) views[kBatchIdx] = vector_view(c.batch);
  if (c.leftpad) views[kLeftpad] = vector_view(c.batch);
  if (c.append == 0) return views;
  views[kKNew] = new_view(c, plan, c.head_dim);
  if (!c.latent) views[kVNew] = new_view(c, plan, c.head_dim_v);
  if (c.append_packed) views[kCuNew] = vector_view(c.batch + 1);
  if (c.rotary == Rotary::kNone) return views;
  const int64_t pairs = std::max<int64_t>(1, c.head_dim / (c.seed % 2 == 0 ? 4 : 2));
  views[kCos] = views[kSin] =
      matrix_view(c.seed % 3 == 0 ? c.dtype : FLASH3_FLOAT32, plan.positions, pairs);
  if (c.rotary_offsets) views[kOffsets] = vector_view(c.batch);
  return views;
}

void copy_values(const std::vector<int32_t>& values, const GuardedTensor& to) {
  std::copy(values.begin(), values.end(), static_cast<int32_t*>(to.view.data));
}

void fill_rotary(const GuardedTensor& table, double (*value)(double)) {
  const int64_t pairs = table.view.shape[1];
  for (int64_t i = 0; i < table.view.shape[0] * pairs; ++i) {
    const double angle = static_cast<double>(i / pairs) *
                         std::pow(1000., -static_cast<double>(i % pairs) / double(pairs));
    store_float(table.view.data, table.view.dtype, i, static_cast<float>(value(angle)));
  }
}

// Fills the rows of k or v that hold no key before the call.
void empty_rows(const Case& c, const CachePlan& plan, const CachePlaces& places, GuardedTensor* t) {
  std::vector<bool> counts(static_cast<size_t>(plan.elements * plan.rows));
  for (int64_t b = 0; b < c.batch; ++b) {
    const auto at = static_cast<size_t>(b);
    for (int64_t place = plan.padding[at]; place < plan.used[at]; ++place) {
      const CacheRow row = places.row_of(c, plan, b, place);
      counts[static_cast<size_t>(row.element * plan.rows + row.row)] = true;
    }
  }
  const flash3_tensor& v = t->view;
  for (int64_t e = 0; e < plan.elements; ++e)
    for (int64_t row = 0; row < plan.rows; ++row)
      for (int64_t h = 0; !counts[static_cast<size_t>(e * plan.rows + row)] && h < v.shape[2]; ++h)
        std::fill_n(
            static_cast<std::byte*>(v.data) +
                (e * v.stride[0] + row * v.stride[1] + h * v.stride[2]) * element_size(v.dtype),
            v.shape[3] * element_size(v.dtype), kFillPattern);
}

// Special values have their places in a plain batch alone.
Distribution usual_distribution(const Case& c) {
  return c.distribution == Distribution::kSpecial ? Distribution::kNormal : c.distribution;
}

}  // namespace

Case without_cache(Case c) {
  c.page_size = c.append = 0;
  c.batch_idx = c.leftpad = c.append_packed = c.rotary_offsets = c.used_k = false;
  c.rotary = Rotary::kNone;
  c.mask = {};  // of the keys of a cache
  return c;
}

std::array<GuardedTensor, kCacheFieldCount> make_cache_fields(const Case& c, const CachePlan& plan,
                                                              const CachePlaces& places) {
  const Fields views = field_views(c, plan);
  std::array<GuardedTensor, kCacheFieldCount> fields;
  for (size_t i = 0; i < kCacheFieldCount; ++i)
    if (views[i].ndim > 0)
      fields[i] = guard(views[i], i == kKNew || i == kVNew ? offset_of(c.layout) : 0);
  copy_values(plan.used, fields[kUsed]);
  if (c.page_size > 0) copy_values(places.page_table, fields[kPageTable]);
  if (c.batch_idx) copy_values(places.batch_idx, fields[kBatchIdx]);
  if (c.leftpad) copy_values(plan.padding, fields[kLeftpad]);
  if (c.append == 0) return fields;
  fill_random(fields[kKNew].view, usual_distribution(c), 3 * c.seed + 4);
  if (!c.latent) fill_random(fields[kVNew].view, usual_distribution(c), 3 * c.seed + 5);
  if (c.append_packed) copy_values(plan.cu_new, fields[kCuNew]);
  if (c.rotary == Rotary::kNone) return fields;
  fill_rotary(fields[kCos], std::cos), fill_rotary(fields[kSin], std::sin);
  if (c.rotary_offsets) copy_values(plan.offsets, fields[kOffsets]);
  return fields;
}

ExtraTensors make_cache_extra(const Case& c, const CachePlan& plan) {
  const Case queries = without_cache(c);
  ExtraTensors extra = make_extra_tensors(queries, make_sequences(queries));
  extra.mask = make_host_mask(c);
  uint64_t next = uint64_t{1} << 43;
  for (const auto& [name, scales] :
       {std::pair{TensorName::kK, &extra.k_scale}, {TensorName::kV, &extra.v_scale}}) {
    const flash3_tensor view = scales_view(c, plan, name);
    *scales = view.ndim > 0 ? guard(view, offset_of(c.layout)) : GuardedTensor{};
    if (view.ndim > 0) next = fill_scales(c, next, scales->view);
  }
  return extra;
}

CacheTensors make_cache_tensors(const Case& c) {
  const CachePlan plan = make_cache_plan(c);
  const CachePlaces places = make_cache_places(c, plan);
  Case queries = without_cache(c);
  queries.seq_k = 0;  // k and v are made here
  queries.distribution = usual_distribution(c);
  CacheTensors t{make_forward_tensors(queries), make_cache_fields(c, plan, places)};
  t.call.extra = make_cache_extra(c, plan);
  t.call.k = guard(cache_view(c, plan, c.head_dim), offset_of(c.layout));
  if (!c.latent) t.call.v = guard(cache_view(c, plan, c.head_dim_v), offset_of(c.layout));
  fill_random(t.call.k.view, queries.distribution, 3 * c.seed + 1);
  if (!c.latent) fill_random(t.call.v.view, queries.distribution, 3 * c.seed + 2);
  for (GuardedTensor* rows : {&t.call.k, &t.call.v})
    if (!rows->bytes.empty()) empty_rows(c, plan, places, rows);
  return t;
}

flash3_forward_params make_cache_params(const Case& c, const flash3_tensor& q,
                                        const flash3_tensor& k, const flash3_tensor& v,
                                        const flash3_tensor& out, const flash3_tensor& lse,
                                        const ExtraViews& extra,
                                        const std::array<flash3_tensor, kCacheFieldCount>& fields) {
  flash3_forward_params p = make_params(c, q, k, v, out, lse, extra);
  p.max_seqlen_k = 0;
  for (size_t i = 0; i < kCacheFieldCount; ++i) p.*kCacheFields[i].member = fields[i];
  p.rotary_interleaved = c.rotary == Rotary::kInterleaved;
  return p;
}

flash3_forward_params make_cache_params(const Case& c, const CacheTensors& t) {
  std::array<flash3_tensor, kCacheFieldCount> fields{};
  for (size_t i = 0; i < kCacheFieldCount; ++i)
    if (!t.fields[i].bytes.empty()) fields[i] = t.fields[i].view;
  return make_cache_params(c, t.call.q.view, t.call.k.view, t.call.v.view, t.call.out.view,
                           t.call.lse.view, t.call.extra.views(), fields);
}

flash3_forward_params make_cache_question(const Case& c) {
  const CachePlan plan = make_cache_plan(c);
  flash3_forward_params p = make_question(without_cache(c));
  p.k = cache_view(c, plan, c.head_dim), p.v = cache_view(c, plan, c.head_dim_v);
  ExtraViews extra = extra_of(p);
  extra.cu_seqlens_k = extra.seqused_k = {};
  extra.mask = question_mask(c);
  extra.k_scale = scales_view(c, plan, TensorName::kK);
  extra.v_scale = scales_view(c, plan, TensorName::kV);
  return make_cache_params(c, p.q, p.k, p.v, p.out, p.lse, extra, field_views(c, plan));
}

bool takes_cache_by_tma(flash3_backend backend, const Case& c) {
  if (c.layout == Layout::kOdd) return false;  // a question has no addresses
  if (flash3_backend_available(backend) != FLASH3_OK) return true;
  flash3_forward_params question = make_cache_question(c);
  question.backend = backend;
  return flash3_forward_supported(&question) != FLASH3_UNSUPPORTED;
}

namespace {

uint64_t bit(int64_t i) { return i < 64 ? uint64_t{1} << i : 0; }

// The words of a sequence's drafts; what they show after the last draft counts for nothing.
void draw_tree(int64_t drafts, uint64_t* state, uint64_t* words) {
  const uint64_t after = drafts < 64 ? ~uint64_t{0} << drafts : 0;
  for (int64_t i = 0; i < drafts; ++i) {
    const uint64_t draw = next_bits(state);
    const auto parent = static_cast<int64_t>(draw % static_cast<uint64_t>(i + 1)) - 1;
    words[i] = bit(i) | (parent < 0 ? 0 : words[parent] & ~after);
    if (draw >> 60 == 0) words[i] = next_bits(state);
    if (draw >> 60 == 1) words[i] = 0;
    words[i] |= next_bits(state) & after;
  }
}

}  // namespace

flash3_tensor tree_mask_view(const Case& c, const CaseSequences& sequences) {
  const int64_t rows = sequences.q.rows;
  if (c.packed_q) return {nullptr, FLASH3_INT64, 1, {rows, 0, 0, 0}, {1, 0, 0, 0}};
  return {nullptr, FLASH3_INT64, 2, {c.batch, rows, 0, 0}, {rows, 1, 0, 0}};
}

GuardedTensor make_tree_mask(const Case& c, const CaseSequences& sequences) {
  GuardedTensor made = guard(tree_mask_view(c, sequences), 0);
  auto* const words = static_cast<uint64_t*>(made.view.data);
  uint64_t state = mix(c.seed + 7000);
  for (int64_t b = 0; b < c.batch; ++b) {
    const RowRange q = rows_of(sequences.q.view(), b);
    draw_tree(q.length, &state, words + (c.packed_q ? 0 : b * sequences.q.rows) + q.first);
  }
  return made;
}

}  // namespace flash3::cases
