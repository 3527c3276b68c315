// SPDX-License-Identifier: Apache-2.0
// The ceiling of flash3 bench on the GPU: every instance runs, and gives a figure that can be one.
#include "device/ceiling.hpp"

#include <gtest/gtest.h>

namespace flash3::device {
namespace {

TEST(Ceiling, EveryInstanceIsNearThePeakAtItsClock) {
  if (flash3_backend_available(FLASH3_BACKEND_HOPPER) != FLASH3_OK)
    GTEST_SKIP() << flash3_last_error();
  std::string reason;
  const std::vector<Gpu> found = gpus(&reason);
  ASSERT_FALSE(found.empty()) << reason;
  const Gpu& gpu = found.front();
  Monitor monitor(gpu.pci_bus_id);
  const auto memory = make_device_memory();
  for (const flash3_dtype dtype : {FLASH3_BFLOAT16, FLASH3_FLOAT16, FLASH3_FLOAT8_E4M3})
    for (const int head_dim : {64, 128, 256}) {
      const CeilingResult r = measure_ceiling(dtype, head_dim, 0.1, gpu, monitor, *memory);
      // Serialised products reach a third or less; more than all is refused by measure_ceiling.
      EXPECT_GT(r.peak_percent, 70) << dtype << " " << head_dim;
      EXPECT_GT(r.clock_hz, 0.3 * gpu.max_clock_hz);
      EXPECT_LT(r.clock_hz, 1.05 * gpu.max_clock_hz);
      EXPECT_GT(r.seconds, 0.05);
    }
  EXPECT_THROW(measure_ceiling(FLASH3_BFLOAT16, 96, 0.1, gpu, monitor, *memory),
               std::runtime_error);
  EXPECT_THROW(measure_ceiling(FLASH3_FLOAT32, 64, 0.1, gpu, monitor, *memory), std::runtime_error);
}

}  // namespace
}  // namespace flash3::device
