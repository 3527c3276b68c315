// SPDX-License-Identifier: Apache-2.0
// flash3 verify --random: problems that no table has thought of, until the time is over.
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <random>
#include <stop_token>
#include <thread>

#include "cases/added_tensors.hpp"
#include "cases/cache_tensors.hpp"
#include "cases/runner.hpp"
#include "cases/table.hpp"
#include "cli/commands.hpp"
#include "cli/environment.hpp"
#include "cli/format.hpp"
#include "cli/progress.hpp"

namespace flash3::cli {
namespace {

using cases::Case;
using Clock = std::chrono::steady_clock;

bool is_wanted(const VerifyOptions& options, const Case& c) {
  if ((options.backward && !c.backward) || (options.ragged && !c.is_ragged()) ||
      (options.quantize && !c.quantize) || (options.decode && !c.has_cache()) ||
      (options.masks && !c.mask.given()))
    return false;
  return matches(options.filters, c);
}

bool takes(flash3_backend backend, const Case& c) {
  const bool has_fp8_keys = c.fp8 || c.dtype_of_kv() == FLASH3_FLOAT8_E4M3;
  if (backend == FLASH3_BACKEND_HOPPER && has_fp8_keys && c.mask.given() &&
      (c.softcap > 0 || c.kv8))
    return false;
  if (backend == FLASH3_BACKEND_HOPPER && c.mask.given() && c.has_cache() &&
      !cases::takes_cache_by_tma(backend, c))
    return false;
  if (!cases::takes_added_tensors(backend, c)) return false;
  const auto dtypes = cases::dtypes_of(backend);
  return c.dtype == FLASH3_FLOAT8_E4M3 ||
         std::find(dtypes.begin(), dtypes.end(), c.dtype) != dtypes.end();
}

// One run: its workers take problem after problem.
class RandomRun {
 public:
  RandomRun(const VerifyOptions& options, flash3_backend backend, uint64_t seed)
      : options_(options),
        backend_(backend),
        seed_(seed),
        progress_("random", static_cast<size_t>(options.random)) {
    run_.backend = backend;
    run_.repeat = options.repeat;
    run_.num_threads = options.threads;
    run_.oracle_threads = 1;
  }

  // Throws if the device failed: nothing after that means anything.
  RandomCounts run(int jobs) {
    running_.resize(static_cast<size_t>(jobs));
    {
      std::vector<std::jthread> workers;
      for (size_t job = 0; job < running_.size(); ++job)
        workers.emplace_back([this, job] { work(job); });
      const std::jthread watch([this](std::stop_token stop) { name_the_late(stop); });
      for (std::jthread& worker : workers) worker.join();
    }
    if (!broken_.empty()) throw std::runtime_error(broken_);
    return counts_;
  }

  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  void work(size_t job) {
    try {
      cases::PooledMemory memory(make_memory(backend_));
      Case c;
      while (take(job, &c)) {
        const cases::CheckResult result = run_case(c, memory, run_);
        note(job, c, result);
      }
    } catch (const std::exception& e) {
      const std::lock_guard lock(mutex_);
      over_ = true;
      if (!broken_.empty()) return;
      broken_ = sentence_of(e) + ", while these ran:";
      for (const std::string& id : running_)
        if (!id.empty()) broken_ += "\n  " + id;
    }
  }

  // Long after the end a problem that still runs may never end: its id is printed.
  void name_the_late(std::stop_token stop) {
    constexpr double kPatience = 20;  // seconds
    std::unique_lock lock(mutex_);
    double next = options_.random + kPatience;
    while (!stop.stop_requested()) {
      late_.wait_for(lock, stop, std::chrono::milliseconds(200), [] { return false; });
      if (seconds() < next) continue;
      next = seconds() + kPatience;
      for (const std::string& id : running_)
        if (!id.empty()) progress_.print(format("still running after {:.0f} s: {}", seconds(), id));
    }
  }

