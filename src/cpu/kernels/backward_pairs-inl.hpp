// SPDX-License-Identifier: Apache-2.0
// The backward of one block of keys in products of bfloat16, summed in float32: words of two
// neighbours along the summed dimension, as in the forward. P and dS are rounded to bfloat16, and
// everything else is as in backward-inl.hpp, which it shares backward_state-inl.hpp with.
//
//   K and V of the block packed once, K both as the forward packs K and as it packs V
//   for each block of rows that sees it:
//     Q, dOut as rows of words, and transposed: [dim][pair of rows]
//     for each strip of rows:  S = Q·Kᵀ, dP = dOut·Vᵀ, their softmax;  all of it in the first cache
//       P, dS as [pair of rows][key], and dS as [row][pair of keys]
//     dVᵀ += dOutᵀ·P,  dKᵀ += Qᵀ·dS
//     dQ += dS·K, in the order of the blocks of keys
//
// dK and dV are summed up transposed: so the left operand of every product is rows of words and the
// right one packed columns, which is all that AMX takes.

#include "cpu/kernels/backward_state-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace flash3::cpu {
namespace {

// The buffers of one task, cut from the thread's scratch. Strides and sizes are in words.
struct PairBuffers {
  int q_words, v_words;                     // of a row
  int rows_stride, keys_stride, ds_stride;  // of pairs of rows; of keys; of pairs of keys
  float *k_columns, *v_columns;             // as K in the forward: [panel][word][key]
  float* k;                                 // as V in the forward: [panel][pair of keys][dim]
  float *q, *dout;                          // [row][word]
  float *q_columns, *dout_columns;          // [dim][pair of rows]
  float *dk, *dv;                           // floats, [dim][key]
  float *s, *dp;            // floats of a strip, [row][key]: S and dP, then P and dS
  float *p_rows, *ds_rows;  // [row of the strip or the block][pair of keys]
  float *p, *ds;            // [pair of rows][key]
  float* stage;
  BiasBuffers biases;

  // Returns the bytes used; without a base it only measures.
  template <class Words>
  size_t cut(const BackwardProblem& problem, TileShape tile, char* base) {
    size_t used = 0;
    const auto take = [&](int64_t words) {
      float* at = base ? reinterpret_cast<float*>(base + used) : nullptr;
      used += (static_cast<size_t>(words) * sizeof(float) + 63) / 64 * 64;
      return at;
    };
    constexpr int kStep = Words::kDepth, kStripRows = Words::kStripRows;
    const auto dims = [](int dim) { return round_up(round_up(dim, kStripRows), kLanes); };
    const int rows = round_up(tile.rows, kStripRows), keys = tile.keys;
    q_words = ceil_div(problem.head_dim, 2 * kStep) * kStep;
    v_words = ceil_div(problem.head_dim_v, 2 * kStep) * kStep;
    rows_stride = kPanel;  // as transpose() writes them
    keys_stride = spread_stride(keys);
    ds_stride = spread_stride(keys / 2);
    k_columns = take(int64_t{keys} * q_words);
    v_columns = take(int64_t{keys} * v_words);
    k = take(int64_t{keys} / 2 * round_up(problem.head_dim, kLanes));
    q = take(int64_t{rows} * q_words);
    dout = take(int64_t{rows} * v_words);
    q_columns = take(int64_t{dims(problem.head_dim)} * rows_stride);
    dout_columns = take(int64_t{dims(problem.head_dim_v)} * rows_stride);
    dk = take(int64_t{dims(problem.head_dim)} * keys_stride);
    dv = take(int64_t{dims(problem.head_dim_v)} * keys_stride);
    s = take(int64_t{kStripRows} * keys_stride);
    dp = take(int64_t{kStripRows} * keys_stride);
    p_rows = take(int64_t{kStripRows} * ds_stride);
    ds_rows = take(int64_t{rows} * ds_stride);
    p = take(int64_t{rows} / 2 * keys_stride);
    ds = take(int64_t{rows} / 2 * keys_stride);
    stage = take(int64_t{kLanes} * round_up(kMaxHeadDim, kPanel));
    biases.cut(problem, keys, take);
    return used;
  }
};

static_assert(kMaxBackwardRows / 2 <= kPanel && kMaxBackwardRows % 32 == 0);

template <class Words>
class PairRunner : BackwardState<Bf16> {
 public:
  PairRunner(const BackwardTask& task, void* scratch) : BackwardState(task) {
    buffers_.template cut<Words>(p_, blocks_.tile, static_cast<char*>(scratch));
  }

