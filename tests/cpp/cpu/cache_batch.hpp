// SPDX-License-Identifier: Apache-2.0
// A batch of sequences whose keys lie in a cache, in memory that holds the fill pattern: only the
// keys that count hold values, so that a kernel which reads others computes NaN, and one that
// writes others is caught. Page table entries that no key needs are out of range.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "oracle/one_sequence.hpp"
#include "ragged_batch.hpp"

namespace flash3::test {

struct CacheSpec {
  flash3_dtype dtype = FLASH3_FLOAT32;
  std::vector<int64_t> queries{1, 1};  // of each sequence
  std::vector<int64_t> used{5, 9};     // places of the cache before the call
  std::vector<int64_t> leftpad;        // of those; empty: none
  std::vector<int64_t> added;          // keys that are appended; empty: no append
  int64_t page_size = 16;              // 0: not paged
  int64_t capacity = 0;                // places of a sequence; 0: a few more than are needed
  bool shares_first_page = false;      // all sequences have the first one's
  bool batch_idx = false;              // of a cache that is not paged
  bool packed_q = false, packed_new = false;
  int64_t heads_q = 2, heads_k = 1, dim = 24, dim_v = 40;
  bool causal = true;
  std::optional<int64_t> left, right;
  int64_t chunk = 0;
  float softcap = 0;
  bool sink = false;
  int64_t rotary_pairs = 0;  // 0: none
  bool interleaved = false, table_of_dtype = false;
  std::vector<int64_t> offsets;  // rotary_offsets; empty: none
  bool rotate = false;
  cases::Layout layout = cases::Layout::kPadded;
  std::vector<uint64_t> contents;  // as in RaggedSpec
  uint64_t shuffle = 1;            // of pages and elements
};

class CacheBatch {
 public:
  explicit CacheBatch(const CacheSpec& s) : spec(s) {
    places_.resize(s.used.size());
    for (size_t b = 0; b < places_.size(); ++b) places_[b] = s.used[b] + added(b);
    const int64_t most = *std::max_element(places_.begin(), places_.end());
    capacity_ = s.capacity > 0 ? s.capacity : most + 3;
    place_keys();
    place_queries();
    place_new();
    for (int64_t b = 0; b < size(); ++b) fill(b);
  }
  CacheBatch(const CacheBatch&) = delete;
  CacheBatch& operator=(const CacheBatch&) = delete;

  int64_t size() const { return static_cast<int64_t>(spec.used.size()); }

  flash3_forward_params params() {
    const auto optional = [](std::vector<int32_t>& t) {
      return t.empty() ? flash3_tensor{} : index_view(t);
    };
    flash3_forward_params p{};
    p.struct_size = sizeof p;
    p.q = rows_view(q, spec.packed_q), p.out = rows_view(out, spec.packed_q);
    p.lse = lse.view;
    if (spec.packed_q)
      p.lse = {lse.view.data,
               FLASH3_FLOAT32,
               2,
               {lse.view.shape[1], lse.view.shape[2]},
               {lse.view.stride[1], 1}};
    p.k = k.view, p.v = v.view;
    p.cu_seqlens_q = optional(cu_q_), p.seqused_q = optional(used_q_);
    p.seqused_k = index_view(used_);
    p.leftpad_k = optional(leftpad_), p.cache_batch_idx = optional(batch_idx_);
    if (spec.page_size > 0)
      p.page_table = {table_.data(), FLASH3_INT32, 2, {size(), max_pages_}, {max_pages_ + 1, 1}};
    if (!spec.added.empty()) {
      p.k_new = rows_view(k_new, spec.packed_new), p.v_new = rows_view(v_new, spec.packed_new);
      p.cu_seqlens_k_new = optional(cu_new_);
    }
    set_rotary(&p);
    if (spec.sink) p.sink = {sink_.data(), FLASH3_FLOAT32, 1, {spec.heads_q}, {1}};
    p.causal = spec.causal;
    p.window = spec.left || spec.right;
    p.window_left = spec.left.value_or(-1), p.window_right = spec.right.value_or(-1);
    p.chunk = spec.chunk, p.softcap = spec.softcap;
    p.rotate = spec.rotate, p.rotation_seed = 0x5EED;
    p.num_threads = 1;
    return p;
  }
  ForwardProblem problem() { return to_problem(params()); }

