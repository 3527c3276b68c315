// SPDX-License-Identifier: Apache-2.0
// What a task of the backward knows whatever its products are made of: where rows lie, what they
// see, the softmax of a row, and the order in which dQ is summed up. Included by backward-inl.hpp.

#include <hwy/cache_control.h>

#include "cpu/backward.hpp"
#include "cpu/kernels/backward_biases-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace flash3::cpu {
namespace {

// Floats from row to row of an array that is read down its columns: an odd number of cache lines,
// so that neighbours do not compete for the same sets.
constexpr int spread_stride(int columns) { return (ceil_div(columns, 16) | 1) * 16; }

// Keys that dQ sums up before they join what is there. Blocks of keys are whole multiples of it, so
// that their size does not change the sums; and that much of K stays in the first-level cache.
constexpr int kDepth = kKeyAlignment;

// e^(score − lse), at most 1. lse is rounded: of scores of 2^25 and more, whose lse is off by more
// than 1, what the difference is above 0 would make it large, and of 2^31 and more infinite.
HWY_INLINE VecF probability(VecF score_minus_lse) {
  const VecF exponent = hn::Mul(score_minus_lse, set(float(kLog2E)));
  return exp2(hn::IfThenElse(hn::Gt(exponent, hn::Zero(F32())), hn::Zero(F32()), exponent));
}

// S and dP of a row become P and dS for the keys of its range, and 0 for all others. kBiased: with
// this bias; then `added`, if given, becomes the gradient of what is added to the scores, in that
// range. Returns whether the bias hides a pair.
template <bool kBiased>
HWY_INLINE bool softmax_backward(const BackwardProblem& problem, Range own, float row_lse,
                                 float row_delta, const RowBias& bias, int columns, float* p,
                                 float* ds, float* added) {
  bool hides = false;
  if (!own.empty()) {
    // Base 2 only after the difference: scale · log2 e, rounded, would be an error of the
    // score's size, which lse, unlike the sum that the forward divides by, does not share.
    const VecF scale = set(problem.softmax_scale), lse = set(row_lse);
    const VecF delta = set(row_delta);
    // P and dS of keys from j on, from scores of which `factor` times as much is the capped one;
    // times_slope: of the softcap.
    const auto gradient = [&](Index j, VecF score, VecF factor, const auto& times_slope) {
      if constexpr (kBiased) {
        const VecF of_keys = bias_at(bias, j, own.end - j);
        const auto hidden = is_hidden(of_keys);
        const VecF weight = hn::IfThenZeroElse(
            hidden, probability(hn::MulSub(score, factor, hn::Sub(lse, of_keys))));
        store(weight, p + j);
        hides = hides || !hn::AllFalse(F32(), hidden);
        const VecF made = hn::IfThenZeroElse(hidden, hn::Mul(weight, hn::Sub(load(ds + j), delta)));
        if (added) store(made, added + j);
        store(hn::IfThenZeroElse(hidden, times_slope(made)), ds + j);
      } else {
        const VecF weight = probability(hn::MulSub(score, factor, lse));
        store(weight, p + j);
        store(times_slope(hn::Mul(weight, hn::Sub(load(ds + j), delta))), ds + j);
      }
    };
    const Index begin = own.begin / kLanes * kLanes;
    if (problem.softcap > 0) {
      const VecF cap = set(problem.softcap);
      const VecF scale_over_cap = set(problem.softmax_scale / problem.softcap);
      for (Index j = begin; j < own.end; j += kLanes) {
        const Tanh t = tanh(hn::Mul(load(p + j), scale_over_cap));
        gradient(j, t.value, cap, [&](VecF x) { return hn::Mul(x, t.slope); });
      }
    } else {
      for (Index j = begin; j < own.end; j += kLanes)
        gradient(j, load(p + j), scale, [](VecF x) { return x; });
    }
  }
  for (float* row : {p, ds}) {
    std::fill(row, row + own.begin, 0.f);
    std::fill(row + own.end, row + columns, 0.f);
  }
  return hides;
}

template <class T>
class BackwardState {
 protected:
  explicit BackwardState(const BackwardTask& task)
      : task_(task),
        p_(*task.problem),
        blocks_(task.blocks),
        keys_(blocks_.keys_of(task.key_block)),
        biased_(has_biases(p_)),
        biases_(task, keys_) {}

  const BackwardTask& task_;
  const BackwardProblem& p_;
  const BackwardBlocks& blocks_;
  const Range keys_;
  const bool biased_;
  TaskBiases biases_;

  // The current block of rows, counted from its first row, and from the first key of the task.
  Range rows_;
  PackedRow row_[kMaxBackwardRows];
  Range row_keys_[kMaxBackwardRows];  // keys that the row sees
  SeenKeys seen_[kMaxBackwardRows];   // with lists: which of those
  float lse_[kMaxBackwardRows] = {}, delta_[kMaxBackwardRows] = {};
  static constexpr Index kKeptBytes = kMaxBackwardKeys / 8;
  uint8_t kept_[kMaxBackwardRows * kKeptBytes];  // with dropout: of the task's keys
  bool bias_hides_ = false;                      // a pair of them

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

