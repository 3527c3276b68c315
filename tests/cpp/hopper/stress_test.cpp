// SPDX-License-Identifier: Apache-2.0
// Many threads with several streams each make calls of every kind at once, ask questions and make
// mistakes in between: every result must be that of the same call alone. FLASH3_STRESS_SECONDS sets
// for how long. Skipped without a Hopper GPU.
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "device_call.hpp"

namespace flash3 {
namespace {

using Clock = std::chrono::steady_clock;
using Random = std::mt19937_64;

constexpr int kThreads = 64, kStreams = 8;

// Every kernel family: dense, ragged, of short sequences, of few queries, caches, copies of odd
// layouts. That of 100 keys in FP8 has a block without work.
constexpr const char* kCalls[] = {
    "bf16/b2/q200/k300/h4x2/d128/causal",
    "fp16/b1/q129/k257/h4/d64/full",
    "bf16/b1/q100/k300/h2/d256/causal/sink",
    "fp16/b1/q200/k200/h2/d192x128/w50:20",
    "bf16/b2/q1/k500/h8x1/d128/causal",
    "bf16/b1/q150/k200/h2/d72/causal/odd",
    "bf16/b2/q150/k200/h4/d128/causal/softcap30",
    "bf16/b5/q200/k300/h2/d64/full/random/packed/used",
    "bf16/b20/q30/k30/h4x2/d128/causal/random/packed",
    "fp16/b4/q100/k200/h4x2/d96/causal/usedk/chunk64",
    "e4m3/b2/q200/k300/h4x2/d128/causal/blockscales",
    "e4m3/b4/q100/k200/h2/d64/full/random/packed/used/blockscales",
    "e4m3/b1/q130/k200/h2/d256/causal/headscales/outfp16",
    "bf16/b2/q200/k200/h4x2/d128/causal/fp8",
    "bf16/b1/q1/k100/h8x1/d128/causal/usedk/kv8",
    "bf16/b2/q16/k300/h32x8/d128/causal/usedk/paged16",
    "fp16/b2/q40/k8000/h2x1/d64/causal/usedk/paged16",
    "e4m3/b2/q130/k300/h4x2/d128/causal/usedk/paged64/headscales",
    "bf16/b2/q130/k300/h4x2/d128/causal/usedk/paged64/kv8/headscales",
    "bf16/b2/q200/k300/h4x2/d128/full/quantize/blockscales/rotate",
    "fp16/b4/q100/k200/h2/d64/full/random/packed/quantize/headscales/rotary",
    "bf16/b2/q200/k300/h4x2/d128/causal/bwd",
    "fp16/b2/q150/k150/h4/d64/causal/bwd/dlse",
    "bf16/b1/q130/k200/h2/d256/full/bwd",
    "bf16/b2/q200/k300/h4x2/d128/causal/deterministic",
    "fp16/b2/q300/k300/h2/d64/full/deterministic",
    "bf16/b1/q130/k200/h2/d256/causal/deterministic",
    "bf16/b5/q150/k150/h4x2/d128/causal/random/packed/used/deterministic",
    "bf16/b4/q150/k150/h2/d64/causal/random/packed/softcap20/deterministic/sink",
    "bf16/b5/q150/k150/h2/d192x128/full/random/packed/bwd",
};

// A call with what it gives alone.
struct Job {
  Job(const char* name, cases::Memory& memory) : id(name), call(name, memory) {
    const cases::Case& c = call.the_case();
    exact = !c.backward || c.deterministic;
    explanation = explain(call.params);
    expected = results(memory);
    for (int i = 0; i < 3; ++i)
      EXPECT_EQ(difference(results(memory).data()), "") << id << ", one call alone";
  }

  Bytes results(cases::Memory& memory) {
    call.reset();
    call.run();
    Bytes bytes(call.results_bytes());
    memory.copy_out(bytes.data(), call.results(), bytes.size());
    return bytes;
  }

  // What is not as expected of bytes that are laid out as results(), in words; "" if nothing. The
  // order of dq's float32 sums may differ where it is not deterministic: beside the last bit of an
  // element that costs as much as float32 keeps of the largest.
  std::string difference(const std::byte* got) const {
    if (exact) {
      return std::memcmp(got, expected.data(), expected.size()) == 0 ? "" : "other bits";
    }
    for (const auto& part : call.parts()) {
      if (!part.output) continue;
      const size_t at = size_t(part.device - call.results());
      const std::byte *const mine = got + at, *const want = expected.data() + at;
      if (part.name != std::string_view("dq")) {
        if (std::memcmp(mine, want, part.host.size()) != 0)
          return std::string("other bits of ") + part.name;
        continue;
      }
      const flash3_dtype dtype = call.the_case().dtype;
      const int64_t count = int64_t(part.host.size()) / 2;
      float largest = 0;
      for (int64_t i = 0; i < count; ++i) {
        const float x = std::abs(load_float(want, dtype, i));
        if (x > largest) largest = x;  // not NaN, which rows of no sequence hold
      }
      for (int64_t i = 0; i < count; ++i) {
        const float a = load_float(mine, dtype, i), b = load_float(want, dtype, i);
        if (std::isnan(a) && std::isnan(b)) continue;
        if (!(std::abs(a - b) <= std::abs(b) / 128 + 1e-4f * largest))
          return "dq: " + std::to_string(a) + " and not " + std::to_string(b);
      }
    }
    return "";
  }

