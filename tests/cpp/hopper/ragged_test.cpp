// Ragged batches on the Hopper backend against the oracle, forward and backward; poison lies in
// every row that is no token's, before and after. Skipped without a Hopper GPU.
#include <gtest/gtest.h>

#include "cases/runner.hpp"
#include "cases/table.hpp"
#include "device/device.hpp"

namespace flash3 {
namespace {

class HopperRagged : public testing::Test {
 protected:
  void SetUp() override {
    if (flash3_backend_available(FLASH3_BACKEND_HOPPER) != FLASH3_OK)
      GTEST_SKIP() << flash3_last_error();
  }

  static void run(const std::vector<cases::Case>& table) {
    const auto memory = device::make_device_memory();
    for (const cases::Case& c : table) {
      cases::RunOptions options;
      options.backend = FLASH3_BACKEND_HOPPER;
      options.oracle_threads = 0;
      const cases::Verdict v = run_case(c, *memory, options);
      EXPECT_TRUE(v.passed()) << to_id(c) << ": " << v.failure;
    }
  }
};

TEST_F(HopperRagged, ForwardTable) {
  run(cases::ragged_case_table(cases::Level::kQuick, cases::dtypes_of(FLASH3_BACKEND_HOPPER)));
}

TEST_F(HopperRagged, BackwardTable) {
  run(cases::ragged_backward_case_table(cases::Level::kQuick,
                                        cases::dtypes_of(FLASH3_BACKEND_HOPPER)));
}

}  // namespace
}  // namespace flash3
