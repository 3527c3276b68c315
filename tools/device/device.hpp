// SPDX-License-Identifier: Apache-2.0
// The GPU as the tools see it. In a build without CUDA there is none, and the messages say so.
#pragma once

#include <cstddef>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cases/memory.hpp"

namespace flash3::device {

struct Gpu {
  std::string name;        // "NVIDIA H200"
  std::string pci_bus_id;  // "0000:1B:00.0"
  int compute_major = 0, compute_minor = 0;
  int sms = 0;
  double max_clock_hz = 0;
  size_t memory_bytes = 0;
};

// CUDA versions as "13.0"; driver is what the driver supports, empty without one.
struct CudaVersions {
  std::string runtime, driver;
};

// All visible GPUs; empty, and why in *reason, if there is none.
std::vector<Gpu> gpus(std::string* reason);
CudaVersions cuda_versions();

// Memory of the current device with a stream of its own. Throws std::runtime_error if that fails.
std::unique_ptr<cases::Memory> make_device_memory();

// Which kernels this program launches. The command line is linked so that every launch passes here
// (--wrap, tools/CMakeLists.txt): a list of kernels that cases ought to run could be wrong.
void start_launch_log();

// Functions launched since then, as the compiler spells their names. Throws std::runtime_error if
// the runtime does not know one.
std::set<std::string> stop_launch_log();

}  // namespace flash3::device
