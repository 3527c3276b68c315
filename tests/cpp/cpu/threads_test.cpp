// SPDX-License-Identifier: Apache-2.0
// Calls of every kind on one set of inputs, which many threads may read at once; what a call writes
// belongs to it alone, and is what it returns.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <latch>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "../cpu/harness.hpp"
#include "cases/backward_tensors.hpp"
#include "core/convert.hpp"
#include "flash3/flash3.hpp"

namespace flash3::test {

constexpr int64_t kBatch = 2, kSeq = 128, kHeadsQ = 4, kHeadsK = 2, kDim = 32;
constexpr int64_t kTotal = kBatch * kSeq, kLongSeq = 16384;

// The larger of the two: a tensor for queries is as good for keys.
constexpr size_t kElements = kTotal * kHeadsQ * kDim;

// Which of the two interfaces makes a call, on how many threads; and where to put what explain()
// says of it.
struct How {
  bool through_c = false;
  int num_threads = 1;
  std::string* explained = nullptr;
};

using Bytes = std::vector<std::byte>;

inline flash3_status through_c(const Forward& args) {
  const auto p = args.params();
  return flash3_forward(&p);
}
inline flash3_status through_c(const Backward& args) {
  const auto p = args.params();
  return flash3_backward(&p);
}
inline flash3_status through_c(const Quantize& args) {
  const auto p = args.params();
  return flash3_quantize(&p);
}
inline void through_cpp(const Forward& args) { forward(args); }
inline void through_cpp(const Backward& args) { backward(args); }
inline void through_cpp(const Quantize& args) { quantize(args); }

// Throws Error, whichever interface it was.
template <class Args>
void call(Args args, const How& how) {
  constexpr size_t kAlignment = FLASH3_WORKSPACE_ALIGNMENT;
  args.backend = FLASH3_BACKEND_CPU;
  args.num_threads = how.num_threads;
  args.workspace_size = workspace(args);
  Bytes memory(args.workspace_size + kAlignment);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  args.workspace = memory.data() + (kAlignment - address % kAlignment) % kAlignment;
  if (how.explained) *how.explained = explain(args);
  if (!how.through_c) return through_cpp(args);
  const flash3_status status = through_c(args);
  if (status != FLASH3_OK) throw Error(status, flash3_last_error());
}

// Numbers between -2 and 2, and bfloat16 copies of them.
class Input {
 public:
  explicit Input(unsigned seed, size_t size = kElements) : floats_(size), halves_(size) {
    std::mt19937 random(seed);
    for (size_t i = 0; i < size; ++i) {
      floats_[i] = static_cast<float>(random() % 4096) / 1024.f - 2.f;
      store_float(halves_.data(), FLASH3_BFLOAT16, static_cast<int64_t>(i), floats_[i]);
    }
  }
  void* data(flash3_dtype dtype) {
    return dtype == FLASH3_FLOAT32 ? static_cast<void*>(floats_.data()) : halves_.data();
  }

 private:
  std::vector<float> floats_;
  std::vector<uint16_t> halves_;
};

// What a call writes; its bytes in the order in which they were asked for.
class Results {
 public:
  void* make(size_t bytes) {
    all_.emplace_back(bytes);
    return all_.back().data();
  }
  float* floats(int64_t count) {
    return static_cast<float*>(make(static_cast<size_t>(count) * sizeof(float)));
  }
  Bytes bytes() const {
    Bytes joined;
    for (const Bytes& each : all_) joined.insert(joined.end(), each.begin(), each.end());
    return joined;
  }

 private:
  std::vector<Bytes> all_;
};

inline Bytes bytes_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

class Calls {
 public:
  Calls() { make_fp8(); }

  Bytes dense(flash3_dtype dtype, const How& how) {
    Results results;
    Forward args = dense_forward(dtype, &results);
    args.causal = true;
    args.softcap = 20.f;
    call(args, how);
    return results.bytes();
  }

  // One query beside many keys: its keys are split, and the parts merged.
  Bytes split(const How& how) {
    Results results;
    Forward args;
    args.q = tensor(q_.data(FLASH3_FLOAT32), FLASH3_FLOAT32, {1, 1, 2, kDim});
    args.k = tensor(long_k_.data(FLASH3_FLOAT32), FLASH3_FLOAT32, {1, kLongSeq, 1, kDim});
    args.v = args.k;
    args.out = tensor(results.floats(2 * kDim), FLASH3_FLOAT32, {1, 1, 2, kDim});
    call(args, how);
    return results.bytes();
  }

  Bytes ragged(const How& how) {
    Results results;
    call(ragged_forward(&results), how);
    return results.bytes();
  }

