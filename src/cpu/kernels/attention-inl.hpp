// Tiled attention with an online softmax, for one instruction set. The file of that set defines
// HWY_TARGET and includes this one, which defines run_task and scratch_bytes.
//
//   for each tile of keys:           K and V packed once, for all rows of the task
//     for each strip of 6 rows:      everything of a strip stays in the first-level cache
//       S = Q·Kᵀ                     multiply()
//       P = exp2(S·scale − max)      softmax_row(): running max and sum, masked entries exactly 0
//       O = O·correction + P·V       multiply()
//   out = O / sum,  lse = ln 2 · (max + log2 sum)
#pragma once

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/convert.hpp"
#include "cpu/attention_task.hpp"

// clang-format off: the second needs the first
#include "cpu/kernels/simd-inl.hpp"
#include "cpu/kernels/pack-inl.hpp"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flash3 {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// c = a·b, or c = c·scale[row] + a·b, for kStripRows rows and kVectors vectors of columns.
template <class Words, int kVectors>
HWY_NOINLINE void multiply_panel(const float* a, int64_t a_stride, const float* b, int64_t depth,
                                 const float* scale, float* c, int64_t c_stride) {
  VecF sum[kStripRows][kVectors];
  for (int r = 0; r < kStripRows; ++r)
    for (int i = 0; i < kVectors; ++i)
      sum[r][i] = scale ? hn::Mul(hn::Load(F32(), c + r * c_stride + i * kLanes), set(scale[r]))
                        : hn::Zero(F32());
  for (int64_t k = 0; k < depth; ++k, ++a, b += kVectors * kLanes) {
    VecF column[kVectors];
    for (int i = 0; i < kVectors; ++i) column[i] = hn::Load(F32(), b + i * kLanes);
    for (int r = 0; r < kStripRows; ++r) {
      const auto element = set(a[r * a_stride]);
      for (int i = 0; i < kVectors; ++i)
        sum[r][i] = Words::multiply_add(element, column[i], sum[r][i]);
    }
  }
  for (int r = 0; r < kStripRows; ++r)
    for (int i = 0; i < kVectors; ++i) hn::Store(sum[r][i], F32(), c + r * c_stride + i * kLanes);
}

// The same for `vectors` vectors of columns in panels that are panel_stride words apart.
template <class Words>
void multiply(const float* a, int64_t a_stride, const float* b, int64_t first, int64_t depth,
              int64_t panel_depth, int vectors, const float* scale, float* c, int64_t c_stride) {
  for (; vectors >= kPanelVectors; vectors -= kPanelVectors) {
    multiply_panel<Words, kPanelVectors>(a, a_stride, b + first * kPanel, depth, scale, c,
                                         c_stride);
    b += panel_depth * kPanel;
    c += kPanel;
  }
  b += first * vectors * kLanes;
  if constexpr (kPanelVectors == 4) {
    if (vectors == 3) multiply_panel<Words, 3>(a, a_stride, b, depth, scale, c, c_stride);
    if (vectors == 2) multiply_panel<Words, 2>(a, a_stride, b, depth, scale, c, c_stride);
  }
  if (vectors == 1) multiply_panel<Words, 1>(a, a_stride, b, depth, scale, c, c_stride);
}

