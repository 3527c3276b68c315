// SPDX-License-Identifier: Apache-2.0
// The backward of one block of keys, for one instruction set; float32 throughout. Included behind
// attention-inl.hpp, whose helpers it shares.
//
//   K and V of the block converted and packed once; dK = dV = 0
//   for each block of rows that sees it, the last one first:
//     Q, dOut as float;  delta = rowsum(dOut ∘ Out) − dlse
//     S = Q·Kᵀ,  dP = dOut·Vᵀ
//     P = exp(S·scale − lse),  dS = P ∘ (dP − delta);  both exactly 0 where masked
//     with a cap:  t = tanh(S·scale / cap),  P = exp(cap·t − lse)
//                  dS = P ∘ (dP − delta) ∘ (1 − t²)
//     dV += Pᵀ·dOut,  dK += dSᵀ·Q
//     dQ += dS·K, in the order of the blocks of keys
//
// The task of the next block of keys follows one block of rows behind. Under a causal mask too: all
// tasks go from the last row, which sees the most, to the first.
//
// A product goes over strips of 6 rows of its result, and over the part of the sum in which the
// mask leaves something.

#include <hwy/cache_control.h>

#include "core/arithmetic.hpp"
#include "cpu/backward_task.hpp"

HWY_BEFORE_NAMESPACE();
namespace flash3::cpu {
namespace {

static_assert(kBackwardStrip == kVectorRows);

// Floats from row to row of an array that is read down its columns: an odd number of cache lines,
// so that neighbours do not compete for the same sets.
constexpr int spread_stride(int columns) { return (ceil_div(columns, 16) | 1) * 16; }

// The buffers of one task, cut from the thread's scratch.
struct BackwardBuffers {
  int qk_stride, v_stride, p_stride;
  float *k_columns, *v_columns;   // packed as K in the forward: [panel][dim][key]
  float *k, *q, *dout, *dk, *dv;  // [key or row][dim]
  float *p, *ds;                  // [row][key]: first S and dP, then P and dS
  float *lse, *delta, *stage;

  // Returns the bytes used; without a base it only measures.
  size_t cut(const BackwardProblem& problem, TileShape tile, char* base) {
    size_t used = 0;
    const auto take = [&](int64_t floats) {
      float* at = base ? reinterpret_cast<float*>(base + used) : nullptr;
      used += (static_cast<size_t>(floats) * sizeof(float) + 63) / 64 * 64;
      return at;
    };
    const int keys = round_up(tile.keys, kVectorRows);
    qk_stride = spread_stride(problem.head_dim);
    v_stride = spread_stride(problem.head_dim_v);
    p_stride = spread_stride(keys);
    k_columns = take(int64_t{tile.keys} * problem.head_dim);
    v_columns = take(int64_t{tile.keys} * problem.head_dim_v);
    k = take(int64_t{tile.keys} * qk_stride);
    q = take(int64_t{tile.rows} * qk_stride);
    dout = take(int64_t{tile.rows} * v_stride);
    dk = take(int64_t{keys} * qk_stride);
    dv = take(int64_t{keys} * v_stride);
    p = take(int64_t{tile.rows} * p_stride);
    ds = take(int64_t{tile.rows} * p_stride);
    lse = take(tile.rows);
    delta = take(tile.rows);
    stage = take(int64_t{kLanes} *
                 ceil_div(std::max(problem.head_dim, problem.head_dim_v), kBlock) * kBlock);
    return used;
  }
};

// Keys that dQ sums up before they join what is there. Blocks of keys are whole multiples of it, so
// that their size does not change the sums; and that much of K stays in the first-level cache.
constexpr int kDepth = kKeyAlignment;

// c += a·b over words `depth` of the sum, in strips of rows: strip s over words depths[s] of it
// alone.
template <class Rows>
void add_product(Rows a, const Range* depths, int strips, Range depth, const float* b,
                 int64_t b_stride, int columns, float* c, int64_t c_stride) {
  for (int column = 0; column < columns; column += kPanel) {
    const int vectors = std::min(kPanelVectors, ceil_div(columns - column, kLanes));
    for (int s = 0; s < strips; ++s) {
      const Range words{std::max(depth.begin, depths[s].begin), std::min(depth.end, depths[s].end)};
      if (words.empty()) continue;
      const int64_t row = int64_t{s} * kVectorRows;
      multiply_columns<FloatWords<float>, Into::kAdded, kVectorRows>(
          a.from(row, words.begin), PackedColumns{b + words.begin * b_stride + column, b_stride},
          words.size(), vectors, nullptr, c + row * c_stride + column, c_stride);
    }
  }
}

// c += factor·row.
HWY_INLINE void add_row(float factor, const float* row, int columns, float* c) {
  for (int d = 0; d < columns; d += kLanes)
    store(hn::MulAdd(set(factor), load(row + d), load(c + d)), c + d);
}

bool all_finite(const float* rows, int64_t count, int64_t stride, int columns) {
  VecF not_finite = set(0.f);  // NaN once a value was not finite
  for (int64_t r = 0; r < count; ++r)
    for (int d = 0; d < columns; d += kLanes)
      not_finite = hn::MulAdd(load(rows + r * stride + d), set(0.f), not_finite);
  return hn::AllFalse(F32(), hn::IsNaN(not_finite));
}

template <class T>
class BackwardRunner {
 public:
  BackwardRunner(const BackwardTask& task, void* scratch)
      : task_(task),
        p_(*task.problem),
        blocks_(task.blocks),
        keys_(blocks_.keys_of(task.key_block)) {
    buffers_.cut(p_, blocks_.tile, static_cast<char*>(scratch));
  }