  Bytes dense_gradients(const How& how) {
    Results results;
    const Forward f = dense_forward(FLASH3_FLOAT32, &results);
    call(f, {false, 1});
    Backward args;
    args.q = f.q, args.k = f.k, args.v = f.v, args.out = f.out, args.lse = f.lse;
    call(gradients(args, &results), how);
    return results.bytes();
  }

  Bytes ragged_gradients(const How& how) {
    Results results;
    const Forward f = ragged_forward(&results);
    call(f, {true, 1});
    Backward args;
    args.q = f.q, args.k = f.k, args.v = f.v, args.out = f.out, args.lse = f.lse;
    args.window_left = f.window_left;
    args.cu_seqlens_q = f.cu_seqlens_q, args.cu_seqlens_k = f.cu_seqlens_k;
    args.sink = f.sink;
    args.dsink = sink_tensor(results.floats(kHeadsQ), FLASH3_FLOAT32, kHeadsQ);
    call(gradients(args, &results), how);
    return results.bytes();
  }

  // Scales of a block, and one of many blocks, which all are read for it first.
  Bytes quantized(const How& how) {
    Results results;
    Quantize args;
    args.q = tensor(q_.data(FLASH3_BFLOAT16), FLASH3_BFLOAT16, {1, kTotal, kHeadsQ, kDim});
    args.k = tensor(long_k_.data(FLASH3_BFLOAT16), FLASH3_BFLOAT16, {1, kLongSeq, 1, kDim});
    args.q_out = fp8_like(args.q, results.make(kElements));
    args.k_out = fp8_like(args.k, results.make(kLongSeq * kDim));
    args.q_scale = scale_tensor(results.floats(2 * kHeadsQ), 1, kHeadsQ, scale_blocks(kTotal));
    args.k_scale = scale_tensor(results.floats(1), 1, 1);
    args.rotate = true;
    args.rotation_seed = 5;
    call(args, how);
    return results.bytes();
  }

  // FP8 tensors as they are; and 16-bit ones that become FP8 in the workspace.
  Bytes fp8(const How& how) {
    Results results;
    Forward args;
    args.q = fp8_like(queries(&q_, FLASH3_BFLOAT16), fp8_q_.data());
    args.k = fp8_like(keys(&k_, FLASH3_BFLOAT16), fp8_k_.data());
    args.v = fp8_like(keys(&v_, FLASH3_BFLOAT16), fp8_v_.data());
    args.out = queries(results.floats(kElements), FLASH3_FLOAT32);
    args.q_scale = scale_tensor(&fp8_scale_);
    call(args, how);
    return results.bytes();
  }
  Bytes computed_in_fp8(const How& how) {
    Results results;
    Forward args = dense_forward(FLASH3_BFLOAT16, &results);
    args.compute = FLASH3_COMPUTE_FP8;
    args.rotation_seed = 9;
    call(args, how);
    return results.bytes();
  }

  // What the library says of calls and of itself.
  Bytes answers(const How& how) {
    Results unused;
    Forward f = dense_forward(FLASH3_FLOAT32, &unused);
    f.backend = FLASH3_BACKEND_CPU;
    f.num_threads = how.num_threads;
    size_t size = 0;
    flash3_backend_describe(FLASH3_BACKEND_CPU, nullptr, &size);
    return bytes_of(explain(f) + std::to_string(workspace(f)) + supported(f).message() +
                    std::to_string(size) + flash3_version());
  }

 private:
  static Tensor queries(void* data, flash3_dtype dtype) {
    return tensor(data, dtype, {kBatch, kSeq, kHeadsQ, kDim});
  }
  static Tensor keys(void* data, flash3_dtype dtype) {
    return tensor(data, dtype, {kBatch, kSeq, kHeadsK, kDim});
  }
  static Tensor queries(Input* input, flash3_dtype dtype) {
    return queries(input->data(dtype), dtype);
  }
  static Tensor keys(Input* input, flash3_dtype dtype) { return keys(input->data(dtype), dtype); }
  static Tensor fp8_like(Tensor t, void* data) {
    t.data = data;
    t.dtype = FLASH3_FLOAT8_E4M3;
    return t;
  }

  Forward dense_forward(flash3_dtype dtype, Results* results) {
    Forward args;
    args.q = queries(&q_, dtype), args.k = keys(&k_, dtype), args.v = keys(&v_, dtype);
    args.out = queries(results->floats(kElements), dtype);
    args.lse = lse_tensor(results->floats(kTotal * kHeadsQ), kBatch, kHeadsQ, kSeq);
    return args;
  }

