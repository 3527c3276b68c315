// SPDX-License-Identifier: Apache-2.0
// The Hopper forward on ragged batches: against the oracle, and what a GPU call also promises:
// graphs that replay with other lengths, sequences that do not know of each other, also where they
// share tiles, 64-bit offsets. Skipped without a Hopper GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "cases/table.hpp"
#include "cases/tensors.hpp"
#include "device_call.hpp"

namespace flash3 {
namespace {

using Bytes = std::vector<std::byte>;
using cases::kFillPattern;

class HopperRaggedForward : public HopperTest {};

// Every row that is no token's holds the fill pattern, before and after.
TEST_F(HopperRaggedForward, CaseTable) {
  for (const cases::Case& c :
       cases::ragged_case_table(cases::Level::kQuick, cases::dtypes_of(FLASH3_BACKEND_HOPPER)))
    verify(c);
}

struct Shape {
  int64_t heads_q, heads_k, dim;
  bool causal;
  int64_t chunk = 0;
  float softcap = 0;
};

// Sequences of the device's cu_seqlens and seqused.
struct Lengths {
  std::vector<int> cu, used;
};

// A packed call on normal numbers, self-attention; NaNs in every row that is no token's.
class PackedCall {
 public:
  PackedCall(const Shape& s, int64_t rows, int64_t batch, int64_t longest, cases::Memory& memory)
      : memory_(memory), batch_(batch), rows_(rows) {
    const auto tensor = [&](int64_t heads) {
      flash3_tensor t{nullptr, FLASH3_BFLOAT16, 3, {rows, heads, s.dim}, {heads * s.dim, s.dim, 1}};
      t.data = upload(Bytes(size_t(rows * heads * s.dim) * 2, kFillPattern));
      return t;
    };
    p_.struct_size = sizeof p_;
    p_.q = tensor(s.heads_q);
    p_.k = tensor(s.heads_k);
    p_.v = tensor(s.heads_k);
    p_.out = tensor(s.heads_q);
    p_.out.data = guarded(size_t(rows * s.heads_q * s.dim) * 2);
    p_.lse = {
        guarded(size_t(s.heads_q * rows) * 4), FLASH3_FLOAT32, 2, {s.heads_q, rows}, {rows, 1}};
    p_.causal = s.causal;
    p_.chunk = s.chunk;
    p_.softcap = s.softcap;
    p_.max_seqlen_q = p_.max_seqlen_k = longest;
    p_.backend = FLASH3_BACKEND_HOPPER;
    p_.stream = memory.stream();
    cu_ = upload(Bytes(size_t(batch + 1) * 4));
    used_ = upload(Bytes(size_t(batch) * 4));
    for (const int64_t count : {int64_t{1}, batch}) {  // either may need more
      set_batch(0, count);
      size_t bytes = 0;
      EXPECT_EQ(flash3_forward_workspace(&p_, &bytes), FLASH3_OK) << flash3_last_error();
      p_.workspace_size = std::max(p_.workspace_size, bytes);
    }
    p_.workspace = upload(Bytes(p_.workspace_size, kFillPattern));
  }

