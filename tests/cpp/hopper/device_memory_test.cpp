// SPDX-License-Identifier: Apache-2.0
// The device memory that the suites run their calls on: what it compares and copies without the
// host. Skipped without a Hopper GPU.
#include <stdexcept>

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

TEST_F(DeviceMemory, RecordedWorkIsDoneEachTimeAndNotBefore) {
  constexpr size_t kSize = 1 << 10;
  const auto a = memory_->allocate(kSize), ones = memory_->allocate(kSize);
  const auto twos = memory_->allocate(kSize);
  memory_->fill(ones.get(), std::byte{1}, kSize), memory_->fill(twos.get(), std::byte{2}, kSize);
  memory_->copy(a.get(), ones.get(), kSize);
  memory_->finish();
  const auto recorded = memory_->record([&] { memory_->copy(a.get(), twos.get(), kSize); });
  for (int i = 0; i < 2; ++i) {
    memory_->copy(a.get(), ones.get(), kSize);
    EXPECT_TRUE(memory_->equal(a.get(), ones.get(), kSize));
    recorded();
    EXPECT_TRUE(memory_->equal(a.get(), twos.get(), kSize));
  }
}

TEST_F(DeviceMemory, CanBeUsedBehindARecordingThatFails) {
  const auto a = memory_->allocate(1), b = memory_->allocate(1);
  EXPECT_THROW(memory_->record([&] {
    memory_->fill(a.get(), std::byte{1}, 1);
    throw std::runtime_error("it fails");
  }),
               std::runtime_error);
  memory_->fill(a.get(), std::byte{2}, 1);
  memory_->copy(b.get(), a.get(), 1);
  EXPECT_TRUE(memory_->equal(a.get(), b.get(), 1));
  EXPECT_NO_THROW(memory_->record([&] { memory_->fill(a.get(), std::byte{3}, 1); })());
  memory_->finish();
}

}  // namespace
}  // namespace flash3