  void run() {
    load_keys();
    for (Index i = blocks_.row_blocks() - 1; i >= 0; --i) {
      const Range seen = blocks_.key_blocks_of(i);
      if (seen.begin <= task_.key_block && task_.key_block < seen.end) run_block(i, seen);
    }
    for (Index j = keys_.begin; j < keys_.end; ++j) {
      store_row(buffers_.dk + (j - keys_.begin) * buffers_.qk_stride, p_.softmax_scale, p_.head_dim,
                p_.dk, key_offset(p_.dk, j));
      store_row(buffers_.dv + (j - keys_.begin) * buffers_.v_stride, 1.f, p_.head_dim_v, p_.dv,
                key_offset(p_.dv, j));
    }
  }

 private:
  using Words = FloatWords<T>;

  const BackwardTask& task_;
  const BackwardProblem& p_;
  const BackwardBlocks& blocks_;
  const Range keys_;
  BackwardBuffers buffers_;
  bool k_is_finite_ = true;

  // The current block of rows, counted from its first row, and from the first key of the task.
  Range rows_;
  int row_strips_ = 0, key_strips_ = 0;
  PackedRow row_[kMaxBackwardRows];
  Range row_keys_[kMaxBackwardRows];                           // keys that the row sees
  Range strip_keys_[kMaxBackwardRows / kVectorRows];           // that some row of the strip sees
  Range strip_rows_[ceil_div(kMaxBackwardKeys, kVectorRows)];  // rows that see a key of the strip

  int64_t key_offset(const TensorView& t, Index j) const {
    return row_offset(t, blocks_.sequence.batch, blocks_.sequence.k, j, task_.kv_head);
  }
  int64_t query_offset(const TensorView& t, PackedRow row) const {
    return row_offset(t, blocks_.sequence.batch, blocks_.sequence.q, row.query, row.head);
  }
  const T* row_of_keys(const TensorView& t, Index j) const {
    return static_cast<const T*>(t.data) + key_offset(t, j);
  }
  const T* row_of_queries(const TensorView& t, PackedRow row) const {
    return static_cast<const T*>(t.data) + query_offset(t, row);
  }
  float value_of(const LseView& t, PackedRow row) const {
    return t.data[row_offset(t, blocks_.sequence, row.query, row.head)];
  }

  template <class Out>
  static void store_scaled(const float* row, float scale, int dim, Out* out) {
    for (int d = 0; d < dim; d += kLanes)
      store_first(hn::Mul(load(row + d), set(scale)), out + d, dim - d);
  }
  // A row of a gradient, T or float32.
  void store_row(const float* row, float scale, int dim, const TensorView& t,
                 int64_t offset) const {
    if (p_.gradient_dtype == p_.dtype)
      store_scaled(row, scale, dim, static_cast<T*>(t.data) + offset);
    else
      store_scaled(row, scale, dim, static_cast<float*>(t.data) + offset);
  }

