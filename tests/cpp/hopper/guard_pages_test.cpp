// SPDX-License-Identifier: Apache-2.0
// Lengths that break the rules, with every tensor between pages that are not there: "no memory
// outside the tensors is touched" (flash3.h), neither read nor written. One that is ends the CUDA
// context, so the first failure is the one to look at. Skipped without a Hopper GPU.

#include <limits>
#include <stdexcept>

#include "device_call.hpp"
#include "guarded_memory.hpp"

namespace flash3 {
namespace {

constexpr int kMost = std::numeric_limits<int>::max(), kLeast = std::numeric_limits<int>::min();

// The lengths of a batch of four.
constexpr int kRows = -77777;  // stands for the number of the tensor's rows
struct Bad {
  std::vector<int> cu, used;
};
const Bad kBad[] = {
    {{0, 0, 0, 0, 0}, {0, 0, 0, 0}},  // good ones, to begin with
    {{0, kRows, kRows, kRows, kRows}, {kRows, kRows, kRows, kRows}},
    {{0, kRows, 0, kRows, 0}, {kRows, -1, kRows, 1}},
    {{-5, -4, -3, -2, -1}, {-5, -4, -3, -2}},
    {{-1000000, 100, 200, 300, 1000000}, {1000000, 1000000, 1000000, 1000000}},
    {{1000000, 1000001, 1000002, 1000003, 1000004}, {1, 1, 1, 1}},
    {{kMost, kMost, kMost, kMost, kMost}, {kMost, kMost, kMost, kMost}},
    {{kLeast, kLeast, kLeast, kLeast, kLeast}, {kLeast, kLeast, kLeast, kLeast}},
    {{kLeast, kMost, kLeast, kMost, kLeast}, {kMost, kLeast, kMost, kLeast}},
    {{0, kMost, kLeast, kMost, kRows}, {kMost, kMost, kMost, kMost}},
    {{kRows, 0, kRows, 0, kRows}, {kMost, kMost, 0, kMost}},
    {{kRows, 65, 64, 63, 0}, {64, 65, 63, 1}},
    {{0x40000000, -0x40000000, 0x7FFFFF80, -0x7FFFFF80, 0}, {0x7FFFFF80, 129, 0x10000, kMost}},
};

class GuardPages : public HopperTest, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    HopperTest::SetUp();
    if (IsSkipped()) return;
    void* host = nullptr;
    ASSERT_EQ(cudaMallocHost(&host, kScratch), cudaSuccess);
    scratch_ = static_cast<std::byte*>(host);
  }
  void TearDown() override {
    if (scratch_) cudaFreeHost(scratch_);
    HopperTest::TearDown();
  }

  static constexpr size_t kScratch = size_t{64} << 20;
  std::byte* scratch_ = nullptr;
};

int64_t rows_of(DeviceCall* call, std::string_view lengths) {
  const flash3_tensor& t = *slot_of(&call->params, lengths.ends_with("_q") ? "q" : "k").tensor;
  return t.ndim == 3 ? t.shape[0] : t.shape[1];
}

