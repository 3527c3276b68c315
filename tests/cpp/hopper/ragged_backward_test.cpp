// SPDX-License-Identifier: Apache-2.0
// The Hopper backward on ragged batches: against the oracle, and what a GPU call also promises:
// graphs that replay with other lengths, sequences that do not know of each other, 64-bit offsets.
// Skipped without a Hopper GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "cases/table.hpp"
#include "cases/tensors.hpp"
#include "device_call.hpp"

namespace flash3 {
namespace {

using Bytes = std::vector<std::byte>;

class HopperRaggedBackward : public HopperTest {};

// Every row that is no token's holds the fill pattern, before and after.
TEST_F(HopperRaggedBackward, CaseTable) {
  for (const cases::Case& c : cases::ragged_backward_case_table(
           cases::Level::kQuick, cases::dtypes_of(FLASH3_BACKEND_HOPPER)))
    verify(c);
}

struct Shape {
  int64_t heads_q, heads_k, dim;
  bool causal;
  int64_t chunk = 0;
};

// A deterministic packed call on normal numbers, self-attention: of rows [0, rows) each belongs to
// the sequence that cu_seqlens says, if to any.
class PackedCall {
 public:
  PackedCall(const Shape& s, int64_t rows, int64_t batch, cases::Memory& memory)
      : memory_(memory), shape_(s), batch_(batch) {
    const auto tensor = [&](int64_t heads, uint64_t seed) {
      flash3_tensor t{nullptr, FLASH3_BFLOAT16, 3, {rows, heads, s.dim}, {heads * s.dim, s.dim, 1}};
      Bytes host(size_t(rows * heads * s.dim) * 2, kFillPattern);
      if (seed > 0) cases::fill_normal(host.data(), t.dtype, rows * heads * s.dim, seed);
      t.data = upload(host);
      return t;
    };
    p_.struct_size = sizeof p_;
    p_.q = tensor(s.heads_q, 1);
    p_.k = tensor(s.heads_k, 2);
    p_.v = tensor(s.heads_k, 3);
    p_.out = tensor(s.heads_q, 4);
    p_.dout = tensor(s.heads_q, 5);
    p_.dq = tensor(s.heads_q, 0);
    p_.dk = tensor(s.heads_k, 0);
    p_.dv = tensor(s.heads_k, 0);
    // Any number that keeps exp(S − lse) in bounds: nothing is compared with the forward here.
    const std::vector<float> lse(size_t(s.heads_q * rows), 5.f);
    Bytes bytes(lse.size() * 4);
    std::memcpy(bytes.data(), lse.data(), bytes.size());
    p_.lse = {upload(bytes), FLASH3_FLOAT32, 2, {s.heads_q, rows}, {rows, 1}};
    p_.causal = s.causal;
    p_.chunk = s.chunk;
    p_.deterministic = 1;
    p_.backend = FLASH3_BACKEND_HOPPER;
    p_.stream = memory.stream();
    cu_ = upload(Bytes(size_t(batch + 1) * 4));
    used_ = upload(Bytes(size_t(batch) * 4));
    set_batch(0, batch);
    size_t bytes_of_workspace = 0;
    EXPECT_EQ(flash3_backward_workspace(&p_, &bytes_of_workspace), FLASH3_OK)
        << flash3_last_error();
    p_.workspace = upload(Bytes(bytes_of_workspace, kFillPattern));
    p_.workspace_size = bytes_of_workspace;
  }

  // The call on sequences [first, first + count).
  void set_batch(int64_t first, int64_t count) {
    p_.cu_seqlens_q = {cu_ + 4 * first, FLASH3_INT32, 1, {count + 1}, {1}};
    p_.seqused_q = {used_ + 4 * first, FLASH3_INT32, 1, {count}, {1}};
    p_.cu_seqlens_k = p_.cu_seqlens_q;
    p_.seqused_k = p_.seqused_q;
  }
  // What the device holds of lengths.
  void set_lengths(const std::vector<int>& cu, const std::vector<int>& used) {
    ASSERT_EQ(std::ssize(cu), batch_ + 1);
    ASSERT_EQ(std::ssize(used), batch_);
    memory_.copy_in(cu_, cu.data(), cu.size() * 4);
    memory_.copy_in(used_, used.data(), used.size() * 4);
  }
  void fill_gradients() {
    for (flash3_tensor* t : {&p_.dq, &p_.dk, &p_.dv}) {
      const Bytes host(size(*t), kFillPattern);
      memory_.copy_in(t->data, host.data(), host.size());
    }
  }
  void run() {
    ASSERT_EQ(flash3_backward(&p_), FLASH3_OK) << flash3_last_error();
    memory_.finish();
  }
  // dq, dk and dv, rows [first, last).
  std::vector<Bytes> gradients(int64_t first, int64_t last) const {
    std::vector<Bytes> all;
    for (const flash3_tensor* t : {&p_.dq, &p_.dk, &p_.dv}) {
      const size_t row = size_t(t->stride[0]) * 2;
      Bytes& host = all.emplace_back(row * size_t(last - first));
      memory_.copy_out(host.data(), static_cast<std::byte*>(t->data) + row * size_t(first),
                       host.size());
    }
    return all;
  }
  flash3_backward_params& params() { return p_; }