  void load_keys() {
    const BackwardBuffers& b = buffers_;
    const Index end = keys_.begin + round_up(keys_.size(), kPanel);
    const EvenRows<T> k{row_of_keys(p_.k, 0), p_.k.stride_seq};
    const EvenRows<T> v{row_of_keys(p_.v, 0), p_.v.stride_seq};
    pack_k<Words>(k, p_.head_dim, p_.head_dim, keys_.begin, end, blocks_.keys(), b.stage,
                  b.k_columns);
    pack_k<Words>(v, p_.head_dim_v, p_.head_dim_v, keys_.begin, end, blocks_.keys(), b.stage,
                  b.v_columns);
    const int words = round_up(p_.head_dim, kLanes);
    for (Index j = keys_.begin; j < keys_.end; ++j)
      copy_row<Words>(row_of_keys(p_.k, j), p_.head_dim, words,
                      b.k + (j - keys_.begin) * b.qk_stride);
    k_is_finite_ = all_finite(b.k, keys_.size(), b.qk_stride, p_.head_dim);

    key_strips_ = ceil_div(static_cast<int>(keys_.size()), kVectorRows);
    std::fill_n(b.dk, int64_t{key_strips_} * kVectorRows * b.qk_stride, 0.f);
    std::fill_n(b.dv, int64_t{key_strips_} * kVectorRows * b.v_stride, 0.f);
  }

  // seen: the blocks of keys that these rows see.
  void run_block(Index row_block, Range seen) {
    const BackwardBuffers& b = buffers_;
    rows_ = blocks_.rows_of(row_block);
    row_strips_ = ceil_div(static_cast<int>(rows_.size()), kVectorRows);
    load_rows();
    const bool all_seen = find_seen();
    multiply_scores(b.q, b.qk_stride, b.k_columns, p_.head_dim, b.p);
    multiply_scores(b.dout, b.v_stride, b.v_columns, p_.head_dim_v, b.ds);
    for (int i = 0; i < row_strips_ * kVectorRows; ++i) softmax_backward(i);

    // A masked pair takes part in a product as a zero, which must not meet an infinity or a NaN.
    const bool safe =
        all_seen || (k_is_finite_ && all_finite(b.q, rows_.size(), b.qk_stride, p_.head_dim) &&
                     all_finite(b.dout, rows_.size(), b.v_stride, p_.head_dim_v));
    if (safe)
      add_to_keys();
    else
      add_seen_pairs();

    std::atomic<int>& next_keys = task_.next_keys[row_block];
    const int own = static_cast<int>(task_.key_block);
    for (int now; (now = next_keys.load(std::memory_order_acquire)) != own;) next_keys.wait(now);
    const int stride = dq_stride(p_.head_dim);
    float* dq = task_.dq + rows_.begin * stride;
    if (seen.begin == task_.key_block) {
      std::fill_n(dq, int64_t{row_strips_} * kVectorRows * stride, 0.f);
      if (task_.sink_terms)
        for (Index i = 0; i < rows_.size(); ++i)
          task_.sink_terms[rows_.begin + i] =
              sink_term(p_, row_[i].head, buffers_.lse[i], buffers_.delta[i]);
    }
    if (safe)
      add_to_queries(dq, stride);
    else
      add_seen_keys(dq, stride);
    if (seen.end - 1 == task_.key_block)
      for (Index i = 0; i < rows_.size(); ++i)
        store_row(dq + i * stride, p_.softmax_scale, p_.head_dim, p_.dq,
                  query_offset(p_.dq, row_[i]));
    next_keys.store(own + 1, std::memory_order_release);
    next_keys.notify_all();
  }

  static void prefetch(const T* row, int dim) {
    for (int d = 0; d < dim; d += 64 / static_cast<int>(sizeof(T))) hwy::Prefetch(row + d);
  }