  // The next problem; false when the run is over. One worker draws at a time: a run of `count`
  // problems is then the first `count`, as `--list` names them.
  bool take(size_t job, Case* c) {
    const std::lock_guard lock(mutex_);
    while (!over_ && !stop_requested() && seconds() < options_.random) {
      *c = cases::random_case(seed_, next_++);
      if (!is_wanted(options_, *c)) continue;
      if (!takes(backend_, *c)) {
        ++counts_.left_out;
        continue;
      }
      if (options_.count > 0 && counts_.all() == options_.count) return false;
      ++(c->backward ? counts_.backward : c->quantize ? counts_.quantize : counts_.forward);
      running_[job] = to_id(*c);
      return true;
    }
    return false;
  }

  void note(size_t job, const Case& c, const cases::CheckResult& result) {
    const std::lock_guard lock(mutex_);
    running_[job].clear();
    for (; shown_seconds_ < seconds(); ++shown_seconds_) progress_.step();
    if (result.passed()) {
      if (!options_.quiet && options_.count > 0) progress_.print("ok    " + to_id(c));
      return;
    }
    ++counts_.failed;
    progress_.print(format("FAIL  {}\n      {}\n      again: flash3 verify --backend {} --case {}",
                           to_id(c), result.failure, flash3_backend_name(backend_), to_id(c)));
  }

  const VerifyOptions& options_;
  const flash3_backend backend_;
  const uint64_t seed_;
  const Clock::time_point start_ = Clock::now();
  cases::RunOptions run_;
  std::atomic<bool> over_{false};
  std::mutex mutex_;  // of what is below
  std::condition_variable_any late_;
  uint64_t next_ = 0;
  Progress progress_;
  double shown_seconds_ = 0;
  RandomCounts counts_;
  std::vector<std::string> running_;  // what each worker has under way
  std::string broken_;
};

void list(const VerifyOptions& options, uint64_t seed) {
  if (options.count == 0) throw UsageError("--list of --random needs --count: there is no end");
  const auto end = Clock::now() + std::chrono::duration<double>(options.random);
  int64_t listed = 0;
  for (uint64_t i = 0; listed < options.count && !stop_requested() && Clock::now() < end; ++i) {
    const Case c = cases::random_case(seed, i);
    if (!is_wanted(options, c)) continue;
    print("{}\n", to_id(c));
    ++listed;
  }
}

}  // namespace

RandomCounts run_random_problems(const VerifyOptions& options, flash3_backend backend,
                                 uint64_t seed) {
  // Host tensors come and go by the thousand: pages that go back to the system each time would have
  // all workers wait for the process's one page table.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  const int jobs = options.jobs > 0 ? options.jobs : available_cores();
  print("seed {}: random problems on {} ({}) for {} s, {} at a time\n", seed,
        flash3_backend_name(backend), describe(backend), options.random, jobs);
  flush_output();
  RandomRun run(options, backend, seed);
  const RandomCounts counts = run.run(jobs);
  print("seed {}: {} forward, {} backward, {} quantize in {:.0f} s, {:.1f} a second", seed,
        counts.forward, counts.backward, counts.quantize, run.seconds(),
        static_cast<double>(counts.all()) / run.seconds());
  if (counts.left_out > 0)
    print(
        "; {} left out, which {} does not take: of float32, of FP8 with max_logits or a mask, or "
        "with a tensor for the CPU alone",
        counts.left_out, flash3_backend_name(backend));
  print("\n{} passed, {} failed\n", counts.all() - counts.failed, counts.failed);
  return counts;
}

int verify_random(const VerifyOptions& options, flash3_backend backend) {
  const uint64_t seed = options.seed.value_or(std::random_device()());
  if (options.list) return list(options, seed), 0;
  return run_random_problems(options, backend, seed).failed == 0 ? 0 : kExitFailure;
}

}  // namespace flash3::cli
