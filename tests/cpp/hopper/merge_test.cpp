// SPDX-License-Identifier: Apache-2.0
// flash3_merge on the GPU. Skipped without a Hopper GPU.
#include <limits>

#include "cases/runner.hpp"
#include "fixture.hpp"

namespace flash3 {
namespace {

class Merge : public HopperTest {};

TEST_F(Merge, IsTheFormula) {
  for (const cases::MergeCase& c : cases::merge_case_table())
    EXPECT_EQ(check_merge(c, *memory_, FLASH3_BACKEND_HOPPER), "") << to_text(c);
}

// Largest and smallest scores, which must not overflow, and NaN, which must stay.
TEST_F(Merge, SpecialValues) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  float host[] = {1, 2, 3, 4, /* lse of each part and row */ 1e30f, kNan, 1e30f, 5, 0, 0, 0, 0};
  const auto memory = memory_->allocate(sizeof host);
  memory_->copy_in(memory.get(), host, sizeof host);
  auto* const at = static_cast<float*>(memory.get());
  flash3_merge_params p{};
  p.struct_size = sizeof p;
  p.out_parts = {at, FLASH3_FLOAT32, 4, {2, 2, 1, 1}, {2, 1, 1, 1}};
  p.lse_parts = {at + 4, FLASH3_FLOAT32, 3, {2, 1, 2}, {2, 2, 1}};
  p.out = {at + 8, FLASH3_FLOAT32, 3, {2, 1, 1}, {1, 1, 1}};
  p.lse = {at + 10, FLASH3_FLOAT32, 2, {1, 2}, {2, 1}};
  p.backend = FLASH3_BACKEND_HOPPER;
  p.stream = memory_->stream();
  ASSERT_EQ(flash3_merge(&p), FLASH3_OK) << flash3_last_error();
  memory_->finish();
  memory_->copy_out(host, memory.get(), sizeof host);
  EXPECT_EQ(host[8], 2.f);
  EXPECT_EQ(host[10], 1e30f);
  EXPECT_TRUE(host[9] != host[9] && host[11] != host[11]);
}

}  // namespace
}  // namespace flash3
