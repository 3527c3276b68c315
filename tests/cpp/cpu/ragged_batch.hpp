// SPDX-License-Identifier: Apache-2.0
// A ragged batch in memory that holds the fill pattern: only the tokens that count hold values, so
// that a kernel which reads others computes NaN, and one that writes others is caught.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "cases/backward_tensors.hpp"
#include "cases/table.hpp"
#include "core/convert.hpp"
#include "cpu/backward.hpp"
#include "harness.hpp"
#include "oracle/attention_ref.hpp"
#include "oracle/one_sequence.hpp"

namespace flash3::test {

struct RaggedSpec {
  flash3_dtype dtype = FLASH3_FLOAT32;
  std::vector<int64_t> lengths_q, lengths_k;  // tokens that count
  bool packed_q = true, packed_k = true;      // else padded to the longest; not ragged if all are
  int64_t spare = 0;                          // unused tokens after those, in some sequences
  int64_t heads_q = 2, heads_k = 1, dim = 24, dim_v = 40;
  bool causal = false;
  std::optional<int64_t> left, right;
  int64_t chunk = 0;
  float softcap = 0;
  flash3_dtype sink = FLASH3_DTYPE_NONE;
  cases::Layout layout = cases::Layout::kPadded;
  std::vector<uint64_t>
      contents;  // sequences with the same number hold the same; empty: all differ
};

class RaggedBatch {
 public:
  explicit RaggedBatch(const RaggedSpec& s)
      : spec(s),
        cu_q_(offsets(s.lengths_q)),
        cu_k_(offsets(s.lengths_k)),
        used_q_(s.lengths_q.begin(), s.lengths_q.end()),
        used_k_(s.lengths_k.begin(), s.lengths_k.end()) {
    const auto rows = [&](bool packed, const std::vector<int32_t>& cu,
                          const std::vector<int64_t>& lengths) {
      return packed ? cu.back() + 3 : *std::max_element(lengths.begin(), lengths.end()) + s.spare;
    };
    const auto batch = [&](bool packed) { return packed ? 1 : size(); };
    const int64_t rows_q = rows(s.packed_q, cu_q_, s.lengths_q), batch_q = batch(s.packed_q);
    const int64_t rows_k = rows(s.packed_k, cu_k_, s.lengths_k), batch_k = batch(s.packed_k);
    const auto make = [&](int64_t batches, int64_t n, int64_t heads, int64_t dim) {
      return cases::make_tensor(s.dtype, batches, n, heads, dim, s.layout);
    };
    for (auto* t : {&q, &dq}) *t = make(batch_q, rows_q, s.heads_q, s.dim);
    for (auto* t : {&out, &dout}) *t = make(batch_q, rows_q, s.heads_q, s.dim_v);
    for (auto* t : {&k, &dk}) *t = make(batch_k, rows_k, s.heads_k, s.dim);
    for (auto* t : {&v, &dv}) *t = make(batch_k, rows_k, s.heads_k, s.dim_v);
    for (auto* t : {&lse, &dlse}) *t = cases::make_lse(batch_q, s.heads_q, rows_q, s.layout);
    sink_.resize(static_cast<size_t>(s.heads_q) * 4);
    dsink_ = sink_;
    for (int64_t h = 0; s.sink != FLASH3_DTYPE_NONE && h < s.heads_q; ++h)
      store_float(sink_.data(), s.sink, h, cases::normal_value(99, static_cast<uint64_t>(h)));
    const ForwardProblem p = forward();
    for (int64_t b = 0; b < size(); ++b) fill(p, b);
  }
  RaggedBatch(const RaggedBatch&) = delete;
  RaggedBatch& operator=(const RaggedBatch&) = delete;

  int64_t size() const { return static_cast<int64_t>(spec.lengths_q.size()); }