  // Rows that only pad the last strip are zero.
  void load_rows() {
    const BackwardBuffers& b = buffers_;
    const int q_words = round_up(p_.head_dim, kLanes);
    const int v_words = round_up(p_.head_dim_v, kLanes);
    // Once for each row: a division takes as long as a load that misses a cache.
    for (Index i = 0; i < rows_.size(); ++i)
      row_[i] = packed_row(blocks_.group, task_.kv_head, rows_.begin + i);
    for (int i = 0; i < row_strips_ * kVectorRows; ++i) {
      float *q = b.q + i * b.qk_stride, *dout = b.dout + i * b.v_stride;
      if (i >= rows_.size()) {
        std::fill_n(q, q_words, 0.f);
        std::fill_n(dout, v_words, 0.f);
        continue;
      }
      constexpr int kAhead = 6;  // rows of a head may be pages apart, where no hardware looks ahead
      if (i + kAhead < rows_.size()) {
        prefetch(row_of_queries(p_.q, row_[i + kAhead]), p_.head_dim);
        prefetch(row_of_queries(p_.dout, row_[i + kAhead]), p_.head_dim_v);
        prefetch(row_of_queries(p_.out, row_[i + kAhead]), p_.head_dim_v);
      }
      const PackedRow row = row_[i];
      copy_row<Words>(row_of_queries(p_.q, row), p_.head_dim, q_words, q);
      copy_row<Words>(row_of_queries(p_.dout, row), p_.head_dim_v, v_words, dout);
      const T* out = row_of_queries(p_.out, row);
      VecF sum = set(0.f);
      for (int d = 0; d < p_.head_dim_v; d += kLanes)
        sum = hn::MulAdd(load(dout + d), load_first(out + d, p_.head_dim_v - d), sum);
      b.delta[i] = hn::GetLane(hn::SumOfLanes(F32(), sum));
      if (p_.dlse.data) b.delta[i] -= value_of(p_.dlse, row);
      b.lse[i] = value_of(p_.lse, row);
    }
  }

  // What rows first … last of the block see of the task's keys.
  Range keys_seen_by(Index first, Index last) const {
    const Range seen =
        blocks_.sequence.mask.keys({row_[first].query, row_[last].query + 1}, blocks_.keys());
    const Index begin = std::clamp(seen.begin, keys_.begin, keys_.end);
    return {begin - keys_.begin, std::clamp(seen.end, begin, keys_.end) - keys_.begin};
  }

  // Fills the ranges; true if every row sees every key.
  bool find_seen() {
    bool all = true;
    std::fill_n(row_keys_, row_strips_ * kVectorRows, Range{});
    for (Index i = 0; i < rows_.size(); ++i) {
      // Gradients of a row that saw nothing are zero, even if it was the scores that hid all keys.
      if (buffers_.lse[i] != -kInfinity) row_keys_[i] = keys_seen_by(i, i);
      all = all && row_keys_[i].size() == keys_.size();
    }
    for (int s = 0; s < row_strips_; ++s) {
      const Index first = s * kVectorRows;
      strip_keys_[s] = keys_seen_by(first, std::min(first + kVectorRows, rows_.size()) - 1);
    }
    for (int s = 0; s < key_strips_; ++s) {
      const Index first = keys_.begin + s * kVectorRows;
      const Range seen = blocks_.rows_that_see({first, std::min(first + kVectorRows, keys_.end)});
      const Index begin = std::clamp(seen.begin, rows_.begin, rows_.end);
      strip_rows_[s] = {begin - rows_.begin, std::clamp(seen.end, begin, rows_.end) - rows_.begin};
    }
    return all;
  }

  // out = rows·columns, where a strip of rows sees something.
  void multiply_scores(const float* rows, int stride, const float* columns, int dim, float* out) {
    for (Index first = 0; first < keys_.size(); first += kPanel, columns += int64_t{dim} * kPanel)
      for (int s = 0; s < row_strips_; ++s) {
        const Range seen = strip_keys_[s];
        if (seen.empty() || seen.end <= first || seen.begin >= first + kPanel) continue;
        const Index vectors = ceil_div(seen.end - first, kLanes);
        const int64_t row = int64_t{s} * kVectorRows;
        multiply_columns<FloatWords<float>, Into::kFresh, kVectorRows>(
            PackedRows{rows + row * stride, stride}, PackedColumns{columns, kPanel}, dim,
            static_cast<int>(std::min<Index>(kPanelVectors, vectors)), nullptr,
            out + row * buffers_.p_stride + first, buffers_.p_stride);
      }
  }