  static void prefetch(const T* row, int dim) {
    for (int d = 0; d < dim; d += 64 / static_cast<int>(sizeof(T))) hwy::Prefetch(row + d);
  }

  // Calls what(block of rows, the blocks of keys that it sees) for those that see this task's keys.
  template <class What>
  void for_each_row_block(const What& what) {
    for (Index i = blocks_.row_blocks() - 1; i >= 0; --i) {
      const Range seen = blocks_.key_blocks_of(task_.kv_head, i);
      if (seen.begin > task_.key_block || task_.key_block >= seen.end) continue;
      if (!blocks_.sees(task_.kv_head, i, task_.key_block)) {
        pass_on(i);
        continue;
      }
      rows_ = blocks_.rows_of(i);
      // Once for each row: a division takes as long as a load that misses a cache.
      for (Index r = 0; r < rows_.size(); ++r)
        row_[r] = packed_row(blocks_.group, task_.kv_head, rows_.begin + r);
      if (p_.dropout.given())
        find_kept(p_, p_.dropout_key(), blocks_.sequence.batch, task_.kv_head, rows_,
                  {keys_.begin, keys_.begin + round_up(keys_.size(), kKeptKeys)}, kept_,
                  kKeptBytes);
      what(i, seen);
    }
  }

  // Rows of a head may be pages apart, where no hardware looks ahead.
  void prefetch_ahead(Index i) const {
    constexpr int kAhead = 6;
    if (i + kAhead >= rows_.size()) return;
    prefetch(row_of_queries(p_.q, row_[i + kAhead]), p_.head_dim);
    prefetch(row_of_queries(p_.dout, row_[i + kAhead]), p_.head_dim_v);
    prefetch(row_of_queries(p_.out, row_[i + kAhead]), p_.head_dim_v);
  }

  // lse and delta = dout·out − dlse of row i.
  void load_sums(Index i) {
    const PackedRow row = row_[i];
    const T *dout = row_of_queries(p_.dout, row), *out = row_of_queries(p_.out, row);
    VecF sum = set(0.f);
    for (int d = 0; d < p_.head_dim_v; d += kLanes)
      sum = hn::MulAdd(load_first(dout + d, p_.head_dim_v - d),
                       load_first(out + d, p_.head_dim_v - d), sum);
    delta_[i] = hn::GetLane(hn::SumOfLanes(F32(), sum));
    if (p_.dlse.data) delta_[i] -= value_of(p_.dlse, row);
    lse_[i] = value_of(p_.lse, row);
  }

  // What rows first … last of the block see of the task's keys; where a mask lists that, the least
  // range that holds what find_keys_of_rows() has found.
  Range keys_seen_by(Index first, Index last) const {
    if (blocks_.masked) {
      Range all{keys_.size(), 0};
      for (Index i = first; i <= last; ++i)
        if (!row_keys_[i].empty())
          all = {std::min(all.begin, row_keys_[i].begin), std::max(all.end, row_keys_[i].end)};
      return all.empty() ? Range{} : all;
    }
    const Range seen =
        blocks_.sequence.mask.keys({row_[first].query, row_[last].query + 1}, blocks_.keys());
    const Index begin = std::clamp(seen.begin, keys_.begin, keys_.end);
    return {begin - keys_.begin, std::clamp(seen.end, begin, keys_.end) - keys_.begin};
  }

  // What rows of the block see some of the task's keys [first, last), counted from its first.
  Range rows_that_see(Index first, Index last) const {
    if (blocks_.masked) {
      Range all{rows_.size(), 0};
      for (Index i = 0; i < rows_.size(); ++i)
        if (row_keys_[i].begin < std::min(last, row_keys_[i].end) && first < row_keys_[i].end)
          all = {std::min(all.begin, i), i + 1};
      return all.empty() ? Range{} : all;
    }
    const Range seen =
        blocks_.rows_that_see({keys_.begin + first, std::min(keys_.begin + last, keys_.end)});
    const Index begin = std::clamp(seen.begin, rows_.begin, rows_.end);
    return {begin - rows_.begin, std::clamp(seen.end, begin, rows_.end) - rows_.begin};
  }

  // Fills row_keys_; true if every row sees every key.
  bool find_keys_of_rows() {
    bool all = true;
    bias_hides_ = false;
    std::fill_n(row_keys_, kMaxBackwardRows, Range{});
    for (Index i = 0; i < rows_.size(); ++i) {
      // Gradients of a row that saw nothing are zero, even if it was the scores that hid all keys.
      if (lse_[i] != -kInfinity)
        row_keys_[i] = blocks_.masked ? listed_keys(i) : keys_seen_by(i, i);
      all = all && row_keys_[i].size() == keys_.size() && !seen_[i].words;
    }
    return all;
  }

