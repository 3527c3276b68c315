// SPDX-License-Identifier: Apache-2.0
// The kernels of flash3 bench --ablation on the GPU: other schedules, the same attention.

#include "device/bench_kernels.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

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

// The kernels of flash3 trace on the GPU: the library's output, bit for bit, and stamps that fit
// together.

std::vector<uint16_t> output_of(const std::function<void()>& call, const flash3_tensor& out,
                                cases::Memory& memory) {
  std::vector<uint16_t> bits(size_t(cases::span_of(out)), 0xFFFF);  // NaN
  memory.copy_in(out.data, bits.data(), 2 * bits.size());
  call();
  memory.copy_out(bits.data(), out.data, 2 * bits.size());
  return bits;
}

// Times of one role do not run backwards, and its last stamp is the end.
void expect_in_order(const RoleTrace& role, const std::string& id) {
  ASSERT_FALSE(role.stamps.empty()) << id;
  EXPECT_EQ(role.left_out, 0u) << id;
  EXPECT_EQ(Phase(role.stamps.back().what & 0xff), Phase::kEnd) << id;
  for (size_t i = 1; i < role.stamps.size(); ++i)
    ASSERT_LT(role.stamps[i].clock - role.stamps[i - 1].clock, 1u << 31) << id << ", stamp " << i;
}

// How many stamps of this phase all roles of this kind have.
int count(const Trace& trace, Role role, Phase phase) {
  int n = 0;
  for (const RoleTrace& r : trace.roles)
    for (const Stamp& stamp : r.stamps) n += r.role == role && Phase(stamp.what & 0xff) == phase;
  return n;
}

// One key tile and many, several work tiles a block, rows that end inside a tile, warpgroups that
// skip.
TEST(Trace, TheTracedKernelComputesWhatTheLibraryDoes) {
  if (flash3_backend_available(FLASH3_BACKEND_HOPPER) != FLASH3_OK)
    GTEST_SKIP() << flash3_last_error();
  const auto memory = make_device_memory();
  for (const char* id :
       {"bf16/b1/q100/k60/h1/d128/full", "bf16/b1/q200/k1000/h4x2/d128/full",
        "bf16/b1/q300/k777/h2/d128/causal", "bf16/b4/q1000/k1111/h16/d128/causal",
        "bf16/b2/q4096/k4096/h16/d128/full", "bf16/b2/q4096/k4096/h16/d128/causal",
        "bf16/b1/q300/k777/h2/d64/full", "bf16/b4/q1000/k1111/h16/d64/causal",
        "e4m3/b1/q300/k777/h2/d128/full/outfp16", "e4m3/b4/q1000/k1111/h16/d128/causal"}) {
    const cases::NormalTensors call = tensors_of(id, *memory);
    const TracedCall traced = traced_call(call.params, 0, *memory);
    const auto want = output_of(traced.library, call.params.out, *memory);
    for (int run = 0; run < 2; ++run) {
      ASSERT_EQ(output_of(traced.traced, call.params.out, *memory), want) << id << ", run " << run;
      const Trace trace = traced.read();
      EXPECT_GT(trace.clock_hz, 2e8) << id;
      EXPECT_LT(trace.clock_hz, 3e9) << id;
      for (const RoleTrace& role : trace.roles) expect_in_order(role, id);
      const bool fp8 = call.params.q.dtype == FLASH3_FLOAT8_E4M3;
      const int consumers = int(std::ranges::count(trace.roles, Role::kConsumer, &RoleTrace::role));
      // At d 128 tiles of 128 queries and of 192 are traced, in FP8 of 128 alone.
      const int least = call.params.q.shape[3] == 64 ? 3 : 2, most = fp8 ? 2 : 3;
      EXPECT_GE(consumers, least) << id;
      EXPECT_LE(consumers, most) << id;
      ASSERT_EQ(int(trace.roles.size()), consumers + (fp8 ? 2 : 4)) << id;
      // Whatever K brings, V brings; a warpgroup issues the products of those key tiles that it
      // sees.
      const int tiles = fp8 ? count(trace, Role::kTransposeV, Phase::kTranspose)
                            : count(trace, Role::kLoadK, Phase::kLoad);
      EXPECT_GT(tiles, 0) << id;
      EXPECT_EQ(count(trace, Role::kLoadV, Phase::kLoad), fp8 ? 0 : tiles) << id;
      const int products = count(trace, Role::kConsumer, Phase::kIssue);
      EXPECT_GT(products, 0) << id;
      EXPECT_LE(products, consumers * tiles) << id;
      EXPECT_EQ(count(trace, Role::kConsumer, Phase::kExponentiate), products) << id;
    }
  }
}

TEST(Trace, RefusesOtherCallsAndBlocks) {
  if (flash3_backend_available(FLASH3_BACKEND_HOPPER) != FLASH3_OK)
    GTEST_SKIP() << flash3_last_error();
  const auto memory = make_device_memory();
  for (const char* id :
       {"fp16/b1/q64/k64/h1/d128/full", "bf16/b1/q64/k64/h1/d256/full",
        "bf16/b1/q300/k300/h1/d128/w64:0", "bf16/b1/q64/k64/h1/d64/full/softcap20"})
    EXPECT_THROW(traced_call(tensors_of(id, *memory).params, 0, *memory), std::runtime_error) << id;
  const cases::NormalTensors call = tensors_of("bf16/b1/q64/k64/h1/d128/full", *memory);
  EXPECT_NO_THROW(traced_call(call.params, 0, *memory));
  for (const int block : {-1, 1, 1 << 20})
    EXPECT_THROW(traced_call(call.params, block, *memory), std::runtime_error) << block;
}

// The ceiling of flash3 bench on the GPU: every instance runs, and gives a figure that can be one.

TEST(Ceiling, EveryInstanceIsNearThePeakAtItsClock) {
  if (flash3_backend_available(FLASH3_BACKEND_HOPPER) != FLASH3_OK)
    GTEST_SKIP() << flash3_last_error();
  std::string reason;
  const std::vector<Gpu> found = gpus(&reason);
  ASSERT_FALSE(found.empty()) << reason;
  const Gpu& gpu = found.front();
  Monitor monitor(gpu.pci_bus_id);
  const auto memory = make_device_memory();
  for (const flash3_dtype dtype : {FLASH3_BFLOAT16, FLASH3_FLOAT16, FLASH3_FLOAT8_E4M3})
    for (const int head_dim : {64, 128, 256}) {
      const CeilingResult r = measure_ceiling(dtype, head_dim, 0.1, gpu, monitor, *memory);
      // Serialised products reach a third or less; more than all is refused by measure_ceiling.
      EXPECT_GT(r.peak_percent, 70) << dtype << " " << head_dim;
      EXPECT_GT(r.clock_hz, 0.3 * gpu.max_clock_hz);
      EXPECT_LT(r.clock_hz, 1.05 * gpu.max_clock_hz);
      EXPECT_GT(r.seconds, 0.05);
    }
  EXPECT_THROW(measure_ceiling(FLASH3_BFLOAT16, 96, 0.1, gpu, monitor, *memory),
               std::runtime_error);
  EXPECT_THROW(measure_ceiling(FLASH3_FLOAT32, 64, 0.1, gpu, monitor, *memory), std::runtime_error);
}

}  // namespace
}  // namespace flash3::device
