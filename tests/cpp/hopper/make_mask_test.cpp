// SPDX-License-Identifier: Apache-2.0
// Masks that the device makes, against the definition pair by pair. Skipped without a Hopper GPU.

#include <utility>

#include "guarded_memory.hpp"
#include "mask_fixture.hpp"

namespace flash3 {
namespace {

constexpr int64_t kSizes[] = {0, 1, 64, 128, 129, 190, 1000, 4097};

MaskRule causal() { return {.window_right = 0}; }
MaskRule window(int64_t left, int64_t right) { return {left, right}; }
MaskRule chunks(int64_t chunk) { return {.window_right = 0, .chunk = chunk}; }

// Pairs of sizes: each beside itself and its neighbours in the list.
template <class What>
void for_sizes(const What& what) {
  for (size_t i = 0; i < std::size(kSizes); ++i)
    for (size_t j = i == 0 ? 0 : i - 1; j < std::min(i + 2, std::size(kSizes)); ++j)
      what(kSizes[i], kSizes[j]);
}

TEST_F(MakeMask, OfABand) {
  for_sizes([&](int64_t q, int64_t k) {
    for (MaskRule rule : {MaskRule{}, causal(), window(200, 5), window(0, -1), chunks(300)})
      for (bool top_left : {false, true}) {
        rule.top_left = top_left;
        verify({.seq_q = q, .seq_k = k, .rule = rule});
      }
  });
  verify({.seq_q = 300, .seq_k = 4097, .rule = causal()});
  verify({.seq_q = 4097, .seq_k = 300, .rule = causal()});
}

TEST_F(MakeMask, OfRanges) {
  for_sizes([&](int64_t q, int64_t k) {
    for (int64_t ranges : {1, 2, 3, 8})
      verify({.source = MaskSource::kRanges, .seq_q = q, .seq_k = k, .ranges = ranges});
  });
  for (bool garbage : {false, true})
    for (int64_t ranges : {1, 8})
      for (const MaskRule& rule : {MaskRule{}, causal(), window(300, 20)})
        verify({.source = MaskSource::kRanges,
                .batch = 2,
                .heads = 3,
                .seq_q = 700,
                .seq_k = 900,
                .rule = rule,
                .ranges = ranges,
                .pad = 3,
                .garbage = garbage});
}

TEST_F(MakeMask, OfDocuments) {
  for_sizes([&](int64_t q, int64_t k) {
    for (const MaskRule& rule : {MaskRule{}, causal()})
      verify({.source = MaskSource::kDocuments, .seq_q = q, .seq_k = k, .rule = rule});
  });
  for (bool garbage : {false, true})
    for (const auto& [q, k] : {std::pair{300, 5000}, {5000, 300}, {5000, 4900}, {6000, 6000}})
      verify({.source = MaskSource::kDocuments,
              .batch = q < 6000 ? 3 : 1,
              .seq_q = q,
              .seq_k = k,
              .rule = window(700, 0),
              .pad = 5,
              .garbage = garbage});
}

// Ends of a run that are far away: more blocks of keys than a thread block has threads.
TEST_F(MakeMask, OfOneLongDocument) {
  verify({.source = MaskSource::kDocuments, .seq_q = 200, .seq_k = 70000, .rule = causal()});
  const MaskCase c{.source = MaskSource::kDocuments, .seq_q = 140, .seq_k = 80000};
  MaskInput in(c, 1);
  std::fill(in.ints.begin(), in.ints.end(), 4);
  in.ints[3] = 1;
  const ExpectedMask expected(in);
  const Made made = make_problem(in, c.shape());
  ASSERT_TRUE(cuda::launch_make_mask(made.problem).ok());
  expect_mask(expected, made);
}

// Room for fewer documents than there are, for just as many and for more; more blocks of keys than
// the thread block that counts them has threads.
TEST_F(MakeMask, NotesWhereDocumentsBegin) {
  for (const int64_t seq : {1, 127, 128, 129, 1000, 4097, 140000})
    for (const int64_t more : {-1, 0, 7}) {
      SCOPED_TRACE(std::to_string(seq) + " keys, room for " + std::to_string(more) + " more");
      const MaskCase c{.source = MaskSource::kDocuments, .seq_q = seq, .seq_k = seq};
      const MaskInput in(c, 3);
      std::vector<int> begins;
      for (size_t j = 0; j < in.ints.size(); ++j)
        if (j == 0 || in.ints[j] != in.ints[j - 1]) begins.push_back(int(j));
      const int64_t count = std::ssize(begins), room = count + more;
      if (room == 0) continue;
      MaskShape shape = c.shape();
      shape.blocks = std::min<int64_t>(shape.blocks, 1 << 18), shape.partial_blocks = 0;
      const Made made = make_problem(in, shape, room);
      ASSERT_TRUE(cuda::launch_make_mask(made.problem).ok());
      std::vector<std::byte> host = read(made);
      EXPECT_EQ(MaskMemory::of(shape, host.data()).counts->documents, count);
      EXPECT_EQ(MaskMemory::of(shape, host.data()).counts->overflow, more < 0);
      const auto end = int(seq);
      std::vector<int> q = begins, k = begins;
      if (more < 0) {
        q.assign(1, 0), k.assign(size_t(room) + 1, 0);
      }
      q.resize(size_t(room) + 2, end), k.resize(size_t(room) + 2, end);
      const MaskStarts starts = mask_starts(shape, room, host.data());
      EXPECT_EQ(q, std::vector<int>(starts.q, starts.q + starts.count()));
      EXPECT_EQ(k, std::vector<int>(starts.k, starts.k + starts.count()));
    }
}

TEST_F(MakeMask, OfPairs) {
  for_sizes([&](int64_t q, int64_t k) {
    verify({.source = MaskSource::kDense, .seq_q = q, .seq_k = k});
    verify({.source = MaskSource::kDense,
            .seq_q = q,
            .seq_k = k,
            .rule = causal(),
            .pad = 16 - k % 16});
  });
  for (int64_t pad : {0, 7, 16})
    for (int64_t batch : {1, 2})
      for (int64_t heads : {1, 3})
        verify({.source = MaskSource::kDense,
                .batch = batch,
                .heads = heads,
                .seq_q = 300,
                .seq_k = 512,
                .rule = window(-1, 50),
                .pad = pad});
  for (int seen : {0, 16})
    verify({.source = MaskSource::kDense, .seq_q = 400, .seq_k = 500, .seen_of_16 = seen});
}

TEST_F(MakeMask, OfBlocks) {
  for_sizes([&](int64_t q, int64_t k) {
    verify({.source = MaskSource::kBlocks, .seq_q = q, .seq_k = k});
    verify({.source = MaskSource::kBlocks,
            .seq_q = q,
            .seq_k = k,
            .rule = causal(),
            .block_rows = 64,
            .block_keys = 64});
  });
  for (bool garbage : {false, true})
    for (const auto& [rows, keys] : {std::pair{8, 8},
                                     {16, 24},
                                     {24, 40},
                                     {40, 136},
                                     {64, 64},
                                     {136, 8},
                                     {256, 384},
                                     {1000, 128}})
      for (const MaskRule& rule : {MaskRule{}, window(200, 30)})
        verify({.source = MaskSource::kBlocks,
                .batch = 2,
                .heads = 2,
                .seq_q = 900,
                .seq_k = 1100,
                .rule = rule,
                .block_rows = rows,
                .block_keys = keys,
                .pad = 1,
                .garbage = garbage});
  for (int seen : {0, 16})
    verify({.source = MaskSource::kBlocks,
            .seq_q = 400,
            .seq_k = 500,
            .block_rows = 64,
            .block_keys = 64,
            .seen_of_16 = seen});
}

TEST_F(MakeMask, OfBits) {
  for (MaskSource source : {MaskSource::kBits, MaskSource::kBitBlocks}) {
    for_sizes([&](int64_t q, int64_t k) {
      verify({.source = source, .seq_q = q, .seq_k = k});
      verify({.source = source, .seq_q = q, .seq_k = k, .rule = causal(), .pad = 3});
    });
    for (bool garbage : {false, true})
      for (int64_t pad : {0, 7, 16})
        for (int64_t batch : {1, 2})
          for (int64_t heads : {1, 3})
            verify({.source = source,
                    .batch = batch,
                    .heads = heads,
                    .seq_q = 300,
                    .seq_k = 1024,
                    .rule = window(-1, 50),
                    .pad = pad,
                    .garbage = garbage});
  }
}

// More blocks than a thread block keeps in shared memory: it looks twice.
TEST_F(MakeMask, OfSequencesThatTakeSeveralLooks) {
  for (MaskSource source : {MaskSource::kBand, MaskSource::kRanges, MaskSource::kDense,
                            MaskSource::kBlocks, MaskSource::kBits, MaskSource::kBitBlocks})
    for (const auto& [q, k] : {std::pair{100, 270000}, {270000, 100}})
      verify({.source = source,
              .seq_q = q,
              .seq_k = k,
              .ranges = 2,
              .block_rows = 8,
              .block_keys = 200});
}

TEST_F(MakeMask, IsTheSameEachTime) {
  for (MaskSource source : {MaskSource::kRanges, MaskSource::kDense, MaskSource::kBlocks,
                            MaskSource::kBits, MaskSource::kBitBlocks})
    verify({.source = source,
            .batch = 2,
            .heads = 2,
            .seq_q = 2000,
            .seq_k = 2100,
            .ranges = 3,
            .block_rows = 64,
            .block_keys = 64},
           5);
}

TEST_F(MakeMask, WithoutRoomIsEmpty) {
  for (MaskSource source :
       {MaskSource::kBand, MaskSource::kRanges, MaskSource::kDocuments, MaskSource::kDense,
        MaskSource::kBlocks, MaskSource::kBits, MaskSource::kBitBlocks}) {
    const MaskCase c{.source = source,
                     .batch = 2,
                     .seq_q = 1500,
                     .seq_k = 1700,
                     .rule = causal(),
                     .ranges = 3,
                     .block_rows = 64,
                     .block_keys = 64};
    const MaskInput in(c, 3);
    const ExpectedMask expected(in);
    for (const auto& [blocks, partial] :
         {std::pair{expected.blocks() - 1, expected.partial_blocks()},
          {expected.blocks(), expected.partial_blocks() - 1},
          {expected.blocks() / 2, expected.partial_blocks() / 2},
          {int64_t{0}, int64_t{0}}}) {
      if (partial < 0) continue;  // it needs no bits
      MaskShape shape = c.shape();
      shape.blocks = blocks, shape.partial_blocks = partial;
      const Made made = make_problem(in, shape);
      ASSERT_TRUE(cuda::launch_make_mask(made.problem).ok());
      expect_mask(expected, made);
      MaskCounts counts{};
      const Status status =
          cuda::read_mask_counts(shape, made.problem.data, made.problem.stream, &counts);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(counts.blocks, expected.blocks());
      EXPECT_EQ(counts.partial_blocks, expected.partial_blocks());
      EXPECT_EQ(counts.overflow, 1);
    }
  }
}

// 2^32 blocks, which would count as none.
TEST_F(MakeMask, CountsNoFurtherThanAnInt) {
  MaskShape shape{1, 1, int64_t{1} << 24, int64_t{1} << 22, 1};
  ASSERT_EQ(shape.all_blocks(), int64_t{1} << 32);
  shape.blocks = 40000;  // the first list has room
  const Made made = make_problem(MaskInput({}, 1), shape);
  ASSERT_TRUE(cuda::launch_make_mask(made.problem).ok());
  MaskCounts counts{};
  ASSERT_TRUE(cuda::read_mask_counts(shape, made.problem.data, made.problem.stream, &counts).ok());
  EXPECT_EQ(counts.blocks, std::numeric_limits<int>::max());
  EXPECT_EQ(counts.key_blocks, std::numeric_limits<int>::max());
  EXPECT_EQ(counts.overflow, 1);
  std::vector<MaskList> lists(size_t(shape.lists()), MaskList{1, 1});
  memory_->copy_out(lists.data(), MaskMemory::of(shape, made.problem.data).lists,
                    lists.size() * sizeof(MaskList));
  EXPECT_TRUE(std::all_of(lists.begin(), lists.end(), [](MaskList l) { return l.count == 0; }));
}

// A graph makes the mask again from what its source then holds.
TEST_F(MakeMask, CanBeCaptured) {
  for (MaskSource source : {MaskSource::kDocuments, MaskSource::kDense, MaskSource::kBlocks,
                            MaskSource::kBits, MaskSource::kBitBlocks}) {
    const MaskCase c{.source = source, .seq_q = 1500, .seq_k = 1700, .rule = causal()};
    const MaskInput first(c, 3), second(c, 4);
    const Made made = make_problem(first, c.shape());
    const auto replay = memory_->record([&] {
      const Status status = cuda::launch_make_mask(made.problem);
      EXPECT_TRUE(status.ok()) << status.message();
    });
    for (const MaskInput* in : {&first, &second, &first}) {
      if (!in->ints.empty())
        memory_->copy_in(made.source.get(), in->ints.data(), in->ints.size() * sizeof(int));
      if (!in->bytes.empty())
        memory_->copy_in((made.bits ? made.bits : made.source).get(), in->bytes.data(),
                         in->bytes.size());
      if (!in->counts.empty())
        memory_->copy_in(made.counts.get(), in->counts.data(), in->counts.size() * sizeof(int));
      replay();
      memory_->finish();
      expect_mask(ExpectedMask(*in), made);
    }
  }
}

// Sources and masks between pages that are not there: nothing is read or written outside of them,
// whatever the sources hold. Skipped without a Hopper GPU.

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