  // The call on sequences [first, first + count).
  void set_batch(int64_t first, int64_t count) {
    p_.cu_seqlens_q = {cu_ + 4 * first, FLASH3_INT32, 1, {count + 1}, {1}};
    p_.seqused_q = {used_ + 4 * first, FLASH3_INT32, 1, {count}, {1}};
    p_.cu_seqlens_k = p_.cu_seqlens_q;
    p_.seqused_k = p_.seqused_q;
  }
  // What the device holds of lengths, and tokens where they say.
  void set_lengths(const Lengths& lengths) {
    ASSERT_EQ(std::ssize(lengths.cu), batch_ + 1);
    ASSERT_EQ(std::ssize(lengths.used), batch_);
    memory_.copy_in(cu_, lengths.cu.data(), lengths.cu.size() * 4);
    memory_.copy_in(used_, lengths.used.data(), lengths.used.size() * 4);
    uint64_t seed = 1;
    for (const flash3_tensor* t : {&p_.q, &p_.k, &p_.v}) {
      const int64_t row = t->stride[0];
      Bytes values(size_t(rows_ * row) * 2), host(values.size(), kFillPattern);
      cases::fill_normal(values.data(), t->dtype, rows_ * row, seed++);
      for (size_t b = 0; b < lengths.used.size(); ++b) {
        const auto first = size_t(lengths.cu[b] * row) * 2;
        std::copy_n(values.begin() + std::ptrdiff_t(first), size_t(lengths.used[b] * row) * 2,
                    host.begin() + std::ptrdiff_t(first));
      }
      memory_.copy_in(t->data, host.data(), host.size());
    }
  }
  void fill_outputs() {
    for (const auto& [t, bytes] : outputs()) {
      const Bytes host(bytes, kFillPattern);
      memory_.copy_in(t->data, host.data(), host.size());
    }
  }
  void run() {
    ASSERT_EQ(flash3_forward(&p_), FLASH3_OK) << flash3_last_error();
    memory_.finish();
  }
  // All of out and lse; looks at what lies around them.
  std::vector<Bytes> results() const {
    std::vector<Bytes> all;
    for (const auto& [t, bytes] : outputs()) {
      Bytes host(bytes + 2 * kGuard);
      memory_.copy_out(host.data(), static_cast<std::byte*>(t->data) - kGuard, host.size());
      const auto begin = host.begin() + kGuard, end = host.end() - kGuard;
      const auto is_fill = [](std::byte b) { return b == kFillPattern; };
      EXPECT_TRUE(std::all_of(host.begin(), begin, is_fill)) << "written before the tensor";
      EXPECT_TRUE(std::all_of(end, host.end(), is_fill)) << "written beyond the tensor";
      all.emplace_back(begin, end);
    }
    return all;
  }
  flash3_forward_params& params() { return p_; }

  // The first row, of these, whose token's outputs are not those of the other results, or that is
  // no token's and not the pattern; −1 if there is none.
  int64_t first_difference(const std::vector<Bytes>& got, const std::vector<Bytes>& want,
                           int64_t first, int64_t used, int64_t last) const {
    const size_t row = size_t(p_.out.stride[0]) * 2;
    const auto heads = size_t(p_.lse.shape[0]);
    for (int64_t i = first; i < last; ++i) {
      const bool token = i < first + used;
      const auto same = [&](size_t output, size_t at, size_t bytes) {
        const auto begin = got[output].begin() + std::ptrdiff_t(at);
        if (token)
          return std::equal(begin, begin + std::ptrdiff_t(bytes),
                            want[output].begin() + std::ptrdiff_t(at));
        return std::all_of(begin, begin + std::ptrdiff_t(bytes),
                           [](std::byte b) { return b == kFillPattern; });
      };
      bool all = same(0, size_t(i) * row, row);
      for (size_t h = 0; h < heads; ++h)
        all = all && same(1, (h * size_t(rows_) + size_t(i)) * 4, 4);
      if (!all) return i;
    }
    return -1;
  }

 private:
  static constexpr std::ptrdiff_t kGuard = 4096;
  std::vector<std::pair<const flash3_tensor*, size_t>> outputs() const {
    return {{&p_.out, size_t(rows_ * p_.out.stride[0]) * 2},
            {&p_.lse, size_t(rows_ * p_.lse.shape[0]) * 4}};
  }
  // Full of the fill pattern, with guards before and after.
  std::byte* guarded(size_t bytes) {
    return upload(Bytes(bytes + 2 * kGuard, kFillPattern)) + kGuard;
  }
  std::byte* upload(const Bytes& host) {
    auto* const at = static_cast<std::byte*>(
        buffers_.emplace_back(memory_.allocate(std::max<size_t>(host.size(), 1))).get());
    memory_.copy_in(at, host.data(), host.size());
    return at;
  }