  CacheSpec spec;
  cases::GuardedTensor q, k, v, out, lse, k_new, v_new;

 private:
  int64_t added(size_t b) const { return spec.added.empty() ? 0 : spec.added[b]; }

  static flash3_tensor index_view(std::vector<int32_t>& t) {
    return {t.data(), FLASH3_INT32, 1, {static_cast<int64_t>(t.size())}, {1}};
  }
  // [1, rows, heads, dim] as [rows, heads, dim].
  static flash3_tensor rows_view(const cases::GuardedTensor& t, bool packed) {
    flash3_tensor view = t.view;
    if (!packed) return view;
    view.ndim = 3;
    for (int d = 0; d < 3; ++d)
      view.shape[d] = view.shape[d + 1], view.stride[d] = view.stride[d + 1];
    return view;
  }

  cases::GuardedTensor make(int64_t batches, int64_t rows, int64_t heads, int64_t dim) const {
    return cases::make_tensor(spec.dtype, batches, rows, heads, dim, spec.layout);
  }

  // Numbers from 0 to count − 1 in an order of their own.
  std::vector<int32_t> shuffled(int64_t count) const {
    std::vector<int32_t> all(static_cast<size_t>(count));
    std::iota(all.begin(), all.end(), 0);
    uint64_t state = spec.shuffle;
    for (size_t i = all.size(); i > 1; --i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      std::swap(all[i - 1], all[(state >> 33) % i]);
    }
    return all;
  }

  void place_keys() {
    used_.assign(spec.used.begin(), spec.used.end());
    leftpad_.assign(spec.leftpad.begin(), spec.leftpad.end());
    int64_t elements = size(), rows = capacity_;
    if (spec.page_size > 0) {
      max_pages_ = (capacity_ + spec.page_size - 1) / spec.page_size;
      elements = size() * max_pages_ + 2, rows = spec.page_size;
      const std::vector<int32_t> pages = shuffled(elements);
      size_t next = 0;
      // A row of the table has one more entry than counts.
      table_.assign(static_cast<size_t>(size() * (max_pages_ + 1)), 123456789);
      for (int64_t b = 0; b < size(); ++b)
        for (int64_t i = 0; i * spec.page_size < places_[static_cast<size_t>(b)]; ++i)
          table_[static_cast<size_t>(b * (max_pages_ + 1) + i)] =
              spec.shares_first_page && i == 0 && b > 0 ? table_[0] : pages[next++];
    } else if (spec.batch_idx) {
      elements = size() + 3;
      batch_idx_ = shuffled(elements);
      batch_idx_.resize(static_cast<size_t>(size()));
    }
    k = make(elements, rows, spec.heads_k, spec.dim);
    v = make(elements, rows, spec.heads_k, spec.dim_v);
  }

  void place_queries() {
    const int64_t most = *std::max_element(spec.queries.begin(), spec.queries.end());
    const bool same = std::count(spec.queries.begin(), spec.queries.end(), most) == size();
    if (spec.packed_q)
      cu_q_ = sums(spec.queries);
    else if (!same)
      used_q_.assign(spec.queries.begin(), spec.queries.end());
    const int64_t batches = spec.packed_q ? 1 : size(), rows = spec.packed_q ? cu_q_.back() : most;
    q = make(batches, rows, spec.heads_q, spec.dim);
    out = make(batches, rows, spec.heads_q, spec.dim_v);
    lse = cases::make_lse(batches, spec.heads_q, rows, spec.layout);
    for (int64_t h = 0; h < spec.heads_q; ++h)
      sink_.push_back(cases::normal_value(99, static_cast<uint64_t>(h)));
  }

