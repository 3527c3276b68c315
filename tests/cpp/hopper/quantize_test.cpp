// SPDX-License-Identifier: Apache-2.0
// flash3_quantize on a Hopper GPU against the CPU backend, bit by bit (but for codes at a border
// where the tensor cores rotate), with what lies around the tokens; and what a GPU call also
// promises: graphs that replay with other lengths, memory left alone whatever the lengths are.
// Skipped without a Hopper GPU.
#include "fixture.hpp"
#include "quantize_call.hpp"

namespace flash3 {
namespace {

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
