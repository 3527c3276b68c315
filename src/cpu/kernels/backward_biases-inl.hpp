// SPDX-License-Identifier: Apache-2.0
// What a task of the backward adds to the gradients of what is added to scores
// (cpu/bias_gradients.hpp). Included by backward_state-inl.hpp.

#include "cpu/backward.hpp"

HWY_BEFORE_NAMESPACE();
namespace flash3::cpu {
namespace {

// In a thread's scratch.
struct BiasBuffers {
  float* row = nullptr;    // the gradient of what is added to the scores of a row
  float* table = nullptr;  // of dbias_table: [part of the keys][query head of the KV head][entry]

  template <class Take>
  void cut(const BackwardProblem& p, int keys, const Take& take) {
    const bool wanted = p.dbias.given || p.dbias_table.given || p.dalibi_slopes.given;
    row = take(wanted ? keys + kLanes : 0);
    table = take(p.dbias_table.given ? keys / kKeyAlignment * entries(p) : 0);
  }
  // Of a part.
  static int64_t entries(const BackwardProblem& p) {
    return p.queries_per_kv_head() * p.dbias_table.entries();
  }
};

class TaskBiases {
 public:
  // keys: those of the task.
  TaskBiases(const BackwardTask& task, Range keys)
      : p_(*task.problem), to_(task.biases), sequence_(task.blocks.sequence), keys_(keys) {}

  void begin(const BiasBuffers& buffers) {
    buffers_ = buffers;
    wanted_ = to_.pairs.data || to_.slope_terms || to_.table;
    if (to_.table) std::fill_n(buffers_.table, parts() * BiasBuffers::entries(p_), 0.f);
  }

  // Where the gradient of a row goes, by key of the task; null: none is wanted.
  float* row() const { return wanted_ ? buffers_.row : nullptr; }

  // Adds that of row i of the block, which sees keys [own).
  void add(Index i, const PackedRow& row, const RowBias& bias, Range own) {
    if (to_.slope_terms) std::fill_n(slopes_[i], kParts, 0.f);
    if (!wanted_ || own.empty()) return;
    if (to_.pairs.data) add_pairs(row, own);
    for (Index part = own.begin / kKeyAlignment; part * kKeyAlignment < own.end; ++part) {
      const Range keys{std::max(own.begin, part * kKeyAlignment),
                       std::min(own.end, (part + 1) * kKeyAlignment)};
      if (to_.slope_terms) slopes_[i][part] = slope_term(bias, keys);
      if (to_.table) add_entries(part, row, bias, keys);
    }
  }

  // Adds the terms of rows [first, first + count) of the KV head, after those of the keys before
  // the task's; fresh: they are the first.
  void add_slope_terms(Index first, Index count, bool fresh) const {
    if (!to_.slope_terms) return;
    for (Index i = 0; i < count; ++i) {
      float& term = to_.slope_terms[first + i];
      if (fresh) term = 0;
      for (Index part = 0; part < parts(); ++part) term += slopes_[i][part];
    }
  }

  // Once all rows are done: the task's part of the table, after those of the tasks before it.
  void finish() const {
    if (!to_.table) return;
    std::atomic<int>& turn = *to_.turn;
    for (int now; (now = turn.load(std::memory_order_acquire)) != to_.own_turn;) turn.wait(now);
    const int64_t entries = BiasBuffers::entries(p_);
    for (Index part = 0; part < parts(); ++part)
      for (int64_t n = 0; n < entries; ++n) to_.table[n] += buffers_.table[part * entries + n];
    turn.store(to_.own_turn + 1, std::memory_order_release);
    turn.notify_all();
  }

 private:
  // Keys that are summed up before they join what is there: as those of dQ, so that the size of a
  // block of keys does not change the sums.
  static constexpr int kParts = kMaxBackwardKeys / kKeyAlignment;
  Index parts() const { return ceil_div<Index>(keys_.size(), kKeyAlignment); }

  void add_pairs(const PackedRow& row, Range own) const {
    const BiasView& t = to_.pairs;
    const Index first = t.offset(sequence_.batch, row.head, sequence_.q.first + row.query) +
                        keys_.begin * t.stride_key;
    if (t.dtype != FLASH3_FLOAT32) {  // no sum: each element once
      for (Index j = own.begin; j < own.end; ++j)
        store_float(t.data, t.dtype, first + j * t.stride_key, buffers_.row[j]);
      return;
    }
    float* const to = static_cast<float*>(t.data) + first;
    if (t.stride_key != 1) {
      for (Index j = own.begin; j < own.end; ++j) to[j * t.stride_key] += buffers_.row[j];
      return;
    }
    for (Index j = own.begin; j < own.end; j += kLanes) {
      const auto count = static_cast<int>(std::min<Index>(kLanes, own.end - j));
      store_first(hn::Add(load_first(to + j, count), load_first(buffers_.row + j, count)), to + j,
                  count);
    }
  }

  float slope_term(const RowBias& bias, Range keys) const {
    float sum = 0;
    for (Index j = keys.begin; j < keys.end; ++j)
      sum -= buffers_.row[j] * static_cast<float>(std::abs(bias.from_diagonal + j));
    return sum;
  }

  void add_entries(Index part, const PackedRow& row, const RowBias& bias, Range keys) const {
    const Index entries = p_.dbias_table.entries(), distance = p_.dbias_table.distance;
    const Index head = row.head % p_.queries_per_kv_head();
    float* const to = buffers_.table + part * BiasBuffers::entries(p_) + head * entries + distance;
    for (Index j = keys.begin; j < keys.end; ++j)
      to[std::clamp(bias.from_diagonal + j, -distance, distance)] += buffers_.row[j];
  }

  const BackwardProblem& p_;
  const BiasGradients& to_;
  const Sequence& sequence_;
  const Range keys_;
  BiasBuffers buffers_;
  bool wanted_ = false;
  float slopes_[kMaxBackwardRows][kParts] = {};
};

}  // namespace
}  // namespace flash3::cpu
HWY_AFTER_NAMESPACE();
