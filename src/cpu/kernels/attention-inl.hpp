// SPDX-License-Identifier: Apache-2.0
// Tiled attention with an online softmax, for one instruction set. The file of that set defines
// HWY_TARGET and includes this one, which defines run_task and scratch_bytes.
//
//   for each tile of keys:          K and V packed once, for all rows of the task
//     for each strip of rows (6):   everything of a strip stays in the first-level cache
//       S = Q·Kᵀ                    only keys that some row of the strip sees; capped if asked for
//       P = exp2(S·scale − max)     max and sum of each row; 0: masked, or dropped after the sum
//       O = O·correction + P·V
//   the sink, if there is one, joins max and sum
//   out = O / sum,  lse = ln 2 · (max + log2 sum)
//
// Few rows in all, as when decoding, read K and V in place.
#pragma once

#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "core/arithmetic.hpp"
#include "core/convert.hpp"
#include "cpu/attention.hpp"

// clang-format off: each needs those before it
#include "cpu/kernels/simd-inl.hpp"
#include "cpu/kernels/pack-inl.hpp"
#include "cpu/kernels/multiply-inl.hpp"
#include "cpu/kernels/biases-inl.hpp"
#include "cpu/kernels/dropout-inl.hpp"
#include "cpu/kernels/softmax-inl.hpp"
#if defined(FLASH3_AMX)
#include "cpu/kernels/amx-inl.hpp"
#endif
#include "cpu/kernels/attention_buffers-inl.hpp"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flash3::cpu {
namespace {

template <class Words>
class TaskRunner {
 public:
  using Element = typename Words::Element;
  using QueryWords = typename Words::QueryWords;

  TaskRunner(const AttentionTask& task, TileShape tile, void* scratch)
      : task_(task),
        p_(*task.problem),
        sequence_(task.sequence),
        tile_(tile),
        group_(p_.queries_per_kv_head()),
        masked_(p_.mask_lists.given),
        reader_(p_.mask_lists, sequence_.batch),
        in_place_(sequence_.q.length * group_ <= (Words::kScaled ? kFewRows : kInPlaceRows) &&
                  p_.head_dim % (kLanes * Words::kElements) == 0 && p_.head_dim_v % kLanes == 0 &&
                  p_.qv.dim % (kLanes * Words::kElements) == 0),
        strip_rows_(in_place_ ? kFewRows : kStripRows),
        padded_rows_(round_up(task.rows.size(), strip_rows_)) {
    buffers_.template cut<Words>(p_, tile, static_cast<char*>(scratch));
    if (!in_place_) unit_.emplace();
  }

  void run() {
    load_q();
    std::fill_n(buffers_.max, padded_rows_, -kInfinity);
    std::fill_n(buffers_.sum, padded_rows_, 0.f);
    std::fill_n(buffers_.out, padded_rows_ * buffers_.v_words, 0.f);
    // Rows that only pad the last strip are computed too, from whatever is here: let it be zero.
    std::fill_n(buffers_.weights, kStripRows * tile_.keys / kPair, 0.f);
    const Range seen = seen_by(task_.rows, task_.keys);
    if (!seen.empty()) {
      for (Index tile = seen.begin / tile_.keys * tile_.keys; tile < seen.end; tile += tile_.keys)
        if (is_listed(task_.rows, tile))
          run_tile(tile, {std::max(tile, seen.begin), std::min(tile + tile_.keys, seen.end)});
    }
    for (Index r = task_.rows.begin; r < task_.rows.end; ++r) finish_row(r);
  }

 private:
  static constexpr Index kPair = Words::kElements;
  static constexpr int kStripRows = Words::kStripRows;