  void run() {
    const PairBuffers& b = buffers_;
    load_keys();
    biases_.begin(b.biases);
    for_each_row_block([&](Index block, Range seen) { run_block(block, seen); });
    store_gradient(b.dk, p_.softmax_scale, p_.head_dim, p_.dk);
    store_gradient(b.dv, p_.dropout.scale(), p_.head_dim_v, p_.dv);
    biases_.finish();
  }

 private:
  static constexpr int kStripRows = Words::kStripRows;
  static constexpr int kStep = 2 * Words::kDepth;  // what a summed dimension is a multiple of
  static_assert(kStripRows % 2 == 0 && kStripRows % kStep == 0 && kDepth % kStep == 0);

  typename Words::Unit unit_;
  PairBuffers buffers_;
  bool k_is_finite_ = true, rows_are_finite_ = true;
  Index padded_rows_ = 0;

  void load_keys() {
    const PairBuffers& b = buffers_;
    const Index end = keys_.begin + round_up(keys_.size(), kPanel);
    const EvenRows<Bf16> k{row_of_keys(p_.k, 0), p_.k.stride_seq};
    const EvenRows<Bf16> v{row_of_keys(p_.v, 0), p_.v.stride_seq};
    pack_k<Words>(k, p_.head_dim, b.q_words, b.q_words, keys_.begin, end, blocks_.keys(), b.stage,
                  b.k_columns);
    pack_k<Words>(v, p_.head_dim_v, b.v_words, b.v_words, keys_.begin, end, blocks_.keys(), b.stage,
                  b.v_columns);
    k_is_finite_ = pack_v<Words>(k, p_.head_dim, keys_.begin, keys_.begin, end, blocks_.keys(),
                                 blocks_.tile.keys / 2, b.k);
    clear_dims(b.dk, p_.head_dim, b.keys_stride);
    clear_dims(b.dv, p_.head_dim_v, b.keys_stride);
    clear_dims(b.q_columns, p_.head_dim, b.rows_stride);
    clear_dims(b.dout_columns, p_.head_dim_v, b.rows_stride);
  }
  static void clear_dims(float* out, int dim, int stride) {
    std::fill_n(out, int64_t{round_up(round_up(dim, kStripRows), kLanes)} * stride, 0.f);
  }

