// SPDX-License-Identifier: Apache-2.0
// The device memory that the suites run their calls on: what it compares and copies without the
// host. Skipped without a Hopper GPU.
#include "fixture.hpp"

namespace flash3 {
namespace {

class DeviceMemory : public HopperTest {};

TEST_F(DeviceMemory, FindsOneOtherByteAnywhere) {
  const size_t size = (1 << 20) + 13;
  const auto a = memory_->allocate(size), b = memory_->allocate(size);
  auto* const bytes = static_cast<std::byte*>(b.get());
  for (const size_t begin : {size_t{0}, size_t{1}}) {
    for (const size_t at : {begin, size_t{255}, size_t{256}, size / 2, size - 1}) {
      memory_->fill(a.get(), std::byte{1}, size);
      memory_->copy(b.get(), a.get(), size);
      EXPECT_TRUE(
          memory_->equal(static_cast<std::byte*>(a.get()) + begin, bytes + begin, size - begin));
      memory_->fill(bytes + at, std::byte{2}, 1);
      EXPECT_FALSE(
          memory_->equal(static_cast<std::byte*>(a.get()) + begin, bytes + begin, size - begin))
          << at;
    }
  }
  EXPECT_TRUE(memory_->equal(a.get(), b.get(), 0));
}

}  // namespace
}  // namespace flash3
