// SPDX-License-Identifier: Apache-2.0
// FP8 on the Hopper backend: against the oracle, beside a plain implementation with the same tensor
// cores, and bit by bit. Skipped without a Hopper GPU.

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cases/table.hpp"
#include "core/scales.hpp"
#include "device/planned_forward.hpp"
#include "device_call.hpp"
#include "planned_steps.hpp"
#include "quantize_call.hpp"

namespace flash3 {
namespace {

using cases::Case;

class HopperFp8 : public HopperTest {
 protected:
  using HopperTest::verify;
  void verify(const char* id, int repeat = 1) {
    std::string error;
    const auto c = cases::parse_id(id, &error);
    ASSERT_TRUE(c) << error;
    verify(*c, repeat);
  }
};

TEST_F(HopperFp8, CaseTable) {
  for (const Case& c : cases::fp8_case_table(cases::Level::kQuick, false)) verify(c);
}

// Every row that is no token's holds the fill pattern, before and after.
TEST_F(HopperFp8, RaggedTable) {
  for (const Case& c : cases::fp8_case_table(cases::Level::kQuick, true)) verify(c);
}

// Every kernel, with key tiles enough to go round its rings several times.
TEST_F(HopperFp8, TheSameBitsEveryTime) {
  for (const char* id :
       {"e4m3/b2/q500/k3000/h6x2/d64/full/blockscales", "e4m3/b2/q3000/k3000/h4/d64/causal",
        "e4m3/b3/q1000/k1000/h15x3/d128/causal/blockscales",
        "e4m3/b2/q700/k2700/h4/d256/full/headscales/outfp16",
        "e4m3/b1/q513/k1900/h6x2/d192x128/causal/blockscales",
        "e4m3/b1/q513/k1900/h6x2/d192/w700:100/onescale",
        "e4m3/b2/q300/k900/h4/d128/causal/softcap30/blockscales",
        "e4m3/b9/q300/k300/h4/d128/causal/random/packed/used/sink/blockscales",
        "bf16/b2/q700/k700/h8x2/d128/causal/fp8"})
    verify(id, 5);
}

// The tensor cores keep few bits of a sum: what that costs grows with its length.
TEST_F(HopperFp8, LongSums) {
  for (const char* id :
       {"bf16/b1/q64/k131072/h1/d64/full/fp8", "bf16/b1/q64/k131072/h1/d128/full/fp8",
        "bf16/b1/q64/k131072/h1/d256/full/fp8"})
    verify(id);
}

// Where O is flushed to float32 sums and where it is not: masks that begin and end anywhere, scales
// of V that change in between.
TEST_F(HopperFp8, TwoLevelSums) {
  for (const char* id :
       {"e4m3/b1/q300/k2049/h2/d64/full", "e4m3/b1/q200/k2560/h2/d128/full/blockscales",
        "e4m3/b1/q700/k4500/h2/d64/causal/blockscales", "e4m3/b1/q300/k5000/h2/d128/causal",
        "e4m3/b1/q900/k6000/h1/d128/w2500:200/blockscales", "e4m3/b1/q500/k9000/h1/d64/w4000:1",
        "e4m3/b1/q400/k5000/h1/d128/causal/softcap30/blockscales",
        "e4m3/b1/q400/k5000/h1/d64/full/softcap30/headscales",
        "e4m3/b3/q600/k6000/h2x1/d128/causal/random/packed/used/blockscales",
        "e4m3/b1/q300/k9000/h2/d256/causal/blockscales",
        "e4m3/b1/q900/k5000/h2/d192x128/full/blockscales",
        "e4m3/b1/q300/k9000/h1/d192/w7000:100/blockscales", "bf16/b1/q300/k4000/h2/d64/causal/fp8"})
    verify(id, 3);
}

// What a sum of n equal products of one sign loses in the tensor cores: half a unit of each. A unit
// is 2^-13 of the power of two below the sum so far; while the sum grows, that is on average at
// most 3/8 of what it ends as.
double largest_loss(int64_t n) { return double(n) * 3 / 8 / 2 / (1 << 13); }

// Every key weighs the same, and values have one sign: a sum in the tensor cores alone loses 13 %
// at this length (docs/fp8.md), more than one that is flushed may lose.
TEST_F(HopperFp8, LongSumsOfOneSignKeepTheirValue) {
  constexpr int64_t kKeys = 8192;
  for (const char* id :
       {"e4m3/b1/q70/k8192/h1/d64/full", "e4m3/b1/q70/k8192/h1/d128/full/blockscales",
        "e4m3/b1/q70/k8192/h1/d128/full/softcap30", "e4m3/b1/q70/k8192/h1/d64/full/softcap30",
        "e4m3/b1/q70/k8192/h1/d256/full/blockscales"}) {
    DeviceCall call(id, *memory_);
    std::mt19937 random(5);
    for (std::byte& q : call.part("q").host) q = std::byte{0};
    for (std::byte& v : call.part("v").host) v = std::byte(0x30 + random() % 9);  // 0.5 … 1
    call.reset();
    call.run();
    const int64_t dim = call.the_case().head_dim;
    const auto* params = std::get_if<flash3_forward_params>(&call.params);
    const bool scaled = params->v_scale.dtype != FLASH3_DTYPE_NONE;
    const Bytes out = call.download(call.part("out"));
    cuda::sm90::PlannedForward plan;
    ASSERT_TRUE(cuda::sm90::plan(cuda::sm90::problem_of(id), cuda::sm90::kDevice, &plan).ok())
        << id;
    const double loss = largest_loss(int64_t{plan.flush_tiles} * plan.kernel->config.tile_n);
    ASSERT_LT(loss, 0.12) << id << ": a single sum would pass";
    for (int64_t d = 0; d < dim; ++d) {
      double exact = 0;
      for (int64_t key = 0; key < kKeys; ++key)
        exact += load_float(call.part("v").host.data(), FLASH3_FLOAT8_E4M3, key * dim + d) *
                 (scaled ? load_float(call.part("v_scale").host.data(), FLASH3_FLOAT32,
                                      key / kScaleBlock)
                         : 1.f);
      exact /= double(kKeys);
      for (int64_t row = 0; row < 70; ++row)
        ASSERT_NEAR(load_float(out.data(), params->out.dtype, row * dim + d), exact, loss * exact)
            << id << " row " << row << " column " << d;
    }
  }
}

// flash3_quantize on a Hopper GPU against the CPU backend, bit by bit (but for codes at a border
// where the tensor cores rotate), with what lies around the tokens; and what a GPU call also
// promises: graphs that replay with other lengths, memory left alone whatever the lengths are.
// Skipped without a Hopper GPU.

class HopperQuantize : public HopperTest {
 protected:
  void expect_same_as_cpu(const Options& o) {
    Call call(*memory_, o);
    call.run_on_device();
    call.expect_same_as_cpu();
  }
};

constexpr int64_t kDims[] = {1, 33, 64, 96, 100, 128, 192, 256};

TEST_F(HopperQuantize, SameBitsAsTheCpu) {
  int number = 0;
  for (const int64_t dim : kDims)
    for (const flash3_dtype dtype : {FLASH3_FLOAT16, FLASH3_BFLOAT16})
      for (const int scale_ndim : {1, 2, 3})
        for (const bool rotate : {false, true})
          for (const Rotary rotary : {Rotary::kNone, Rotary::kHalves, Rotary::kInterleaved}) {
            if (rotary != Rotary::kNone && dim < 2) continue;
            ++number;
            Options o;
            o.dtype = dtype;
            o.dim = dim;
            o.dim_v = kDims[number % 8];
            o.scale_ndim = scale_ndim;
            o.rotate = rotate;
            o.rotary = rotary;
            o.rotary_dim = number % 3 == 0 ? std::max<int64_t>(dim / 4 * 2, 2) : dim / 2 * 2;
            o.table = number % 2 == 0 ? FLASH3_FLOAT32 : dtype;
            o.packed = number % 5 >= 3;
            o.used = number % 7 >= 4;
            expect_same_as_cpu(o);
          }
}

TEST_F(HopperQuantize, EdgesOfBlocks) {
  for (const int64_t seq : {0, 1, 127, 128, 129, 257})
    for (const int scale_ndim : {1, 2, 3})
      for (const bool packed : {false, true}) {
        Options o;
        o.seq_q = seq;
        o.seq_k = 257 - seq;
        o.dim = 112, o.dim_v = 64;  // 64 + 32 + 16: a step of 32 must leave out the last two
        o.scale_ndim = scale_ndim;
        o.rotate = true;
        o.packed = packed;
        expect_same_as_cpu(o);
      }
  Options none;
  none.batch = 0;
  expect_same_as_cpu(none);
  none.packed = true;
  none.scale_ndim = 1;
  expect_same_as_cpu(none);
}

TEST_F(HopperQuantize, OddStridesAndBases) {
  for (const int64_t dim : {64, 72, 98, 100, 128, 256})
    for (const int64_t pad : {0, 1, 2, 8})
      for (const int64_t out_pad : {0, 1, 4, 16})
        for (const bool rotate : {false, true}) {
          Options o;
          o.seq_q = 130, o.seq_k = 40, o.batch = 2;
          o.dim = o.dim_v = dim;
          o.pad = pad, o.out_pad = out_pad;
          o.rotate = rotate;
          o.heads_first = (pad + out_pad) % 2 != 0;
          expect_same_as_cpu(o);
        }
}

// Sizes at which rounding could go either way: those halfway between two codes, and just beside,
// and the largest of a block at the borders of its scale.
TEST_F(HopperQuantize, RoundsTies) {
  for (const flash3_dtype dtype : {FLASH3_FLOAT16, FLASH3_BFLOAT16})
    for (const bool rotate : {false, true})
      for (const float largest : {448.f, 449.f, 450.f, 464.f, 512.f, 447.f}) {
        Options o;
        o.dtype = dtype;
        o.dim = 128;
        o.rotate = rotate;
        Call call(*memory_, o);
        call.set_element(0, 0, 0, 0, 0, largest);
        for (int64_t i = 1; i < 128; ++i)
          call.set_element(0, 0, i % 7, 0, i, 16.f + 0.5f * float(i));
        call.run_on_device();
        call.expect_same_as_cpu();
      }
}

TEST_F(HopperQuantize, NonFiniteElementsMakeTheScaleNaN) {
  for (const float x : {std::numeric_limits<float>::infinity(),
                        -std::numeric_limits<float>::infinity(), std::nanf("")})
    for (const int scale_ndim : {1, 2, 3})
      for (const bool rotate : {false, true}) {
        Options o;
        o.dim = 64;
        o.scale_ndim = scale_ndim;
        o.rotate = rotate;
        Call call(*memory_, o);
        call.set_element(0, 1, 200, 3, 17, x);
        call.set_element(2, 0, 0, 0, 0, x);
        call.run_on_device();
        call.expect_same_as_cpu();
      }
}

TEST_F(HopperQuantize, CanBeCapturedInAGraphAndReplayedWithOtherLengths) {
  for (const int scale_ndim : {1, 2, 3})
    for (const bool packed : {false, true}) {
      Options o;
      o.batch = 6;
      o.seq_q = 700, o.seq_k = 500;
      o.scale_ndim = scale_ndim;
      o.rotate = true;
      o.packed = packed;
      o.used = true;
      Call call(*memory_, o);
      const auto stream = static_cast<cudaStream_t>(memory_->stream());
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t executable = nullptr;
      const flash3_quantize_params p = call.params(true);
      ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
      EXPECT_EQ(flash3_quantize(&p), FLASH3_OK) << flash3_last_error();
      ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
      ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
      for (uint64_t seed = 0; seed < 5; ++seed) {
        call.set_lengths(lengths_of(o, seed));
        call.fill_results();
        ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
        memory_->finish();
        call.expect_same_as_cpu();
      }
      cudaGraphExecDestroy(executable);
      cudaGraphDestroy(graph);
    }
}

// Lengths that break the rules: whatever comes out, the call ends and writes its tensors alone.
TEST_F(HopperQuantize, EndsWhateverTheLengthsAre) {
  for (const int scale_ndim : {1, 2, 3})
    for (const Rotary rotary : {Rotary::kNone, Rotary::kHalves}) {
      Options o;
      o.batch = 6;
      o.seq_q = 700, o.seq_k = 500;
      o.scale_ndim = scale_ndim;
      o.packed = o.used = true;
      o.rotary = rotary;
      o.rotary_dim = 64;
      Call call(*memory_, o);
      const std::vector<int> cu = {0, 700, 0, 1500, -5, 100000, 3},
                             used = {100000, 7, -1, 1500, 1500, 2};
      call.set_lengths({cu, cu, used, used});
      call.run_on_device();
      call.expect_guards();
    }
}

TEST_F(HopperQuantize, ExplainsItself) {
  Options o;
  o.dim = 100;
  o.dim_v = 256;
  o.rotate = true;
  Call call(*memory_, o);
  const flash3_quantize_params p = call.params(true);
  size_t size = 0;
  ASSERT_EQ(flash3_quantize_explain(&p, nullptr, &size), FLASH3_OK) << flash3_last_error();
  std::string text(size, '\0');
  ASSERT_EQ(flash3_quantize_explain(&p, text.data(), &size), FLASH3_OK);
  for (const char* part : {"kernel: quantize_bf16_d128_transformed", "kernel: quantize_bf16_d256\n",
                           "loads of 4, stores of 4 bytes", "workspace: 0 bytes"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
}

}  // namespace
}  // namespace flash3
