// SPDX-License-Identifier: Apache-2.0
// The kernels of flash3 bench --ablation on the GPU: other schedules, the same attention.
#include "device/ablation.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cases/kernel_input.hpp"
#include "cases/tensors.hpp"
#include "core/convert.hpp"
#include "device/device.hpp"

namespace flash3::device {
namespace {

cases::NormalTensors tensors_of(const std::string& id, cases::Memory& memory) {
  std::string error;
  const auto c = cases::parse_id(id, &error);
  if (!c) throw std::runtime_error(error);
  return {*c, memory};
}

std::vector<uint16_t> output_of(const AblationVariant& variant, const flash3_tensor& out,
                                cases::Memory& memory) {
  std::vector<uint16_t> bits(size_t(cases::span_of(out)), 0xFFFF);  // NaN
  memory.copy_in(out.data, bits.data(), 2 * bits.size());
  variant.call();
  memory.copy_out(bits.data(), out.data, 2 * bits.size());
  return bits;
}

// One key tile, two, three and many; several work tiles a block; rows that end inside a tile.
TEST(Ablation, EveryVariantComputesWhatTheLibraryDoes) {
  if (flash3_backend_available(FLASH3_BACKEND_HOPPER) != FLASH3_OK)
    GTEST_SKIP() << flash3_last_error();
  const auto memory = make_device_memory();
  for (const char* id : {"fp16/b1/q200/k64/h2/d128/full", "fp16/b1/q128/k130/h1/d128/full",
                         "fp16/b2/q128/k240/h2/d128/full", "fp16/b1/q300/k384/h4x2/d128/full",
                         "fp16/b4/q1000/k1111/h16/d128/full", "fp16/b16/q700/k80/h16/d128/full"}) {
    const cases::NormalTensors call = tensors_of(id, *memory);
    const auto variants = ablation_variants(call.params);
    ASSERT_EQ(variants.size(), 6u);
    const auto want = output_of(variants[0], call.params.out, *memory);
    for (const AblationVariant& variant : variants)
      for (int run = 0; run < 3; ++run) {
        const auto got = output_of(variant, call.params.out, *memory);
        double worst = 0;
        for (size_t i = 0; i < got.size(); ++i) {
          const double d = std::abs(double(float16_to_float(got[i])) - float16_to_float(want[i]));
          worst = std::isnan(d) ? INFINITY : std::max(worst, d);
        }
        // Outputs stay below 4, and a float16 there has steps of 2^-9.
        ASSERT_LE(worst, 0x1p-8) << variant.name << ", run " << run << ", " << id;
      }
  }
}

// As above; 64 keys a tile, so that these are one, two and many tiles too.
TEST(Ablation, EveryFp8VariantComputesWhatTheLibraryDoes) {
  if (flash3_backend_available(FLASH3_BACKEND_HOPPER) != FLASH3_OK)
    GTEST_SKIP() << flash3_last_error();
  const auto memory = make_device_memory();
  for (const char* shape : {"b1/q200/k64/h2", "b1/q128/k130/h1", "b2/q128/k240/h2",
                            "b1/q300/k384/h4x2", "b4/q1000/k1111/h16", "b16/q700/k80/h16"}) {
    const std::string rest = std::string(shape) + "/d128/full";
    const cases::NormalTensors from = tensors_of("fp16/" + rest, *memory);
    cases::Fp8Input fp8(*memory, from.params, cases::Scales::kBlock, /*rotate=*/true);
    ASSERT_EQ(fp8.quantize(), FLASH3_OK) << flash3_last_error();
    flash3_forward_params params = from.params;
    fp8.apply(&params);
    const auto variants = ablation_variants(params);
    ASSERT_EQ(variants.size(), 5u);
    const auto want = output_of(variants[0], params.out, *memory);
    for (const AblationVariant& variant : variants)
      for (int run = 0; run < 3; ++run) {
        const auto got = output_of(variant, params.out, *memory);
        double squares = 0, wanted = 0;
        for (size_t i = 0; i < got.size(); ++i) {
          const double w = float16_to_float(want[i]), d = float16_to_float(got[i]) - w;
          squares += d * d, wanted += w * w;
        }
        // Two roundings of the weights to 3 bits of mantissa.
        ASSERT_LE(std::sqrt(squares / wanted), 0.05)
            << variant.name << ", run " << run << ", " << rest;
      }
  }
}

TEST(Ablation, RefusesOtherCalls) {
  if (flash3_backend_available(FLASH3_BACKEND_HOPPER) != FLASH3_OK)
    GTEST_SKIP() << flash3_last_error();
  const auto memory = make_device_memory();
  for (const char* id : {"bf16/b1/q64/k64/h1/d128/full", "fp16/b1/q64/k64/h1/d64/full",
                         "fp16/b1/q64/k64/h1/d128/causal"})
    EXPECT_THROW(ablation_variants(tensors_of(id, *memory).params), std::runtime_error) << id;
}

}  // namespace
}  // namespace flash3::device
