// SPDX-License-Identifier: Apache-2.0
// The Hopper backend against the oracle, and what a GPU call also promises: graph capture,
// 64-bit offsets, the same bits every time, calls from many threads. Skipped without a Hopper GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <thread>

#include "../parsed.hpp"
#include "cases/table.hpp"
#include "fixture.hpp"

namespace flash3 {
namespace {

using cases::Case;

class HopperForward : public HopperTest {
 protected:
  std::shared_ptr<void> zeroed(size_t bytes) {
    auto p = memory_->allocate(bytes);
    EXPECT_EQ(cudaMemset(p.get(), 0, bytes), cudaSuccess);
    return p;
  }
};

TEST_F(HopperForward, CaseTable) {
  for (const Case& c :
       cases::case_table(cases::Level::kQuick, cases::dtypes_of(FLASH3_BACKEND_HOPPER)))
    verify(c);
}

TEST_F(HopperForward, TheSameBitsEveryTime) {
  for (const char* id :
       {"bf16/b3/q1000/k1000/h15x3/d128/causal", "fp16/b2/q300/k1111/h4x2/d64/w100:50",
        "bf16/b2/q700/k700/h4/d256/full", "bf16/b1/q513/k900/h6x2/d192x128/causal",
        "bf16/b2/q300/k300/h4/d72/causal/odd"})
    verify(cases::parsed(id), 5);
}

TEST_F(HopperForward, CallsFromManyThreadsOnTheirOwnStreams) {
  verify_from_many_threads(cases::parsed("bf16/b2/q333/k444/h4x2/d128/causal"));
}

TEST_F(HopperForward, RefusesHostMemory) {
  const Case c = cases::parsed("bf16/b1/q64/k64/h1/d64/full");
  const cases::ForwardTensors host = make_forward_tensors(c);
  const auto before = host.out.bytes;
  auto params = make_params(c, host.q.view, host.k.view, host.v.view, host.out.view, host.lse.view);
  params.backend = FLASH3_BACKEND_HOPPER;
  EXPECT_EQ(flash3_forward(&params), FLASH3_INVALID_ARGUMENT);
  EXPECT_NE(std::string(flash3_last_error()).find("q.data is host memory"), std::string::npos)
      << flash3_last_error();
  EXPECT_EQ(host.out.bytes, before);
}

// A call on device memory, with its workspace; inputs can be replaced, outputs read.
class DeviceCall {
 public:
  DeviceCall(const Case& c, cases::Memory& memory)
      : case_(c), memory_(memory), host_(make_forward_tensors(c)) {
    const auto place = [&](const cases::GuardedTensor& t) {
      buffers_.push_back(memory.allocate(t.bytes.size()));
      memory.copy_in(buffers_.back().get(), t.bytes.data(), t.bytes.size());
      return t.at(buffers_.back().get());
    };
    // In this order: buffers_ is indexed by it.
    const flash3_tensor q = place(host_.q), k = place(host_.k), v = place(host_.v),
                        out = place(host_.out);
    params_ = make_params(c, q, k, v, out, c.want_lse ? place(host_.lse) : flash3_tensor{});
    params_.backend = FLASH3_BACKEND_HOPPER;
    params_.stream = memory.stream();
    size_t bytes = 0;
    EXPECT_EQ(flash3_forward_workspace(&params_, &bytes), FLASH3_OK) << flash3_last_error();
    buffers_.push_back(memory.allocate(bytes));
    params_.workspace = bytes > 0 ? buffers_.back().get() : nullptr;
    params_.workspace_size = bytes;
  }
  const flash3_forward_params& params() const { return params_; }

  // New q, k and v in the same place; the fill pattern in out.
  void refill(uint64_t seed) {
    Case other = case_;
    other.seed = seed;
    const cases::ForwardTensors fresh = make_forward_tensors(other);
    const cases::GuardedTensor* tensors[] = {&fresh.q, &fresh.k, &fresh.v, &fresh.out};
    for (size_t i = 0; i < 4; ++i)
      memory_.copy_in(buffers_[i].get(), tensors[i]->bytes.data(), tensors[i]->bytes.size());
  }
  std::vector<std::byte> out() const {
    std::vector<std::byte> bytes(host_.out.bytes.size());
    memory_.copy_out(bytes.data(), buffers_[3].get(), bytes.size());
    return bytes;
  }

 private:
  Case case_;
  cases::Memory& memory_;
  cases::ForwardTensors host_;
  std::vector<std::shared_ptr<void>> buffers_;
  flash3_forward_params params_{};
};

// A thread has no CUDA context before it has called the runtime.
TEST_F(HopperForward, CanBeTheFirstThingThatAThreadDoes) {
  DeviceCall call(cases::parsed("bf16/b1/q64/k64/h2/d64/causal"), *memory_);
  ASSERT_EQ(flash3_forward(&call.params()), FLASH3_OK) << flash3_last_error();
  memory_->finish();
  const auto expected = call.out();
  std::string failure;
  std::jthread([&] {
    if (flash3_forward(&call.params()) != FLASH3_OK) failure = flash3_last_error();
  }).join();
  EXPECT_EQ(failure, "");
  memory_->finish();
  EXPECT_TRUE(call.out() == expected);
}

TEST_F(HopperForward, CanBeCapturedInAGraphAndReplayed) {
  for (const char* id : {"bf16/b2/q300/k500/h4x2/d128/causal", "fp16/b1/q200/k200/h2/d64/full",
                         "bf16/b2/q200/k300/h2/d72/causal/odd"}) {
    DeviceCall call(cases::parsed(id), *memory_);
    const auto stream = static_cast<cudaStream_t>(memory_->stream());
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_EQ(flash3_forward(&call.params()), FLASH3_OK) << flash3_last_error();
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess) << id;
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);

