// SPDX-License-Identifier: Apache-2.0
// Many cases at a time, but no more than the machine's memory has room for.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <fstream>
#include <mutex>

namespace flash3::cli {

// Bytes that this machine has, or a container gives.
inline double memory_of_machine() {
  double bytes =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  for (const char* path :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"})
    if (double limit; std::ifstream(path) >> limit) bytes = std::min(bytes, limit);
  return bytes;
}

class MemoryBudget {
 public:
  // Bytes for all that is under way at a time.
  explicit MemoryBudget(double bytes) : bytes_(bytes) {}

  // Half of what there is.
  static double of_machine() { return memory_of_machine() / 2; }

  // A share of the budget while it lives. Waits until there is room, or until nothing else is under
  // way: what needs more than all of it runs alone.
  class Share {
   public:
    Share(MemoryBudget& budget, double bytes) : budget_(budget), bytes_(bytes) {
      std::unique_lock lock(budget_.mutex_);
      budget_.freed_.wait(
          lock, [&] { return budget_.taken_ <= 0 || budget_.taken_ + bytes <= budget_.bytes_; });
      budget_.taken_ += bytes;
    }
    ~Share() {
      {
        const std::lock_guard lock(budget_.mutex_);
        budget_.taken_ -= bytes_;
      }
      budget_.freed_.notify_all();
    }
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;

   private:
    MemoryBudget& budget_;
    const double bytes_;
  };

 private:
  const double bytes_;
  double taken_ = 0;
  std::mutex mutex_;
  std::condition_variable freed_;
};

}  // namespace flash3::cli
