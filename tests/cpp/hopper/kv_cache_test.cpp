// SPDX-License-Identifier: Apache-2.0
// Calls on a KV cache on the GPU: against the oracle with the cache bit for bit. Skipped without a
// Hopper GPU.

#include <algorithm>
#include <random>

#include "cases/table.hpp"
#include "device_call.hpp"
#include "flash3/schedule.h"

namespace flash3 {
namespace {

class KvCache : public HopperTest {};

TEST_F(KvCache, CaseTable) {
  for (const cases::Case& c :
       cases::cache_case_table(cases::Level::kQuick, cases::dtypes_of(FLASH3_BACKEND_HOPPER)))
    verify(c);
}

TEST_F(KvCache, PagesOfAnySize) {
  for (const char* const page_size : {"1", "2", "3", "16", "64", "128", "256"})
    for (const char* const rest : {"", "/leftpad", "/append1/rotary", "/leftpad/append5/rotary2"})
      for (const char* const call : {"bf16/b5/q1/k900/h8x1/d128/causal/random/usedk/paged",
                                     "fp16/b5/q7/k700/h4x2/d64/causal/random/usedk/paged",
                                     "bf16/b3/q2/k500/h4/d80/w200:5/edges/usedk/paged",
                                     "bf16/b3/q150/k300/h2x1/d256/causal/random/usedk/paged"})
        verify(cases::parsed(std::string(call) + page_size + rest), 2);
}

TEST_F(KvCache, AppendOfEveryKind) {
  for (const char* const id :
       {"bf16/b4/q1/k1000/h8x2/d128/causal/random/usedk/append1",
        "bf16/b4/q30/k100/h8x2/d128/causal/random/packedq/usedk/append30/packednew/rotary",
        "fp16/b4/q4/k300/h4x1/d64/causal/random/usedk/batchidx/append9/rotary2",
        "fp16/b4/q1/k300/h4/d256/causal/random/usedk/append1/offsets/rotary/seed2",
        "bf16/b4/q1/k300/h4/d40x72/full/random/usedk/append3/rotary/seed3",
        "bf16/b4/q3/k300/h3x1/d33/causal/random/usedk/append3/rotary/odd",
        "bf16/b1/q700/k2000/h8x2/d128/causal/usedk/paged64/append700/rotary"})
    verify(cases::parsed(id), 2);
}

// Rows of every number of lanes, some with more transforms than one; queries alone too, in decode
// and in forward kernels, and dims that 16 bytes do not divide.
TEST_F(KvCache, RotationOfEveryHeadDim) {
  for (const char* const dim :
       {"1", "7", "16", "33", "64", "80", "96", "127", "128", "160", "200", "256"})
    for (const char* const call :
         {"bf16/b4/q1/k500/h8x2/causal/random/usedk/paged16/append1/kv8/headscales/rotary",
          "fp16/b4/q3/k300/h4x1/causal/random/usedk/append9/packednew/kv8/blockscales/rotary2",
          "fp16/b3/q2/k400/h6x2/causal/random/usedk/append5/leftpad/rotary/odd",
          "bf16/b2/q150/k300/h4x2/causal/random/usedk/paged64/append40",
          "bf16/b2/q4/k900/h8x2/full/random/usedk/kv8/onescale", "fp16/b2/q70/k90/h3/causal/odd"}) {
      std::string id = call;
      const size_t mask =
          id.find("/causal") != std::string::npos ? id.find("/causal") : id.find("/full");
      id.insert(mask, std::string("/d") + dim);
      if (std::string(dim) == "1" && id.find("rotary") != std::string::npos) continue;
      verify(cases::parsed(id + "/rotate"), 2);
    }
  for (const char* const id :
       {"bf16/b3/q4/k500/h16x1/d64x512/causal/random/usedk/paged64/append4/qv/rotate",
        "bf16/b3/q7/k500/h8x2/d128/full/random/usedk/paged16/append7/kv8/tree/rotate",
        "bf16/b40/q600/k1500/h8x1/d128/causal/giant/packedq/usedk/paged16/append1/rotary/rotate"})
    verify(cases::parsed(id), 2);
}

// Prompts, alone and beside sequences that decode, in boxes of every number of rows, under masks
// that hide keys before and after.
TEST_F(KvCache, PromptsInPagesOfAnySize) {
  for (const char* const page_size : {"8", "16", "32", "48", "64", "96", "128", "256", "512"})
    for (const char* const call :
         {"bf16/b5/q150/k900/h8x1/d128/causal/giant/packedq/usedk/paged",
          "fp16/b4/q300/k300/h4x2/d64/causal+w70:/random/usedk/paged",
          "bf16/b3/q100/k500/h4/d192x128/w200:5/edges/packedq/usedk/append5/rotary/paged",
          "bf16/b3/q300/k400/h2x1/d256/full/random/usedk/softcap20/sink/paged",
          "bf16/b3/q200/k600/h6x2/d72x40/causal/random/packedq/usedk/chunk100/paged"})
      verify(cases::parsed(std::string(call) + page_size), 2);
  for (const char* const id :
       {"bf16/b4/q200/k700/h4x2/d128/causal/random/usedk/batchidx",
        "fp16/b4/q200/k700/h4x2/d64/w100:/random/packedq/usedk/batchidx/leftpad/append7/rotary",
        "bf16/b4/q200/k700/h4/d256/causal/random/usedk/leftpad",
        "bf16/b4/q100/k300/h4x2/d128/causal/random/usedk/leftpad/append100/rotary2",
        "bf16/b1/q1000/k1000/h4x2/d128/causal/usedk/append1000/rotary/padded",
        "bf16/b40/q600/k1500/h8x1/d128/causal/giant/packedq/usedk/paged16/append1/rotary"})
    verify(cases::parsed(id), 2);
}

// Packed heads of queries in FP8, each with scales of its own: packs of every number of heads,
// those that leave rows idle too, in boxes of every number of rows and without a table.
TEST_F(KvCache, PacksHeadsOfFp8Queries) {
  const std::string own_keys = "/k:headscales/v:onescale";
  for (const char* const heads : {"h8x2", "h6x2", "h5x1", "h14x2", "h16x1", "h64x1", "h144x16"})
    for (const char* const queries : {"q17", "q40", "q130"})
      for (const char* const rest :
           {"d128/causal/random/packedq/usedk/paged128", "d64/causal+w70:/giant/usedk/paged256",
            "d192x128/full/random/packedq/usedk/batchidx", "d256/causal/random/sink/usedk/append9",
            "d128/w200:5/edges/packedq/usedk/softcap20/paged128"})
        verify(cases::parsed(std::string("e4m3/b3/") + queries + "/k500/" + heads + "/" + rest +
                             "/blockscales"),
               2);
  for (const char* const page_size : {"16", "32", "48", "64", "96"})
    verify(cases::parsed("e4m3/b4/q30/k900/h12x2/d128/causal/random/packedq/usedk/paged" +
                         std::string(page_size) + "/blockscales" + own_keys),
           2);
  verify(cases::parsed("e4m3/b4/q30/k900/h12x2/d64/causal/random/usedk/leftpad/blockscales" +
                       own_keys),
         2);
}

// Prompts with many FP8 keys that blocks share, with scales of V that differ from part to
// part and maxima that do: many tiles, few of many parts, sums in one level and in two.
TEST_F(KvCache, SplitsFp8Keys) {
  for (const char* const id :
       {"e4m3/b1/q150/k9000/h2x1/d128/full/usedk/blockscales",
        "e4m3/b2/q40/k30000/h8x1/d64/causal/random/usedk/paged256/blockscales/outliers",
        "e4m3/b1/q40/k30000/h4x2/d256/causal/usedk/batchidx/blockscales/outfp32",
        "e4m3/b3/q300/k15000/h6x2/d192x128/w9000:5/random/packedq/usedk/paged128/append9/"
        "blockscales",
        "e4m3/b2/q40/k15000/h8x2/d128/causal/usedk/paged48/headscales",
        "e4m3/b80/q17/k7300/h8x1/d128/causal/usedk/paged64/sink",
        "bf16/b1/q150/k9000/h2x1/d128/full/usedk/kv8/blockscales",
        "fp16/b2/q40/k30000/h8x1/d64/causal/random/usedk/paged256/kv8/blockscales/outliers",
        "bf16/b1/q40/k30000/h4x2/d256/causal/usedk/batchidx/kv8/blockscales/outfp32",
        "bf16/b3/q300/k15000/h6x2/d192x128/w9000:5/random/packedq/usedk/paged128/append9/kv8/"
        "blockscales",
        "bf16/b80/q17/k7300/h8x1/d128/causal/usedk/paged64/sink/kv8/headscales"})
    verify(cases::parsed(id), 3);
}

// A call that has tokens to append and no query only appends.
TEST_F(KvCache, AppendsWithoutQueries) {
  const std::string id = "bf16/b4/q1/k300/h4x2/d128/causal/random/usedk/paged16/append3/rotary";
  DeviceCall whole(id, *memory_), only(id, *memory_);
  whole.run();
  auto& p = std::get<flash3_forward_params>(only.params);
  p.q.shape[1] = p.out.shape[1] = p.lse.shape[2] = 0;
  only.run();
  for (const char* const name : {"k", "v"}) {
    EXPECT_TRUE(only.download(only.part(name)) == whole.download(whole.part(name))) << name;
    EXPECT_FALSE(only.download(only.part(name)) == only.part(name).host) << name;
  }
  EXPECT_EQ(only.download(only.part("out")), only.part("out").host);
}

// With fewer blocks the bits stay.
TEST_F(KvCache, MarginsChangeNoBit) {
  for (const char* const id :
       {"bf16/b3/q1/k5000/h8x2/d128/causal/random/usedk/paged16",
        "bf16/b3/q150/k15000/h8x2/d128/causal/usedk/paged64", "bf16/b2/q300/k700/h4x2/d128/causal",
        "fp16/b3/q200/k300/h4/d64/full/random/packed",
        "e4m3/b2/q300/k300/h4x2/d128/causal/blockscales", "bf16/b2/q300/k300/h4/d128/causal/fp8",
        "e4m3/b3/q150/k15000/h8x2/d256/causal/usedk/paged128/blockscales",
        "bf16/b3/q150/k15000/h8x2/d128/causal/usedk/paged128/kv8/blockscales"}) {
    DeviceCall call(id, *memory_);
    call.run();
    const auto expected = call.outputs();
    for (const int margin : {1, 100, 131, 1000}) {
      call.reset();
      auto& p = std::get<flash3_forward_params>(call.params);
      p.sm_margin = margin;
      size_t bytes = 0;
      ASSERT_EQ(flash3_forward_workspace(&p, &bytes), FLASH3_OK) << flash3_last_error();
      const auto workspace = memory_->allocate(std::max<size_t>(bytes, 256));
      p.workspace = workspace.get(), p.workspace_size = bytes;
      call.run();
      EXPECT_TRUE(call.outputs() == expected) << id << ", margin " << margin;
    }
  }
}

// Schedules that the caller keeps, on the GPU: one graph makes a schedule and runs the layers of a
// model with it, replayed with other lengths; each layer must give what a call with a schedule of
// its own gives. Skipped without a Hopper GPU.

constexpr int kLayers = 64, kReplays = 100;

class Schedule : public HopperTest, public testing::WithParamInterface<const char*> {};

TEST_P(Schedule, IsSharedByTheLayersOfAModel) {
  DeviceCall call(GetParam(), *memory_);
  const auto stream = static_cast<cudaStream_t>(memory_->stream());
  auto& params = std::get<flash3_forward_params>(call.params);
  flash3_schedule schedule{};
  ASSERT_EQ(flash3_forward_schedule_size(&params, &schedule.size), FLASH3_OK)
      << flash3_last_error();
  ASSERT_GT(schedule.size, 0u);
  const auto memory = memory_->allocate(schedule.size);
  schedule.data = memory.get();

  const size_t bytes = call.results_bytes();
  const auto results = memory_->allocate(kLayers * bytes);
  const Bytes unwritten(kLayers * bytes, kUnwritten);
  const auto enqueue_layers = [&] {
    ASSERT_EQ(flash3_forward_schedule(&params, &schedule), FLASH3_OK) << flash3_last_error();
    for (int layer = 0; layer < kLayers; ++layer) {
      AnyParams of_layer =
          call.moved(static_cast<std::byte*>(results.get()) + size_t(layer) * bytes,
                     static_cast<std::byte*>(params.workspace), stream);
      std::get<flash3_forward_params>(of_layer).schedule = &schedule;
      ASSERT_EQ(flash3::run(of_layer), FLASH3_OK) << flash3_last_error();
    }
  };
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  enqueue_layers();
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);