  const char* id;
  DeviceCall call;
  bool exact;
  Bytes expected;
  std::string explanation;
};

// A stream with memory of its own.
struct Lane {
  cudaStream_t stream = nullptr;
  std::byte *results = nullptr, *workspace = nullptr, *host = nullptr;
  std::atomic<const Job*> job = nullptr;  // that is under way
};

class Failures {
 public:
  void add(const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (texts_.size() < 20) texts_.push_back(text);
    failed_ = true;
  }
  bool any() const { return failed_; }
  const std::vector<std::string>& texts() const { return texts_; }

 private:
  std::mutex mutex_;
  std::vector<std::string> texts_;
  std::atomic<bool> failed_{false};
};

std::string cuda_problem(cudaError_t error, const char* call) {
  return error == cudaSuccess ? "" : std::string(call) + ": " + cudaGetErrorString(error);
}

// Unwritten memory, the call, and its results on their way to the host.
std::string enqueue(const Job& job, Lane* lane) {
  lane->job = &job;
  const AnyParams params = job.call.moved(lane->results, lane->workspace, lane->stream);
  const size_t bytes = job.expected.size();
  std::string problem = cuda_problem(
      cudaMemsetAsync(lane->results, int(kUnwritten), bytes, lane->stream), "cudaMemsetAsync");
  if (job.call.workspace_bytes() > 0 && problem.empty())
    problem = cuda_problem(
        cudaMemsetAsync(lane->workspace, int(kUnwritten), job.call.workspace_bytes(), lane->stream),
        "cudaMemsetAsync");
  if (!problem.empty()) return problem;
  if (run(params) != FLASH3_OK) return flash3_last_error();
  return cuda_problem(
      cudaMemcpyAsync(lane->host, lane->results, bytes, cudaMemcpyDeviceToHost, lane->stream),
      "cudaMemcpyAsync");
}

std::string collect(Lane* lane) {
  const std::string problem =
      cuda_problem(cudaStreamSynchronize(lane->stream), "cudaStreamSynchronize");
  return problem.empty() ? lane->job.load()->difference(lane->host) : problem;
}

// The same answers as alone.
std::string ask(const Job& job) {
  if (supported(job.call.params) != FLASH3_OK) return flash3_last_error();
  size_t bytes = 0;
  if (workspace(job.call.params, &bytes) != FLASH3_OK) return flash3_last_error();
  if (bytes != job.call.workspace_bytes()) return "another workspace: " + std::to_string(bytes);
  const std::string text = explain(job.call.params);
  return text == job.explanation ? "" : "another explanation: " + text;
}

// A mistake with a number of this thread's own: its sentence, and not another thread's, stays.
std::string make_mistake(const Job& job, int number, const Lane& lane) {
  AnyParams params = job.call.moved(lane.results, lane.workspace, lane.stream);
  std::string sentence;
  if (number % 2 == 0) {
    std::visit([&](auto& p) { p.backend = number; }, params);
    sentence = "backend = " + std::to_string(number) + " but";
  } else {
    slot_of(&params, "q").tensor->shape[1] = -number;
    sentence = "q.shape[1] = " + std::to_string(-number) + " but";
  }
  const flash3_status status = run(params);
  if (status != FLASH3_INVALID_ARGUMENT)
    return "status " + std::to_string(status) + " of a mistake that " + sentence;
  std::this_thread::yield();
  const std::string got = flash3_last_error();
  return got.find(sentence) != std::string::npos ? "" : "\"" + got + "\" and not " + sentence;
}

class HopperStress : public HopperTest {
 protected:
  std::byte* device(size_t bytes) {
    return static_cast<std::byte*>(buffers_.emplace_back(memory_->allocate(bytes)).get());
  }