  static constexpr std::byte kFillPattern{0xFF};  // a NaN

 private:
  static size_t size(const flash3_tensor& t) { return size_t(t.shape[0] * t.stride[0]) * 2; }
  std::byte* upload(const Bytes& host) {
    auto* const at = static_cast<std::byte*>(
        buffers_.emplace_back(memory_.allocate(std::max<size_t>(host.size(), 1))).get());
    memory_.copy_in(at, host.data(), host.size());
    return at;
  }

  cases::Memory& memory_;
  Shape shape_;
  int64_t batch_;
  std::vector<std::shared_ptr<void>> buffers_;
  std::byte *cu_ = nullptr, *used_ = nullptr;
  flash3_backward_params p_{};
};

constexpr int64_t kRows = 1500, kBatch = 6;
struct Lengths {
  std::vector<int> cu, used;
};
const Lengths kLengths[] = {
    {{0, 300, 301, 301, 800, 1100, 1500}, {300, 1, 0, 499, 290, 400}},
    {{10, 10, 1400, 1410, 1450, 1450, 1490}, {0, 1390, 10, 17, 0, 33}},
    {{0, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}},
    {{1, 129, 257, 385, 513, 641, 1499}, {128, 0, 127, 64, 128, 700}},
};
constexpr Shape kShapes[] = {{4, 2, 128, true},
                             {2, 2, 64, false},
                             {6, 1, 256, true},
                             {2, 1, 128, false},
                             {2, 1, 64, true, 100}};

TEST_F(HopperRaggedBackward, CanBeCapturedInAGraphAndReplayedWithOtherLengths) {
  for (const Shape& shape : kShapes) {
    PackedCall call(shape, kRows, kBatch, *memory_);
    const auto stream = static_cast<cudaStream_t>(memory_->stream());
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_EQ(flash3_backward(&call.params()), FLASH3_OK) << flash3_last_error();
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    for (const size_t i : {0u, 1u, 2u, 3u, 1u}) {
      const Lengths& lengths = kLengths[i];
      call.set_lengths(lengths.cu, lengths.used);
      call.fill_gradients();
      ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
      memory_->finish();
      const auto replayed = call.gradients(0, kRows);
      call.fill_gradients();
      call.run();
      EXPECT_TRUE(replayed == call.gradients(0, kRows)) << "d " << shape.dim << ", lengths " << i;
      // Rows of no sequence, before the first and after the last.
      for (const auto& [first, last] : {std::pair{int64_t{0}, int64_t{lengths.cu.front()}},
                                        std::pair{int64_t{lengths.cu.back()}, kRows}})
        for (const Bytes& bytes : call.gradients(first, last))
          EXPECT_TRUE(
              std::ranges::all_of(bytes, [](std::byte b) { return b == PackedCall::kFillPattern; }))
              << "d " << shape.dim << ", lengths " << i;
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
  }
}

// The same bits whatever sequences are beside it, and 0 after the tokens that count.
TEST_F(HopperRaggedBackward, EachSequenceAsIfItWereAlone) {
  for (const Shape& shape : kShapes)
    for (const Lengths& lengths : kLengths) {
      PackedCall call(shape, kRows, kBatch, *memory_);
      call.set_lengths(lengths.cu, lengths.used);
      call.run();
      const auto together = call.gradients(0, kRows);
      for (int64_t b = 0; b < kBatch; ++b) {
        call.fill_gradients();
        call.set_batch(b, 1);
        call.run();
        const int64_t first = lengths.cu[size_t(b)], last = lengths.cu[size_t(b) + 1],
                      used = lengths.used[size_t(b)];
        const auto alone = call.gradients(first, last);
        for (size_t g = 0; g < alone.size(); ++g) {
          const size_t row = together[g].size() / kRows;
          const auto begin = together[g].begin() + std::ptrdiff_t(row) * first;
          EXPECT_TRUE(std::equal(alone[g].begin(), alone[g].end(), begin))
              << "d " << shape.dim << ", sequence " << b << ", gradient " << g;
          EXPECT_TRUE(std::all_of(begin + std::ptrdiff_t(row) * used,
                                  begin + std::ptrdiff_t(row) * (last - first),
                                  [](std::byte x) { return x == std::byte{0}; }))
              << "d " << shape.dim << ", sequence " << b << ", gradient " << g;
        }
        call.set_batch(0, kBatch);
      }
    }
}

// Lengths that break the rules: whatever comes out, the call ends and writes its rows alone.
TEST_F(HopperRaggedBackward, EndsWhateverTheLengthsAre) {
  for (const Shape& shape : kShapes) {
    PackedCall call(shape, kRows, kBatch, *memory_);
    call.set_lengths({0, 1500, 0, 1500, -5, 100000, 3}, {100000, 7, -1, 1500, 1500, 2});
    call.run();
  }
}

TEST_F(HopperRaggedBackward, RefusesLengthsInHostMemory) {
  PackedCall call(kShapes[0], kRows, kBatch, *memory_);
  flash3_backward_params& p = call.params();
  std::vector<int> lengths(kBatch + 1);
  for (const auto& [name, tensor] :
       {std::pair{"cu_seqlens_q", &p.cu_seqlens_q}, std::pair{"cu_seqlens_k", &p.cu_seqlens_k},
        std::pair{"seqused_q", &p.seqused_q}, std::pair{"seqused_k", &p.seqused_k}}) {
    void* const on_device = std::exchange(tensor->data, lengths.data());
    EXPECT_EQ(flash3_backward(&p), FLASH3_INVALID_ARGUMENT) << name;
    EXPECT_NE(std::string(flash3_last_error()).find(std::string(name) + ".data is host memory"),
              std::string::npos)
        << flash3_last_error();
    tensor->data = on_device;
  }
}

// Many times the same sequence: of more than 2^31 elements in each tensor. Every one must have the
// gradients of the first.
TEST_F(HopperRaggedBackward, PackedTensorsOfMoreThan2To31Elements) {
  constexpr int64_t kCopies = 4097, kLength = 64, kHeads = 64, kDim = 128;
  constexpr int64_t kElements = kLength * kHeads * kDim;
  static_assert(kCopies * kElements > int64_t{1} << 31);
  size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  if (free < size_t{64} << 30) GTEST_SKIP() << "needs 64 GiB of free device memory";

  PackedCall one({kHeads, kHeads, kDim, true}, kLength, 1, *memory_);
  one.set_lengths({0, kLength}, {kLength});
  one.run();
  const auto expected = one.gradients(0, kLength);

  flash3_backward_params p = one.params();
  std::vector<std::shared_ptr<void>> buffers;
  const auto allocate = [&](size_t bytes) {
    return static_cast<std::byte*>(buffers.emplace_back(memory_->allocate(bytes)).get());
  };
  constexpr size_t kBytes = 2 * size_t{kElements};
  for (flash3_tensor* t : {&p.q, &p.k, &p.v, &p.out, &p.dout, &p.dq, &p.dk, &p.dv}) {
    std::byte* const to = allocate(size_t{kCopies} * kBytes);
    for (size_t i = 0; i < size_t{kCopies}; ++i)
      ASSERT_EQ(cudaMemcpy(to + i * kBytes, t->data, kBytes, cudaMemcpyDeviceToDevice),
                cudaSuccess);
    t->data = to;
    t->shape[0] *= kCopies;
  }
  constexpr size_t kAll = size_t{kCopies * kLength};
  const std::vector<float> lse(kAll * kHeads, 5.f);
  p.lse.data = allocate(lse.size() * 4);
  memory_->copy_in(p.lse.data, lse.data(), lse.size() * 4);
  p.lse.shape[1] = p.lse.stride[0] = int64_t{kAll};
  std::vector<int> cu(size_t{kCopies} + 1);
  for (size_t i = 0; i < cu.size(); ++i) cu[i] = int(i) * int{kLength};
  p.cu_seqlens_q = {allocate(cu.size() * 4), FLASH3_INT32, 1, {kCopies + 1}, {1}};
  memory_->copy_in(p.cu_seqlens_q.data, cu.data(), cu.size() * 4);
  p.cu_seqlens_k = p.cu_seqlens_q;
  p.seqused_q = p.seqused_k = {};
  size_t bytes = 0;
  ASSERT_EQ(flash3_backward_workspace(&p, &bytes), FLASH3_OK) << flash3_last_error();
  p.workspace = allocate(bytes), p.workspace_size = bytes;
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // the copies ran on another stream
  for (flash3_tensor* t : {&p.dq, &p.dk, &p.dv})
    ASSERT_EQ(cudaMemset(t->data, 0xFF, size_t{kCopies} * kBytes), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ASSERT_EQ(flash3_backward(&p), FLASH3_OK) << flash3_last_error();
  memory_->finish();
  Bytes got(kBytes);
  const flash3_tensor* const gradients[] = {&p.dq, &p.dk, &p.dv};
  for (size_t g = 0; g < 3; ++g)
    for (const size_t i : {size_t{0}, size_t{kCopies / 2}, size_t{kCopies - 1}}) {
      memory_->copy_out(got.data(), static_cast<std::byte*>(gradients[g]->data) + i * kBytes,
                        kBytes);
      EXPECT_TRUE(got == expected[g]) << "gradient " << g << " of copy " << i;
    }
}

}  // namespace
}  // namespace flash3