// Turns scores [begin, end) of one row, a multiple of 2 · kLanes, into weights; updates the row's
// max and sum; returns the factor that brings what was summed before to the new max.
template <class Words>
HWY_INLINE float softmax_row(const float* scores, int64_t begin, int64_t end, float scale,
                             float* weights, float* row_max, float* row_sum) {
  VecF max0 = set(-kInfinity), max1 = max0;
  for (int64_t j = begin; j < end; j += 2 * kLanes) {
    max0 = hn::Max(max0, hn::Load(F32(), scores + j));
    max1 = hn::Max(max1, hn::Load(F32(), scores + j + kLanes));
  }
  const float tile_max = hn::GetLane(hn::MaxOfLanes(F32(), hn::Max(max0, max1)));
  const float max = std::max(*row_max, tile_max * scale);
  const float origin = max == -kInfinity ? 0.f : max;
  const float correction = *row_max == max ? 1.f : std::exp2(*row_max - origin);

  const VecF factor = set(scale), shift = set(origin);
  VecF sum0 = hn::Zero(F32()), sum1 = sum0;
  for (int64_t j = begin; j < end; j += 2 * kLanes) {
    const VecF p0 = exp2(hn::MulSub(hn::Load(F32(), scores + j), factor, shift));
    const VecF p1 = exp2(hn::MulSub(hn::Load(F32(), scores + j + kLanes), factor, shift));
    sum0 = hn::Add(sum0, p0);
    sum1 = hn::Add(sum1, p1);
    Words::store_weights(p0, p1, weights + j / Words::kElements);
  }
  *row_max = max;
  *row_sum = *row_sum * correction + hn::GetLane(hn::SumOfLanes(F32(), hn::Add(sum0, sum1)));
  return correction;
}

// The buffers of one task, cut from the thread's scratch.
struct Buffers {
  int q_words, k_words, v_words;  // per row; v_words in whole vectors of columns
  float *q, *k, *v, *scores, *weights, *out, *max, *sum, *stage;

  // elements: how many share a word. Returns the bytes used; with base null only measures.
  size_t cut(const ForwardProblem& p, TileShape tile, int elements, char* base) {
    size_t used = 0;
    const auto take = [&](int64_t words) {
      float* at = reinterpret_cast<float*>(base + used);
      used += (static_cast<size_t>(words) * sizeof(float) + 63) / 64 * 64;
      return at;
    };
    const int rows = div_up(tile.rows, kStripRows) * kStripRows;
    q_words = div_up(p.head_dim, elements);
    v_words = div_up(p.head_dim_v, kLanes) * kLanes;
    q = take(int64_t{rows} * q_words);
    k = take(int64_t{tile.keys} * q_words);
    v = take(int64_t{tile.keys} / elements * v_words);
    scores = take(int64_t{kStripRows} * tile.keys);
    weights = take(int64_t{kStripRows} * tile.keys / elements);
    out = take(int64_t{rows} * v_words);
    max = take(rows);
    sum = take(rows);
    stage = take(int64_t{kLanes} * div_up(q_words, kBlock) * kBlock);
    return used;
  }
};

template <class Words>
class TaskRunner {
 public:
  using Element = typename Words::Element;

  TaskRunner(const AttentionTask& task, TileShape tile, void* scratch)
      : task_(task), p_(*task.problem), tile_(tile), group_(p_.queries_per_kv_head()) {
    buffers_.cut(p_, tile, Words::kElements, static_cast<char*>(scratch));
  }

  void run() {
    load_q();
    std::fill_n(buffers_.max, padded_rows(), -kInfinity);
    std::fill_n(buffers_.sum, padded_rows(), 0.f);
    std::fill_n(buffers_.out, padded_rows() * buffers_.v_words, 0.f);
    // Rows that only pad the last strip are computed too, from whatever is here: let it be zero.
    std::fill_n(buffers_.weights, kStripRows * tile_.keys / Words::kElements, 0.f);
    const Range seen = seen_by(task_.rows, task_.keys);
    if (!seen.empty()) {
      for (Index begin = seen.begin / tile_.keys * tile_.keys; begin < seen.end;
           begin += tile_.keys)
        run_tile(begin, {std::max(begin, seen.begin), std::min(begin + tile_.keys, seen.end)});
    }
    for (Index r = task_.rows.begin; r < task_.rows.end; ++r) finish_row(r);
  }

 private:
  const AttentionTask& task_;
  const ForwardProblem& p_;
  const TileShape tile_;
  const Index group_;
  Buffers buffers_;
  bool v_is_finite_ = true;