  // The memory of all threads, from three allocations.
  void make_lanes(size_t results, size_t workspace) {
    results = (results + 511) / 512 * 512, workspace = (workspace + 511) / 512 * 512;
    std::byte *const all_results = device(kThreads * kStreams * results),
                     *const all_workspaces = device(kThreads * kStreams * workspace + 1);
    void* host = nullptr;
    ASSERT_EQ(cudaMallocHost(&host, kThreads * kStreams * results), cudaSuccess);
    host_ = {static_cast<std::byte*>(host), [](std::byte* p) { cudaFreeHost(p); }};
    size_t i = 0;
    for (auto& lanes : lanes_)
      for (Lane& lane : lanes) {
        ASSERT_EQ(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking), cudaSuccess);
        lane.results = all_results + i * results;
        lane.workspace = all_workspaces + i * workspace;
        lane.host = host_.get() + i * results;
        ++i;
      }
  }
  // A kernel does not end: whose it may be, and the end of this process, whose threads wait for it.
  [[noreturn]] void give_up() {
    std::map<std::string, int> under_way;
    for (const auto& lanes : lanes_)
      for (const Lane& lane : lanes)
        if (lane.job.load() && cudaStreamQuery(lane.stream) == cudaErrorNotReady)
          ++under_way[lane.job.load()->id];
    for (const auto& [id, count] : under_way)
      std::printf("not done: %d of %s\n", count, id.c_str());
    std::printf("no call has ended for %d s\n", kPatience);
    std::fflush(stdout);
    std::abort();
  }

  static constexpr int kPatience = 20;  // seconds

  void TearDown() override {
    for (auto& lanes : lanes_)
      for (Lane& lane : lanes)
        if (lane.stream) cudaStreamDestroy(lane.stream);
    HopperTest::TearDown();
  }

  std::array<std::array<Lane, kStreams>, kThreads> lanes_;
  std::vector<std::shared_ptr<void>> buffers_;
  std::shared_ptr<std::byte> host_;
};

TEST_F(HopperStress, MixedCallsFromManyThreadsOnManyStreams) {
  const auto seconds = setting("FLASH3_STRESS_SECONDS", 10);
  const TimeLimit limit(unsigned(seconds) + 600);
  // More threads than cores wait for the device: not by spinning.
  if (cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync) != cudaSuccess) cudaGetLastError();

  std::vector<std::unique_ptr<Job>> jobs;
  size_t results = 0, workspace = 0;
  for (const char* const id : kCalls) {
    jobs.push_back(std::make_unique<Job>(id, *memory_));
    results = std::max(results, jobs.back()->expected.size());
    workspace = std::max(workspace, jobs.back()->call.workspace_bytes());
  }
  if (HasFailure()) return;
  make_lanes(results, workspace);
  if (HasFatalFailure()) return;
  std::printf("%zu calls alone are done; %d threads with %d streams of %zu + %zu KiB each\n",
              jobs.size(), kThreads, kStreams, results >> 10, workspace >> 10);
  std::fflush(stdout);

  Failures failures;
  std::atomic<int64_t> calls{0}, questions{0}, mistakes{0};
  const auto end = Clock::now() + std::chrono::seconds(seconds);
  const auto work = [&](int thread) {
    Random random{uint64_t(thread)};
    auto& lanes = lanes_[size_t(thread)];
    const auto pick = [&]() -> const Job& { return *jobs[random() % jobs.size()]; };
    const auto check = [&](const Job& job, const std::string& problem) {
      if (!problem.empty())
        failures.add("thread " + std::to_string(thread) + ", " + job.id + ": " + problem);
    };
    for (int round = 0; Clock::now() < end && !failures.any(); ++round) {
      for (Lane& lane : lanes) {
        const Job& job = pick();
        check(job, enqueue(job, &lane));
        ++calls;
        const Job& other = pick();
        switch (random() % 4) {
          case 0: check(other, ask(other)), ++questions; break;
          case 1:
            check(other, make_mistake(other, 1000 + thread + kThreads * (round % 1000), lane));
            ++mistakes;
            break;
          default: break;
        }
      }
      for (Lane& lane : lanes) check(*lane.job.load(), collect(&lane));
    }
  };
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
    int64_t before = 0;
    int still = 0;
    for (int second = 1; second <= seconds && !failures.any(); ++second) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
      still = calls == before ? still + 1 : 0;
      before = calls;
      if (still == kPatience) give_up();
      if (second % 10 != 0 && second != seconds) continue;
      std::printf("%d s: %lld calls, %lld questions, %lld mistakes\n", second,
                  static_cast<long long>(calls), static_cast<long long>(questions),
                  static_cast<long long>(mistakes));
      std::fflush(stdout);
    }
  }
  for (const std::string& text : failures.texts()) ADD_FAILURE() << text;
  EXPECT_GE(calls, 2 * kThreads * kStreams);
}

}  // namespace
}  // namespace flash3
