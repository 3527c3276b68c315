// SPDX-License-Identifier: Apache-2.0
// Host memory that runs out, and threads that the system refuses, at any point of any call: a call
// that fails has written nothing, and one that succeeds all the same has written what it always
// does. This program replaces what allocates memory and what makes threads.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "core/pointers.hpp"
#include "flash3/flash3.hpp"
#include "flash3/plan.h"
#include "flash3/schedule.h"

namespace {

constexpr int64_t kNever = INT64_MAX;

// Requests for memory and for threads, counted from when they are watched on.
std::atomic<int64_t> requests{0}, first_refused{kNever}, last_refused{kNever};
std::atomic<bool> is_watched{false};
std::atomic<int64_t> refused_threads{0};
std::atomic<int64_t> requested_bytes{0};

bool is_refused() {
  if (!is_watched) return false;
  const int64_t number = ++requests;
  return number >= first_refused && number <= last_refused;
}

void* allocate(size_t size, size_t alignment) {
  void* memory = nullptr;
  if (is_watched) requested_bytes += static_cast<int64_t>(size);
  if (is_refused() || posix_memalign(&memory, alignment, size) != 0) return nullptr;
  return memory;
}

void* allocate_or_throw(size_t size, size_t alignment) {
  void* memory = allocate(size > 0 ? size : 1, std::max(alignment, sizeof(void*)));
  if (!memory) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t size) {
  return allocate_or_throw(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
void* operator new(size_t size, std::align_val_t alignment) {
  return allocate_or_throw(size, static_cast<size_t>(alignment));
}
void* operator new[](size_t size) { return operator new(size); }
void* operator new[](size_t size, std::align_val_t alignment) {
  return operator new(size, alignment);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

extern "C" void* aligned_alloc(size_t alignment, size_t size) { return allocate(size, alignment); }
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (!is_refused()) return create(thread, attributes, start, argument);
  ++refused_threads;
  return EAGAIN;
}

namespace flash3::test {
namespace {

using Bytes = std::vector<unsigned char>;

// The memory that a call writes, from the first to the last byte of each tensor.
class Written {
 public:
  template <class P, class Params>
  Written(const P& problem, const Params& params) {
    static_cast<void>(visit_pointers(
        problem, [&](const char*, auto member, const auto* data, const char* access) -> Status {
          if (data && access == kWrite) add(params.*member);
          return {};
        }));
  }

  Bytes bytes() const {
    Bytes all;
    for (const auto& [begin, size] : parts_) all.insert(all.end(), begin, begin + size);
    return all;
  }
  void set(const Bytes& all) const {
    const unsigned char* from = all.data();
    for (const auto& [begin, size] : parts_) std::memcpy(begin, from, size), from += size;
  }

 private:
  void add(const flash3_tensor& t) {
    int64_t elements = 1;
    for (int d = 0; d < t.ndim; ++d)
      if (t.shape[d] > 1) elements += (t.shape[d] - 1) * t.stride[d];
    parts_.push_back(
        {static_cast<unsigned char*>(t.data), static_cast<size_t>(elements * dtype_size(t.dtype))});
  }
  struct Part {
    unsigned char* begin;
    size_t size;
  };
  std::vector<Part> parts_;
};

// Refuses the n-th request of a call, alone or with all later ones, for every n that it comes to.
template <class Run>
void expect_all_or_nothing(const Written& written, const Run& run) {
  const Bytes before = written.bytes();
  ASSERT_EQ(run(), FLASH3_OK) << flash3_last_error();
  const Bytes after = written.bytes();
  ASSERT_TRUE(after != before);
  int failures = 0;
  for (const bool later_too : {false, true})
    for (int64_t n = 1;; ++n) {
      written.set(before);
      first_refused = n, last_refused = later_too ? kNever : n, requests = 0, is_watched = true;
      const flash3_status status = run();
      is_watched = false;
      if (status == FLASH3_OK) {
        ASSERT_TRUE(written.bytes() == after) << "request " << n << " was refused";
        if (requests < n) break;  // none was
        continue;
      }
      ASSERT_EQ(status, FLASH3_OUT_OF_MEMORY) << flash3_last_error();
      ASSERT_NE(flash3_last_error()[0], '\0');
      ASSERT_TRUE(written.bytes() == before)
          << "request " << n << " was refused: " << flash3_last_error();
      ++failures;
    }
  EXPECT_GT(failures, 0);
}

// The C functions of each kind of params.
flash3_status run_call(const flash3_forward_params& p) { return flash3_forward(&p); }
flash3_status run_call(const flash3_backward_params& p) { return flash3_backward(&p); }
flash3_status run_call(const flash3_quantize_params& p) { return flash3_quantize(&p); }
flash3_status run_call(const flash3_merge_params& p) { return flash3_merge(&p); }
// In the workspace that the params have, which is given or refused.
void* give(size_t, void* workspace) { return is_refused() ? nullptr : workspace; }
flash3_status run_allocating(const flash3_forward_params& p) {
  return flash3_forward_allocating(&p, give, p.workspace);
}
flash3_status run_allocating(const flash3_backward_params& p) {
  return flash3_backward_allocating(&p, give, p.workspace);
}
flash3_status run_allocating(const flash3_quantize_params& p) {
  return flash3_quantize_allocating(&p, give, p.workspace);
}
flash3_status run_allocating(const flash3_merge_params& p) {
  return flash3_merge_allocating(&p, give, p.workspace);
}
flash3_status make_plan(const flash3_forward_params& p, flash3_plan** plan) {
  return flash3_forward_plan(&p, plan);
}
flash3_status make_plan(const flash3_backward_params& p, flash3_plan** plan) {
  return flash3_backward_plan(&p, plan);
}
flash3_status make_plan(const flash3_quantize_params& p, flash3_plan** plan) {
  return flash3_quantize_plan(&p, plan);
}
flash3_status make_plan(const flash3_merge_params& p, flash3_plan** plan) {
  return flash3_merge_plan(&p, plan);
}
flash3_status run_plan(const flash3_plan* plan, const flash3_forward_params& p) {
  return flash3_forward_run(plan, &p);
}
flash3_status run_plan(const flash3_plan* plan, const flash3_backward_params& p) {
  return flash3_backward_run(plan, &p);
}
flash3_status run_plan(const flash3_plan* plan, const flash3_quantize_params& p) {
  return flash3_quantize_run(plan, &p);
}
flash3_status run_plan(const flash3_plan* plan, const flash3_merge_params& p) {
  return flash3_merge_run(plan, &p);
}

// The same of a plan that is made for one call.
template <class Params>
flash3_status run_by_plan(const Params& params) {
  flash3_plan* plan = nullptr;
  flash3_status status = make_plan(params, &plan);
  EXPECT_EQ(status == FLASH3_OK, plan != nullptr);
  if (status == FLASH3_OK) status = run_plan(plan, params);
  flash3_plan_destroy(plan);
  return status;
}

// The call, the call that asks for its workspace, and a plan made and run.
template <class P, class Args>
void expect_all_or_nothing(Args args) {
  args.backend = FLASH3_BACKEND_CPU;
  args.num_threads = 3;
  args.workspace_size = workspace(args);
  Bytes memory(args.workspace_size + FLASH3_WORKSPACE_ALIGNMENT);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  args.workspace =
      memory.data() + (FLASH3_WORKSPACE_ALIGNMENT - address % FLASH3_WORKSPACE_ALIGNMENT);
  const auto params = args.params();
  P problem;
  ASSERT_TRUE(make_problem(&params, Pointers::kRequired, &problem).ok());
  const Written written(problem, params);
  const Bytes before = written.bytes();

  expect_all_or_nothing(written, [&] { return run_call(params); });
  written.set(before);
  expect_all_or_nothing(written, [&] { return run_allocating(params); });
  written.set(before);
  expect_all_or_nothing(written, [&] { return run_by_plan(params); });
}

constexpr int64_t kBatch = 2, kSeq = 160, kHeadsQ = 4, kHeadsK = 2, kDim = 32;
constexpr int64_t kElements = kBatch * kSeq * kHeadsQ * kDim, kRows = kBatch * kSeq * kHeadsQ;

class Faults : public testing::Test {
 protected:
  // Memory with values of its own, enough for any tensor here.
  template <class T = float>
  T* memory(int64_t bytes = kElements * 4) {
    all_.emplace_back(static_cast<size_t>(bytes));
    for (size_t i = 0; i < all_.back().size(); ++i) {
      state_ = state_ * 1664525u + 1013904223u;
      // Small numbers in float32, float16 and e4m3: no large exponents, no NaN.
      all_.back()[i] = static_cast<unsigned char>(i % 4 == 3 ? 0x3D : state_ >> 25);
    }
    return reinterpret_cast<T*>(all_.back().data());
  }
  int32_t* ints(std::vector<int32_t> values) {
    auto* to = memory<int32_t>(static_cast<int64_t>(values.size()) * 4);
    std::copy(values.begin(), values.end(), to);
    return to;
  }

  Forward dense(int64_t seq_q = kSeq) {
    Forward f;
    f.q = tensor(memory(), FLASH3_FLOAT32, {kBatch, seq_q, kHeadsQ, kDim});
    f.k = tensor(memory(), FLASH3_FLOAT32, {kBatch, kSeq, kHeadsK, kDim});
    f.v = tensor(memory(), FLASH3_FLOAT32, {kBatch, kSeq, kHeadsK, kDim});
    f.out = tensor(memory(), FLASH3_FLOAT32, {kBatch, seq_q, kHeadsQ, kDim});
    f.lse = lse_tensor(memory(kRows * 4), kBatch, kHeadsQ, seq_q);
    return f;
  }
  Forward ragged() {
    Forward f;
    f.q = packed_tensor(memory(), FLASH3_FLOAT32, {kBatch * kSeq, kHeadsQ, kDim});
    f.k = packed_tensor(memory(), FLASH3_FLOAT32, {kBatch * kSeq, kHeadsK, kDim});
    f.v = packed_tensor(memory(), FLASH3_FLOAT32, {kBatch * kSeq, kHeadsK, kDim});
    f.out = packed_tensor(memory(), FLASH3_FLOAT32, {kBatch * kSeq, kHeadsQ, kDim});
    f.lse = packed_lse_tensor(memory(kRows * 4), kHeadsQ, kBatch * kSeq);
    f.cu_seqlens_q = f.cu_seqlens_k = index_tensor(ints({0, 30, 320}), 3);
    f.sink = sink_tensor(memory(), FLASH3_FLOAT32, kHeadsQ);
    return f;
  }
  // 12 pages of 32 rows, of which both sequences have six.
  Forward cache(flash3_dtype kv, flash3_dtype added) {
    Forward f;
    f.q = tensor(memory(), FLASH3_FLOAT16, {kBatch, 3, kHeadsQ, kDim});
    f.k = tensor(memory(), kv, {12, 32, kHeadsK, kDim});
    f.v = tensor(memory(), kv, {12, 32, kHeadsK, kDim});
    f.out = tensor(memory(), FLASH3_FLOAT16, {kBatch, 3, kHeadsQ, kDim});
    f.page_table = page_table_tensor(ints({3, 1, 5, 7, 9, 11, 0, 2, 4, 6, 8, 10}), kBatch, 6);
    f.seqused_k = index_tensor(ints({120, 64}), kBatch);
    f.k_new = tensor(memory(), added, {kBatch, 40, kHeadsK, kDim});
    f.v_new = tensor(memory(), added, {kBatch, 40, kHeadsK, kDim});
    f.causal = true;
    return f;
  }
  Backward gradients(const Forward& f) {
    const auto like = [&](Tensor t) {
      t.data = memory();
      return t;
    };
    Backward b;
    b.q = f.q, b.k = f.k, b.v = f.v, b.out = f.out, b.lse = f.lse, b.dout = like(f.out);
    b.dq = like(f.q), b.dk = like(f.k), b.dv = like(f.v);
    b.cu_seqlens_q = f.cu_seqlens_q, b.cu_seqlens_k = f.cu_seqlens_k, b.sink = f.sink;
    if (f.sink.data) b.dsink = sink_tensor(memory(), FLASH3_FLOAT32, kHeadsQ);
    return b;
  }

 private:
  uint32_t state_ = 7;
  std::vector<std::vector<unsigned char>> all_;
};

TEST_F(Faults, OfForwardCalls) {
  refused_threads = 0;
  expect_all_or_nothing<ForwardProblem>(dense());
  EXPECT_GT(refused_threads, 0);
  expect_all_or_nothing<ForwardProblem>(ragged());
  Forward split = dense(1);
  split.q.shape[0] = split.k.shape[0] = split.v.shape[0] = split.out.shape[0] = 1;
  split.lse = {};
  for (Tensor* t : {&split.k, &split.v})
    *t = tensor(memory(20000 * kHeadsK * kDim * 4), FLASH3_FLOAT32, {1, 20000, kHeadsK, kDim});
  expect_all_or_nothing<ForwardProblem>(split);
}

// Host memory that a call asks for: (how often, how much).
template <class Run>
std::pair<int64_t, int64_t> asked_for(const Run& run) {
  first_refused = kNever, last_refused = kNever, requests = 0, requested_bytes = 0;
  is_watched = true;
  const flash3_status status = run();
  is_watched = false;
  EXPECT_EQ(status, FLASH3_OK) << flash3_last_error();
  return {requests, requested_bytes};
}

TEST_F(Faults, ACallThatAsksForItsWorkspaceKeepsNothing) {
  Forward f = dense();
  f.backend = FLASH3_BACKEND_CPU, f.num_threads = 1;
  ASSERT_EQ(workspace(f), 0u);
  const auto params = f.params();
  const auto plain = asked_for([&] { return run_call(params); });
  EXPECT_EQ(asked_for([&] { return run_allocating(params); }), plain);
  // Beside it a plan, which has the params and the problem once each.
  const auto kept = asked_for([&] { return run_by_plan(params); });
  constexpr int64_t kBoth = sizeof(flash3_forward_params) + sizeof(ForwardProblem);
  EXPECT_EQ(kept.first, plain.first + 1);
  EXPECT_GE(kept.second, plain.second + kBoth);
  EXPECT_LT(kept.second, plain.second + kBoth + static_cast<int64_t>(sizeof(ForwardProblem)));
}

TEST_F(Faults, OfACallThatQuantizesFirst) {
  Forward f = dense();
  f.compute = FLASH3_COMPUTE_FP8;
  expect_all_or_nothing<ForwardProblem>(f);
}

TEST_F(Faults, OfAppends) {
  Forward f = cache(FLASH3_FLOAT16, FLASH3_FLOAT16);
  expect_all_or_nothing<ForwardProblem>(f);
  f.rotary_cos = rotary_tensor(memory(), FLASH3_FLOAT32, 192, 8);
  f.rotary_sin = rotary_tensor(memory(), FLASH3_FLOAT32, 192, 8);
  expect_all_or_nothing<ForwardProblem>(f);
  f.rotate = true;
  expect_all_or_nothing<ForwardProblem>(f);
  expect_all_or_nothing<ForwardProblem>(cache(FLASH3_FLOAT8_E4M3, FLASH3_FLOAT16));
  f = cache(FLASH3_FLOAT16, FLASH3_FLOAT16);  // nothing but the append
  f.q.shape[1] = f.out.shape[1] = 0;
  expect_all_or_nothing<ForwardProblem>(f);
}

TEST_F(Faults, OfBackwardCalls) {
  for (Forward f : {dense(), ragged()}) {
    f.backend = FLASH3_BACKEND_CPU, f.num_threads = 1;
    forward(f);
    expect_all_or_nothing<BackwardProblem>(gradients(f));
  }
}

TEST_F(Faults, OfQuantizeCalls) {
  Quantize c;
  c.q = tensor(memory(), FLASH3_FLOAT32, {kBatch, kSeq, kHeadsQ, kDim});
  c.k = tensor(memory(), FLASH3_FLOAT32, {kBatch, kSeq, kHeadsK, kDim});
  c.v = tensor(memory(), FLASH3_FLOAT32, {kBatch, kSeq, kHeadsK, kDim});
  c.q_out = tensor(memory(), FLASH3_FLOAT8_E4M3, {kBatch, kSeq, kHeadsQ, kDim});
  c.k_out = tensor(memory(), FLASH3_FLOAT8_E4M3, {kBatch, kSeq, kHeadsK, kDim});
  c.v_out = tensor(memory(), FLASH3_FLOAT8_E4M3, {kBatch, kSeq, kHeadsK, kDim});
  c.q_scale = scale_tensor(memory(), kBatch, kHeadsQ, 2);
  c.k_scale = scale_tensor(memory(), kBatch, kHeadsK);
  c.v_scale = scale_tensor(memory());
  c.rotate = true;
  expect_all_or_nothing<QuantizeProblem>(c);
}

TEST_F(Faults, OfMergeCalls) {
  expect_all_or_nothing<MergeProblem>(Merge{
      .out_parts = tensor(memory(kElements * 64), FLASH3_FLOAT32, {16, kSeq * 2, kHeadsQ, kDim}),
      .lse_parts = lse_tensor(memory(kRows * 64), 16, kHeadsQ, kSeq * 2),
      .out = packed_tensor(memory(), FLASH3_FLOAT16, {kSeq * 2, kHeadsQ, kDim}),
      .lse = packed_lse_tensor(memory(), kHeadsQ, kSeq * 2)});
}

// What else may fail says so, and leaves its result as it was.
TEST_F(Faults, OfQuestionsAndSchedules) {
  Forward args = cache(FLASH3_FLOAT16, FLASH3_FLOAT16);
  args.backend = FLASH3_BACKEND_CPU;
  const auto p = args.params();
  for (int64_t n = 1, failures = 0;; ++n) {
    size_t bytes = 77, size = 78, length = 0;
    flash3_schedule schedule{};
    first_refused = n, last_refused = kNever, requests = 0, is_watched = true;
    const flash3_status statuses[] = {
        flash3_forward_workspace(&p, &bytes), flash3_forward_schedule_size(&p, &size),
        flash3_forward_schedule(&p, &schedule), flash3_forward_explain(&p, nullptr, &length),
        flash3_backend_describe(FLASH3_BACKEND_CPU, nullptr, &length)};
    is_watched = false;
    for (const flash3_status status : statuses) {
      ASSERT_TRUE(status == FLASH3_OK || status == FLASH3_OUT_OF_MEMORY) << flash3_last_error();
      failures += status != FLASH3_OK;
    }
    EXPECT_EQ(bytes == 77, statuses[0] != FLASH3_OK);
    EXPECT_EQ(size == 78, statuses[1] != FLASH3_OK);
    EXPECT_EQ(schedule.key == 0, statuses[2] != FLASH3_OK);
    if (requests >= n) continue;
    EXPECT_GT(failures, 0);
    break;
  }
}

}  // namespace
}  // namespace flash3::test