  Forward ragged_forward(Results* results) {
    Forward args;
    args.q = packed_tensor(q_.data(FLASH3_FLOAT32), FLASH3_FLOAT32, {kTotal, kHeadsQ, kDim});
    args.k = packed_tensor(k_.data(FLASH3_FLOAT32), FLASH3_FLOAT32, {kTotal, kHeadsK, kDim});
    args.v = packed_tensor(v_.data(FLASH3_FLOAT32), FLASH3_FLOAT32, {kTotal, kHeadsK, kDim});
    args.out = packed_tensor(results->floats(kElements), FLASH3_FLOAT32, {kTotal, kHeadsQ, kDim});
    args.lse = packed_lse_tensor(results->floats(kTotal * kHeadsQ), kHeadsQ, kTotal);
    args.window_left = 200;
    args.cu_seqlens_q = args.cu_seqlens_k = index_tensor(bounds_.data(), 4);
    args.sink = sink_tensor(sink_.data(), FLASH3_FLOAT32, kHeadsQ);
    return args;
  }

  Backward gradients(Backward args, Results* results) {
    const auto like = [&](Tensor t, int64_t heads) {
      t.data = results->floats(kTotal * heads * kDim);
      return t;
    };
    args.dout = args.out;
    args.dout.data = dout_.data(FLASH3_FLOAT32);
    args.dq = like(args.q, kHeadsQ), args.dk = like(args.k, kHeadsK),
    args.dv = like(args.v, kHeadsK);
    return args;
  }

  void make_fp8() {
    for (size_t i = 0; i < kElements; ++i) {
      const auto code = [&](Input& of) {
        return float_to_e4m3(static_cast<const float*>(of.data(FLASH3_FLOAT32))[i]);
      };
      fp8_q_[i] = code(q_), fp8_k_[i] = code(k_), fp8_v_[i] = code(v_);
    }
  }