  std::vector<int> most(size_t(call.the_case().batch)), used(most.size());
  std::memcpy(most.data(), call.part("seqused_k").host.data(), most.size() * sizeof(int));
  std::mt19937_64 random(11);
  for (int replay = 0; replay < kReplays; ++replay) {
    for (size_t b = 0; b < used.size(); ++b) used[b] = int(random() % uint64_t(most[b] + 1));
    call.set("seqused_k", used);
    memory_->copy_in(results.get(), unwritten.data(), unwritten.size());
    ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    memory_->finish();
    Bytes got(kLayers * bytes), expected(bytes);
    memory_->copy_out(got.data(), results.get(), got.size());
    memory_->copy_in(call.results(), unwritten.data(), bytes);
    call.run();
    memory_->copy_out(expected.data(), call.results(), bytes);
    for (int layer = 0; layer < kLayers; ++layer)
      ASSERT_EQ(std::memcmp(got.data() + size_t(layer) * bytes, expected.data(), bytes), 0)
          << "layer " << layer << " of replay " << replay;
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

// Few sequences, which many blocks share; many of them; several query tiles of each.
constexpr const char* kCalls[] = {
    "bf16/b2/q1/k6000/h8x2/d128/causal/usedk/paged16",
    "bf16/b40/q1/k700/h8x2/d128/causal/usedk",
    "fp16/b5/q13/k900/h8x1/d64/causal/usedk/paged64",
};
INSTANTIATE_TEST_SUITE_P(Calls, Schedule, testing::ValuesIn(kCalls));

class ScheduleRules : public HopperTest {};

TEST_F(ScheduleRules, ACallForWhichItWasNotMadeIsRefused) {
  DeviceCall call("bf16/b3/q1/k900/h8x2/d128/causal/usedk/paged16", *memory_);
  auto& params = std::get<flash3_forward_params>(call.params);
  flash3_schedule schedule{};
  EXPECT_EQ(flash3_forward_schedule(&params, &schedule), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(flash3_last_error()).rfind("schedule->data is null", 0), 0u);
  ASSERT_EQ(flash3_forward_schedule_size(&params, &schedule.size), FLASH3_OK);
  const auto memory = memory_->allocate(schedule.size);
  schedule.data = memory.get();
  ASSERT_EQ(flash3_forward_schedule(&params, &schedule), FLASH3_OK) << flash3_last_error();
  params.schedule = &schedule;
  params.sm_margin = 1;
  EXPECT_EQ(flash3_forward(&params), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(flash3_last_error()).rfind("schedule->key = ", 0), 0u);
  memory_->finish();
  EXPECT_EQ(call.download(call.part("out")), call.part("out").host);
}

}  // namespace
}  // namespace flash3