std::vector<int> ints(const Bytes& bytes) {
  std::vector<int> values(bytes.size() / sizeof(int));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// Values that follow from lengths, or what a page table or the indices of a cache hold.
bool is_index(std::string_view name) {
  return name.starts_with("cu_seqlens") || name.starts_with("seqused") || name == "page_table" ||
         name == "cache_batch_idx" || name == "leftpad_k" || name == "rotary_offsets";
}

// As many values as are wanted, from the first on again.
std::vector<int> repeated(const std::vector<int>& values, size_t count) {
  std::vector<int> all;
  for (size_t i = 0; i < count; ++i) all.push_back(values[i % values.size()]);
  return all;
}

std::vector<int> with_rows(std::vector<int> values, int64_t rows) {
  std::replace(values.begin(), values.end(), kRows, int(rows));
  return values;
}

TEST_P(GuardPages, AreNotTouchedWhateverTheLengthsAre) {
  const TimeLimit limit;
  for (const Place place : {Place::kStart, Place::kEnd}) {
    std::vector<std::unique_ptr<GuardedMemory>> pages;
    const auto allocate = [&](const char* name, size_t bytes) {
      // Its beginning is aligned wherever the pages end.
      if (std::string_view(name) == "workspace") bytes = round_up(bytes, kWorkspaceAlignment);
      pages.push_back(std::make_unique<GuardedMemory>(name, bytes, place));
      EXPECT_LE(pages.back()->mapped(), kScratch);
      return pages.back()->data();
    };
    DeviceCall call(GetParam(), *memory_, allocate);
    // What the case's own lengths give, and in ordinary memory.
    DeviceCall plain(GetParam(), *memory_);
    call.run();
    plain.run();
    ASSERT_TRUE(call.outputs() == plain.outputs());

    std::vector<const char*> lengths;
    for (const auto& part : call.parts())
      if (is_index(part.name)) lengths.push_back(part.name);
    // Each of them bad beside good ones, one after the other, then all. q's and k's are bad in
    // different ways.
    for (size_t which = 0; which <= lengths.size(); ++which)
      for (size_t i = 0; i < std::size(kBad); ++i) {
        call.reset();
        for (size_t j = 0; j < lengths.size(); ++j) {
          const std::string_view name = lengths[j];
          if (which < lengths.size() && j != which) {
            call.set(name, ints(plain.part(name).host));
            continue;
          }
          const Bad& bad = kBad[(i + (name.ends_with("_k") ? 3 * which : 0)) % std::size(kBad)];
          call.set(name, repeated(with_rows(name.starts_with("cu") ? bad.cu : bad.used,
                                            rows_of(&call, name)),
                                  call.part(name).host.size() / sizeof(int)));
        }
        const std::string what = std::string(GetParam()) + ", tensors at the " +
                                 (place == Place::kStart ? "start" : "end") + ", lengths " +
                                 std::to_string(i) + " of " +
                                 (which < lengths.size() ? lengths[which] : "all");
        ASSERT_EQ(flash3::run(call.params), FLASH3_OK) << what << ": " << flash3_last_error();
        const cudaError_t error = cudaDeviceSynchronize();
        ASSERT_EQ(error, cudaSuccess) << what << ": " << cudaGetErrorString(error);
        for (const auto& page : pages)
          ASSERT_TRUE(page->is_intact(scratch_)) << what << ": beside " << page->name();
        for (const auto& part : call.parts())
          ASSERT_TRUE(part.output || call.grows(part) || call.download(part) == part.host)
              << what << ": " << part.name;
      }
  }
}

// With max_seqlen and without, masks, paths of copies, slots of short sequences, one side alone.
constexpr const char* kForward[] = {
    "bf16/b4/q200/k200/h4x2/d128/causal/packed",
    "bf16/b4/q200/k300/h2/d64/full/packed/used",
    "bf16/b4/q40/k40/h2/d128/causal/packed/used",
    "bf16/b4/q16/k16/h4x2/d64/causal/packed",
    "bf16/b4/q200/k300/h4x2/d96/causal/used",
    "bf16/b4/q100/k300/h8x1/d192/full/packedq",
    "bf16/b4/q100/k300/h8x2/d128/full/packedk",
    "bf16/b4/q1/k300/h8x1/d128/causal/usedk",
    "bf16/b4/q200/k200/h2/d256/causal/packed/nomax/sink",
    "bf16/b4/q150/k200/h2/d128/full/packed/softcap20",
    "fp16/b4/q130/k200/h2/d192x128/causal/odd/packed/used",
    "bf16/b4/q200/k200/h2/d128/w50:20/bhsd/packed/used",
    "bf16/b4/q200/k200/h2x1/d64/causal/packed/chunk64",
};
// Few queries, and a KV cache: boxes of pages, rows that are gathered, one long sequence, appends.
constexpr const char* kDecode[] = {
    "bf16/b4/q1/k300/h8x1/d128/causal/random/usedk/paged16",
    "bf16/b4/q1/k300/h8x1/d128/causal/random/usedk/paged1",
    "bf16/b4/q1/k5000/h4x1/d128/causal/random/usedk/paged128/sink",
    "fp16/b4/q3/k300/h4x2/d64/causal/random/usedk/paged3",
    "bf16/b4/q1/k300/h8x1/d128/w100:/random/usedk/paged64/leftpad",
    "bf16/b4/q2/k300/h4/d192x128/causal/random/usedk/batchidx/leftpad",
    "fp16/b3/q1/k257/h4x2/d192x128/causal/odd",
    "bf16/b4/q20/k300/h4x2/d256/full/random/usedk/paged256/softcap20",
    "bf16/b4/q1/k300/h4x1/d128/causal/random/usedk/paged16/append1/rotary",
    "fp16/b4/q5/k300/h4x2/d96/causal/random/usedk/paged2/append5/offsets/rotary2",
    "bf16/b4/q40/k300/h4x2/d64/causal/random/packedq/usedk/append40/packednew/rotary",
    "bf16/b4/q16/k300/h4x1/d128/full/random/usedk/paged16/append16/tree",
    "fp16/b4/q40/k300/h4x2/d64/full/random/packedq/usedk/paged64/tree",
    "bf16/b4/q1/k300/h4x2/d40/causal/random/usedk/batchidx/append3/packednew",
};
// Prompts on a KV cache: boxes of pages, of elements, of rows that lie as they come.
constexpr const char* kPrompts[] = {
    "bf16/b4/q200/k300/h4x2/d128/causal/random/usedk/paged16",
    "fp16/b4/q150/k300/h4/d64/w100:/random/packedq/usedk/paged64/append40/packednew/rotary",
    "bf16/b4/q100/k300/h4x1/d192x128/full/random/usedk/paged256/sink",
    "bf16/b4/q100/k300/h4x2/d256/causal/random/usedk/batchidx/leftpad/softcap20",
    "bf16/b4/q100/k300/h8x2/d128/causal/random/packedq/usedk/batchidx/append9/offsets/rotary2",
    "fp16/b4/q100/k300/h4x2/d128/causal/random/usedk/leftpad/append9/rotary",
};
constexpr const char* kFp8[] = {
    "e4m3/b4/q200/k300/h4x2/d128/causal/packed/used/blockscales",
    "e4m3/b4/q200/k300/h4x2/d64/full/packed/headscales/nomax",
    "e4m3/b4/q200/k300/h4x2/d256/full/used/blockscales",
    "e4m3/b4/q100/k300/h2/d192x128/causal/packedk/blockscales",
    "e4m3/b4/q40/k40/h2/d64/causal/packed/used/blockscales",
    "e4m3/b4/q100/k200/h2/d128/full/odd/packed/blockscales/softcap30",
    "e4m3/b4/q200/k5000/h4x2/d128/causal/usedk/blockscales",
    "e4m3/b4/q100/k5000/h2x1/d256/full/packedk/blockscales",
    "bf16/b4/q200/k300/h4x2/d128/causal/packed/used/fp8",
    "fp16/b4/q100/k100/h2/d64/full/packedq/fp8",
};
constexpr const char* kQuantize[] = {
    "bf16/b4/q200/k300/h4x2/d128/full/packed/used/quantize/blockscales/rotate",
    "fp16/b4/q200/k300/h4x2/d64/full/packed/quantize/headscales/rotate",
    "bf16/b4/q200/k300/h4x2/d128/full/packed/used/quantize/blockscales/rotary",
    "bf16/b4/q200/k300/h4x2/d96/full/used/quantize/onescale/rotary2",
    "bf16/b4/q200/k300/h4x2/d256/full/packedk/quantize/blockscales",
    "bf16/b4/q130/k200/h2/d128/full/odd/packed/used/quantize/blockscales/rotate",
};
constexpr const char* kBackward[] = {
    "bf16/b4/q200/k200/h4x2/d128/causal/packed/used/deterministic",
    "bf16/b4/q200/k300/h4x2/d64/full/packed/deterministic",
    "bf16/b4/q200/k300/h2/d256/causal/packed/used/nomax/deterministic",
    "fp16/b4/q200/k200/h2/d192x128/causal/packed/deterministic/dlse",
    "bf16/b4/q200/k300/h4x2/d96/causal/used/deterministic/dlse/sink",
    "bf16/b4/q100/k300/h4x2/d128/full/packedq/deterministic",
    "bf16/b4/q100/k300/h4x2/d128/full/packedk/deterministic",
    "bf16/b4/q100/k300/h4x1/d64/causal/usedk/deterministic",
    "bf16/b4/q200/k200/h2/d128/causal/packed/used/softcap20/deterministic",
    "bf16/b4/q130/k200/h2/d64/causal/odd/packed/used/deterministic",
    "bf16/b4/q200/k200/h2/d128/w50:20/bhsd/packed/used/deterministic",
};
INSTANTIATE_TEST_SUITE_P(Forward, GuardPages, testing::ValuesIn(kForward));
INSTANTIATE_TEST_SUITE_P(Decode, GuardPages, testing::ValuesIn(kDecode));
INSTANTIATE_TEST_SUITE_P(Prompts, GuardPages, testing::ValuesIn(kPrompts));
INSTANTIATE_TEST_SUITE_P(Fp8, GuardPages, testing::ValuesIn(kFp8));
INSTANTIATE_TEST_SUITE_P(Quantize, GuardPages, testing::ValuesIn(kQuantize));
INSTANTIATE_TEST_SUITE_P(Backward, GuardPages, testing::ValuesIn(kBackward));

// The device memory that the suites run their calls on: what it compares and copies without the
// host. Skipped without a Hopper GPU.

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
