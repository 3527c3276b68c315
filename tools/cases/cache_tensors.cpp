// SPDX-License-Identifier: Apache-2.0
#include "cases/cache_tensors.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <random>

#include "cases/internals.hpp"
#include "cases/memory.hpp"

namespace flash3::cases {
namespace {

constexpr int64_t kMostPadding = 7, kSpareElements = 2, kMostOffset = 9;
constexpr int32_t kNoPage = 123456789;

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

// How many keys each sequence has, and where they lie.
struct CachePlan {
  std::vector<int32_t> padding, used, added, cu_new, offsets;
  int64_t capacity = 0;  // places of a sequence
  int64_t max_pages = 0, elements = 0, rows = 0;
  std::vector<int32_t> table, batch_idx;

  // The element and the row of a place of sequence b.
  CacheRow row_of(const Case& c, int64_t b, int64_t place) const {
    if (c.page_size > 0)
      return {table[static_cast<size_t>(b * max_pages + place / c.page_size)], place % c.page_size};
    return {c.batch_idx ? batch_idx[static_cast<size_t>(b)] : b, place};
  }
};

std::vector<int32_t> shuffled(int64_t count, std::mt19937_64* random) {
  std::vector<int32_t> all(static_cast<size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  for (size_t i = all.size(); i > 1; --i) std::swap(all[i - 1], all[(*random)() % i]);
  return all;
}

void place(const Case& c, std::mt19937_64* random, CachePlan* plan) {
  plan->elements = c.batch, plan->rows = plan->capacity;
  if (c.page_size > 0) {
    plan->max_pages = std::max<int64_t>(1, ceil_div(plan->capacity, c.page_size));
    plan->rows = c.page_size;
    int64_t pages = 0;
    const auto needed = [&](size_t b) {
      return ceil_div(int64_t{plan->used[b]} + plan->added[b], c.page_size);
    };
    for (size_t b = 0; b < plan->used.size(); ++b) pages += needed(b);
    plan->elements = pages + kSpareElements;
    const std::vector<int32_t> order = shuffled(plan->elements, random);
    plan->table.assign(static_cast<size_t>(c.batch * plan->max_pages), kNoPage);
    size_t next = 0;
    for (size_t b = 0; b < plan->used.size(); ++b)
      for (int64_t i = 0; i < needed(b); ++i)
        plan->table[b * static_cast<size_t>(plan->max_pages) + static_cast<size_t>(i)] =
            order[next++];
  } else if (c.batch_idx) {
    plan->elements = c.batch + kSpareElements;
    plan->batch_idx = shuffled(plan->elements, random);
    plan->batch_idx.resize(static_cast<size_t>(c.batch));
  }
}

CachePlan plan_of(const Case& c) {
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
  place(c, &random, &plan);
  return plan;
}

GuardedTensor vector_of(const std::vector<int32_t>& values) {
  GuardedTensor made = make_vector(FLASH3_INT32, static_cast<int64_t>(values.size()));
  std::copy(values.begin(), values.end(), static_cast<int32_t*>(made.view.data));
  return made;
}

// Fills the rows of k or v that hold no key before the call.
void empty_rows(const Case& c, const CachePlan& plan, GuardedTensor* t) {
  std::vector<bool> counts(static_cast<size_t>(plan.elements * plan.rows));
  for (int64_t b = 0; b < c.batch; ++b) {
    const auto at = static_cast<size_t>(b);
    for (int64_t place = plan.padding[at]; place < plan.used[at]; ++place) {
      const CacheRow row = plan.row_of(c, b, place);
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

// Positions up to the last that a token can have.
void make_rotary(const Case& c, const CachePlan& plan, CacheTensors* t) {
  const int64_t pairs = std::max<int64_t>(1, c.head_dim / (c.seed % 2 == 0 ? 4 : 2));
  const int64_t positions =
      std::max(plan.capacity, kMostOffset) + std::max({c.seq_q, c.append, int64_t{1}});
  const flash3_dtype dtype = c.seed % 3 == 0 ? c.dtype : FLASH3_FLOAT32;
  for (const Which which : {kCos, kSin}) {
    GuardedTensor made = make_vector(dtype, positions * pairs);
    for (int64_t i = 0; i < positions * pairs; ++i) {
      const double angle = static_cast<double>(i / pairs) *
                           std::pow(1000., -static_cast<double>(i % pairs) / double(pairs));
      store_float(made.view.data, dtype, i,
                  static_cast<float>(which == kCos ? std::cos(angle) : std::sin(angle)));
    }
    made.view.ndim = 2;
    made.view.shape[0] = positions, made.view.shape[1] = pairs;
    made.view.stride[0] = pairs, made.view.stride[1] = 1;
    t->fields[which] = std::move(made);
  }
  if (c.rotary_offsets) t->fields[kOffsets] = vector_of(plan.offsets);
}

GuardedTensor make_new(const Case& c, const CachePlan& plan, int64_t dim) {
  const int64_t total = plan.cu_new.back();
  GuardedTensor made = c.append_packed
                           ? make_tensor(c.dtype, 1, total, c.heads_k, dim, c.layout)
                           : make_tensor(c.dtype, c.batch, c.append, c.heads_k, dim, c.layout);
  if (c.append_packed) made.view = packed(made.view);
  return made;
}

}  // namespace

Case without_cache(Case c) {
  c.page_size = c.append = 0;
  c.batch_idx = c.leftpad = c.append_packed = c.rotary_offsets = c.used_k = false;
  c.rotary = Rotary::kNone;
  return c;
}

CacheTensors make_cache_tensors(const Case& c) {
  const CachePlan plan = plan_of(c);
  Case queries = without_cache(c);
  queries.seq_k = 0;  // k and v are made here
  queries.distribution =
      c.distribution == Distribution::kSpecial ? Distribution::kNormal : c.distribution;
  CacheTensors t{make_forward_tensors(queries), {}};
  t.call.k = make_tensor(c.dtype, plan.elements, plan.rows, c.heads_k, c.head_dim, c.layout);
  t.call.v = make_tensor(c.dtype, plan.elements, plan.rows, c.heads_k, c.head_dim_v, c.layout);
  fill_random(t.call.k.view, queries.distribution, 3 * c.seed + 1);
  fill_random(t.call.v.view, queries.distribution, 3 * c.seed + 2);
  for (GuardedTensor* rows : {&t.call.k, &t.call.v}) empty_rows(c, plan, rows);

  t.fields[kUsed] = vector_of(plan.used);
  if (c.page_size > 0) {
    t.fields[kPageTable] = vector_of(plan.table);
    flash3_tensor& view = t.fields[kPageTable].view;
    view.ndim = 2;
    view.shape[0] = c.batch, view.shape[1] = plan.max_pages;
    view.stride[0] = plan.max_pages, view.stride[1] = 1;
  }
  if (c.batch_idx) t.fields[kBatchIdx] = vector_of(plan.batch_idx);
  if (c.leftpad) t.fields[kLeftpad] = vector_of(plan.padding);
  if (c.append == 0) return t;
  t.fields[kKNew] = make_new(c, plan, c.head_dim);
  t.fields[kVNew] = make_new(c, plan, c.head_dim_v);
  fill_random(t.fields[kKNew].view, queries.distribution, 3 * c.seed + 4);
  fill_random(t.fields[kVNew].view, queries.distribution, 3 * c.seed + 5);
  if (c.append_packed) t.fields[kCuNew] = vector_of(plan.cu_new);
  if (c.rotary != Rotary::kNone) make_rotary(c, plan, &t);
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
  const CacheTensors tensors = make_cache_tensors(c);
  flash3_forward_params p = make_cache_params(c, tensors);
  using Params = flash3_forward_params;
  for (flash3_tensor Params::*member :
       {&Params::q, &Params::k, &Params::v, &Params::out, &Params::lse, &Params::sink,
        &Params::cu_seqlens_q, &Params::seqused_q})
    (p.*member).data = nullptr;
  for (const CacheField& field : kCacheFields) (p.*field.member).data = nullptr;
  return p;
}

}  // namespace flash3::cases