  Input q_{1}, k_{2}, v_{3}, dout_{4}, long_k_{5, kLongSeq* kDim};
  std::vector<unsigned char> fp8_q_ = std::vector<unsigned char>(kElements), fp8_k_ = fp8_q_,
                             fp8_v_ = fp8_q_;
  float fp8_scale_ = 0.5f;
  std::vector<int32_t> bounds_{0, 20, 20, int32_t{kTotal}};
  std::vector<float> sink_{-1.f, 0.f, 0.5f, 2.f};
};

namespace {

// Many threads in the library at once, with calls of every kind through both interfaces: each gives
// the bits that it gives alone, and its own error. Under ThreadSanitizer (threads_test_sanitized)
// also: no two of them touch the same memory without an order between them.

constexpr int kCallers = 64, kMaxThreads = 4;

struct Kind {
  const char* name;
  std::function<Bytes(const How&)> run;
  bool shares;               // has work for four threads
  bool same_on_any_threads;  // the bits; else only those of calls on as many threads
};

std::vector<Kind> kinds_of(Calls* c) {
  const auto dense = [c](flash3_dtype dtype) {
    return [c, dtype](const How& how) { return c->dense(dtype, how); };
  };
  return {
      {"dense float32", dense(FLASH3_FLOAT32), true, false},
      // AMX makes it too short.
      {"dense bfloat16", dense(FLASH3_BFLOAT16), false, false},
      {"split keys", [c](const How& how) { return c->split(how); }, true, false},
      {"ragged", [c](const How& how) { return c->ragged(how); }, true, true},
      {"gradients", [c](const How& how) { return c->dense_gradients(how); }, true, true},
      {"ragged gradients", [c](const How& how) { return c->ragged_gradients(how); }, true, true},
      {"quantize", [c](const How& how) { return c->quantized(how); }, true, true},
      {"FP8", [c](const How& how) { return c->fp8(how); }, true, false},
      {"computed in FP8", [c](const How& how) { return c->computed_in_fp8(how); }, true, false},
      {"answers", [c](const How& how) { return c->answers(how); }, false, false},
  };
}

// Fails a call with a number that no other thread has in its message, through one interface and the
// other; "" if both tell it, also after a call that went well.
std::string wrong_error(int caller) {
  const int given = -1 - caller;
  const std::string want =
      "num_threads = " + std::to_string(given) + " but it must be at least 0 (0: one per core)";
  float x = 0;
  Forward args;
  args.q = args.k = args.v = args.out = tensor(&x, FLASH3_FLOAT32, {1, 1, 1, 1});
  args.num_threads = given;
  if (const Result result = try_forward(args); result.message() != want) return result.message();
  const auto params = args.params();
  if (flash3_forward(&params) != FLASH3_INVALID_ARGUMENT) return "not refused";
  std::this_thread::yield();
  if (flash3_backend_available(FLASH3_BACKEND_CPU) != FLASH3_OK) return "no CPU backend";
  return flash3_last_error() == want ? "" : flash3_last_error();
}

class MixedCalls : public testing::Test {
 protected:
  Calls calls_;
  const std::vector<Kind> kinds_ = kinds_of(&calls_);
};

// Or the next test would see threads beside each other alone, and none within a call.
TEST_F(MixedCalls, HaveWorkForTheirThreads) {
  for (const Kind& kind : kinds_) {
    std::string explained;
    kind.run({.num_threads = kMaxThreads, .explained = &explained});
    if (kind.shares) {
      EXPECT_NE(explained.find("on 4 threads"), std::string::npos) << kind.name << explained;
    }
  }
}

TEST_F(MixedCalls, GiveWhatTheyGiveAlone) {
  // [kind][threads - 1]
  std::vector<std::vector<Bytes>> alone;
  for (const Kind& kind : kinds_) {
    auto& of_kind = alone.emplace_back();
    for (int threads = 1; threads <= kMaxThreads; ++threads) {
      of_kind.push_back(kind.run({threads % 2 == 0, threads}));
      if (kind.same_on_any_threads) {
        EXPECT_EQ(of_kind.back(), of_kind.front()) << kind.name << " on " << threads;
      }
    }
  }

  // gtest's own checks stay out of the threads: it is not built for ThreadSanitizer.
  std::vector<std::string> wrong(kCallers);
  const auto call_all = [&](int caller) {
    for (size_t i = 0; i < kinds_.size(); ++i) {
      const size_t at = (i + static_cast<size_t>(caller)) % kinds_.size();
      const int threads = 1 + (caller / 10 + static_cast<int>(i)) % kMaxThreads;
      if (kinds_[at].run({caller % 2 == 0, threads}) != alone[at][static_cast<size_t>(threads - 1)])
        wrong[static_cast<size_t>(caller)] += std::string(kinds_[at].name) + " differs; ";
      wrong[static_cast<size_t>(caller)] += wrong_error(caller);
    }
  };

  std::latch together(kCallers);
  std::vector<std::thread> threads;
  threads.reserve(kCallers);
  for (int caller = 0; caller < kCallers; ++caller)
    threads.emplace_back([&, caller] {
      together.arrive_and_wait();
      try {
        call_all(caller);
      } catch (const Error& error) {
        wrong[static_cast<size_t>(caller)] += error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (int caller = 0; caller < kCallers; ++caller)
    EXPECT_EQ(wrong[static_cast<size_t>(caller)], "") << "thread " << caller;
}

// The CPU backward's blocks of rows, which threads sum up side by side, on every instruction set:
// strips of AMX are longer than a block's last rows, and must leave the next block's alone. That
// seldom changes a bit; ThreadSanitizer (threads_test_sanitized) sees it each time.

TEST(RowBlocks, BelongToOneThreadAtATime) {
  for (const std::string id :
       {"bf16/b1/q300/k1100/h1/d64/full/bwd", "bf16/b2/q70/k600/h2/d32/causal/bwd"}) {
    std::string error;
    const auto c = cases::parse_id(id, &error);
    ASSERT_TRUE(c) << error;
    cases::BackwardTensors tensors = cases::make_backward_tensors(*c);
    const flash3_backward_params params = cases::make_backward_params(*c, tensors.views());
    BackwardProblem problem;
    ASSERT_TRUE(make_backward_problem(&params, Pointers::kRequired, &problem).ok());
    for (const TestTarget& target : backward_targets(problem.dtype)) {
      std::vector<std::byte> alone;
      for (const int threads : {1, 2, 3, 5, 7, 16}) {
        problem.num_threads = threads;
        const BackwardPlan plan = plan_backward_on(target, problem);
        Workspace workspace(plan.workspace_size + 64);
        BackwardProblem run = problem;
        const auto address = reinterpret_cast<uintptr_t>(workspace.data());
        run.workspace = reinterpret_cast<void*>((address + 63) / 64 * 64);
        run.workspace_size = plan.workspace_size;
        ASSERT_TRUE(run_backward(run, plan).ok());
        if (threads == 1) alone.assign(tensors.dq.bytes.begin(), tensors.dq.bytes.end());
        EXPECT_TRUE(std::equal(alone.begin(), alone.end(), tensors.dq.bytes.begin()))
            << id << " on " << target.name() << ", " << threads << " threads";
      }
    }
  }
}

}  // namespace
}  // namespace flash3::test
