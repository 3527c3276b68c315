// SPDX-License-Identifier: Apache-2.0
// Sources and masks between pages that are not there: nothing is read or written outside of them,
// whatever the sources hold. Skipped without a Hopper GPU.
#include "guarded_memory.hpp"
#include "mask_fixture.hpp"

namespace flash3 {
namespace {

// Another memory, with what it allocates between guard pages.
class GuardedAllocations final : public cases::MemoryOver {
 public:
  GuardedAllocations(std::unique_ptr<cases::Memory> memory, Place place)
      : MemoryOver(std::move(memory)), place_(place) {}

  std::shared_ptr<void> allocate(size_t bytes) override {
    const auto guarded = std::make_shared<GuardedMemory>("allocation", bytes, place_);
    return {guarded, guarded->data()};
  }

 private:
  const Place place_;
};

class GuardedMask : public MakeMask, public testing::WithParamInterface<Place> {
 protected:
  void SetUp() override {
    MakeMask::SetUp();
    if (!memory_) return;  // skipped
    memory_ = std::make_unique<GuardedAllocations>(std::move(memory_), GetParam());
    canary_ = 0;  // the pages are next to the mask
  }
};

TEST_P(GuardedMask, NothingOutsideIsTouched) {
  for (MaskSource source :
       {MaskSource::kBand, MaskSource::kRanges, MaskSource::kDocuments, MaskSource::kDense,
        MaskSource::kBlocks, MaskSource::kBits, MaskSource::kBitBlocks})
    for (int64_t size : {1, 129, 1000, 1280})
      for (int64_t pad : {0, 1})
        verify({.source = source,
                .batch = 2,
                .seq_q = size,
                .seq_k = size + 32,
                .rule = {.window_right = 0},
                .ranges = 2,
                .block_rows = 64,
                .block_keys = 24,
                .pad = pad,
                .garbage = true});
}
INSTANTIATE_TEST_SUITE_P(Places, GuardedMask, testing::Values(Place::kStart, Place::kEnd));

}  // namespace
}  // namespace flash3