  // seen: the blocks of keys that these rows see.
  void run_block(Index row_block, Range seen) {
    padded_rows_ = round_up(rows_.size(), kStripRows);
    for (Index i = 0; i < rows_.size(); ++i) {
      prefetch_ahead(i);
      load_sums(i);
    }
    rows_are_finite_ = true;
    load_rows(p_.q, p_.head_dim, buffers_.q_words, buffers_.q, buffers_.q_columns);
    load_rows(p_.dout, p_.head_dim_v, buffers_.v_words, buffers_.dout, buffers_.dout_columns);
    const bool all_seen = find_keys_of_rows();
    for (Index first = 0; first < padded_rows_; first += kStripRows) run_strip(first);

    // A masked pair takes part in a product as a zero, which must not meet an infinity or a NaN.
    const bool safe = (all_seen && !bias_hides_) || (k_is_finite_ && rows_are_finite_);
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

  // The block's rows of q or dout, as they are and transposed. Rows that only pad the last strip
  // are zero.
  void load_rows(const TensorView& t, int dim, int words, float* rows, float* columns) {
    static constexpr Bf16 kZeros[kMaxHeadDim] = {};
    float* stage = buffers_.stage;
    const int stride = round_up(dim, kLanes);
    VecF not_finite = set(0.f);  // NaN once a value was not finite
    for (Index first = 0; first < padded_rows_; first += 2 * kLanes) {
      for (Index i = first; i < first + 2 * kLanes; i += 2) {
        const Bf16* row[2];
        for (Index r = 0; r < 2; ++r) {
          row[r] = i + r < rows_.size() ? row_of_queries(t, row_[i + r]) : kZeros;
          if (i + r < padded_rows_) copy_row<Words>(row[r], dim, words, rows + (i + r) * words);
        }
        float* out = stage + (i - first) / 2 * stride;
        for (int d = 0; d < dim; d += kLanes) {
          const VecF pair = load_pair(row[0] + d, row[1] + d, dim - d);
          not_finite = Words::multiply_add(pair, set(0.f), not_finite);
          hn::Store(pair, F32(), out + d);
        }
      }
      for (int d = 0; d < dim; d += kBlock)
        transpose(stage + d, stride, columns + int64_t{d} * kPanel + first / 2);
    }
    rows_are_finite_ = rows_are_finite_ && hn::AllFalse(F32(), hn::IsNaN(not_finite));
  }
  static VecF load_pair(const Bf16* row, const Bf16* next, int count) {
    if (count >= kLanes) return Words::load_across(row, next);
    Bf16 rest[2][kLanes] = {};
    std::copy_n(row, count, rest[0]);
    std::copy_n(next, count, rest[1]);
    return Words::load_across(rest[0], rest[1]);
  }

  // What some row of the strip sees; rows that only pad it see nothing.
  Range keys_of_strip(Index first) const {
    if (first >= rows_.size()) return {};
    return keys_seen_by(first, std::min<Index>(first + kStripRows, rows_.size()) - 1);
  }

  // P and dS of a strip of rows.
  void run_strip(Index first) {
    const PairBuffers& b = buffers_;
    const Range seen = keys_of_strip(first);
    const int columns = round_up(static_cast<int>(keys_.size()), kPanel);
    if (!seen.empty()) {
      const Index panel = seen.begin / kPanel * kPanel;
      const auto vectors = static_cast<int>(ceil_div(seen.end - panel, kLanes));
      packed_scores<Words>(b.q + first * b.q_words, b.q_words, b.k_columns + panel * b.q_words,
                           vectors, b.s + panel, b.keys_stride);
      packed_scores<Words>(b.dout + first * b.v_words, b.v_words, b.v_columns + panel * b.v_words,
                           vectors, b.dp + panel, b.keys_stride);
    }
    for (int i = 0; i < kStripRows; i += 2) {
      for (int r = i; r < i + 2; ++r) {
        const Index row = first + r;
        float *p = b.s + r * b.keys_stride, *ds = b.dp + r * b.keys_stride;
        softmax_of_row(row, columns, p, ds);
        round_row(p, columns, b.p_rows + r * b.ds_stride);
        round_row(ds, columns, b.ds_rows + row * b.ds_stride);
      }
      const Index pair = (first + i) / 2;
      pair_rows(b.p_rows + i * b.ds_stride, columns, b.p + pair * b.keys_stride);
      pair_rows(b.ds_rows + (first + i) * b.ds_stride, columns, b.ds + pair * b.keys_stride);
    }
  }
  static void round_row(const float* row, int columns, float* words) {
    for (int j = 0; j < columns; j += 2 * kLanes)
      Words::store_weights(load(row + j), load(row + j + kLanes), words + j / 2);
  }
  void pair_rows(const float* words, int columns, float* out) const {
    const auto* row = reinterpret_cast<const Bf16*>(words);
    const auto* next = reinterpret_cast<const Bf16*>(words + buffers_.ds_stride);
    for (int j = 0; j < columns; j += kLanes)
      hn::Store(Words::load_across(row + j, next + j), F32(), out + j);
  }

  void add_to_keys() {
    const PairBuffers& b = buffers_;
    for (Index first = 0; first < keys_.size(); first += kPanel) {
      const Range seen = rows_that_see(first, first + kPanel);
      if (seen.empty()) continue;
      const Index begin = seen.begin / kStep * kStep / 2, end = round_up(seen.end, kStep) / 2;
      const auto vectors =
          static_cast<int>(std::min<Index>(kPanelVectors, ceil_div(keys_.size() - first, kLanes)));
      const auto add = [&](const float* rows, const float* columns, int dim, float* out) {
        for (int d = 0; d < dim; d += kStripRows)
          packed_sum<Words>(rows + int64_t{d} * b.rows_stride + begin, b.rows_stride,
                            columns + begin * b.keys_stride + first, b.keys_stride, end - begin,
                            vectors, kStripRows, out + int64_t{d} * b.keys_stride + first,
                            b.keys_stride);
      };
      add(b.dout_columns, b.p, p_.head_dim_v, b.dv);
      add(b.q_columns, b.ds, p_.head_dim, b.dk);
    }
  }

  void add_to_queries(float* dq, int stride) {
    const PairBuffers& b = buffers_;
    const int depth = blocks_.tile.keys / 2;
    // The rows after these are the next block's, which another thread may be at.
    const Index own_rows = round_up(rows_.size(), kBackwardStrip);
    for (Index first = 0; first < keys_.size(); first += kDepth)
      for (int column = 0; column < p_.head_dim; column += kPanel) {
        const int vectors = std::min(kPanelVectors, ceil_div(p_.head_dim - column, kLanes));
        const float* k = b.k + int64_t{column} * depth;
        for (Index row = 0; row < rows_.size(); row += kStripRows) {
          const Range seen = keys_of_strip(row);
          const Index begin = std::max(first, seen.begin / kStep * kStep) / 2;
          const Index end = std::min(first + kDepth, round_up(seen.end, kStep)) / 2;
          if (seen.empty() || begin >= end) continue;
          packed_sum<Words>(b.ds_rows + row * b.ds_stride + begin, b.ds_stride,
                            k + begin * vectors * kLanes, vectors * kLanes, end - begin, vectors,
                            static_cast<int>(own_rows - row), dq + row * stride + column, stride);
        }
      }
  }

  // The same two, pair by pair.
  void add_seen_pairs() {
    const PairBuffers& b = buffers_;
    for (Index i = 0; i < rows_.size(); ++i) {
      const auto add = [&](const TensorView& t, const float* weights, int dim, float* out) {
        const Bf16* row = row_of_queries(t, row_[i]);
        const auto* pairs =
            reinterpret_cast<const uint16_t*>(weights + i / 2 * b.keys_stride) + i % 2;
        for (int d = 0; d < dim; ++d, out += b.keys_stride) {
          const float x = bfloat16_to_float(row[d].bits);
          for (Index j = row_keys_[i].begin; j < row_keys_[i].end; ++j)
            if (!hides(i, j)) out[j] += bfloat16_to_float(pairs[2 * j]) * x;
        }
      };
      add(p_.dout, b.p, p_.head_dim_v, b.dv);
      add(p_.q, b.ds, p_.head_dim, b.dk);
    }
  }

  void add_seen_keys(float* dq, int stride) {
    for (Index i = 0; i < rows_.size(); ++i, dq += stride)
      for (Index j = row_keys_[i].begin; j < row_keys_[i].end; ++j) {
        if (hides(i, j)) continue;
        const VecF weight = set(Words::weight(buffers_.ds_rows + i * buffers_.ds_stride, j));
        const Bf16* k = row_of_keys(p_.k, keys_.begin + j);
        for (int d = 0; d < p_.head_dim; d += kLanes)
          store(hn::MulAdd(weight, load_first(k + d, p_.head_dim - d), load(dq + d)), dq + d);
      }
  }

  // Rows of dK or dV from their transpose, four keys and a panel of columns at a time.
  void store_gradient(const float* sums, float scale, int dim, const TensorView& t) const {
    const PairBuffers& b = buffers_;
    for (Index j = 0; j < keys_.size(); j += kBlock) {
      const Index keys = std::min<Index>(kBlock, keys_.size() - j);
      for (int column = 0; column < dim; column += kPanel) {
        const int count = std::min(kPanel, dim - column);
        for (int d = 0; d < count; d += kLanes)
          transpose(sums + int64_t{column + d} * b.keys_stride + j, b.keys_stride, b.stage + d);
        for (Index i = 0; i < keys; ++i)
          store_row(b.stage + i * kPanel, scale, count, t,
                    key_offset(t, keys_.begin + j + i) + column);
      }
    }
  }
};

#if defined(FLASH3_AMX)
using PairWords = AmxWords;
#else
using PairWords = Bf16Words;
#endif

size_t pair_scratch_bytes(const BackwardProblem& problem, TileShape tile) {
  return PairBuffers().cut<PairWords>(problem, tile, nullptr);
}

void run_pair_task(const BackwardTask& task, void* scratch) {
  PairRunner<PairWords>(task, scratch).run();
}

}  // namespace
}  // namespace flash3::cpu
HWY_AFTER_NAMESPACE();
