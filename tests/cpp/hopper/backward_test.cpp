// SPDX-License-Identifier: Apache-2.0
// The Hopper backward against the oracle, and what a GPU call also promises: nothing written but
// the gradients, graph capture, 64-bit offsets, the same bits in deterministic mode, calls from
// many threads. Skipped without a Hopper GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>

#include "../parsed.hpp"
#include "cases/backward_tensors.hpp"
#include "cases/table.hpp"
#include "cases/upload.hpp"
#include "core/convert.hpp"
#include "device_call.hpp"

namespace flash3 {
namespace {

using cases::BackwardTensors;
using cases::BackwardViews;
using cases::Case;
using cases::GuardedTensor;

Case parse(const std::string& id) { return cases::parsed(id + "/bwd"); }

class HopperBackward : public HopperTest {};

TEST_F(HopperBackward, CaseTable) {
  for (const Case& c :
       cases::backward_case_table(cases::Level::kQuick, cases::dtypes_of(FLASH3_BACKEND_HOPPER)))
    verify(c);
}

TEST_F(HopperBackward, TheSameBitsEveryTimeInDeterministicMode) {
  for (const char* id :
       {"bf16/b3/q1000/k1000/h15x3/d128/causal", "fp16/b2/q300/k1111/h4x2/d64/w100:50",
        "bf16/b1/q700/k700/h4/d64/full", "bf16/b2/q300/k300/h4/d72/causal/odd",
        "bf16/b2/q700/k900/h4/d256/full", "fp16/b1/q513/k900/h6x2/d192x128/causal"}) {
    const Case c = parse(std::string(id) + "/deterministic");
    verify(c, 10);
  }
}

TEST_F(HopperBackward, CallsFromManyThreadsOnTheirOwnStreams) {
  for (const char* id :
       {"bf16/b2/q333/k444/h4x2/d128/causal/dlse", "bf16/b1/q900/k900/h4/d64/full/deterministic"})
    verify_from_many_threads(parse(id));
}

// A call on device memory, with its workspace; inputs can be replaced, gradients read.
class DeviceCall {
 public:
  DeviceCall(const Case& c, cases::Memory& memory)
      : case_(c), memory_(memory), host_(make_backward_tensors(c, 0)) {
    BackwardViews views;
    for (const Member& member : kMembers) {
      const GuardedTensor& t = host_.*member.tensor;
      uploads_.push_back(std::make_unique<cases::Upload>(memory, t));
      views.*member.view = uploads_.back()->view();
    }
    params_ = make_backward_params(c, views);
    params_.backend = FLASH3_BACKEND_HOPPER;
    params_.stream = memory.stream();
    size_t bytes = 0;
    EXPECT_EQ(flash3_backward_workspace(&params_, &bytes), FLASH3_OK) << flash3_last_error();
    scratch_ = cases::make_workspace(bytes);
    workspace_ = std::make_unique<cases::Upload>(memory, scratch_);
    params_.workspace = bytes > 0 ? workspace_->view().data : nullptr;
    params_.workspace_size = bytes;
  }
  const flash3_backward_params& params() const { return params_; }

  // New inputs in the same place; the fill pattern in gradients and workspace.
  void refill(uint64_t seed) {
    Case other = case_;
    other.seed = seed;
    const BackwardTensors fresh = make_backward_tensors(other, 0);
    for (const Member& member : kMembers) host_.*member.tensor = clone(fresh.*member.tensor);
    for (const auto& upload : uploads_) upload->upload();
    workspace_->restore();
  }
  void run() {
    ASSERT_EQ(flash3_backward(&params_), FLASH3_OK) << flash3_last_error();
    memory_.finish();
  }
  // dq, dk and dv, with all that lies around them, which must be as it was.
  std::vector<std::vector<std::byte>> gradients() const {
    std::vector<std::vector<std::byte>> all;
    for (size_t i = 0; i < std::size(kMembers); ++i) {
      GuardedTensor now = clone(host_.*kMembers[i].tensor);
      uploads_[i]->download(&now);
      if (i < kGradients) {
        EXPECT_EQ(now.damage(), "") << kMembers[i].name;
        all.push_back(now.bytes);
      } else {
        EXPECT_TRUE(now.bytes == (host_.*kMembers[i].tensor).bytes) << kMembers[i].name;
      }
    }
    GuardedTensor scratch = clone(scratch_);
    workspace_->download(&scratch);
    EXPECT_EQ(scratch.damage(), "") << "workspace";
    return all;
  }

 private:
  struct Member {
    const char* name;
    GuardedTensor BackwardTensors::*tensor;
    flash3_tensor BackwardViews::*view;
  };
  static constexpr size_t kGradients = 3;  // the first ones
  static constexpr Member kMembers[] = {{"dq", &BackwardTensors::dq, &BackwardViews::dq},
                                        {"dk", &BackwardTensors::dk, &BackwardViews::dk},
                                        {"dv", &BackwardTensors::dv, &BackwardViews::dv},
                                        {"q", &BackwardTensors::q, &BackwardViews::q},
                                        {"k", &BackwardTensors::k, &BackwardViews::k},
                                        {"v", &BackwardTensors::v, &BackwardViews::v},
                                        {"out", &BackwardTensors::out, &BackwardViews::out},
                                        {"lse", &BackwardTensors::lse, &BackwardViews::lse},
                                        {"dout", &BackwardTensors::dout, &BackwardViews::dout},
                                        {"dlse", &BackwardTensors::dlse, &BackwardViews::dlse}};

