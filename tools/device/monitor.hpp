// SPDX-License-Identifier: Apache-2.0
// Clocks and watts of a GPU while something runs on it, from the driver's NVML. The library is
// opened at run time; without it there are no readings, and that is no error.
#pragma once

#include <memory>
#include <string>

namespace flash3::device {

struct Reading {
  int samples = 0;                        // 0: NVML gave nothing; the rest is meaningless
  double clock_hz = 0, min_clock_hz = 0;  // of the SMs
  double watts = 0, max_watts = 0;        // mean and maximum of the samples
  // From the driver's energy counter, between the first and the last of its steps that fell into
  // the time; 0 where they lie less than half a second apart, or there is no counter.
  double counted_watts = 0;
  int celsius = 0;
  bool throttled = false;  // below the clock asked for: power, heat or a hardware brake

  // The better figure of the two.
  double mean_watts() const { return counted_watts > 0 ? counted_watts : watts; }
};

class Monitor {
 public:
  explicit Monitor(const std::string& pci_bus_id);
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  std::string driver_version() const;  // "580.82.07"; "" if unknown

  // Samples in a thread between start() and stop().
  void start();
  Reading stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace flash3::device