  cases::Memory& memory_;
  int64_t batch_, rows_;
  std::vector<std::shared_ptr<void>> buffers_;
  std::byte *cu_ = nullptr, *used_ = nullptr;
  flash3_forward_params p_{};
};

// The same batches with long sequences, and with sequences that share tiles.
constexpr int64_t kRows = 1500, kBatch = 6;
struct Batches {
  int64_t longest;
  std::vector<Lengths> lengths;
};
const Batches kBatches[] = {
    {1500,
     {{{0, 300, 301, 301, 800, 1100, 1500}, {300, 1, 0, 499, 290, 400}},
      {{10, 10, 1400, 1410, 1450, 1450, 1490}, {0, 1390, 10, 17, 0, 33}},
      {{0, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}},
      {{1, 129, 257, 385, 513, 641, 1499}, {128, 0, 127, 64, 128, 700}}}},
    {64,
     {{{0, 64, 65, 65, 129, 160, 200}, {64, 1, 0, 63, 31, 40}},
      {{10, 10, 70, 1410, 1450, 1450, 1490}, {0, 60, 10, 17, 0, 33}},
      {{0, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}},
      {{1, 65, 129, 193, 257, 321, 385}, {64, 64, 64, 64, 64, 64}}}},
    {16,
     {{{0, 16, 17, 17, 33, 40, 1500}, {16, 1, 0, 15, 7, 9}},
      {{10, 10, 26, 42, 58, 58, 74}, {0, 16, 16, 5, 0, 12}}}},
};
constexpr Shape kShapes[] = {{4, 2, 128, true},          {2, 2, 64, false},
                             {6, 1, 256, true},          {8, 1, 128, false},
                             {2, 1, 64, true, 100},      {4, 2, 64, true, 0, 20.f},
                             {2, 1, 128, false, 0, 30.f}};

std::string what(const Shape& s, const Batches& batches, size_t i) {
  return "d " + std::to_string(s.dim) + ", softcap " + std::to_string(s.softcap) + ", at most " +
         std::to_string(batches.longest) + " tokens, lengths " + std::to_string(i);
}

TEST_F(HopperRaggedForward, CanBeCapturedInAGraphAndReplayedWithOtherLengths) {
  for (const Shape& shape : kShapes)
    for (const Batches& batches : kBatches) {
      PackedCall call(shape, kRows, kBatch, batches.longest, *memory_);
      const auto stream = static_cast<cudaStream_t>(memory_->stream());
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t executable = nullptr;
      ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
      EXPECT_EQ(flash3_forward(&call.params()), FLASH3_OK) << flash3_last_error();
      ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
      ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
      for (size_t j = 0; j <= batches.lengths.size(); ++j) {
        const size_t i = j % batches.lengths.size();  // the first once more
        const Lengths& lengths = batches.lengths[i];
        call.set_lengths(lengths);
        call.fill_outputs();
        ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
        memory_->finish();
        const auto replayed = call.results();
        call.fill_outputs();
        call.run();
        EXPECT_TRUE(replayed == call.results()) << what(shape, batches, i);
        // Rows of no sequence, before the first and after the last.
        for (const auto& [first, last] : {std::pair{int64_t{0}, int64_t{lengths.cu.front()}},
                                          std::pair{int64_t{lengths.cu.back()}, kRows}})
          EXPECT_EQ(call.first_difference(replayed, replayed, first, 0, last), -1)
              << what(shape, batches, i);
      }
      cudaGraphExecDestroy(executable);
      cudaGraphDestroy(graph);
    }
}

// The same finite bits whatever sequences are beside it, and nothing written after the tokens that
// count.
TEST_F(HopperRaggedForward, EachSequenceAsIfItWereAlone) {
  for (const Shape& shape : kShapes)
    for (const Batches& batches : kBatches)
      for (size_t i = 0; i < batches.lengths.size(); ++i) {
        const Lengths& lengths = batches.lengths[i];
        PackedCall call(shape, kRows, kBatch, batches.longest, *memory_);
        call.set_lengths(lengths);
        call.run();
        const auto together = call.results();
        for (int64_t b = 0; b < kBatch; ++b) {
          call.fill_outputs();
          call.set_batch(b, 1);
          call.run();
          const int64_t first = lengths.cu[size_t(b)], last = lengths.cu[size_t(b) + 1],
                        used = lengths.used[size_t(b)];
          const auto alone = call.results();
          EXPECT_EQ(call.first_difference(together, alone, first, used, last), -1)
              << what(shape, batches, i) << ", sequence " << b << " beside others";
          EXPECT_EQ(call.first_difference(alone, together, first, used, last), -1)
              << what(shape, batches, i) << ", sequence " << b << " alone";
          if (used > 0) {
            float lse = 0;
            std::memcpy(&lse, alone[1].data() + 4 * first, 4);
            EXPECT_TRUE(std::isfinite(lse)) << what(shape, batches, i) << ", sequence " << b;
          }
          call.set_batch(0, kBatch);
        }
      }
}

// Lengths that break the rules: whatever comes out, the call ends and writes its tensors alone.
TEST_F(HopperRaggedForward, EndsWhateverTheLengthsAre) {
  for (const Shape& shape : kShapes)
    for (const Batches& batches : kBatches) {
      PackedCall call(shape, kRows, kBatch, batches.longest, *memory_);
      const std::vector<int> cu = {0, 1500, 0, 1500, -5, 100000, 3},
                             used = {100000, 7, -1, 1500, 1500, 2};
      memory_->copy_in(call.params().cu_seqlens_q.data, cu.data(), cu.size() * 4);
      memory_->copy_in(call.params().seqused_q.data, used.data(), used.size() * 4);
      call.run();
      call.results();
    }
}

TEST_F(HopperRaggedForward, RefusesLengthsInHostMemory) {
  PackedCall call(kShapes[0], kRows, kBatch, kRows, *memory_);
  flash3_forward_params& p = call.params();
  std::vector<int> lengths(kBatch + 1);
  for (const auto& [name, tensor] :
       {std::pair{"cu_seqlens_q", &p.cu_seqlens_q}, std::pair{"cu_seqlens_k", &p.cu_seqlens_k},
        std::pair{"seqused_q", &p.seqused_q}, std::pair{"seqused_k", &p.seqused_k}}) {
    void* const on_device = std::exchange(tensor->data, lengths.data());
    EXPECT_EQ(flash3_forward(&p), FLASH3_INVALID_ARGUMENT) << name;
    EXPECT_NE(std::string(flash3_last_error()).find(std::string(name) + ".data is host memory"),
              std::string::npos)
        << flash3_last_error();
    tensor->data = on_device;
  }
  call.run();
}

// Many times the same sequence, of more than 2^31 elements in each tensor: every one must have the
// output of the first. As a sequence with tiles of its own, and as one in a slot.
TEST_F(HopperRaggedForward, PackedTensorsOfMoreThan2To31Elements) {
  constexpr int64_t kCopies = 4097, kLength = 64, kHeads = 64, kDim = 128;
  constexpr int64_t kElements = kLength * kHeads * kDim;
  static_assert(kCopies * kElements > int64_t{1} << 31);
  constexpr size_t kBytes = 2 * size_t{kElements};
  size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  if (free < 5 * kCopies * kBytes) GTEST_SKIP() << "needs 22 GB of free device memory";

  for (const int64_t longest : {kLength, 2 * kLength}) {
    PackedCall one({kHeads, kHeads, kDim, true}, kLength, 1, longest, *memory_);
    one.set_lengths({{0, int{kLength}}, {int{kLength}}});
    one.run();
    const Bytes expected = one.results()[0];

    flash3_forward_params p = one.params();
    std::vector<std::shared_ptr<void>> buffers;
    const auto allocate = [&](size_t bytes) {
      return static_cast<std::byte*>(buffers.emplace_back(memory_->allocate(bytes)).get());
    };
    for (flash3_tensor* t : {&p.q, &p.k, &p.v, &p.out}) {
      std::byte* const to = allocate(size_t{kCopies} * kBytes);
      for (size_t i = 0; t != &p.out && i < size_t{kCopies}; ++i)
        ASSERT_EQ(cudaMemcpy(to + i * kBytes, t->data, kBytes, cudaMemcpyDeviceToDevice),
                  cudaSuccess);
      t->data = to;
      t->shape[0] *= kCopies;
    }
    p.lse = {};
    std::vector<int> cu(size_t{kCopies} + 1);
    for (size_t i = 0; i < cu.size(); ++i) cu[i] = int(i) * int{kLength};
    p.cu_seqlens_q = {allocate(cu.size() * 4), FLASH3_INT32, 1, {kCopies + 1}, {1}};
    memory_->copy_in(p.cu_seqlens_q.data, cu.data(), cu.size() * 4);
    p.cu_seqlens_k = p.cu_seqlens_q;
    p.seqused_q = p.seqused_k = {};
    size_t bytes = 0;
    ASSERT_EQ(flash3_forward_workspace(&p, &bytes), FLASH3_OK) << flash3_last_error();
    p.workspace = allocate(bytes), p.workspace_size = bytes;
    ASSERT_EQ(cudaMemset(p.out.data, 0xFF, size_t{kCopies} * kBytes), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // the copies ran on another stream
    ASSERT_EQ(flash3_forward(&p), FLASH3_OK) << flash3_last_error();
    memory_->finish();
    Bytes got(kBytes);
    for (const size_t i : {size_t{0}, size_t{kCopies / 2}, size_t{kCopies - 1}}) {
      memory_->copy_out(got.data(), static_cast<std::byte*>(p.out.data) + i * kBytes, kBytes);
      EXPECT_TRUE(got == expected) << "copy " << i << " of sequences up to " << longest;
    }
  }
}

}  // namespace
}  // namespace flash3
