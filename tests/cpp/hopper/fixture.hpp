// SPDX-License-Identifier: Apache-2.0
// What the tests of the Hopper backend share: they skip, with the reason, where it cannot run;
// after each the device must be well.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "cases/runner.hpp"
#include "device/device.hpp"

namespace flash3 {

class HopperTest : public testing::Test {
 protected:
  void SetUp() override {
    if (flash3_backend_available(FLASH3_BACKEND_HOPPER) != FLASH3_OK)
      GTEST_SKIP() << flash3_last_error();
    memory_ = device::make_device_memory();
  }
  void TearDown() override {
    if (!memory_) return;  // skipped
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  // Against the oracle; `repeat` calls must give the same bits.
  void verify(const cases::Case& c, int repeat = 1) {
    cases::RunOptions options;
    options.backend = FLASH3_BACKEND_HOPPER;
    options.oracle_threads = 0;
    options.repeat = repeat;
    const cases::CheckResult v = run_case(c, *memory_, options);
    EXPECT_TRUE(v.passed()) << to_id(c) << ": " << v.failure;
  }

  // Calls from eight threads, each on a stream of its own and with inputs of its own.
  static void verify_from_many_threads(const cases::Case& c) {
    constexpr int kThreads = 8;
    std::atomic<int> passed{0};
    {
      std::vector<std::jthread> threads;
      for (int i = 0; i < kThreads; ++i)
        threads.emplace_back([&, i] {
          const auto memory = device::make_device_memory();
          cases::RunOptions options;
          options.backend = FLASH3_BACKEND_HOPPER;
          options.repeat = 20;
          cases::Case mine = c;
          mine.seed = static_cast<uint64_t>(i) + 1;
          passed += run_case(mine, *memory, options).passed();
        });
    }
    EXPECT_EQ(passed, kThreads) << to_id(c);
  }

  static bool has_free_memory(size_t bytes) {
    size_t free = 0, total = 0;
    return cudaMemGetInfo(&free, &total) == cudaSuccess && free > bytes;
  }

  std::unique_ptr<cases::Memory> memory_;
};

}  // namespace flash3
