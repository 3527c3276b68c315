// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>

#include "core/interrupt.hpp"
#include "cpu/mask.hpp"
#include "cpu/parallel.hpp"

namespace flash3::cpu {
namespace {

constexpr int kGroup = 16;  // queries, and keys, that the groups of pairs divide into

// For a query of the lower half of 16 and the one 8 after it.
void write_rows(const DropoutMaskProblem& p, PhiloxKey key, unsigned head, int query, uint8_t* row,
                uint8_t* next) {
  for (int j = 0; j < p.seq_k; ++j) {
    if (j / 8 % 2 == 1 || j % 2 == 1) continue;  // of the group of one before
    const PhiloxWords words = DropoutGroup::of(query, j).words(head, key);
    for (const int k : {j, j + 1, j + 8, j + 9}) {
      if (k >= p.seq_k) break;
      const auto keeps = [&](int i) {
        return dropout_bits(words, DropoutGroup::place(i, k)) >= p.dropout.threshold;
      };
      row[k] = keeps(query);
      if (next) next[k] = keeps(query + 8);
    }
  }
}

}  // namespace

Status make_dropout_mask(const DropoutMaskProblem& p) {
  const PhiloxKey key = p.dropout.key(p.state);
  const int64_t blocks = ceil_div(p.seq_q, int64_t{kGroup}), tasks = p.batch * p.heads * blocks;
  const double work = 8. * static_cast<double>(tasks) * kGroup * static_cast<double>(p.seq_k);
  std::atomic<int64_t> next{0};
  Interrupt interrupt;
  run_workers(threads_for(work, p.num_threads), [&](int worker) {
    for (int64_t task; (task = next.fetch_add(1)) < tasks && !interrupt.ends(worker);) {
      const int64_t of_head = task / blocks, b = of_head / p.heads, h = of_head % p.heads;
      uint8_t* const kept = p.kept + b * p.stride_batch + h * p.stride_head;
      const int64_t first = task % blocks * kGroup;
      for (int64_t i = first; i < std::min(first + kGroup / 2, p.seq_q); ++i)
        write_rows(p, key, static_cast<unsigned>(of_head), static_cast<int>(i),
                   kept + i * p.stride_query,
                   i + 8 < p.seq_q ? kept + (i + 8) * p.stride_query : nullptr);
    }
  });
  return interrupt.status();
}

}  // namespace flash3::cpu
