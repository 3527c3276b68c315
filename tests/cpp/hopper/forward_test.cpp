// SPDX-License-Identifier: Apache-2.0
// The Hopper backend against the oracle, and what a GPU call also promises: graph capture,
// 64-bit offsets, the same bits every time, calls from many threads. Skipped without a Hopper GPU.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <thread>

#include "../parsed.hpp"
#include "cases/table.hpp"
#include "cases/tensors.hpp"
#include "core/convert.hpp"
#include "device/device.hpp"
#include "device/planned_forward.hpp"
#include "device_call.hpp"

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

namespace flash3::cuda::sm90 {
namespace {

// Packed heads on the GPU: every way of packing gives what the same problem gives with K and V
// repeated for each query head, where nothing can be packed. Skipped without a Hopper GPU.

using cases::Case;
using cases::ForwardTensors;
using cases::GuardedTensor;

std::byte* row_of(const flash3_tensor& t, int64_t b, int64_t s, int64_t h) {
  return static_cast<std::byte*>(t.data) +
         2 * (b * t.stride[0] + s * t.stride[1] + h * t.stride[2]);
}

// K or V with each head as often as there are query heads for it.
GuardedTensor repeated(const GuardedTensor& kv, const Case& c, int64_t dim) {
  GuardedTensor all = cases::make_tensor(c.dtype, c.batch, c.seq_k, c.heads_q, dim, c.layout);
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t s = 0; s < c.seq_k; ++s)
      for (int64_t h = 0; h < c.heads_q; ++h)
        std::memcpy(row_of(all.view, b, s, h), row_of(kv.view, b, s, h / (c.heads_q / c.heads_k)),
                    2 * static_cast<size_t>(dim));
  return all;
}

// A call's tensors on the GPU, as the backend gets them after validation.
class GpuCall {
 public:
  GpuCall(const Case& c, const ForwardTensors& host, cases::Memory& memory)
      : memory_(memory), host_(host) {
    const auto place = [&](const GuardedTensor& t) {
      buffers_.push_back(memory.allocate(t.bytes.size()));
      memory.copy_in(buffers_.back().get(), t.bytes.data(), t.bytes.size());
      return t.at(buffers_.back().get());
    };
    // In this order: run() indexes buffers_ by it.
    const flash3_tensor out = place(host.out), lse = place(host.lse), q = place(host.q),
                        k = place(host.k), v = place(host.v);
    auto params = make_params(c, q, k, v, out, lse);
    params.stream = memory.stream();
    const Status status = make_forward_problem(&params, Pointers::kRequired, &problem);
    EXPECT_TRUE(status.ok()) << status.message();
  }

  // Leaves out and lse in *result, starting from the fill pattern.
  void run(const Device& device, const ForwardChoice& choice, ForwardTensors* result) {
    *result = host_;
    GuardedTensor* outputs[] = {&result->out, &result->lse};
    for (size_t i = 0; i < 2; ++i)
      memory_.copy_in(buffers_[i].get(), outputs[i]->bytes.data(), outputs[i]->bytes.size());
    PlannedForward plan;
    Status status = plan_choice(problem, device, choice, &plan);
    ASSERT_TRUE(status.ok()) << status.message();
    const auto workspace = memory_.allocate(plan.workspace_bytes);
    problem.workspace = workspace.get();
    problem.workspace_size = plan.workspace_bytes;
    status = cuda::sm90::launch(problem, plan, device);
    ASSERT_TRUE(status.ok()) << status.message();
    memory_.finish();
    for (size_t i = 0; i < 2; ++i) {
      memory_.copy_out(outputs[i]->bytes.data(), buffers_[i].get(), outputs[i]->bytes.size());
      outputs[i]->view.data = outputs[i]->bytes.data() + outputs[i]->offset;
      EXPECT_EQ(outputs[i]->damage(), "");
    }
  }

  ForwardProblem problem;

 private:
  cases::Memory& memory_;
  const ForwardTensors& host_;
  std::vector<std::shared_ptr<void>> buffers_;
};

// Equal but for another order of the same sums; infinities and zeros of empty rows exactly.
bool close(float a, float b, float absolute) {
  if (!std::isfinite(b)) return a == b;
  return std::abs(a - b) <= absolute + 0.02f * std::abs(b);
}

// The first element that differs, in words; "" if none does.
std::string difference(const Case& c, const ForwardTensors& got, const ForwardTensors& want,
                       bool same_bits) {
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < c.heads_q; ++h)
      for (int64_t s = 0; s < c.seq_q; ++s) {
        const auto where = [&](const char* name, int64_t d, float x, float y) {
          return std::string(name) + " of batch " + std::to_string(b) + ", query " +
                 std::to_string(s) + ", head " + std::to_string(h) + ", dim " + std::to_string(d) +
                 " is " + std::to_string(x) + ", expected " + std::to_string(y);
        };
        const std::byte *x = row_of(got.out.view, b, s, h), *y = row_of(want.out.view, b, s, h);
        for (int64_t d = 0; d < c.head_dim_v; ++d) {
          const float got_d = load_float(x, c.dtype, d), want_d = load_float(y, c.dtype, d);
          if (same_bits ? got_d != want_d : !close(got_d, want_d, 0.01f))
            return where("out", d, got_d, want_d);
        }
        const auto lse = [&](const flash3_tensor& t) {
          return static_cast<const float*>(t.data)[b * t.stride[0] + h * t.stride[1] + s];
        };
        const float got_lse = lse(got.lse.view), want_lse = lse(want.lse.view);
        if (same_bits ? got_lse != want_lse : !close(got_lse, want_lse, 1e-3f))
          return where("lse", 0, got_lse, want_lse);
      }
  return "";
}