  const AttentionTask& task_;
  const ForwardProblem& p_;
  const Sequence& sequence_;
  const TileShape tile_;
  const Index group_;
  const bool masked_;  // by lists: a tile of keys lies in one block of them
  const MaskReader reader_;
  const bool in_place_;  // few rows: K and V are not packed
  const Index strip_rows_, padded_rows_;
  Buffers buffers_;
  std::optional<typename Words::Unit> unit_;
  bool v_is_finite_ = true;  // of the packed tile
  bool bias_hides_ = false;  // a pair of the strip

  // Whether a mask lets any of the rows see the tile.
  bool is_listed(Range rows, Index tile) const {
    return !masked_ || reader_.lists(rows, group_, task_.kv_head, tile / kMaskBlock);
  }
  // What packed row r sees of `keys`, which lie in one tile.
  SeenKeys seen_by_row(Index r, Range keys) const {
    if (!masked_) return {seen_by({r, r + 1}, keys)};
    const PackedRow row = packed_row(group_, task_.kv_head, r);
    SeenKeys seen = reader_.seen(row.query, row.head, keys.begin / kMaskBlock);
    seen.keys = {std::max(seen.keys.begin, keys.begin), std::min(seen.keys.end, keys.end)};
    return seen;
  }

  // The part of `keys` that some of these packed rows see, by the band.
  Range seen_by(Range rows, Range keys) const {
    return seen_by_queries({rows.begin / group_, (rows.end - 1) / group_ + 1}, keys);
  }
  Range seen_by_queries(Range queries, Range keys) const {
    const Range seen = sequence_.mask.keys(queries, sequence_.k.length);
    return {std::max(seen.begin, keys.begin), std::min(seen.end, keys.end)};
  }
  float q_scale(Index r) const {
    if constexpr (!QueryWords::kScaled) return 1.f;
    const PackedRow row = packed_row(group_, task_.kv_head, r);
    return row_scales(p_.q_scale, p_.sequences_q, sequence_.q, sequence_.batch, row.head)
        .at(row.query);
  }
  // Row j of this KV head.
  const Element* kv_row(const TensorView& t, Index j) const {
    return static_cast<const Element*>(t.data) + key_offset(p_, t, sequence_, j, task_.kv_head);
  }
  // Calls what(rows) for the rows of K or V; of pages those of the tile, which `list` holds.
  template <class What>
  auto with_rows(const TensorView& t, Index tile, void* list, const What& what) const {
    if (p_.cache.paged)
      return what(ListedRows<Element>{static_cast<const Element**>(list), t.stride_seq, tile});
    return what(EvenRows<Element>{kv_row(t, 0), t.stride_seq});
  }
  // Looks up the scales of keys [begin, end) of a tile.
  void list_scales(const ScaleView& scale, Index tile, Index begin, Index end, float* list) {
    const Index b = sequence_.batch, head = task_.kv_head;
    const RowScales rows = row_scales(scale, p_.sequences_k, sequence_.k, b, head);
    for (Index j = begin; j < end; ++j)
      list[j - tile] = p_.has_cache() ? cache_scale(scale, b, head,
                                                    cache_row(p_.cache, b, sequence_.k.first + j))
                                      : rows.at(j);
  }
  // Looks up where rows [begin, end) of a paged tile lie.
  void list_rows(Index tile, Index begin, Index end) {
    for (Index j = begin; j < end; ++j) {
      static_cast<const Element**>(buffers_.k_rows)[j - tile] = kv_row(p_.k, j);
      static_cast<const Element**>(buffers_.v_rows)[j - tile] = kv_row(p_.v, j);
    }
  }
  // Start of packed row r of a tensor of query heads.
  Index query_offset(const TensorView& t, Index r) const {
    const PackedRow row = packed_row(group_, task_.kv_head, r);
    return row_offset(t, sequence_.batch, sequence_.q, row.query, row.head);
  }

