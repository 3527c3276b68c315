// SPDX-License-Identifier: Apache-2.0
// How the work of a call whose sequences have one length is shared out among threads: by the oracle
// and by the naive implementation.
#pragma once

#include <algorithm>
#include <atomic>

#include "core/arithmetic.hpp"
#include "core/problem.hpp"
#include "cpu/parallel.hpp"

namespace flash3 {

// Each worker makes an object by make_rows() and calls its compute(batch, head, rows) for groups of
// kRows rows.
template <int kRows, class MakeRows>
void for_each_row_group(const ForwardProblem& p, int num_threads, const MakeRows& make_rows) {
  if (p.is_empty()) return;
  // A task is a group of rows; workers take runs of tasks, so that they seldom change heads.
  const int64_t groups = ceil_div(p.seq_q, kRows), tasks = p.batch * p.heads_q * groups;
  const int64_t run = std::clamp<int64_t>(tasks / 64, 1, 64);
  const double work = static_cast<double>(tasks) * kRows * static_cast<double>(p.seq_k + 1) *
                      (p.head_dim + p.head_dim_v + 64);
  const int threads = num_threads > 0 ? num_threads : cpu::available_threads();

  std::atomic<int64_t> next{0};
  cpu::run_workers(static_cast<int>(std::clamp<double>(work / 4e6, 1, threads)), [&](int) {
    auto rows = make_rows();
    for (int64_t first; (first = next.fetch_add(run)) < tasks;)
      for (int64_t task = first; task < std::min(first + run, tasks); ++task) {
        const int64_t begin = task % groups * kRows;
        rows.compute(task / groups / p.heads_q, task / groups % p.heads_q,
                     {begin, std::min<int64_t>(begin + kRows, p.seq_q)});
      }
  });
}

// Each worker makes a function by make_head() and calls it with (batch, kv_head).
template <class MakeHead>
void for_each_kv_head(const BackwardProblem& p, int num_threads, const MakeHead& make_head) {
  if (p.is_empty()) return;
  const int64_t tasks = p.batch * p.heads_k;
  const int threads = num_threads > 0 ? num_threads : cpu::available_threads();
  std::atomic<int64_t> next{0};
  cpu::run_workers(static_cast<int>(std::clamp<int64_t>(tasks, 1, threads)), [&](int) {
    auto head = make_head();
    for (int64_t task; (task = next.fetch_add(1)) < tasks;)
      head(task / p.heads_k, task % p.heads_k);
  });
}

}  // namespace flash3
