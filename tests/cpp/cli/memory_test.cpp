// SPDX-License-Identifier: Apache-2.0
// Memory that is used again instead of freed, what an upload remembers, and how much each may have.
#include "cases/memory.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>

#include "cases/upload.hpp"
#include "cli/environment.hpp"

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
                          [](std::byte b) { return b == kFillPattern; }));
  EXPECT_NE(memory.allocate(5000).get(), where);
  EXPECT_NE(memory.allocate(0).get(), nullptr);
}

// Counts the blocks that it has given and that live.
class CountingMemory final : public Memory {
 public:
  explicit CountingMemory(int* blocks) : blocks_(blocks) {}
  std::shared_ptr<void> allocate(size_t bytes) override {
    const auto block = host_.allocate(bytes);
    ++*blocks_;
    return {block.get(), [this, block](void*) { --*blocks_; }};
  }
  void copy_in(void* to, const void* from, size_t n) override { host_.copy_in(to, from, n); }
  void copy_out(void* to, const void* from, size_t n) override { host_.copy_out(to, from, n); }
  void fill(void* to, std::byte value, size_t n) override { host_.fill(to, value, n); }
  void copy(void* to, const void* from, size_t n) override { host_.copy(to, from, n); }
  bool equal(const void* a, const void* b, size_t n) override { return host_.equal(a, b, n); }
  void finish() override {}
  double time(const std::function<void()>& work) override { return host_.time(work); }
  std::function<void()> record(const std::function<void()>& work) override { return work; }
  void* stream() const override { return nullptr; }

 private:
  HostMemory host_;
  int* blocks_;
};

TEST(PooledMemory, KeepsNoLargeBlock) {
  int blocks = 0;
  PooledMemory memory(std::make_unique<CountingMemory>(&blocks));
  memory.allocate(PooledMemory::kLargest);
  EXPECT_EQ(blocks, 1);
  {
    const auto large = memory.allocate(PooledMemory::kLargest + 1);
    EXPECT_EQ(blocks, 2);
  }
  EXPECT_EQ(blocks, 1);
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

TEST(Memory, RecordedWorkIsDoneEachTimeAndNotBefore) {
  PooledMemory memory(std::make_unique<HostMemory>());
  const auto block = memory.allocate(2);
  memory.fill(block.get(), std::byte{0}, 2);
  auto* const counts = static_cast<unsigned char*>(block.get());
  const std::function<void()> recorded = memory.record([&] { ++counts[0]; });
  EXPECT_EQ(counts[0], 0);
  for (int i = 0; i < 3; ++i) recorded();
  EXPECT_EQ(counts[0], 3);
}

TEST(Upload, TellsWhatACallHasChanged) {
  PooledMemory memory(std::make_unique<HostMemory>());
  GuardedTensor tensor = make_tensor(FLASH3_FLOAT16, 1, 3, 1, 5, Layout::kBatchSeq);
  Upload upload(memory, tensor);
  auto* const first = static_cast<std::byte*>(upload.view().data) - tensor.offset;
  const auto change = [&](size_t at) { memory.fill(first + at, std::byte{7}, 1); };
  EXPECT_TRUE(upload.is_unchanged());
  change(tensor.offset);
  EXPECT_FALSE(upload.is_unchanged());
  EXPECT_TRUE(upload.is_unchanged_around());
  upload.keep();
  EXPECT_TRUE(upload.is_as_kept());
  change(tensor.bytes.size() - 1);
  EXPECT_FALSE(upload.is_as_kept());
  EXPECT_FALSE(upload.is_unchanged_around());
  upload.restore();
  EXPECT_TRUE(upload.is_unchanged());
  change(0);
  EXPECT_FALSE(upload.is_unchanged_around());
  tensor.bytes[tensor.offset] = std::byte{3};
  upload.upload();
  EXPECT_TRUE(upload.is_unchanged());
  EXPECT_EQ(first[tensor.offset], std::byte{3});
}

TEST(MemoryBudget, LetsIntoTheBudgetWhatFitsAndAloneWhatDoesNot) {
  EXPECT_GT(cli::MemoryBudget::of_machine(), 0);
  cli::MemoryBudget budget(10);
  std::optional<cli::MemoryBudget::Share> first(std::in_place, budget, 6);
  const cli::MemoryBudget::Share second(budget, 4);
  std::atomic<bool> in = false;
  std::optional<std::jthread> third(std::in_place, [&] {
    const cli::MemoryBudget::Share share(budget, 6);
    in = true;
  });
  EXPECT_FALSE(in);
  first.reset();
  third.reset();  // joins
  EXPECT_TRUE(in);
  cli::MemoryBudget small(1);
  const cli::MemoryBudget::Share whole(small, 5);
}

}  // namespace
}  // namespace flash3::cases
