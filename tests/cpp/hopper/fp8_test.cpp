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
#include "forward_problem.hpp"

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

}  // namespace
}  // namespace flash3