  // S and dP of a row become P and dS.
  void softmax_backward(int i) {
    const BackwardBuffers& b = buffers_;
    float *p = b.p + i * b.p_stride, *ds = b.ds + i * b.p_stride;
    const Range own = row_keys_[i];
    if (!own.empty()) {
      // Base 2 only behind the difference: scale · log2 e, rounded, would be an error of the
      // score's size, which lse, unlike the sum that the forward divides by, does not share.
      const VecF scale = set(p_.softmax_scale), lse = set(b.lse[i]), log2_e = set(float(kLog2E));
      const VecF delta = set(b.delta[i]);
      const Index begin = own.begin / kLanes * kLanes;
      if (p_.softcap > 0) {
        const VecF cap = set(p_.softcap), scale_over_cap = set(p_.softmax_scale / p_.softcap);
        for (Index j = begin; j < own.end; j += kLanes) {
          const Tanh t = tanh(hn::Mul(load(p + j), scale_over_cap));
          const VecF weight = exp2(hn::Mul(hn::MulSub(t.value, cap, lse), log2_e));
          store(weight, p + j);
          store(hn::Mul(hn::Mul(weight, t.slope), hn::Sub(load(ds + j), delta)), ds + j);
        }
      } else {
        for (Index j = begin; j < own.end; j += kLanes) {
          const VecF weight = exp2(hn::Mul(hn::MulSub(load(p + j), scale, lse), log2_e));
          store(weight, p + j);
          store(hn::Mul(weight, hn::Sub(load(ds + j), delta)), ds + j);
        }
      }
    }
    for (float* row : {p, ds}) {
      std::fill(row, row + own.begin, 0.f);
      std::fill(row + own.end, row + b.p_stride, 0.f);
    }
  }

  void add_to_keys() {
    const BackwardBuffers& b = buffers_;
    const Range all{0, rows_.size()};
    add_product(TransposedRows{b.p, b.p_stride}, strip_rows_, key_strips_, all, b.dout, b.v_stride,
                p_.head_dim_v, b.dv, b.v_stride);
    add_product(TransposedRows{b.ds, b.p_stride}, strip_rows_, key_strips_, all, b.q, b.qk_stride,
                p_.head_dim, b.dk, b.qk_stride);
  }

  void add_to_queries(float* dq, int stride) {
    const BackwardBuffers& b = buffers_;
    for (Index first = 0; first < keys_.size(); first += kDepth)
      add_product(PackedRows{b.ds, b.p_stride}, strip_keys_, row_strips_, {first, first + kDepth},
                  b.k, b.qk_stride, p_.head_dim, dq, stride);
  }

  // The same two, pair by pair.
  void add_seen_pairs() {
    const BackwardBuffers& b = buffers_;
    for (Index i = 0; i < rows_.size(); ++i)
      for (Index j = row_keys_[i].begin; j < row_keys_[i].end; ++j) {
        add_row(b.p[i * b.p_stride + j], b.dout + i * b.v_stride, p_.head_dim_v,
                b.dv + j * b.v_stride);
        add_row(b.ds[i * b.p_stride + j], b.q + i * b.qk_stride, p_.head_dim,
                b.dk + j * b.qk_stride);
      }
  }

  void add_seen_keys(float* dq, int stride) {
    const BackwardBuffers& b = buffers_;
    for (Index i = 0; i < rows_.size(); ++i)
      for (Index j = row_keys_[i].begin; j < row_keys_[i].end; ++j)
        add_row(b.ds[i * b.p_stride + j], b.k + j * b.qk_stride, p_.head_dim, dq + i * stride);
  }
};

size_t backward_scratch_bytes(const BackwardProblem& problem, TileShape tile) {
  return BackwardBuffers().cut(problem, tile, nullptr);
}

void run_backward_task(const BackwardTask& task, void* scratch) {
  switch (task.problem->dtype) {
    case FLASH3_FLOAT16: return BackwardRunner<Fp16>(task, scratch).run();
    case FLASH3_BFLOAT16: return BackwardRunner<Bf16>(task, scratch).run();
    default: return BackwardRunner<float>(task, scratch).run();
  }
}

}  // namespace
}  // namespace flash3::cpu
HWY_AFTER_NAMESPACE();