  flash3_forward_params forward_params() {
    flash3_forward_params p{};
    set_common(&p);
    return p;
  }
  flash3_backward_params backward_params() {
    flash3_backward_params p{};
    set_common(&p);
    p.dout = rows_view(dout, spec.packed_q), p.dq = rows_view(dq, spec.packed_q);
    p.dk = rows_view(dk, spec.packed_k), p.dv = rows_view(dv, spec.packed_k);
    p.dlse = rows_view(dlse, spec.packed_q);
    if (spec.sink != FLASH3_DTYPE_NONE) p.dsink = heads_view(dsink_);
    return p;
  }
  ForwardProblem forward() { return to_problem(forward_params()); }
  BackwardProblem backward() {
    const auto params = backward_params();
    BackwardProblem problem;
    const Status status = make_backward_problem(&params, Pointers::kRequired, &problem);
    EXPECT_TRUE(status.ok()) << status.message();
    return problem;
  }
  std::vector<float> dsink() const {
    std::vector<float> values;
    for (int64_t h = 0; h < spec.heads_q; ++h)
      values.push_back(load_float(dsink_.data(), spec.sink, h));
    return values;
  }

  RaggedSpec spec;
  cases::GuardedTensor q, k, v, out, lse, dout, dlse, dq, dk, dv;

 private:
  // The first sequence does not begin with the first row.
  std::vector<int32_t> offsets(const std::vector<int64_t>& lengths) const {
    std::vector<int32_t> cu{2};
    for (size_t b = 0; b < lengths.size(); ++b)
      cu.push_back(cu.back() + static_cast<int32_t>(lengths[b] + int64_t(b % 3) * spec.spare));
    return cu;
  }

  static flash3_tensor rows_view(const cases::GuardedTensor& t, bool packed) {
    flash3_tensor view = t.view;
    if (!packed) return view;
    --view.ndim;
    std::copy_n(t.view.shape + 1, 3, view.shape);
    std::copy_n(t.view.stride + 1, 3, view.stride);
    return view;
  }
  static flash3_tensor index_view(std::vector<int32_t>& values) {
    return {values.data(), FLASH3_INT32, 1, {static_cast<int64_t>(values.size())}, {1}};
  }
  flash3_tensor heads_view(std::vector<std::byte>& values) const {
    return {values.data(), spec.sink, 1, {spec.heads_q}, {1}};
  }

  bool needs_used(bool packed, const std::vector<int64_t>& lengths) const {
    return spec.spare > 0 || (!packed && std::adjacent_find(lengths.begin(), lengths.end(),
                                                            std::not_equal_to()) != lengths.end());
  }

  template <class Params>
  void set_common(Params* p) {
    p->struct_size = sizeof *p;
    p->q = rows_view(q, spec.packed_q), p->out = rows_view(out, spec.packed_q);
    p->k = rows_view(k, spec.packed_k), p->v = rows_view(v, spec.packed_k);
    p->lse = rows_view(lse, spec.packed_q);
    if (spec.packed_q) p->cu_seqlens_q = index_view(cu_q_);
    if (spec.packed_k) p->cu_seqlens_k = index_view(cu_k_);
    if (needs_used(spec.packed_q, spec.lengths_q)) p->seqused_q = index_view(used_q_);
    if (needs_used(spec.packed_k, spec.lengths_k)) p->seqused_k = index_view(used_k_);
    if (spec.sink != FLASH3_DTYPE_NONE) p->sink = heads_view(sink_);
    p->causal = spec.causal;
    p->window = spec.left || spec.right;
    p->window_left = spec.left.value_or(-1), p->window_right = spec.right.value_or(-1);
    p->softcap = spec.softcap;
    p->chunk = spec.chunk;
    p->num_threads = 1;
  }