  void load_q() {
    float* out = buffers_.q;
    for (Index i = 0; i < padded_rows_; ++i, out += buffers_.q_words) {
      const Index r = task_.rows.begin + i;
      if (r >= task_.rows.end) {
        std::fill_n(out, buffers_.q_words, 0.f);
        continue;
      }
      copy_row<QueryWords>(query_row(p_.q, r), p_.head_dim, buffers_.k_words, out, q_scale(r));
      if (p_.has_qv())
        copy_row<QueryWords>(query_row(p_.qv, r), p_.head_dim_v,
                             buffers_.q_words - buffers_.k_words, out + buffers_.k_words);
    }
  }
  const typename QueryWords::Element* query_row(const TensorView& t, Index r) const {
    return static_cast<const typename QueryWords::Element*>(t.data) + query_offset(t, r);
  }

  // Keys [seen) of the tile of keys that starts at `tile`.
  void run_tile(Index tile, Range seen) {
    constexpr int kStep = std::max(kPanel, 4);  // whole panels, as packing takes them, or fours
    const Index begin = tile + (seen.begin - tile) / kStep * kStep;
    const Index end = tile + round_up(seen.end - tile, kPanel), length = sequence_.k.length;
    if (p_.cache.paged) list_rows(tile, begin, std::min(end + 1, length));
    if constexpr (Words::kScaled) {
      list_scales(p_.k_scale, tile, begin, std::min(end, length), buffers_.k_scales);
      list_scales(p_.v_scale, tile, begin, std::min(end, length), buffers_.v_scales);
    }
    if (!in_place_) pack_tile(tile, seen);
    if (p_.dropout.given()) find_kept_of_tile(tile, seen);
    for (Index r = task_.rows.begin; r < task_.rows.end; r += strip_rows_) {
      const Range rows{r, std::min(r + strip_rows_, task_.rows.end)};
      const Range keys = seen_by(rows, seen);
      if (!keys.empty() && is_listed(rows, tile)) run_strip(tile, rows, keys);
    }
  }

  // For the strips that see some of these keys.
  void find_kept_of_tile(Index tile, Range seen) {
    Range rows{task_.rows.end, task_.rows.begin};
    for (Index r = task_.rows.begin; r < task_.rows.end; r += strip_rows_) {
      const Index end = std::min(r + strip_rows_, task_.rows.end);
      if (!seen_by({r, end}, seen).empty()) rows = {std::min(rows.begin, r), end};
    }
    const Index first = (seen.begin - tile) / kKeptKeys * kKeptKeys;
    const Range keys{tile + first, tile + round_up(seen.end - tile, kKeptKeys)};
    find_kept(p_, p_.dropout_key(), sequence_.batch, task_.kv_head, rows, keys,
              kept_of(rows.begin) + first / 8, tile_.keys / 8);
  }
  uint8_t* kept_of(Index r) const {
    return buffers_.kept ? buffers_.kept + (r - task_.rows.begin) * (tile_.keys / 8) : nullptr;
  }

  void pack_tile(Index tile, Range seen) {
    const Index first = (seen.begin - tile) / kPanel * kPanel;
    const Index last = round_up(seen.end - tile, kPanel);
    const Index length = sequence_.k.length;
    with_rows(p_.k, tile, buffers_.k_rows, [&](auto rows) {
      pack_k<Words>(rows, p_.head_dim, buffers_.k_words, buffers_.q_words, tile + first,
                    tile + last, length, buffers_.stage, buffers_.k + first * buffers_.q_words,
                    ListedScales{buffers_.k_scales, tile});
    });
    if (p_.has_qv())
      with_rows(p_.v, tile, buffers_.v_rows, [&](auto rows) {
        pack_k<Words>(rows, p_.head_dim_v, buffers_.q_words - buffers_.k_words, buffers_.q_words,
                      tile + first, tile + last, length, buffers_.stage,
                      buffers_.k + first * buffers_.q_words + buffers_.k_words * kPanel);
      });
    constexpr Index kStep = kPair * Words::kDepth;
    v_is_finite_ = with_rows(p_.v, tile, buffers_.v_rows, [&](auto rows) {
      return pack_v<Words>(rows, p_.head_dim_v, tile, seen.begin / kStep * kStep,
                           round_up(seen.end, kStep), length, tile_.keys / kPair, buffers_.v,
                           ListedScales{buffers_.v_scales, tile});
    });
  }