  // Not packed, all sequences append as much.
  void place_new() {
    if (spec.added.empty()) return;
    if (spec.packed_new) cu_new_ = sums(spec.added);
    const int64_t batches = spec.packed_new ? 1 : size();
    const int64_t rows = spec.packed_new ? cu_new_.back() : spec.added[0];
    k_new = make(batches, rows, spec.heads_k, spec.dim);
    v_new = make(batches, rows, spec.heads_k, spec.dim_v);
  }

  static std::vector<int32_t> sums(const std::vector<int64_t>& lengths) {
    std::vector<int32_t> cu{0};
    for (const int64_t n : lengths) cu.push_back(cu.back() + static_cast<int32_t>(n));
    return cu;
  }

  void set_rotary(flash3_forward_params* p) {
    if (spec.rotary_pairs == 0) return;
    if (tables_[0].empty()) {
      const int64_t positions = positions_needed();
      for (int t = 0; t < 2; ++t)
        for (int64_t i = 0; i < positions * spec.rotary_pairs; ++i) {
          const auto angle = static_cast<float>(i / spec.rotary_pairs) /
                             std::pow(3.f, static_cast<float>(i % spec.rotary_pairs));
          tables_[t].resize(static_cast<size_t>(positions * spec.rotary_pairs) * 4);
          store_float(tables_[t].data(), table_dtype(), i, t ? std::sin(angle) : std::cos(angle));
        }
    }
    const auto table = [&](int t) {
      return flash3_tensor{tables_[t].data(),
                           table_dtype(),
                           2,
                           {positions_needed(), spec.rotary_pairs},
                           {spec.rotary_pairs, 1}};
    };
    p->rotary_cos = table(0), p->rotary_sin = table(1);
    p->rotary_interleaved = spec.interleaved;
    offsets_.assign(spec.offsets.begin(), spec.offsets.end());
    if (!offsets_.empty()) p->rotary_offsets = index_view(offsets_);
  }
  flash3_dtype table_dtype() const { return spec.table_of_dtype ? spec.dtype : FLASH3_FLOAT32; }
  int64_t positions_needed() const {
    int64_t most = 1;
    for (size_t b = 0; b < spec.used.size(); ++b)
      most = std::max(most, (spec.offsets.empty() ? spec.used[b] : spec.offsets[b]) +
                                std::max({added(b), spec.queries[b], int64_t{1}}));
    return most;
  }

  // N(0, 1) into what counts.
  void fill(int64_t b) {
    const auto at = static_cast<size_t>(b);
    const uint64_t content = spec.contents.empty() ? at + 1 : spec.contents[at];
    const ForwardProblem p = problem();
    uint64_t i = 0;
    const auto fill_row = [&](const TensorView& t, int64_t element, int64_t row) {
      for (int64_t h = 0; h < t.heads; ++h)
        for (int64_t d = 0; d < t.dim; ++d)
          store_float(t.data, spec.dtype,
                      element * t.stride_batch + row * t.stride_seq + h * t.stride_head + d,
                      cases::normal_value(content, i++));
    };
    for (int64_t row = 0; row < spec.queries[at]; ++row)
      fill_row(p.q, b, (spec.packed_q ? cu_q_[at] : 0) + row);
    for (int64_t place = spec.leftpad.empty() ? 0 : spec.leftpad[at]; place < spec.used[at];
         ++place) {
      const CacheRow row = cache_row(p.cache, b, place);
      fill_row(p.k, row.element, row.row);
      fill_row(p.v, row.element, row.row);
    }
    for (int64_t n = 0; n < added(at); ++n) {
      fill_row(p.append.k, b, (spec.packed_new ? cu_new_[at] : 0) + n);
      fill_row(p.append.v, b, (spec.packed_new ? cu_new_[at] : 0) + n);
    }
  }

  std::vector<int64_t> places_;  // that each sequence has after the call
  int64_t capacity_ = 0, max_pages_ = 0;
  std::vector<int32_t> table_, batch_idx_, leftpad_, used_, used_q_, cu_q_, cu_new_, offsets_;
  std::vector<float> sink_;
  std::vector<std::byte> tables_[2];
};

}  // namespace flash3::test
