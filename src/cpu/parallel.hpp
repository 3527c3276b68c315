// SPDX-License-Identifier: Apache-2.0
// Threads for one call, spawned when it starts and joined before it returns, and how its work is
// shared out among them. No pool, no hidden state.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

namespace flash3::cpu {

// The cores that this process may run on.
inline int available_threads() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// How many threads pay for so many multiply-adds in float32: starting one takes about 20 µs.
// num_threads: what the caller allows, 0 for all cores.
inline int threads_for(double multiply_adds, int num_threads) {
  constexpr double kWorkPerThread = 1.5e6;
  constexpr int kMaxThreads = 4096;  // more than any machine has: a bound on what one can ask for
  const int most = std::min(num_threads > 0 ? num_threads : available_threads(), kMaxThreads);
  return static_cast<int>(std::clamp<double>(multiply_adds / kWorkPerThread, 1, most));
}

// Runs work(worker) for every worker in [0, num_workers), the first on the calling thread. Workers
// must share their tasks through a counter rather than own a fixed part: where the system refuses
// more threads, fewer workers run, and they do everything. work must not throw.
template <class Work>
void run_workers(int num_workers, const Work& work) {
  std::vector<std::thread> threads;
  try {
    for (int worker = 1; worker < num_workers; ++worker) threads.emplace_back(work, worker);
  } catch (const std::system_error&) {  // NOLINT(bugprone-empty-catch): no more threads to be had
  } catch (const std::bad_alloc&) {     // NOLINT(bugprone-empty-catch): no memory for one more
  }
  work(0);
  for (std::thread& thread : threads) thread.join();
}

// What the threads of a call share out: blocks of its sequences, those that take longest first, so
// that no thread is left with a long one at the end. What is too short to be worth a task of its
// own goes together with its neighbours.

// Rows (forward) or keys (backward) of one sequence.
struct Block {
  int64_t sequence = 0;
  int64_t index = 0;   // of the block in its sequence
  double cost = 0;     // multiply-adds of one KV head
  double urgency = 0;  // what is to come first has more
};

class WorkList {
 public:
  // lanes: how often each block is done, once for every KV head, or more.
  explicit WorkList(int64_t lanes) : lanes_(lanes) {}

  void add(const Block& block) {
    blocks_.push_back(block);
    work_ += block.cost * static_cast<double>(lanes_);
  }
  double work() const { return work_; }

  // When all are there: orders them, those of equal urgency as they were added, and makes the
  // tasks.
  void close(int threads) {
    const auto sooner = [](const Block& a, const Block& b) { return a.urgency > b.urgency; };
    if (!std::is_sorted(blocks_.begin(), blocks_.end(), sooner))
      std::stable_sort(blocks_.begin(), blocks_.end(), sooner);

    const double enough = std::min(kLeastWork, work_ / (kTasksPerThread * threads));
    double work = 0;
    for (int64_t unit = 0; unit < units(); ++unit) {
      work += block_of(unit).cost;
      if (work < enough && unit + 1 < units()) continue;
      starts_.push_back(unit + 1);
      work = 0;
    }
  }

  int64_t tasks() const { return static_cast<int64_t>(starts_.size()) - 1; }
  int64_t units() const { return static_cast<int64_t>(blocks_.size()) * lanes_; }
  const Block& block_of(int64_t unit) const { return blocks_[static_cast<size_t>(unit / lanes_)]; }
  int64_t lane_of(int64_t unit) const { return unit % lanes_; }

  // run(unit) for the units of a task. Lanes of a block follow each other.
  template <class Run>
  void for_each_unit(int64_t task, const Run& run) const {
    const auto at = starts_.begin() + task;
    for (int64_t unit = at[0]; unit < at[1]; ++unit) run(unit);
  }

 private:
  // Taking a task costs a fraction of a microsecond; so many multiply-adds take ten or more.
  static constexpr double kLeastWork = 5e5;
  // But each thread gets so many tasks, where there are as many units.
  static constexpr int kTasksPerThread = 8;

  int64_t lanes_;
  double work_ = 0;
  std::vector<Block> blocks_;
  std::vector<int64_t> starts_{0};  // first unit of each task; the end
};

}  // namespace flash3::cpu
