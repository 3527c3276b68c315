// SPDX-License-Identifier: Apache-2.0
// Results in float32 on the GPU: rounded, they are the bits of the 16-bit results, and lse is the
// same. Skipped without a Hopper GPU.

#include <limits>

#include "cases/runner.hpp"
#include "device_call.hpp"

namespace flash3 {
namespace {

// Runs a call and the same one with results in float32.
class HopperUnrounded : public HopperTest {
 protected:
  void expect_rounded(const std::string& id, const std::string& option) {
    SCOPED_TRACE(id + option);
    DeviceCall rounded(id, *memory_), wide(id + option, *memory_);
    rounded.run();
    wide.run();
    for (const Slot& slot : slots_of(&wide.params)) {
      if (!slot.output) continue;
      const DeviceCall::Part &a = rounded.part(slot.name), &b = wide.part(slot.name);
      const flash3_tensor& of_a = *slot_of(&rounded.params, slot.name).tensor;
      const bool is_result = of_a.dtype != slot.tensor->dtype;
      EXPECT_EQ(is_result, std::string_view(slot.name) != "lse");
      const int64_t differ =
          compare(of_a, rounded.download(a), *slot.tensor, wide.download(b), slot.name);
      EXPECT_EQ(differ > 0, is_result) << slot.name;
    }
  }

 private:
  // Elements that rounding changes; each is compared with what its bits become.
  static int64_t compare(const flash3_tensor& a, const Bytes& rounded, const flash3_tensor& b,
                         const Bytes& wide, const char* name) {
    std::vector<int64_t> rows_a, rows_b;
    cases::for_each_row(a, [&](int64_t offset) { rows_a.push_back(offset); });
    cases::for_each_row(b, [&](int64_t offset) { rows_b.push_back(offset); });
    EXPECT_EQ(rows_a.size(), rows_b.size());
    int64_t differ = 0;
    for (size_t row = 0; row < rows_a.size(); ++row)
      for (int64_t d = 0; d < a.shape[a.ndim - 1]; ++d) {
        const float exact = load_float(wide.data(), b.dtype, rows_b[row] + d);
        const float got = load_float(rounded.data(), a.dtype, rows_a[row] + d);
        uint32_t bits = 0;  // room for any dtype
        store_float(&bits, a.dtype, 0, exact);
        const float wanted = load_float(&bits, a.dtype, 0);
        if (std::isnan(got) && std::isnan(wanted)) continue;  // no token's row
        if (got != wanted) {
          ADD_FAILURE() << name << ", row " << row << ", " << d << ": " << got << " of " << exact;
          return 0;
        }
        differ += got != exact;
      }
    return differ;
  }
};

TEST_F(HopperUnrounded, Forward) {
  for (const char* dtype : {"bf16", "fp16"})
    for (const char* call :
         {"/b2/q200/k300/h4x2/d64/causal", "/b1/q70/k90/h3/d40x72/w5:3/padded",
          "/b1/q130/k140/h2/d31/causal/odd", "/b1/q64/k64/h8x1/d128/full",
          "/b1/q333/k333/h2/d192x128/causal/softcap20", "/b2/q150/k280/h2/d256/full/sink",
          "/b5/q100/k100/h2/d64/causal/random/packed", "/b3/q30/k5/h2/d128/causal",
          "/b2/q300/k400/h2/d128/causal/fp8", "/b2/q300/k2500/h2x1/d101/causal/fp8/odd"})
      expect_rounded(std::string(dtype) + call, "/outfp32");
}

TEST_F(HopperUnrounded, ForwardOnACache) {
  for (const char* call :
       {"bf16/b3/q1/k1000/h8x2/d128/causal/usedk", "fp16/b2/q4/k5000/h8x1/d64/causal/usedk/paged16",
        "bf16/b1/q1/k300/h4/d100x72/causal/usedk/paged1",
        "bf16/b2/q300/k900/h2/d256/causal/usedk/paged64",
        "bf16/b4/q40/k900/h4x2/d128/causal/usedk/paged128/random/packedq/append3"})
    expect_rounded(call, "/outfp32");
}

// Deterministic: in any order two runs of one call differ too.
TEST_F(HopperUnrounded, Gradients) {
  for (const char* dtype : {"bf16", "fp16"})
    for (const char* call :
         {"/b2/q200/k300/h4x2/d64/causal", "/b1/q150/k90/h3/d40x72/w5:3/padded",
          "/b1/q130/k140/h2/d31/causal/odd", "/b1/q300/k200/h4x1/d128/full",
          "/b1/q333/k333/h2/d192x128/causal/dlse", "/b2/q150/k280/h2/d256/full",
          "/b1/q200/k200/h2/d128/causal/softcap20", "/b1/q200/k200/h2/d256/causal/softcap20",
          "/b5/q100/k100/h2/d64/causal/random/packed"})
      expect_rounded(std::string(dtype) + call + "/deterministic", "/gradfp32");
}

// flash3_merge on the GPU. Skipped without a Hopper GPU.

class Merge : public HopperTest {};

TEST_F(Merge, IsTheFormula) {
  for (const cases::MergeCase& c : cases::merge_case_table())
    EXPECT_EQ(check_merge(c, *memory_, FLASH3_BACKEND_HOPPER), "") << to_text(c);
}

// Largest and smallest scores, which must not overflow, and NaN, which must stay.
TEST_F(Merge, SpecialValues) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  float host[] = {1, 2, 3, 4, /* lse of each part and row */ 1e30f, kNan, 1e30f, 5, 0, 0, 0, 0};
  const auto memory = memory_->allocate(sizeof host);
  memory_->copy_in(memory.get(), host, sizeof host);
  auto* const at = static_cast<float*>(memory.get());
  flash3_merge_params p{};
  p.struct_size = sizeof p;
  p.out_parts = {at, FLASH3_FLOAT32, 4, {2, 2, 1, 1}, {2, 1, 1, 1}};
  p.lse_parts = {at + 4, FLASH3_FLOAT32, 3, {2, 1, 2}, {2, 2, 1}};
  p.out = {at + 8, FLASH3_FLOAT32, 3, {2, 1, 1}, {1, 1, 1}};
  p.lse = {at + 10, FLASH3_FLOAT32, 2, {1, 2}, {2, 1}};
  p.backend = FLASH3_BACKEND_HOPPER;
  p.stream = memory_->stream();
  ASSERT_EQ(flash3_merge(&p), FLASH3_OK) << flash3_last_error();
  memory_->finish();
  memory_->copy_out(host, memory.get(), sizeof host);
  EXPECT_EQ(host[8], 2.f);
  EXPECT_EQ(host[10], 1e30f);
  EXPECT_TRUE(host[9] != host[9] && host[11] != host[11]);
}

}  // namespace
}  // namespace flash3