  // keys: those of the tile that some row of the strip sees.
  void run_strip(Index tile, Range rows, Range keys) {
    const Index strip = rows.begin - task_.rows.begin;
    const Range columns{keys.begin - tile, keys.end - tile};
    compute_scores(tile, strip, rows, columns);

    constexpr Index kStep = 2 * kLanes;
    const Index begin = columns.begin / kStep * kStep;
    const Index end = round_up(columns.end, kStep);
    float correction[kStripRows] = {};
    const bool capped = p_.softcap > 0;
    const float factor = capped ? p_.softcap : p_.softmax_scale;
    const bool biased = has_biases(p_);
    bias_hides_ = false;
    const float scale = biased ? float(kLog2E) : factor * float(kLog2E);
    Index query = rows.begin / group_, of_query = rows.begin % group_;
    for (Index i = 0; i < rows.size(); ++i) {
      // What this row does not see of what the softmax runs over is −∞ from here on.
      const Index row_query = query;
      const SeenKeys seen = masked_ ? seen_by_row(rows.begin + i, keys)
                                    : SeenKeys{seen_by_queries({query, query + 1}, keys)};
      const Range& own = seen.keys;
      if (++of_query == group_) ++query, of_query = 0;
      const Index own_begin = std::clamp(own.begin - tile, begin, end);
      const Index own_end = std::clamp(own.end - tile, own_begin, end);
      float* scores = buffers_.scores + i * tile_.keys;
      if (capped)
        cap_row(scores, own_begin / kLanes * kLanes, own_end, p_.softmax_scale / p_.softcap);
      if (biased && own_begin < own_end &&
          add_biases(bias_of(rows.begin + i, tile), factor, own_begin / kLanes * kLanes, own_end,
                     scores))
        bias_hides_ = true;
      std::fill(scores + begin, scores + own_begin, -kInfinity);
      std::fill(scores + own_end, scores + end, -kInfinity);
      if (sequence_.tree) hide_drafts(row_query, {tile + own_begin, tile + own_end}, scores - tile);
      if (seen.words)
        for (Index j = own_begin; j < own_end; ++j)
          if (seen.hides(tile + j)) scores[j] = -kInfinity;
      correction[i] = softmax_row<Words>(scores, begin, end, scale, kept_of(rows.begin + i),
                                         buffers_.weights + i * tile_.keys / kPair,
                                         buffers_.max + strip + i, buffers_.sum + strip + i);
    }
    add_values(tile, strip, rows, keys, correction);
  }

  // Of packed row r and the keys from this one on.
  RowBias bias_of(Index r, Index key) const {
    const PackedRow row = packed_row(group_, task_.kv_head, r);
    return row_bias(p_, sequence_, row.query, row.head, key);
  }

  void hide_drafts(Index query, Range keys, float* scores) const {
    for (Index j = std::max(keys.begin, sequence_.first_draft()); j < keys.end; ++j)
      if (sequence_.hides(query, j)) scores[j] = -kInfinity;
  }

  void compute_scores(Index tile, Index strip, Range rows, Range columns) {
    const float* q = buffers_.q + strip * buffers_.q_words;
    if (!in_place_) {
      const Index first = columns.begin / kPanel * kPanel;
      const Index vectors = ceil_div(columns.end - first, kLanes);
      packed_scores<Words>(q, buffers_.q_words, buffers_.k + first * buffers_.q_words,
                           static_cast<int>(vectors), buffers_.scores + first, tile_.keys);
      return;
    }
    multiply_in_place<Into::kFresh>(p_.k, buffers_.k_rows, q, buffers_.k_words, tile, rows,
                                    columns);
    if (p_.has_qv())
      multiply_in_place<Into::kAdded>(p_.v, buffers_.v_rows, q + buffers_.k_words,
                                      buffers_.q_words - buffers_.k_words, tile, rows, columns);
    if constexpr (Words::kScaled)
      for (Index i = 0; i < rows.size(); ++i)
        multiply_by(buffers_.k_scales, columns, buffers_.scores + i * tile_.keys);
  }

