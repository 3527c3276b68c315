// SPDX-License-Identifier: Apache-2.0
// What the commands share: the backend to use, its memory, what is known about the machine.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <fstream>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cases/case.hpp"
#include "cases/memory.hpp"
#include "device/device.hpp"
#include "flash3/flash3.h"

namespace flash3::cli {

// "auto": Hopper if there is one, else the CPU. Throws UsageError for an unknown name.
flash3_backend backend_named(const std::string& name);
// The same; throws std::runtime_error, with the reason, for a backend that cannot run here.
flash3_backend resolve_backend(const std::string& name);

// "" if the backend can run here, else why not.
std::string unavailable(flash3_backend backend);
// What the backend runs on, in words.
std::string describe(flash3_backend backend);

std::unique_ptr<cases::Memory> make_memory(flash3_backend backend);

// The cores that this process may run on.
int available_cores();

// The GPU that the Hopper backend uses: the current device. Nothing for the CPU.
std::optional<device::Gpu> gpu_of(flash3_backend backend);

// Throws the library's message unless status is OK: a UsageError where the call breaks a rule, else
// a std::runtime_error.
void check(flash3_status status);

// What to tell the user of it.
std::string sentence_of(const std::exception& e);

// The case that text names, or UsageError.
cases::Case parse_case(const std::string& text);
// Whether the case's id, as "/bf16/…/causal/", has all of the filters.
bool matches(const std::vector<std::string>& filters, const cases::Case& c);
// Drops the cases that do not match. UsageError if none stays.
void keep_matching(const std::vector<std::string>& filters, std::vector<cases::Case>* list);

// What flash3_forward_explain or flash3_backward_explain says; throws with the library's reason.
std::string explanation(const flash3_forward_params& params);
std::string explanation(const flash3_backward_params& params);
std::string explanation(const flash3_quantize_params& params);
// The value of "name: value" in such a text, "" if it is not there.
std::string value_of(const std::string& text, const std::string& name);

// Version, commit, date, host, backend and device: what a result must carry along.
nlohmann::ordered_json metadata(flash3_backend backend);

// `git describe` of the tree that this program was built from.
const char* build_commit();

// Many cases at a time, but no more than the machine's memory has room for.

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
