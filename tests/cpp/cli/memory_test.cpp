// SPDX-License-Identifier: Apache-2.0
// Memory that is used again instead of freed.
#include "cases/memory.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "cases/upload.hpp"

namespace flash3::cases {
namespace {

const std::byte* bytes_of(const std::shared_ptr<void>& block) {
  return static_cast<const std::byte*>(block.get());
}

TEST(PooledMemory, UsesABlockAgainAndPoisonsWhatLiesBehindTheBytes) {
  PooledMemory memory(std::make_unique<HostMemory>());
  auto first = memory.allocate(3000);
  const void* const where = first.get();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(where) % 256, 0u);
  memory.fill(first.get(), std::byte{1}, 4096);
  EXPECT_NE(memory.allocate(3000).get(), where);  // it is in use
  first.reset();

  const auto second = memory.allocate(100);
  EXPECT_EQ(second.get(), where);
  EXPECT_TRUE(std::all_of(bytes_of(second) + 100, bytes_of(second) + 4096,
                          [](std::byte b) { return b == kPoison; }));
  EXPECT_NE(memory.allocate(5000).get(), where);
  EXPECT_NE(memory.allocate(0).get(), nullptr);
}

// Guards, gaps and outputs of a tensor in a used block are as in a new one.
TEST(PooledMemory, AnUploadRenewsTheGuards) {
  PooledMemory memory(std::make_unique<HostMemory>());
  const GuardedTensor tensor = make_tensor(FLASH3_FLOAT32, 2, 3, 2, 5, Layout::kOdd);
  {
    const Upload used(memory, tensor);
    memory.fill(static_cast<std::byte*>(used.view().data) - tensor.offset, std::byte{1},
                tensor.bytes.size());
  }
  const Upload again(memory, tensor);
  GuardedTensor now = tensor;
  memory.fill(now.bytes.data(), std::byte{2}, now.bytes.size());
  again.download(&now);
  EXPECT_EQ(now.bytes, tensor.bytes);
}

}  // namespace
}  // namespace flash3::cases
