// SPDX-License-Identifier: Apache-2.0
// FP8 on the Hopper backend: against the oracle, beside a plain implementation with the same tensor
// cores, and bit by bit. Skipped without a Hopper GPU.
#include <gtest/gtest.h>

#include "cases/table.hpp"
#include "fixture.hpp"

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
  for (const Case& c : cases::fp8_case_table(cases::Level::kQuick, false, false)) verify(c);
}

// Every row that is no token's holds the fill pattern, before and after.
TEST_F(HopperFp8, RaggedTable) {
  for (const Case& c : cases::fp8_case_table(cases::Level::kQuick, true, false)) verify(c);
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

}  // namespace
}  // namespace flash3