  Index padded_rows() const {
    return (task_.rows.size() + kStripRows - 1) / kStripRows * kStripRows;
  }
  Range queries(Range rows) const { return {rows.begin / group_, (rows.end - 1) / group_ + 1}; }
  // The part of `keys` that some of these packed rows see.
  Range seen_by(Range rows, Range keys) const {
    const Range seen = p_.band.keys(queries(rows), p_.seq_k);
    return {std::max(seen.begin, keys.begin), std::min(seen.end, keys.end)};
  }
  // Start of packed row r of a tensor of query heads.
  Index row_offset(const TensorView& t, Index r) const {
    return task_.batch * t.stride_batch + r / group_ * t.stride_seq +
           (task_.kv_head * group_ + r % group_) * t.stride_head;
  }
  const Element* kv_head(const TensorView& t) const {
    return static_cast<const Element*>(t.data) + task_.batch * t.stride_batch +
           task_.kv_head * t.stride_head;
  }

  void load_q() {
    float* out = buffers_.q;
    for (Index i = 0; i < padded_rows(); ++i, out += buffers_.q_words) {
      const Index r = task_.rows.begin + i;
      if (r < task_.rows.end)
        copy_row<Words>(static_cast<const Element*>(p_.q.data) + row_offset(p_.q, r), p_.head_dim,
                        buffers_.q_words, out);
      else
        std::fill_n(out, buffers_.q_words, 0.f);
    }
  }

  // Keys [seen) of the tile that starts at `begin`.
  void run_tile(Index begin, Range seen) {
    const Index panels_begin = (seen.begin - begin) / kPanel * kPanel;
    const Index panels_end = (seen.end - begin + kPanel - 1) / kPanel * kPanel;
    pack_k<Words>(kv_head(p_.k), p_.k.stride_seq, p_.head_dim, begin + panels_begin,
                  begin + panels_end, p_.seq_k, buffers_.stage,
                  buffers_.k + panels_begin * buffers_.q_words);
    constexpr Index kPair = Words::kElements;
    v_is_finite_ = pack_v<Words>(kv_head(p_.v), p_.v.stride_seq, p_.head_dim_v, begin,
                                 seen.begin / kPair * kPair, (seen.end + kPair - 1) / kPair * kPair,
                                 p_.seq_k, tile_.keys / kPair, buffers_.v);
    for (Index r = task_.rows.begin; r < task_.rows.end; r += kStripRows) {
      const Range rows{r, std::min(r + kStripRows, task_.rows.end)};
      const Range keys = seen_by(rows, seen);
      if (!keys.empty()) run_strip(begin, rows, keys);
    }
  }

  // keys: those of the tile at `begin` that some row of the strip sees.
  void run_strip(Index begin, Range rows, Range keys) {
    const Index strip = rows.begin - task_.rows.begin;
    const Index first = keys.begin - begin, last = keys.end - begin;  // within the tile
    const Index panels_begin = first / kPanel * kPanel;
    const Index panels_end = (last + kPanel - 1) / kPanel * kPanel;
    multiply<Words>(buffers_.q + strip * buffers_.q_words, buffers_.q_words,
                    buffers_.k + panels_begin * buffers_.q_words, 0, buffers_.q_words,
                    buffers_.q_words, static_cast<int>((panels_end - panels_begin) / kLanes),
                    nullptr, buffers_.scores + panels_begin, tile_.keys);

    constexpr Index kStep = 2 * kLanes;
    const Index softmax_begin = first / kStep * kStep;
    const Index softmax_end = (last + kStep - 1) / kStep * kStep;
    float correction[kStripRows] = {};
    for (Index i = 0; i < rows.size(); ++i) {
      // What this row does not see of what the softmax runs over is −∞ from here on.
      const Range own = p_.band.keys(queries({rows.begin + i, rows.begin + i + 1}), p_.seq_k);
      float* scores = buffers_.scores + i * tile_.keys;
      const Index own_begin = std::clamp(own.begin - begin, softmax_begin, softmax_end);
      const Index own_end = std::clamp(std::min(own.end, keys.end) - begin, own_begin, softmax_end);
      std::fill(scores + softmax_begin, scores + own_begin, -kInfinity);
      std::fill(scores + own_end, scores + softmax_end, -kInfinity);
      correction[i] =
          softmax_row<Words>(scores, softmax_begin, softmax_end, p_.softmax_scale * 1.44269504f,
                             buffers_.weights + i * tile_.keys / Words::kElements,
                             buffers_.max + strip + i, buffers_.sum + strip + i);
    }

    constexpr Index kPair = Words::kElements;
    const Index word = first / kPair, end_word = (last + kPair - 1) / kPair;
    float* out = buffers_.out + strip * buffers_.v_words;
    const bool masked = !p_.band.covers(
        queries(rows), {begin + word * kPair, std::min<Index>(begin + end_word * kPair, p_.seq_k)});
    if (masked && !v_is_finite_) return add_seen_values(begin, rows, keys, correction, out);
    multiply<Words>(buffers_.weights + word, tile_.keys / kPair, buffers_.v, word, end_word - word,
                    tile_.keys / kPair, buffers_.v_words / kLanes, correction, out,
                    buffers_.v_words);
  }