  // N(0, 1) into the tokens that count of everything that is read.
  void fill(const ForwardProblem& p, int64_t b) {
    const uint64_t content =
        spec.contents.empty() ? static_cast<uint64_t>(b) : spec.contents[static_cast<size_t>(b)];
    const SeqInfo s = p.sequence(b);
    uint64_t i = 0;
    const auto fill_rows = [&](cases::GuardedTensor& t, bool packed, const RowRange& rows) {
      const auto& stride = t.view.stride;
      for (Index row = rows.first; row < rows.first + rows.length; ++row)
        for (int64_t h = 0; h < t.view.shape[2]; ++h)
          for (int64_t d = 0; d < t.view.shape[3]; ++d)
            store_float(t.view.data, t.view.dtype,
                        (packed ? 0 : b * stride[0]) + row * stride[1] + h * stride[2] + d,
                        cases::normal_value(content, i++));
    };
    fill_rows(q, spec.packed_q, s.q);
    fill_rows(k, spec.packed_k, s.k);
    fill_rows(v, spec.packed_k, s.k);
    fill_rows(dout, spec.packed_q, s.q);
    const auto& stride = dlse.view.stride;
    for (int64_t h = 0; h < spec.heads_q; ++h)
      for (Index row = s.q.first; row < s.q.first + s.q.length; ++row)
        static_cast<float*>(
            dlse.view.data)[(spec.packed_q ? 0 : b * stride[0]) + h * stride[1] + row] =
            cases::normal_value(content, i++);
  }