  Case case_;
  cases::Memory& memory_;
  BackwardTensors host_;
  GuardedTensor scratch_;
  std::vector<std::unique_ptr<cases::Upload>> uploads_;
  std::unique_ptr<cases::Upload> workspace_;
  flash3_backward_params params_{};
};

TEST_F(HopperBackward, RefusesHostMemory) {
  const Case c = parse("bf16/b1/q64/k64/h1/d64/full");
  const BackwardTensors host = make_backward_tensors(c);
  const DeviceCall call(c, *memory_);
  const auto before = host.dq.bytes;
  auto params = call.params();
  params.dq = host.dq.view;
  EXPECT_EQ(flash3_backward(&params), FLASH3_INVALID_ARGUMENT);
  EXPECT_NE(std::string(flash3_last_error()).find("dq.data is host memory"), std::string::npos)
      << flash3_last_error();
  EXPECT_EQ(host.dq.bytes, before);
}

// Ends in the middle of tiles, of rows of 16 bytes, and of the band.
TEST_F(HopperBackward, WritesNothingButTheGradients) {
  for (const char* id :
       {"bf16/b2/q65/k129/h2/d64/full", "bf16/b2/q63/k191/h3x1/d128/causal/padded",
        "fp16/b2/q129/k65/h2/d72x40/w10:3/padded", "bf16/b1/q1/k1/h1/d1/full/odd",
        "bf16/b2/q200/k77/h2/d100x44/causal/dlse", "fp16/b2/q70/k300/h4x2/d128/full/odd/dlse",
        "bf16/b1/q300/k100/h2/d64/causal/bhsd", "bf16/b1/q100/k300/h2/d64/w0:5",
        "bf16/b2/q70/k130/h2/d256/causal/padded", "fp16/b1/q130/k70/h2/d180x120/full/odd"}) {
    DeviceCall call(parse(id), *memory_);
    call.run();
    call.gradients();  // looks at what lies around them
    verify(parse(id));
  }
}

// At most two tiles of keys: the sum of two is the same in either order, so dq's bits are too. Or
// deterministic: counters in the workspace must start again with each replay.
TEST_F(HopperBackward, CanBeCapturedInAGraphAndReplayed) {
  for (const char* id :
       {"bf16/b2/q300/k128/h4x2/d128/causal", "fp16/b1/q200/k100/h2/d64/full",
        "bf16/b2/q200/k90/h2/d72/causal/odd/dlse", "bf16/b1/q200/k128/h2/d256/full",
        "bf16/b2/q300/k900/h4x2/d128/causal/deterministic",
        "fp16/b1/q500/k500/h2/d192/full/deterministic"}) {
    DeviceCall call(parse(id), *memory_);
    const auto stream = static_cast<cudaStream_t>(memory_->stream());
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_EQ(flash3_backward(&call.params()), FLASH3_OK) << flash3_last_error();
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess) << id;
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);

