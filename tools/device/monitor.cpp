// SPDX-License-Identifier: Apache-2.0
#include "device/monitor.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <type_traits>

namespace flash3::device {
namespace {

// The few declarations of nvml.h that are needed.
using Device = struct OpaqueDevice*;
constexpr int kSuccess = 0;
constexpr int kSmClock = 1;              // NVML_CLOCK_SM
constexpr unsigned kPowerInstant = 186;  // NVML_FI_DEV_POWER_INSTANT
// SW power cap, HW slowdown, SW thermal, HW thermal, HW power brake
constexpr unsigned long long kThrottleReasons = 0x4 | 0x8 | 0x20 | 0x40 | 0x80;
struct FieldValue {
  unsigned field_id, scope_id;
  long long timestamp, latency_usec;
  int value_type, status;
  union {
    double d;
    unsigned u;
    unsigned long long ull;
  } value;
};

struct Nvml {
  int (*init)() = nullptr;
  int (*handle)(const char*, Device*) = nullptr;
  int (*driver)(char*, unsigned) = nullptr;
  int (*clock)(Device, int, unsigned*) = nullptr;
  int (*power)(Device, unsigned*) = nullptr;
  int (*fields)(Device, int, FieldValue*) = nullptr;
  int (*temperature)(Device, int, unsigned*) = nullptr;
  int (*throttle)(Device, unsigned long long*) = nullptr;
  int (*energy)(Device, unsigned long long*) = nullptr;  // null: no such function
  bool ready = false;

  Nvml() {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);  // stays open
    if (library == nullptr) return;
    const auto bind = [&](auto& function, const char* name) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      return function != nullptr;
    };
    bind(energy, "nvmlDeviceGetTotalEnergyConsumption");
    ready = bind(init, "nvmlInit_v2") && bind(handle, "nvmlDeviceGetHandleByPciBusId_v2") &&
            bind(driver, "nvmlSystemGetDriverVersion") && bind(clock, "nvmlDeviceGetClockInfo") &&
            bind(power, "nvmlDeviceGetPowerUsage") && bind(fields, "nvmlDeviceGetFieldValues") &&
            bind(temperature, "nvmlDeviceGetTemperature") &&
            bind(throttle, "nvmlDeviceGetCurrentClocksThrottleReasons") && init() == kSuccess;
  }
};

const Nvml& nvml() {
  static const Nvml instance;
  return instance;
}

}  // namespace

// Mean power from a counter of millijoules that the driver moves on in steps, some milliseconds or
// tenths of a second apart. Only a step tells a time at which the count was true.
class EnergyCounter {
 public:
  void look(Device device) {
    unsigned long long now_mj = 0;
    if (nvml().energy == nullptr || nvml().energy(device, &now_mj) != kSuccess) return;
    const Step now{std::chrono::steady_clock::now(), now_mj};
    if (!looked_) {
      looked_ = true;
    } else if (now.millijoules == last_.millijoules) {
      return;
    } else if (steps_++ == 0) {
      first_ = now;
    }
    last_ = now;
  }

  double watts() const {
    if (steps_ < 2) return 0;
    const double seconds = std::chrono::duration<double>(last_.time - first_.time).count();
    return seconds < 0.5 ? 0 : 1e-3 * double(last_.millijoules - first_.millijoules) / seconds;
  }

 private:
  struct Step {
    std::chrono::steady_clock::time_point time;
    unsigned long long millijoules;
  };
  bool looked_ = false;
  int steps_ = 0;
  Step first_{}, last_{};
};

struct Monitor::Impl {
  Device device = nullptr;
  std::thread thread;
  std::atomic<bool> running{false};
  Reading reading;
  EnergyCounter energy;

  // The momentary power where the driver tells it; nvmlDeviceGetPowerUsage is a one-second mean.
  double watts() const {
    FieldValue field{};
    field.field_id = kPowerInstant;
    if (nvml().fields(device, 1, &field) == kSuccess && field.status == kSuccess)
      return 1e-3 * field.value.u;
    unsigned milliwatts = 0;
    return nvml().power(device, &milliwatts) == kSuccess ? 1e-3 * milliwatts : 0;
  }

  void sample() {
    unsigned megahertz = 0, celsius = 0;
    unsigned long long reasons = 0;
    if (nvml().clock(device, kSmClock, &megahertz) != kSuccess) return;
    const double hz = 1e6 * megahertz, power = watts();
    reading.min_clock_hz = reading.samples == 0 ? hz : std::min(reading.min_clock_hz, hz);
    reading.max_watts = std::max(reading.max_watts, power);
    reading.clock_hz += hz;
    reading.watts += power;
    if (nvml().temperature(device, 0, &celsius) == kSuccess)
      reading.celsius = std::max(reading.celsius, static_cast<int>(celsius));
    if (nvml().throttle(device, &reasons) == kSuccess)
      reading.throttled |= (reasons & kThrottleReasons) != 0;
    energy.look(device);
    ++reading.samples;
  }
};

Monitor::Monitor(const std::string& pci_bus_id) : impl_(std::make_unique<Impl>()) {
  if (nvml().ready && nvml().handle(pci_bus_id.c_str(), &impl_->device) != kSuccess)
    impl_->device = nullptr;
}

Monitor::~Monitor() { stop(); }

std::string Monitor::driver_version() const {
  char text[96] = "";
  return nvml().ready && nvml().driver(text, sizeof text) == kSuccess ? text : "";
}

void Monitor::start() {
  stop();
  if (impl_->device == nullptr) return;
  impl_->reading = {};
  impl_->energy = {};
  impl_->running = true;
  impl_->thread = std::thread([impl = impl_.get()] {
    while (impl->running) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      if (impl->running) impl->sample();
    }
  });
}

Reading Monitor::stop() {
  if (!impl_->thread.joinable()) return {};
  impl_->running = false;
  impl_->thread.join();
  Reading r = impl_->reading;
  if (r.samples > 0) r.clock_hz /= r.samples, r.watts /= r.samples;
  r.counted_watts = impl_->energy.watts();
  return r;
}

}  // namespace flash3::device
