// SPDX-License-Identifier: Apache-2.0
// One graph replayed thousands of times, each time with other lengths, which a copy on the stream
// brings before it: the outputs of every replay must be, bit by bit, those of a fresh call with the
// same lengths. FLASH3_GRAPH_REPLAYS sets how many. Skipped without a Hopper GPU.

#include <chrono>
#include <random>

#include "device_call.hpp"

namespace flash3 {
namespace {

constexpr int kSets = 50;

class GraphReplay : public HopperTest, public testing::WithParamInterface<const char*> {
 protected:
  std::shared_ptr<std::byte> pinned(size_t bytes) {
    void* p = nullptr;
    EXPECT_EQ(cudaMallocHost(&p, std::max<size_t>(bytes, 1)), cudaSuccess);
    return {static_cast<std::byte*>(p), [](std::byte* at) { cudaFreeHost(at); }};
  }
};

using Random = std::mt19937_64;

// Between 0 and most, the ends often.
int draw(int64_t most, Random& random) {
  switch (random() % 8) {
    case 0: return 0;
    case 1: return int(most);
    default: return int(random() % uint64_t(most + 1));
  }
}

// Sets of lengths that follow the rules, for one side.
struct Side {
  const char *cu, *used;
  std::vector<std::vector<int>> cus, useds;  // of each set; empty: not in the call
};

// A cache's lengths: no sequence has more keys than there are values for.
void draw_cache(DeviceCall& call, Random& random, Side* side) {
  const auto values = [&](const char* name) {
    std::vector<int> ints(size_t(call.the_case().batch));
    if (slot_of(&call.params, name).tensor)
      std::memcpy(ints.data(), call.part(name).host.data(), ints.size() * sizeof(int));
    return ints;
  };
  const std::vector<int> most = values("seqused_k"), least = values("leftpad_k");
  for (int set = 0; set < kSets; ++set) {
    auto& used = side->useds.emplace_back();
    for (size_t b = 0; b < most.size(); ++b)
      used.push_back(least[b] + draw(most[b] - least[b], random));
  }
}

Side draw_side(DeviceCall& call, bool is_q, Random& random) {
  Side side{is_q ? "cu_seqlens_q" : "cu_seqlens_k", is_q ? "seqused_q" : "seqused_k", {}, {}};
  const cases::Case& c = call.the_case();
  if (!is_q && c.has_cache()) {
    draw_cache(call, random, &side);
    return side;
  }
  const bool packed = is_q ? c.packed_q : c.packed_k, used = is_q ? c.used_q : c.used_k;
  const flash3_tensor& t = *slot_of(&call.params, is_q ? "q" : "k").tensor;
  const int64_t rows = packed ? t.shape[0] : t.shape[1], longest = is_q ? c.seq_q : c.seq_k;
  for (int set = 0; set < kSets; ++set) {
    std::vector<int> cu{0}, lengths;
    if (packed) {
      cu[0] = int(random() % 5);  // rows of no sequence come first
      for (int64_t b = 0; b < c.batch; ++b) {
        const int64_t fair = 2 * rows / c.batch;
        const int64_t length = std::min(
            {longest, rows - cu.back(), int64_t{draw(random() % 4 ? fair : rows, random)}});
        cu.push_back(cu.back() + int(length));
      }
      side.cus.push_back(cu);
    }
    if (!used) continue;
    for (int64_t b = 0; b < c.batch; ++b)
      lengths.push_back(draw(packed ? cu[size_t(b) + 1] - cu[size_t(b)] : rows, random));
    side.useds.push_back(lengths);
  }
  return side;
}

TEST_P(GraphReplay, WithOtherLengthsEachTime) {
  const auto replays = setting("FLASH3_GRAPH_REPLAYS", 1000);
  const TimeLimit limit(unsigned(600 + replays / 20));
  const auto started = std::chrono::steady_clock::now();
  const std::string id = GetParam();
  DeviceCall call(id, *memory_);
  const auto stream = static_cast<cudaStream_t>(memory_->stream());
  Random random(7);
  const Side sides[] = {draw_side(call, true, random), draw_side(call, false, random)};

  // All sets in memory that copies on a stream can read; enqueue(set) brings one to the device.
  struct Copy {
    std::byte* to;
    size_t bytes;
    std::shared_ptr<std::byte> from;
  };
  std::vector<Copy> copies;
  for (const Side& side : sides)
    for (const auto& [name, sets] : {std::pair{side.cu, &side.cus}, {side.used, &side.useds}}) {
      if (sets->empty()) continue;
      const size_t bytes = sets->front().size() * sizeof(int);
      Copy& copy = copies.emplace_back(call.part(name).device, bytes, pinned(kSets * bytes));
      ASSERT_EQ(call.part(name).host.size(), bytes);
      for (size_t set = 0; set < kSets; ++set)
        std::memcpy(copy.from.get() + set * bytes, (*sets)[set].data(), bytes);
    }
  ASSERT_FALSE(copies.empty());
  // What a call leaves: its results, and a cache that grows, which begins as it was each time.
  struct Grown {
    std::byte* at;
    size_t bytes;
    std::shared_ptr<void> first;
  };
  std::vector<Grown> caches;
  size_t bytes = call.results_bytes();
  for (const auto& part : call.parts()) {
    if (!call.grows(part)) continue;
    const Grown& cache =
        caches.emplace_back(part.device, part.host.size(), memory_->allocate(part.host.size()));
    memory_->copy_in(cache.first.get(), part.host.data(), part.host.size());
    bytes += cache.bytes;
  }
  const auto got = pinned(bytes);
  const auto prepare = [&](size_t set) {
    for (const Copy& copy : copies)
      ASSERT_EQ(cudaMemcpyAsync(copy.to, copy.from.get() + set * copy.bytes, copy.bytes,
                                cudaMemcpyHostToDevice, stream),
                cudaSuccess);
    ASSERT_EQ(cudaMemsetAsync(call.results(), int(kUnwritten), call.results_bytes(), stream),
              cudaSuccess);
    for (const Grown& cache : caches)
      ASSERT_EQ(cudaMemcpyAsync(cache.at, cache.first.get(), cache.bytes, cudaMemcpyDeviceToDevice,
                                stream),
                cudaSuccess);
  };
  const auto collect = [&] {
    std::byte* to = got.get();
    const auto bring = [&](const std::byte* from, size_t count) {
      ASSERT_EQ(cudaMemcpyAsync(to, from, count, cudaMemcpyDeviceToHost, stream), cudaSuccess);
      to += count;
    };
    bring(call.results(), call.results_bytes());
    for (const Grown& cache : caches) bring(cache.at, cache.bytes);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  };

  std::vector<Bytes> expected;
  for (size_t set = 0; set < kSets; ++set) {
    prepare(set);
    ASSERT_EQ(flash3::run(call.params), FLASH3_OK) << flash3_last_error();
    collect();
    expected.emplace_back(got.get(), got.get() + bytes);
  }
  int others = 0;  // the sets must matter
  for (size_t set = 1; set < kSets; ++set) others += expected[set] != expected[0];
  EXPECT_GT(others, kSets / 2);

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_EQ(flash3::run(call.params), FLASH3_OK) << flash3_last_error();
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (int64_t replay = 0; replay < replays; ++replay) {
    const size_t set = random() % kSets;
    prepare(set);
    ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    collect();
    ASSERT_EQ(std::memcmp(got.get(), expected[set].data(), bytes), 0)
        << id << ": replay " << replay << ", lengths " << set;
    if (replay % 500 != 499) continue;
    // Nothing that a replay leaves behind reaches a fresh call.
    prepare(set);
    ASSERT_EQ(flash3::run(call.params), FLASH3_OK) << flash3_last_error();
    collect();
    ASSERT_EQ(std::memcmp(got.get(), expected[set].data(), bytes), 0)
        << id << ": a fresh call after replay " << replay << ", lengths " << set;
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - started;
  std::printf("%s: %lld replays in %.1f s\n", id.c_str(), static_cast<long long>(replays),
              took.count());
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

// Each list of sequences: longest first, in slots, of one side, of tensors that are not packed.
constexpr const char* kReplayed[] = {
    "bf16/b6/q300/k300/h4x2/d128/causal/random/packed/used",
    "bf16/b16/q60/k60/h2/d64/causal/packed/used",
    "bf16/b6/q200/k300/h2/d64/full/used/softcap20/sink",
    "bf16/b6/q1/k3000/h8x2/d128/causal/usedk",
    "bf16/b9/q1/k2000/h8x1/d128/causal/usedk/paged16",
    "bf16/b9/q1/k2000/h8x1/d128/causal/usedk/paged1",
    "fp16/b6/q3/k900/h4x2/d64/causal/usedk/paged64/leftpad/append3/rotary",
    "bf16/b6/q9/k500/h4x1/d192x128/full/packedq/usedk/batchidx/append4/packednew",
    "bf16/b6/q300/k600/h4x2/d128/causal/random/packedq/usedk/paged16",
    "fp16/b6/q200/k500/h4x2/d64/causal/giant/packedq/usedk/paged128/append40/packednew/rotary",
    "bf16/b6/q100/k400/h4x1/d192x128/w200:/usedk/batchidx/leftpad",
    "bf16/b6/q100/k400/h2/d256/causal/usedk/append100/rotary",
    "fp16/b6/q100/k400/h2/d256/causal/random/packedk/usedk",
    "e4m3/b6/q300/k300/h4x2/d128/causal/random/packed/used/blockscales",
    "e4m3/b6/q200/k300/h2/d64/full/used/headscales",
    "e4m3/b6/q100/k5000/h4x2/d128/causal/usedk/blockscales",
    "e4m3/b6/q100/k5000/h2x1/d256/full/random/packed/blockscales",
    "bf16/b6/q200/k200/h2/d128/full/random/packed/fp8",
    "bf16/b6/q300/k300/h4x2/d128/full/random/packed/used/quantize/blockscales/rotate",
    "bf16/b6/q300/k300/h4x2/d128/causal/random/packed/used/deterministic",
    "bf16/b6/q200/k300/h2/d64/full/random/packed/deterministic/dlse",
    "bf16/b6/q200/k200/h2/d256/causal/used/deterministic",
};
INSTANTIATE_TEST_SUITE_P(Calls, GraphReplay, testing::ValuesIn(kReplayed));

// Plans that the caller keeps, on the GPU: made without an address, they run with any that are
// aligned, also inside a captured graph, and give the bits that the call gives. Skipped without a
// Hopper GPU.

using PlanOwner = std::unique_ptr<flash3_plan, void (*)(flash3_plan*)>;

PlanOwner make_plan(const AnyParams& any) {
  flash3_plan* plan = nullptr;
  const auto make = [&](const auto& p) { return cases::make_plan(p, &plan); };
  EXPECT_EQ(std::visit(make, any), FLASH3_OK) << flash3_last_error();
  return {plan, flash3_plan_destroy};
}

flash3_status run_plan(const flash3_plan* plan, const AnyParams& any) {
  return std::visit([&](const auto& p) { return cases::run_plan(plan, p); }, any);
}

class KeptPlanOnHopper : public HopperTest, public testing::WithParamInterface<const char*> {};

// The call's params without any address, stream or workspace.
AnyParams question(AnyParams params) {
  for (const Slot& slot : slots_of(&params)) slot.tensor->data = nullptr;
  std::visit([](auto& p) { p.stream = p.workspace = nullptr, p.workspace_size = 0; }, params);
  return params;
}

TEST_P(KeptPlanOnHopper, RunsAsTheCallDoes) {
  const TimeLimit limit;
  DeviceCall first(GetParam(), *memory_), second(GetParam(), *memory_);
  const bool aligned = second.the_case().layout != cases::Layout::kOdd;
  const PlanOwner plan = make_plan(aligned ? question(first.params) : first.params);
  size_t bytes = 1;
  ASSERT_EQ(flash3_plan_workspace(plan.get(), &bytes), FLASH3_OK);
  EXPECT_EQ(bytes, second.workspace_bytes());

  second.run();
  const auto expected = second.outputs();
  second.reset();
  ASSERT_EQ(run_plan(plan.get(), second.params), FLASH3_OK) << flash3_last_error();
  memory_->finish();
  EXPECT_EQ(second.outputs(), expected);

  const auto stream = static_cast<cudaStream_t>(memory_->stream());
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  const flash3_status status = run_plan(plan.get(), second.params);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(status, FLASH3_OK) << flash3_last_error();
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (int replay = 0; replay < 3; ++replay) {
    second.reset();
    ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    memory_->finish();
    EXPECT_EQ(second.outputs(), expected);
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

TEST_P(KeptPlanOnHopper, RefusesHostMemoryAndBadAlignment) {
  DeviceCall call(GetParam(), *memory_);
  if (call.the_case().layout == cases::Layout::kOdd) GTEST_SKIP() << "any address will do";
  const PlanOwner plan = make_plan(call.params);
  const auto refused = [&](void* address, const std::string& reason) {
    AnyParams params = call.params;
    slot_of(&params, "k").tensor->data = address;
    EXPECT_EQ(run_plan(plan.get(), params), FLASH3_INVALID_ARGUMENT);
    EXPECT_NE(std::string(flash3_last_error()).find(reason), std::string::npos)
        << flash3_last_error();
  };
  alignas(256) static std::byte host[256];
  refused(host, "k.data is host memory, which the hopper backend cannot read");
  refused(call.part("k").device + 4, "but the plan was made for a multiple of 16");
  refused(nullptr, "k.data is null but k has elements");
}

// Each kind of call, packed and not; copies of tensors that TMA cannot address.
constexpr const char* kCalls[] = {
    "bf16/b2/q300/k300/h4x2/d128/causal",
    "bf16/b8/q1/k500/h8x2/d128/full",
    "fp16/b2/q200/k300/h2/d100/causal/odd",
    "bf16/b6/q300/k300/h4x2/d128/causal/random/packed/used",
    "e4m3/b2/q300/k300/h4x2/d128/causal/blockscales",
    "bf16/b2/q300/k300/h4x2/d128/causal/fp8",
    "bf16/b2/q300/k300/h4x2/d64/causal/quantize/blockscales/rotate",
    "bf16/b2/q300/k300/h4x2/d128/causal/deterministic",
    "bf16/b6/q200/k300/h2/d64/causal/random/packed/deterministic",
};
INSTANTIATE_TEST_SUITE_P(Calls, KeptPlanOnHopper, testing::ValuesIn(kCalls));

}  // namespace
}  // namespace flash3
