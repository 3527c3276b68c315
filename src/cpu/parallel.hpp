// SPDX-License-Identifier: Apache-2.0
// Threads for one call: spawned when it starts, joined before it returns. No pool, no hidden state.
#pragma once

#include <algorithm>
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

}  // namespace flash3::cpu