  // Scores of a strip, or what is added to them: products of `words` of q and rows of K or V.
  template <Into kInto>
  void multiply_in_place(const TensorView& t, void* list, const float* q, int words, Index tile,
                         Range rows, Range columns) {
    const Index first = columns.begin / 4 * 4;
    with_rows(t, tile, list, [&](auto keys) {
      using Rows = decltype(keys);
      const auto in_place = rows.size() == 1 ? &scores_in_place<Words, kInto, 1, Rows>
                                             : &scores_in_place<Words, kInto, kFewRows, Rows>;
      in_place(q, buffers_.q_words, words, keys, tile + first, columns.end - first,
               buffers_.scores + first, tile_.keys);
    });
  }

  // values[j] *= factors[j], for whole vectors that hold the columns.
  static void multiply_by(const float* factors, Range columns, float* values) {
    for (Index j = columns.begin / kLanes * kLanes; j < columns.end; j += kLanes)
      hn::Store(hn::Mul(hn::Load(F32(), values + j), hn::Load(F32(), factors + j)), F32(),
                values + j);
  }

  // out = out · correction + P·V. A key that a row does not see must not be multiplied where V is
  // not finite, as zero times infinity is NaN: the whole strip takes part only in keys that all its
  // rows see, or if V was found to be finite when it was packed.
  void add_values(Index tile, Index strip, Range rows, Range keys, const float* correction) {
    float* out = buffers_.out + strip * buffers_.v_words;
    const int vectors = buffers_.v_words / kLanes;
    // In keys; words and, where the products need them, whole tiles of words.
    const Index step = in_place_ ? kPair : kPair * Words::kDepth;
    Range common{(keys.begin - tile) / step * step, round_up(keys.end - tile, step)};
    if (in_place_ || !v_is_finite_) {
      for (Index i = 0; i < rows.size(); ++i) {
        const SeenKeys seen = seen_by_row(rows.begin + i, keys);
        common.begin = std::max(common.begin, round_up(seen.keys.begin - tile, step));
        common.end = std::min(common.end, (seen.keys.end - tile) / step * step);
        if (seen.words || bias_hides_) common.end = common.begin;
      }
      if (sequence_.tree)
        common.end = std::min(common.end, (sequence_.first_draft() - tile) / step * step);
      common.end = std::max(common.begin, common.end);
    }

    const Index stride = tile_.keys / kPair, first = common.begin / kPair,
                depth = common.size() / kPair;
    if (in_place_) {
      if constexpr (Words::kScaled)
        for (Index i = 0; i < rows.size(); ++i)
          multiply_by(buffers_.v_scales, {keys.begin - tile, keys.end - tile},
                      buffers_.weights + i * tile_.keys);
      with_rows(p_.v, tile, buffers_.v_rows, [&](auto values) {
        using Rows = decltype(values);
        const auto in_place = rows.size() == 1 ? &values_in_place<Words, 1, Rows>
                                               : &values_in_place<Words, kFewRows, Rows>;
        in_place(buffers_.weights + first, stride, values, tile + common.begin, depth, vectors,
                 correction, out);
      });
    } else {
      packed_values<Words>(buffers_.weights, stride, buffers_.v, stride, first, depth, vectors,
                           correction, out);
    }
    if (!in_place_ && v_is_finite_) return;
    for (Index i = 0; i < rows.size(); ++i) {
      const SeenKeys seen = seen_by_row(rows.begin + i, keys);
      const Range& own = seen.keys;
      const Index middle = tile + common.begin, rest = tile + common.end;
      add_keys(tile, rows.begin, i, seen, {own.begin, std::min(own.end, middle)}, out);
      add_keys(tile, rows.begin, i, seen, {std::max(own.begin, rest), own.end}, out);
    }
  }