  // P·V where V holds infinities or NaN and the strip masks some keys: zero weight times infinity
  // would be NaN, so that only what a row sees may be multiplied. Slow, and rare.
  void add_seen_values(Index begin, Range rows, Range keys, const float* correction, float* out) {
    for (Index i = 0; i < rows.size(); ++i, out += buffers_.v_words) {
      const Range own = seen_by({rows.begin + i, rows.begin + i + 1}, keys);
      const float* weights = buffers_.weights + i * tile_.keys / Words::kElements;
      for (int d = 0; d < p_.head_dim_v; ++d) {
        out[d] *= correction[i];
        for (Index j = own.begin; j < own.end; ++j)
          out[d] += Words::weight(weights, j - begin) *
                    hn::GetLane(load_first(kv_head(p_.v) + j * p_.v.stride_seq + d, 1));
      }
    }
  }

  void finish_row(Index r) {
    const Index i = r - task_.rows.begin;
    const float* row = buffers_.out + i * buffers_.v_words;
    const float max = buffers_.max[i], sum = buffers_.sum[i];
    if (task_.partial.out) {
      std::copy_n(row, p_.head_dim_v, task_.partial.out + i * p_.head_dim_v);
      task_.partial.max[i] = max;
      task_.partial.sum[i] = sum;
      return;
    }
    const VecF factor = set(sum == 0 ? 0.f : 1.f / sum);
    Element* out = static_cast<Element*>(p_.out.data) + row_offset(p_.out, r);
    for (int d = 0; d < p_.head_dim_v; d += kLanes)
      store_first(hn::Mul(load(row + d), factor), out + d, p_.head_dim_v - d);
    if (p_.lse.data) {
      const Index head = task_.kv_head * group_ + r % group_;
      p_.lse.data[task_.batch * p_.lse.stride_batch + head * p_.lse.stride_head + r / group_] =
          log_sum_exp(max, sum);
    }
  }
};

// Calls what(Words) for the words in which this instruction set computes this dtype.
template <class What>
auto with_words(flash3_dtype dtype, const What& what) {
  switch (dtype) {
    case FLASH3_FLOAT16: return what(FloatWords<Fp16>());
#if defined(FLASH3_NATIVE_BF16)
    case FLASH3_BFLOAT16: return what(Bf16Words());
#else
    case FLASH3_BFLOAT16: return what(FloatWords<Bf16>());
#endif
    default: return what(FloatWords<float>());
  }
}

size_t scratch_bytes(const ForwardProblem& problem, TileShape tile) {
  return with_words(problem.dtype, [&](auto words) {
    Buffers buffers;
    return buffers.cut(problem, tile, decltype(words)::kElements, nullptr);
  });
}

void run_task(const AttentionTask& task, TileShape tile, void* scratch) {
  with_words(task.problem->dtype,
             [&](auto words) { TaskRunner<decltype(words)>(task, tile, scratch).run(); });
}

}  // namespace
}  // namespace flash3
HWY_AFTER_NAMESPACE();