class PackedHeads : public testing::Test {
 protected:
  void SetUp() override {
    if (const Status status = current_hopper(&device_); !status.ok())
      GTEST_SKIP() << status.message();
    memory_ = device::make_device_memory();
  }

  // All choices of the case against the first choice of the one with repeated K and V. Returns how
  // many packed ones there were.
  int compare_choices(const Case& c) {
    const ForwardTensors host = make_forward_tensors(c);
    Case plain = c;
    plain.heads_k = plain.heads_q;
    ForwardTensors plain_host = host;
    plain_host.k = repeated(host.k, c, c.head_dim);
    plain_host.v = repeated(host.v, c, c.head_dim_v);

    GpuCall call(c, host, *memory_), plain_call(plain, plain_host, *memory_);
    const auto plain_choices = forward_choices(plain_call.problem);
    if (plain_choices.empty() || plain_choices[0].pack.heads != 1) {
      ADD_FAILURE() << to_id(plain) << " has no choice without packed heads";
      return 0;
    }
    ForwardTensors want, got;
    plain_call.run(device_, plain_choices[0], &want);
    int packed = 0;
    for (const ForwardChoice& choice : forward_choices(call.problem)) {
      call.run(device_, choice, &got);
      // Rows do not touch each other, and without a band all have the same key tiles.
      const bool same_bits =
          choice.kernel == plain_choices[0].kernel && !choice.kernel->config.band;
      EXPECT_EQ(difference(c, got, want, same_bits), "")
          << to_id(c) << " on " << choice.kernel->id << ", " << choice.pack.heads
          << " heads packed";
      packed += choice.pack.heads > 1;
    }
    return packed;
  }

  Device device_;
  std::unique_ptr<cases::Memory> memory_;
};

TEST_F(PackedHeads, GiveWhatRepeatedKeysAndValuesGive) {
  const char* const kHeads[] = {"64x1", "24x1", "14x2", "10x1"};
  // Kernels of every row, dims that they fill and that they do not; 33 and 127 are stored without
  // TMA.
  const char* const kDims[] = {"d64", "d128", "d72", "d192x128", "d33", "d256", "d127", "d192"};
  const char* const kMasks[] = {"full", "causal", "causal+w20:", "w30:7"};
  const char* const kLayouts[] = {"bshd", "bhsd", "padded", "odd"};
  int packed = 0, i = 0;
  for (const int seq_q : {1, 5, 63, 64, 65, 200})
    for (const char* heads : kHeads)
      for (const char* mask : kMasks) {
        const int seq_k = seq_q + (i % 3 - 1) * 50;  // fewer keys, as many, more
        packed += compare_choices(
            cases::parsed(std::string(i % 2 ? "fp16" : "bf16") + "/b2/q" + std::to_string(seq_q) +
                          "/k" + std::to_string(seq_k < 1 ? 177 : seq_k) + "/h" + heads + "/" +
                          kDims[(i + i / 8) % 8] + "/" + mask + "/" + kLayouts[(i + i / 16) % 4]));
        ++i;
      }
  EXPECT_GE(packed, 6 * 4 * (6 + 7 + 1 + 3));  // the divisors of 64, 24, 7, 10
}

// More tiles than multiprocessors: from the counter, and more than one round of the others.
TEST_F(PackedHeads, OverManyTiles) {
  for (const char* id : {"bf16/b9/q100/k300/h32x4/d128/causal", "bf16/b9/q100/k300/h32x4/d64/full",
                         "fp16/b5/q333/k444/h24x4/d128/w100:50"})
    EXPECT_GT(compare_choices(cases::parsed(id)), 0) << id;
}

TEST_F(PackedHeads, AreExplained) {
  const auto explain = [](const char* id) {
    auto params = cases::make_question(cases::parsed(id));
    params.backend = FLASH3_BACKEND_HOPPER;
    char text[4096];
    size_t size = sizeof text;
    EXPECT_EQ(flash3_forward_explain(&params, text, &size), FLASH3_OK) << flash3_last_error();
    return std::string(text);
  };
  const std::string packed = explain("bf16/b64/q5/k255/h32x4/d128/causal");
  EXPECT_NE(packed.find("8 of the 8 query heads of a KV head share a tile"), std::string::npos)
      << packed;
  EXPECT_NE(packed.find("one head a tile at 2048 tiles"), std::string::npos) << packed;
  const std::string plain = explain("bf16/b1/q8192/k8192/h32x4/d128/full");
  EXPECT_NE(plain.find("one query head a tile, 192 queries"), std::string::npos) << plain;
}

}  // namespace
}  // namespace flash3::cuda::sm90