  // What row i sees by the lists, counted from the task's first key; seen_[i] counts from the
  // sequence's.
  Range listed_keys(Index i) {
    const PackedRow row = row_[i];
    seen_[i] = blocks_.reader.seen(row.query, row.head, keys_.begin / kMaskBlock);
    const Index begin = std::clamp(seen_[i].keys.begin, keys_.begin, keys_.end);
    return {begin - keys_.begin, std::clamp(seen_[i].keys.end, begin, keys_.end) - keys_.begin};
  }
  // Of row i and the task's keys.
  RowBias bias_of(Index i) const {
    return row_bias(p_, blocks_.sequence, row_[i].query, row_[i].head, keys_.begin);
  }
  // S and dP of row i, which may only pad a strip, become P and dS: 0 where it does not see the
  // key. With dropout dP is that of the kept weights, divided by 1 − p, and then P is of them.
  HWY_INLINE void softmax_of_row(Index i, int columns, float* p, float* ds) {
    keep_of_row(i, p_.dropout.scale(), ds);
    if (!biased_ || row_keys_[i].empty()) {
      softmax_backward<false>(p_, row_keys_[i], lse_[i], delta_[i], {}, columns, p, ds, nullptr);
      clear_hidden(i, p, ds);
      keep_of_row(i, 1.f, p);
      if (i < rows_.size()) biases_.add(i, row_[i], {}, {});
      return;
    }
    const RowBias bias = bias_of(i);
    float* const added = biases_.row();
    if (softmax_backward<true>(p_, row_keys_[i], lse_[i], delta_[i], bias, columns, p, ds, added))
      bias_hides_ = true;
    clear_hidden(i, p, ds);
    if (added) clear_hidden(i, added, added);
    biases_.add(i, row_[i], bias, row_keys_[i]);
    keep_of_row(i, 1.f, p);
  }
  // Those of row i's values whose weights are kept, times this; 0 for the others.
  HWY_INLINE void keep_of_row(Index i, float scale, float* values) const {
    if (!p_.dropout.given()) return;
    const uint8_t* const kept = kept_ + i * kKeptBytes;
    for (Index j = row_keys_[i].begin / kLanes * kLanes; j < row_keys_[i].end; j += kLanes)
      store(keep(hn::Mul(load(values + j), set(scale)), kept, j), values + j);
  }
  // Whether a bit or the bias hides the task's key j from row i, which is in its range.
  bool hides(Index i, Index j) const {
    return seen_[i].hides(keys_.begin + j) || (bias_hides_ && bias_of(i).hides(j));
  }
  // P and dS of hidden pairs become 0.
  void clear_hidden(Index i, float* p, float* ds) const {
    if (i >= rows_.size() || !seen_[i].words) return;
    for (Index j = row_keys_[i].begin; j < row_keys_[i].end; ++j)
      if (seen_[i].hides(keys_.begin + j)) p[j] = ds[j] = 0.f;
  }

  // The block of rows sees nothing of the task's keys: the next block of keys may add to its sums.
  void pass_on(Index row_block) const {
    wait_for_turn(row_block);
    end_turn(row_block);
  }
  void wait_for_turn(Index row_block) const {
    std::atomic<int>& next_keys = task_.next_keys[row_block];
    const int own = static_cast<int>(task_.key_block);
    for (int now; (now = next_keys.load(std::memory_order_acquire)) != own;) next_keys.wait(now);
  }
  void end_turn(Index row_block) const {
    std::atomic<int>& next_keys = task_.next_keys[row_block];
    next_keys.store(static_cast<int>(task_.key_block) + 1, std::memory_order_release);
    next_keys.notify_all();
  }

  // Calls add(dq, stride) for the sums of the block of rows once all keys before the task's have
  // been added. seen: the blocks of keys that these rows see.
  template <class Add>
  void add_in_order(Index row_block, Range seen, const Add& add) {
    wait_for_turn(row_block);
    const int stride = dq_stride(p_.head_dim);
    float* dq = task_.dq + rows_.begin * stride;
    if (seen.begin == task_.key_block) {
      std::fill_n(dq, round_up(rows_.size(), kBackwardStrip) * stride, 0.f);
      if (task_.sink_terms)
        for (Index i = 0; i < rows_.size(); ++i)
          task_.sink_terms[rows_.begin + i] = sink_term(p_, row_[i].head, lse_[i], delta_[i]);
    }
    biases_.add_slope_terms(rows_.begin, rows_.size(), seen.begin == task_.key_block);
    add(dq, stride);
    if (seen.end - 1 == task_.key_block)
      for (Index i = 0; i < rows_.size(); ++i)
        store_row(dq + i * stride, p_.softmax_scale, p_.head_dim, p_.dq,
                  query_offset(p_.dq, row_[i]));
    end_turn(row_block);
  }
};

}  // namespace
}  // namespace flash3::cpu
HWY_AFTER_NAMESPACE();