  std::vector<int32_t> cu_q_, cu_k_, used_q_, used_k_;
  std::vector<std::byte> sink_, dsink_;
};

// Bytes of row i of sequence b, all heads' after each other.
inline std::vector<std::byte> row_bytes(const TensorView& t, flash3_dtype dtype, int64_t b,
                                        int64_t row) {
  const int64_t element = dtype_size(dtype);
  std::vector<std::byte> bytes(static_cast<size_t>(t.heads * t.dim * element));
  for (int64_t h = 0; h < t.heads; ++h)
    std::memcpy(bytes.data() + h * t.dim * element,
                static_cast<const std::byte*>(t.data) +
                    (b * t.stride_batch + row * t.stride_seq + h * t.stride_head) * element,
                static_cast<size_t>(t.dim * element));
  return bytes;
}
inline std::vector<std::byte> row_bytes(const LseView& t, int64_t heads, int64_t b, int64_t row) {
  std::vector<std::byte> bytes(static_cast<size_t>(heads) * sizeof(float));
  for (int64_t h = 0; h < heads; ++h)
    std::memcpy(bytes.data() + h * 4, t.data + b * t.stride_batch + h * t.stride_head + row, 4);
  return bytes;
}

enum class Unused { kUntouched, kZero };

// Every row of the tensor: those that count are as row(b, i) says, those after them in a sequence
// as `unused` says, and all others untouched. bytes_of(b, row) reads one.
template <class BytesOf, class Row>
void check_rows(const char* name, const Sequences& sequences, int64_t batch, Unused unused,
                const BytesOf& bytes_of, const Row& row) {
  const auto all = [](const std::vector<std::byte>& bytes, std::byte value) {
    return std::all_of(bytes.begin(), bytes.end(), [&](std::byte b) { return b == value; });
  };
  std::vector<std::vector<bool>> known(sequences.packed ? 1 : static_cast<size_t>(batch));
  for (auto& k : known) k.resize(static_cast<size_t>(sequences.rows));
  for (int64_t b = 0; b < batch; ++b) {
    const RowRange rows = rows_of(sequences, b);
    for (Index i = 0; i < rows.capacity; ++i) {
      const auto bytes = bytes_of(b, rows.first + i);
      known[sequences.packed ? 0 : static_cast<size_t>(b)][static_cast<size_t>(rows.first + i)] =
          true;
      if (i < rows.length) {
        ASSERT_EQ(bytes, row(b, i)) << name << " of sequence " << b << ", row " << i;
      } else {
        ASSERT_TRUE(all(bytes, unused == Unused::kZero ? std::byte{0} : std::byte{0xFF}))
            << name << " of sequence " << b << ", unused row " << i;
      }
    }
  }
  for (size_t b = 0; b < known.size(); ++b)
    for (size_t i = 0; i < known[b].size(); ++i)
      if (!known[b][i]) {
        ASSERT_TRUE(
            all(bytes_of(static_cast<int64_t>(b), static_cast<int64_t>(i)), std::byte{0xFF}))
            << name << ", row " << i << " of no sequence";
      }
}

// Specs in which every two levels of every two factors meet: what the lengths are, how they are
// packed, masks, heads, head dims, sinks, caps. check(spec, threads).
template <class Check>
void for_each_spec(const Check& check) {
  const std::vector<flash3_dtype> dtypes{FLASH3_FLOAT32, FLASH3_BFLOAT16, FLASH3_FLOAT16};
  const std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>> lengths{
      {{1}, {1}},
      {{5, 0, 130, 1, 0, 33}, {7, 12, 65, 0, 0, 300}},
      {{64, 64, 64}, {64, 64, 64}},
      {{0, 0}, {3, 0}},
      {{201, 3, 97, 18}, {201, 3, 97, 18}},
      {{2, 1, 9, 3}, {150, 0, 1, 77}},
      {{450, 16}, {30, 513}}};
  const std::vector<std::pair<int64_t, int64_t>> heads{{1, 1}, {3, 3}, {4, 2}, {8, 1}},
      dims{{24, 40}, {64, 64}, {1, 33}, {128, 128}, {200, 17}};
  struct MaskSpec {
    bool causal;
    std::optional<int64_t> left, right;
  };
  const std::vector<MaskSpec> masks{{false, {}, {}}, {true, {}, {}}, {true, 9, {}}, {false, 3, 20}};
  const std::vector<int64_t> chunks{0, 16, 100}, spares{0, 2};
  const std::vector<float> caps{0, 0.7f, 30};
  const std::vector<flash3_dtype> sinks{FLASH3_DTYPE_NONE, FLASH3_FLOAT32, FLASH3_BFLOAT16};
  const std::vector<int> threads{1, 2, 5};
  const std::vector<cases::Layout> layouts{cases::Layout::kBatchSeq, cases::Layout::kPadded,
                                           cases::Layout::kOdd};
  const auto size = [](const auto& v) { return static_cast<int>(v.size()); };
  for (const auto& row : cases::pairwise({size(dtypes), size(lengths), size(heads), size(dims),
                                          size(masks), size(chunks), size(spares), size(caps),
                                          size(sinks), size(threads), size(layouts), 2, 2})) {
    const auto at = [&](const auto& v, int factor) { return v[static_cast<size_t>(row[factor])]; };
    RaggedSpec s;
    s.dtype = at(dtypes, 0);
    std::tie(s.lengths_q, s.lengths_k) = at(lengths, 1);
    std::tie(s.heads_q, s.heads_k) = at(heads, 2);
    std::tie(s.dim, s.dim_v) = at(dims, 3);
    s.causal = at(masks, 4).causal, s.left = at(masks, 4).left, s.right = at(masks, 4).right;
    s.chunk = at(chunks, 5), s.spare = at(spares, 6), s.softcap = at(caps, 7);
    s.sink = at(sinks, 8);
    if (s.sink != FLASH3_DTYPE_NONE && s.sink != FLASH3_FLOAT32) s.sink = s.dtype;
    s.layout = at(layouts, 10);
    s.packed_q = row[11] == 1, s.packed_k = row[12] == 1;
    SCOPED_TRACE(testing::Message()
                 << "dtype " << s.dtype << ", lengths " << row[1] << ", heads " << s.heads_q << "x"
                 << s.heads_k << ", dims " << s.dim << "x" << s.dim_v << ", mask " << row[4]
                 << ", chunk " << s.chunk << ", spare " << s.spare << ", cap " << s.softcap
                 << ", sink " << s.sink << ", packed " << s.packed_q << s.packed_k << ", threads "
                 << at(threads, 9));
    check(s, at(threads, 9));
    if (testing::Test::HasFatalFailure()) return;
  }
}

// Contiguous memory for what a sequence alone computes.
inline cases::GuardedTensor like(const TensorView& t, flash3_dtype dtype) {
  return cases::make_tensor(dtype, 1, t.seq, t.heads, t.dim, cases::Layout::kBatchSeq);
}
inline void write_to(const cases::GuardedTensor& memory, TensorView* t) {
  t->data = memory.view.data;
  t->stride_seq = memory.view.stride[1], t->stride_head = memory.view.stride[2];
}
inline void write_to(const cases::GuardedTensor& memory, LseView* t) {
  t->data = static_cast<float*>(memory.view.data);
  t->stride_head = memory.view.stride[1];
}

}  // namespace flash3::test