    for (const uint64_t seed : {11u, 12u, 11u}) {
      call.refill(seed);
      ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
      memory_->finish();
      const auto replayed = call.out();
      call.refill(seed);
      ASSERT_EQ(flash3_forward(&call.params()), FLASH3_OK) << flash3_last_error();
      memory_->finish();
      EXPECT_TRUE(replayed == call.out()) << id << " seed " << seed;
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
  }
}

// q and out of more than 2^31 elements: one block of rows, checked by the oracle, again and again;
// every copy must give the same bits, in the only tile of head dim 160.
TEST_F(HopperForward, QueriesOfMoreThan2To31Elements) {
  constexpr int64_t kCopies = 3301, kHeads = 64, kDim = 160;
  Case block = cases::parsed("bf16/b1/q64/k192/h64x4/d160/full/nolse");
  const cases::ForwardTensors host = make_forward_tensors(block);
  const size_t block_bytes = static_cast<size_t>(block.seq_q * kHeads * kDim) * 2;
  ASSERT_GT(kCopies * static_cast<int64_t>(block_bytes) / 2, int64_t{1} << 31);
  if (!has_free_memory(2 * kCopies * block_bytes + (size_t{1} << 30)))
    GTEST_SKIP() << "needs 10 GB of free device memory";
  verify(block);

  const auto q = memory_->allocate(kCopies * block_bytes), out = zeroed(kCopies * block_bytes);
  for (int64_t i = 0; i < kCopies; ++i)
    ASSERT_EQ(cudaMemcpy(static_cast<std::byte*>(q.get()) + i * static_cast<int64_t>(block_bytes),
                         host.q.view.data, block_bytes, cudaMemcpyHostToDevice),
              cudaSuccess);
  DeviceCall call(block, *memory_);
  auto params = call.params();
  for (flash3_tensor* t : {&params.q, &params.out}) {
    t->shape[1] *= kCopies;
    t->stride[0] *= kCopies;
  }
  params.q.data = q.get(), params.out.data = out.get();
  size_t bytes = 0;
  ASSERT_EQ(flash3_forward_workspace(&params, &bytes), FLASH3_OK) << flash3_last_error();
  const auto workspace = memory_->allocate(bytes);
  params.workspace = workspace.get(), params.workspace_size = bytes;
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // the copies ran on another stream
  ASSERT_EQ(flash3_forward(&params), FLASH3_OK) << flash3_last_error();
  memory_->finish();

  ASSERT_EQ(flash3_forward(&call.params()), FLASH3_OK) << flash3_last_error();
  memory_->finish();
  std::vector<std::byte> expected(block_bytes), got(block_bytes);
  memory_->copy_out(expected.data(), call.params().out.data, block_bytes);
  for (const int64_t i : {int64_t{0}, kCopies / 2, kCopies - 2, kCopies - 1}) {
    memory_->copy_out(got.data(),
                      static_cast<std::byte*>(out.get()) + i * static_cast<int64_t>(block_bytes),
                      block_bytes);
    EXPECT_TRUE(got == expected) << "copy " << i;
  }
}

// Keys and values so far apart that their last rows lie more than 2^31 elements from their first.
TEST_F(HopperForward, KeysSpreadOverMoreThan2To31Elements) {
  const Case c = cases::parsed("bf16/b1/q100/k192/h2/d128/causal");
  constexpr int64_t kStride = int64_t{1} << 24;  // elements from key to key
  const size_t bytes = static_cast<size_t>(c.seq_k * kStride) * 2;
  if (!has_free_memory(bytes + (size_t{1} << 30)))
    GTEST_SKIP() << "needs 8 GB of free device memory";
  DeviceCall call(c, *memory_);
  ASSERT_EQ(flash3_forward(&call.params()), FLASH3_OK) << flash3_last_error();
  memory_->finish();
  const auto expected = call.out();

  // Both in one allocation: v begins where k's row ends.
  const auto far = zeroed(bytes);
  auto params = call.params();
  const int64_t row = c.heads_k * c.head_dim;
  params.k.data = far.get();
  params.v.data = static_cast<std::byte*>(far.get()) + 2 * row;
  for (const auto& [near, to] :
       {std::pair{&call.params().k, &params.k}, std::pair{&call.params().v, &params.v}}) {
    to->stride[1] = kStride, to->stride[0] = c.seq_k * kStride;
    ASSERT_EQ(cudaMemcpy2D(to->data, 2 * kStride, near->data, 2 * static_cast<size_t>(row),
                           2 * static_cast<size_t>(row), static_cast<size_t>(c.seq_k),
                           cudaMemcpyDeviceToDevice),
              cudaSuccess);
  }
  call.refill(c.seed);                              // the fill pattern in out
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // the copies ran on another stream
  ASSERT_EQ(flash3_forward(&params), FLASH3_OK) << flash3_last_error();
  memory_->finish();
  EXPECT_TRUE(call.out() == expected);
}

}  // namespace
}  // namespace flash3