    for (const uint64_t seed : {11u, 12u, 11u}) {
      call.refill(seed);
      ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
      memory_->finish();
      const auto replayed = call.gradients();
      call.refill(seed);
      call.run();
      EXPECT_TRUE(replayed == call.gradients()) << id << " seed " << seed;
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
  }
}

// q, out, dout and dq of more than 2^31 elements: one block of rows, checked by the oracle, again
// and again. dq of every copy must have the same bits (there is one tile of keys), and dk and dv
// must be so many times those of the block.
TEST_F(HopperBackward, QueriesOfMoreThan2To31Elements) {
  constexpr int64_t kCopies = 4097, kHeads = 64, kDim = 128, kQueries = 64;
  const Case block = parse("bf16/b1/q64/k64/h64/d128/full");
  constexpr int64_t kElements = kQueries * kHeads * kDim;
  constexpr size_t kBytes = 2 * size_t{kElements};
  static_assert(kCopies * kElements > int64_t{1} << 31);
  // Four of them in 16 bits, and the sums of dq in 32.
  if (!has_free_memory(6 * kCopies * kBytes + (size_t{1} << 30)))
    GTEST_SKIP() << "needs 27 GB of free device memory";
  verify(block);

  DeviceCall call(block, *memory_);
  auto params = call.params();
  std::vector<std::shared_ptr<void>> buffers;
  for (flash3_tensor* t : {&params.q, &params.out, &params.dout, &params.dq}) {
    auto* const to =
        static_cast<std::byte*>(buffers.emplace_back(memory_->allocate(kCopies * kBytes)).get());
    for (size_t i = 0; i < kCopies; ++i)
      ASSERT_EQ(cudaMemcpy(to + i * kBytes, t->data, kBytes, cudaMemcpyDeviceToDevice),
                cudaSuccess);
    t->data = to;
    t->shape[1] *= kCopies;
    t->stride[0] *= kCopies;
  }
  // lse is [heads, queries]: the copies stand side by side in each head.
  constexpr size_t kRow = kQueries * sizeof(float);
  const flash3_tensor lse = params.lse;
  ASSERT_EQ(lse.stride[1], kQueries);
  params.lse.data = buffers.emplace_back(memory_->allocate(kCopies * kHeads * kRow)).get();
  params.lse.shape[2] *= kCopies;
  params.lse.stride[1] *= kCopies;
  params.lse.stride[0] *= kCopies;
  for (size_t i = 0; i < kCopies; ++i)
    ASSERT_EQ(cudaMemcpy2D(static_cast<std::byte*>(params.lse.data) + i * kRow, kCopies * kRow,
                           lse.data, kRow, kRow, kHeads, cudaMemcpyDeviceToDevice),
              cudaSuccess);
  size_t bytes = 0;
  ASSERT_EQ(flash3_backward_workspace(&params, &bytes), FLASH3_OK) << flash3_last_error();
  buffers.push_back(memory_->allocate(bytes));
  params.workspace = buffers.back().get(), params.workspace_size = bytes;
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // the copies ran on another stream

  std::vector<std::byte> expected(kBytes), got(kBytes);
  std::vector<std::byte> many[2] = {expected, expected};  // dk and dv: as many keys as queries
  ASSERT_EQ(flash3_backward(&params), FLASH3_OK) << flash3_last_error();
  memory_->finish();
  memory_->copy_out(many[0].data(), params.dk.data, kBytes);
  memory_->copy_out(many[1].data(), params.dv.data, kBytes);
  call.run();
  memory_->copy_out(expected.data(), call.params().dq.data, kBytes);
  for (const size_t i :
       {size_t{0}, size_t{kCopies / 2}, size_t{kCopies - 2}, size_t{kCopies - 1}}) {
    memory_->copy_out(got.data(), static_cast<std::byte*>(params.dq.data) + i * kBytes, kBytes);
    EXPECT_TRUE(got == expected) << "dq of copy " << i;
  }
  for (int g = 0; g < 2; ++g) {
    memory_->copy_out(got.data(), (g == 0 ? params.dk : params.dv).data, kBytes);
    int wrong = 0;
    for (int64_t i = 0; i < kElements; ++i) {
      const float one = static_cast<float>(kCopies) * load_float(got.data(), FLASH3_BFLOAT16, i);
      const float all = load_float(many[g].data(), FLASH3_BFLOAT16, i);
      wrong += !(std::abs(all - one) <= 0.02f * std::abs(one) + 0.02f);  // both are rounded
    }
    EXPECT_EQ(wrong, 0) << "elements of " << (g == 0 ? "dk" : "dv");
  }
}

// Keys, values and their gradients so far apart that the last rows lie more than 2^31 elements from
// the first. Two tiles of keys: see above.
TEST_F(HopperBackward, KeysSpreadOverMoreThan2To31Elements) {
  const Case c = parse("bf16/b1/q100/k192/h2/d128/causal");
  constexpr int64_t kStride = int64_t{1} << 24;  // elements from key to key
  const size_t bytes = static_cast<size_t>(c.seq_k * kStride) * 2;
  if (!has_free_memory(bytes + (size_t{1} << 30)))
    GTEST_SKIP() << "needs 8 GB of free device memory";
  DeviceCall call(c, *memory_);
  auto params = call.params();
  const flash3_tensor near[] = {params.k, params.v, params.dk, params.dv};
  flash3_tensor* const to[] = {&params.k, &params.v, &params.dk, &params.dv};
  const size_t row = 2 * static_cast<size_t>(c.heads_k * c.head_dim);

  // All in one allocation, one after the other in each key's row.
  const auto far = memory_->allocate(bytes);
  for (size_t i = 0; i < 4; ++i) {
    to[i]->data = static_cast<std::byte*>(far.get()) + i * row;
    to[i]->stride[1] = kStride, to[i]->stride[0] = c.seq_k * kStride;
    ASSERT_EQ(cudaMemcpy2D(to[i]->data, 2 * kStride, near[i].data, row, row,
                           static_cast<size_t>(c.seq_k), cudaMemcpyDeviceToDevice),
              cudaSuccess);
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // the copies ran on another stream
  ASSERT_EQ(flash3_backward(&params), FLASH3_OK) << flash3_last_error();
  memory_->finish();
  // The gradients where an ordinary call has them, then compared with one.
  for (const size_t i : {size_t{2}, size_t{3}})
    ASSERT_EQ(cudaMemcpy2D(near[i].data, row, to[i]->data, 2 * kStride, row,
                           static_cast<size_t>(c.seq_k), cudaMemcpyDeviceToDevice),
              cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const auto got = call.gradients();
  call.refill(c.seed);
  call.run();
  EXPECT_TRUE(got == call.gradients());
}

}  // namespace
}  // namespace flash3