  // out[i] += P·V for these keys of row i of the strip, which begins at row `first`.
  void add_keys(Index tile, Index first, Index i, const SeenKeys& seen, Range keys, float* out) {
    const float* weights = buffers_.weights + i * tile_.keys / kPair;
    out += i * buffers_.v_words;
    const Index query = (first + i) / group_;
    const RowBias bias = bias_hides_ ? bias_of(first + i, 0) : RowBias{};
    for (Index j = keys.begin; j < keys.end; ++j) {
      if (sequence_.hides(query, j) || seen.hides(j) || bias.hides(j)) continue;
      float of_key = Words::weight(weights, j - tile);
      if constexpr (Words::kScaled)  // in place, weights have been multiplied before
        if (!in_place_) of_key *= buffers_.v_scales[j - tile];
      const VecF weight = set(of_key);
      const Element* v = kv_row(p_.v, j);
      for (int d = 0; d < p_.head_dim_v; d += kLanes)
        store(hn::MulAdd(weight, load_first(v + d, p_.head_dim_v - d), load(out + d)), out + d);
    }
  }

  template <class Out>
  void store_row(const float* row, VecF factor, Out* out) const {
    for (int d = 0; d < p_.head_dim_v; d += kLanes)
      store_first(hn::Mul(load(row + d), factor), out + d, p_.head_dim_v - d);
  }

  void finish_row(Index r) {
    const Index i = r - task_.rows.begin;
    const float* row = buffers_.out + i * buffers_.v_words;
    const float max = buffers_.max[i], sum = buffers_.sum[i], of_kept = p_.dropout.scale();
    if (task_.partial.out) {
      float* const out = task_.partial.out + i * p_.head_dim_v;
      for (int d = 0; d < p_.head_dim_v; ++d) out[d] = row[d] * of_kept;
      task_.partial.max[i] = max;
      task_.partial.sum[i] = sum;
      return;
    }
    const PackedRow at = packed_row(group_, task_.kv_head, r);
    const RowEnd end = end_of_row(max, sum, p_.sink, at.head);
    const VecF factor = set(end.sum == 0 ? 0.f : end.scale / end.sum * of_kept);
    const Index offset = row_offset(p_.out, sequence_.batch, sequence_.q, at.query, at.head);
    if (p_.out_dtype == FLASH3_FLOAT16)
      store_row(row, factor, static_cast<Fp16*>(p_.out.data) + offset);
    else if (p_.out_dtype == FLASH3_BFLOAT16)
      store_row(row, factor, static_cast<Bf16*>(p_.out.data) + offset);
    else
      store_row(row, factor, static_cast<float*>(p_.out.data) + offset);
    if (p_.lse.data)
      p_.lse.data[row_offset(p_.lse, sequence_, at.query, at.head)] = log_sum_exp(end.max, end.sum);
    if (p_.max_logits.data)
      p_.max_logits.data[row_offset(p_.max_logits, sequence_, at.query, at.head)] = max_logit(max);
  }
};

size_t scratch_bytes(const ForwardProblem& problem, TileShape tile) {
  return with_words(problem, [&](auto words) {
    Buffers buffers;
    return buffers.cut<decltype(words)>(problem, tile, nullptr);
  });
}

void run_task(const AttentionTask& task, TileShape tile, void* scratch) {
  with_words(*task.problem,
             [&](auto words) { TaskRunner<decltype(words)>(task, tile, scratch).run(); });
}

}  // namespace
}  // namespace flash3::cpu
HWY_AFTER_NAMESPACE();
