// SPDX-License-Identifier: Apache-2.0
// The backward of one block of keys, for one instruction set; float32 throughout. Included after
// attention-inl.hpp, whose helpers it shares.
//
//   K and V of the block converted and packed once; dK = dV = 0
//   for each block of rows that sees it, the last one first:
//     Q, dOut as float;  delta = rowsum(dOut ∘ Out) − dlse
//     S = Q·Kᵀ,  dP = dOut·Vᵀ
//     P = exp(S·scale − lse),  dS = P ∘ (dP − delta);  both exactly 0 where masked
//     with a cap:  t = tanh(S·scale / cap),  P = exp(cap·t − lse)
//                  dS = P ∘ (dP − delta) ∘ (1 − t²)
//     with dropout: dP, and then P, are those of the kept weights, divided by 1 − p
//     dV += Pᵀ·dOut,  dK += dSᵀ·Q
//     dQ += dS·K, in the order of the blocks of keys
//
// The task of the next block of keys follows by one block of rows, also under a causal mask: all
// tasks go from the last row, which sees the most, to the first.
//
// A product goes over strips of 6 rows of its result, and over the part of the sum in which the
// mask leaves something.

#include "core/arithmetic.hpp"
#include "cpu/kernels/backward_state-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace flash3::cpu {
namespace {

static_assert(kBackwardStrip == kVectorRows);

// The buffers of one task, cut from the thread's scratch.
struct BackwardBuffers {
  int qk_stride, v_stride, p_stride;
  float *k_columns, *v_columns;   // packed as K in the forward: [panel][dim][key]
  float *k, *q, *dout, *dk, *dv;  // [key or row][dim]
  float *p, *ds;                  // [row][key]: first S and dP, then P and dS
  float* stage;
  BiasBuffers biases;

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
    stage = take(int64_t{kLanes} *
                 ceil_div(std::max(problem.head_dim, problem.head_dim_v), kBlock) * kBlock);
    biases.cut(problem, tile.keys, take);
    return used;
  }
};

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
class BackwardRunner : BackwardState<T> {
 public:
  BackwardRunner(const BackwardTask& task, void* scratch) : State(task) {
    buffers_.cut(p_, blocks_.tile, static_cast<char*>(scratch));
  }

  void run() {
    load_keys();
    biases_.begin(buffers_.biases);
    for_each_row_block([&](Index block, Range seen) { run_block(block, seen); });
    for (Index j = keys_.begin; j < keys_.end; ++j) {
      store_row(buffers_.dk + (j - keys_.begin) * buffers_.qk_stride, p_.softmax_scale, p_.head_dim,
                p_.dk, key_offset(p_.dk, j));
      store_row(buffers_.dv + (j - keys_.begin) * buffers_.v_stride, p_.dropout.scale(),
                p_.head_dim_v, p_.dv, key_offset(p_.dv, j));
    }
    biases_.finish();
  }

 private:
  using Words = FloatWords<T>;

  using State = BackwardState<T>;
  using State::add_in_order, State::bias_hides_, State::biases_, State::blocks_,
      State::find_keys_of_rows, State::for_each_row_block, State::hides, State::key_offset,
      State::keys_, State::keys_seen_by, State::load_sums, State::p_, State::prefetch_ahead,
      State::row_, State::row_keys_, State::row_of_keys, State::row_of_queries, State::rows_,
      State::rows_that_see, State::softmax_of_row, State::store_row;

  BackwardBuffers buffers_;
  bool k_is_finite_ = true;

  // These are of the current block of rows.
  int row_strips_ = 0, key_strips_ = 0;
  Range strip_keys_[kMaxBackwardRows / kVectorRows];           // that some row of the strip sees
  Range strip_rows_[ceil_div(kMaxBackwardKeys, kVectorRows)];  // rows that see a key of the strip

  void load_keys() {
    const BackwardBuffers& b = buffers_;
    const Index end = keys_.begin + round_up(keys_.size(), kPanel);
    const EvenRows<T> k{row_of_keys(p_.k, 0), p_.k.stride_seq};
    const EvenRows<T> v{row_of_keys(p_.v, 0), p_.v.stride_seq};
    pack_k<Words>(k, p_.head_dim, p_.head_dim, p_.head_dim, keys_.begin, end, blocks_.keys(),
                  b.stage, b.k_columns);
    pack_k<Words>(v, p_.head_dim_v, p_.head_dim_v, p_.head_dim_v, keys_.begin, end, blocks_.keys(),
                  b.stage, b.v_columns);
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
    row_strips_ = ceil_div(static_cast<int>(rows_.size()), kVectorRows);
    load_rows();
    const bool all_seen = find_seen();
    multiply_scores(b.q, b.qk_stride, b.k_columns, p_.head_dim, b.p);
    multiply_scores(b.dout, b.v_stride, b.v_columns, p_.head_dim_v, b.ds);
    for (int i = 0; i < row_strips_ * kVectorRows; ++i)
      softmax_of_row(i, b.p_stride, b.p + i * b.p_stride, b.ds + i * b.p_stride);

    // A masked pair takes part in a product as a zero, which must not meet an infinity or a NaN.
    const bool safe = (all_seen && !bias_hides_) ||
                      (k_is_finite_ && all_finite(b.q, rows_.size(), b.qk_stride, p_.head_dim) &&
                       all_finite(b.dout, rows_.size(), b.v_stride, p_.head_dim_v));
    if (safe)
      add_to_keys();
    else
      add_seen_pairs();

    add_in_order(row_block, seen, [&](float* dq, int stride) {
      if (safe)
        add_to_queries(dq, stride);
      else
        add_seen_keys(dq, stride);
    });
  }

  // Rows that only pad the last strip are zero.
  void load_rows() {
    const BackwardBuffers& b = buffers_;
    const int q_words = round_up(p_.head_dim, kLanes);
    const int v_words = round_up(p_.head_dim_v, kLanes);
    for (int i = 0; i < row_strips_ * kVectorRows; ++i) {
      float *q = b.q + i * b.qk_stride, *dout = b.dout + i * b.v_stride;
      if (i >= rows_.size()) {
        std::fill_n(q, q_words, 0.f);
        std::fill_n(dout, v_words, 0.f);
        continue;
      }
      prefetch_ahead(i);
      const PackedRow row = row_[i];
      copy_row<Words>(row_of_queries(p_.q, row), p_.head_dim, q_words, q);
      copy_row<Words>(row_of_queries(p_.dout, row), p_.head_dim_v, v_words, dout);
      load_sums(i);
    }
  }

  // Fills the ranges; true if every row sees every key.
  bool find_seen() {
    const bool all = find_keys_of_rows();
    for (int s = 0; s < row_strips_; ++s) {
      const Index first = s * kVectorRows;
      strip_keys_[s] = keys_seen_by(first, std::min(first + kVectorRows, rows_.size()) - 1);
    }
    for (int s = 0; s < key_strips_; ++s) {
      const Index first = s * kVectorRows;
      strip_rows_[s] = rows_that_see(first, first + kVectorRows);
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
        if (hides(i, j)) continue;
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
        if (!hides(i, j))
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
