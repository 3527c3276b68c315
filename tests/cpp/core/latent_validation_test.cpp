// SPDX-License-Identifier: Apache-2.0
// The rules for qv and for values that are a part of their keys, and what becomes of them.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "call.hpp"
#include "core/problem.hpp"
#include "flash3/flash3.hpp"
#include "flash3/limits.h"
#include "flash3/plan.hpp"

namespace flash3::test {
namespace {

using F = flash3_forward_params;

// What a call with qv is refused for; "" if it is not.
std::string qv_error(const std::function<void(Forward&)>& breaks) {
  Call call;
  std::vector<float> qv(2 * 3 * 4 * 16, 0.5f);
  call.args.qv = tensor(qv.data(), FLASH3_FLOAT32, {2, 3, 4, 16});
  call.args.backend = FLASH3_BACKEND_CPU;
  breaks(call.args);
  const F p = call.params();
  return flash3_forward_supported(&p) == FLASH3_OK ? "" : flash3_last_error();
}

TEST(Qv, Rules) {
  EXPECT_EQ(qv_error([](Forward&) {}), "");
  EXPECT_EQ(qv_error([](Forward& f) { f.qv.dtype = FLASH3_FLOAT16; }),
            "qv.dtype = float16 but q.dtype = float32; q and qv must have the same dtype");
  EXPECT_EQ(qv_error([](Forward& f) { f.qv.ndim = 3; }),
            "qv.ndim = 3 but it must be 4, [batch, seq_q, heads_q, head_dim_v]");
  EXPECT_EQ(qv_error([](Forward& f) { f.qv.shape[0] = 3; }),
            "qv.shape[0] = 3 but q.shape[0] = 2; q and qv must have the same batch size");
  EXPECT_EQ(qv_error([](Forward& f) { f.qv.shape[1] = 4; }),
            "qv.shape[1] = 4 but q.shape[1] = 3; q and qv must have the same seq_q");
  EXPECT_EQ(qv_error([](Forward& f) { f.qv.shape[2] = 2; }),
            "qv.shape[2] = 2 but q.shape[2] = 4; q and qv must have the same heads_q");
  EXPECT_EQ(qv_error([](Forward& f) { f.qv.shape[3] = 8; }),
            "qv.shape[3] = 8 but v.shape[3] = 16; v and qv must have the same head_dim_v");
  EXPECT_EQ(qv_error([](Forward& f) { f.qv.stride[3] = 2; }),
            "qv.stride[3] = 2 but it must be 1; the last dimension of qv, [batch, seq_q, heads_q, "
            "head_dim_v], must be contiguous");
  EXPECT_EQ(qv_error([](Forward& f) { f.q.shape[3] = f.k.shape[3] = 561; }),
            "q.shape[3] = 561 and v.shape[3] = 16 but with qv head_dim + head_dim_v must be at "
            "most 576");
  EXPECT_EQ(qv_error([](Forward& f) { f.compute = FLASH3_COMPUTE_FP8; }),
            "qv is given but compute = 1 (fp8); with qv nothing may be FP8");
}

TEST(Qv, NullDataIsRefusedOnlyByALaunch) {
  Call call;
  call.args.qv = tensor(nullptr, FLASH3_FLOAT32, {2, 3, 4, 16});
  const F p = call.params();
  ForwardProblem problem;
  EXPECT_TRUE(make_forward_problem(&p, Pointers::kOptional, &problem).ok());
  EXPECT_TRUE(problem.has_qv());
  EXPECT_EQ(problem.score_dim(), 8 + 16);
  EXPECT_FLOAT_EQ(problem.softmax_scale, 1 / std::sqrt(24.f));
  EXPECT_EQ(make_forward_problem(&p, Pointers::kRequired, &problem).message(),
            "qv.data is null but qv has elements; only a tensor with a size of 0 needs no memory");
}

TEST(WideHeads, AreOfForwardsAloneAndNotOfFp8) {
  for (const auto dtype : {FLASH3_FLOAT16, FLASH3_FLOAT8_E4M3}) {
    Forward f;
    f.q = tensor(nullptr, dtype, {1, 1, 4, 576}), f.k = tensor(nullptr, dtype, {1, 9, 1, 576});
    f.v = tensor(nullptr, dtype, {1, 9, 1, 512});
    f.out = tensor(nullptr, FLASH3_FLOAT16, {1, 1, 4, 512});
    f.backend = FLASH3_BACKEND_CPU;
    const F p = f.params();
    EXPECT_EQ(flash3_forward_supported(&p),
              dtype == FLASH3_FLOAT16 ? FLASH3_OK : FLASH3_INVALID_ARGUMENT);
    if (dtype == FLASH3_FLOAT8_E4M3) {
      EXPECT_STREQ(flash3_last_error(), "q.shape[3] = 576 but head_dim must be from 1 to 256");
    }
  }
}

// A cache of two sequences of up to eight keys, each a row of 16 elements of which v has 8.
struct LatentCall {
  std::vector<float> q = std::vector<float>(2 * 2 * 16, 0.25f), cache = q, k_new = q;
  std::vector<float> out = std::vector<float>(2 * 2 * 8, Call::kUntouched);
  std::vector<float> cos = std::vector<float>(8 * 4, 0.5f), sin = cos, other = q;
  std::vector<int32_t> used{5, 0};

  Forward args(int64_t first = 0) {
    cache.resize(2 * 8 * 16), other.resize(2 * 8 * 16);
    Forward f;
    f.q = tensor(q.data(), FLASH3_FLOAT32, {2, 1, 2, 16});
    f.k = tensor(cache.data(), FLASH3_FLOAT32, {2, 8, 1, 16});
    f.v = f.k;
    f.v.shape[3] = 8;
    f.v.data = cache.data() + first;
    f.out = tensor(out.data(), FLASH3_FLOAT32, {2, 1, 2, 8});
    f.seqused_k = index_tensor(used.data(), 2);
    f.k_new = tensor(k_new.data(), FLASH3_FLOAT32, {2, 1, 1, 16});
    f.backend = FLASH3_BACKEND_CPU;
    f.num_threads = 1;
    return f;
  }
  Forward with_rotary(int64_t first, int64_t pairs) {
    Forward f = args(first);
    f.rotary_cos = rotary_tensor(cos.data(), FLASH3_FLOAT32, 8, pairs);
    f.rotary_sin = rotary_tensor(sin.data(), FLASH3_FLOAT32, 8, pairs);
    f.causal = true;
    return f;
  }
};

std::string error_of(const Forward& f) {
  const F p = f.params();
  ForwardProblem problem;
  const Status status = make_forward_problem(&p, Pointers::kRequired, &problem);
  return status.message();
}

TEST(ValuesInKeys, AreAppendedOnce) {
  for (const int64_t first : {0, 3, 8}) {
    LatentCall call;
    for (size_t i = 0; i < call.k_new.size(); ++i) call.k_new[i] = static_cast<float>(i) / 8;
    forward(call.args(first));
    // Sequence 1 has one key: its value is the result.
    for (int64_t d = 0; d < 8; ++d)
      EXPECT_FLOAT_EQ(call.out[static_cast<size_t>(2 * 8 + d)],
                      call.k_new[static_cast<size_t>(16 + first + d)]);
    for (int64_t d = 0; d < 16; ++d)
      EXPECT_EQ(call.cache[static_cast<size_t>(8 * 16 + d)],
                call.k_new[static_cast<size_t>(16 + d)]);
  }
}

TEST(ValuesInKeys, Rules) {
  LatentCall call;
  const std::string alone =
      "k_new is given but v_new is not; keys are appended with their values, unless v is a part of "
      "the rows of k, with the same strides";
  EXPECT_EQ(error_of(call.args(9)), alone);  // its last element is that of the next row
  Forward f = call.args();
  f.v.data = call.other.data();
  EXPECT_EQ(error_of(f), alone);
  f = call.args();
  f.v.stride[0] *= 2;
  EXPECT_EQ(error_of(f), alone);

  std::vector<float> v_new(2 * 8, 1.f);
  for (const int64_t first : {0, 8}) {
    f = call.args(first);
    f.v_new = tensor(v_new.data(), FLASH3_FLOAT32, {2, 1, 1, 8});
    EXPECT_EQ(without_addresses(error_of(f)),
              "k and v share memory, but the call writes both; what it writes must lie in no other "
              "tensor of the call, but for v in the rows of k where k_new alone is given");
  }
  EXPECT_EQ(error_of(call.with_rotary(8, 4)), "");  // of the elements before v
  EXPECT_EQ(error_of(call.with_rotary(7, 4)),
            "rotary_cos.shape[1] = 4 but v begins at element 7 of the rows of k, and v_new is not "
            "given; the values must not get the embedding of the keys");
}

// A plan is made for one of the two, and its addresses may change.
TEST(ValuesInKeys, APlanLooksAgain) {
  LatentCall call;
  Forward f = call.args();
  const Plan plan(f);
  EXPECT_NO_THROW(plan.run(f));
  f.v.data = call.other.data();
  try {
    plan.run(f);
    FAIL() << "v elsewhere was taken";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("v_new is not; keys are appended"), std::string::npos)
        << error.what();
  }
}

// limits.h: what a backend says of its head dims is what it answers when a call is made.

Result ask(flash3_head_dims_of calls, int64_t dim, int64_t dim_v) {
  const bool fp8 = calls == FLASH3_HEAD_DIMS_OF_FORWARD_FP8;
  const flash3_dtype dtype = fp8 ? FLASH3_FLOAT8_E4M3 : FLASH3_FLOAT16;
  const Tensor q = tensor(nullptr, dtype, {1, 20, 2, dim});
  const Tensor v = tensor(nullptr, dtype, {1, 20, 2, dim_v});
  const Tensor out = tensor(nullptr, FLASH3_FLOAT16, {1, 20, 2, dim_v});
  if (calls == FLASH3_HEAD_DIMS_OF_BACKWARD)
    return supported(Backward{.dout = out,
                              .q = q,
                              .k = q,
                              .v = v,
                              .out = out,
                              .lse = lse_tensor(nullptr, 1, 2, 20),
                              .dq = q,
                              .dk = q,
                              .dv = v,
                              .backend = FLASH3_BACKEND_CPU});
  return supported(Forward{.q = q, .k = q, .v = v, .out = out, .backend = FLASH3_BACKEND_CPU});
}

TEST(Limits, OfTheCpuAreWhatItTakes) {
  for (const auto calls : {FLASH3_HEAD_DIMS_OF_FORWARD, FLASH3_HEAD_DIMS_OF_FORWARD_FP8,
                           FLASH3_HEAD_DIMS_OF_BACKWARD}) {
    int32_t most = 0, most_v = 0;
    ASSERT_EQ(flash3_backend_head_dims(FLASH3_BACKEND_CPU, calls, &most, &most_v), FLASH3_OK);
    for (int64_t dim = 1; dim <= most; ++dim)
      EXPECT_TRUE(ask(calls, dim, 8)) << calls << ' ' << dim;
    for (int64_t dim = 1; dim <= most_v; ++dim)
      EXPECT_TRUE(ask(calls, 8, dim)) << calls << ' ' << dim;
    EXPECT_TRUE(ask(calls, most, most_v)) << calls;
    EXPECT_EQ(ask(calls, most + 1, 8).message(), "q.shape[3] = " + std::to_string(most + 1) +
                                                     " but head_dim must be from 1 to " +
                                                     std::to_string(most));
    EXPECT_EQ(ask(calls, 8, most_v + 1).message(), "v.shape[3] = " + std::to_string(most_v + 1) +
                                                       " but head_dim_v must be from 1 to " +
                                                       std::to_string(most_v));
  }
}

TEST(Limits, OfTheHopperBackendNeedNoGpu) {
  for (const auto calls : {FLASH3_HEAD_DIMS_OF_FORWARD, FLASH3_HEAD_DIMS_OF_FORWARD_FP8,
                           FLASH3_HEAD_DIMS_OF_BACKWARD}) {
    int32_t most = 77, most_v = 78;
    const auto status = flash3_backend_head_dims(FLASH3_BACKEND_HOPPER, calls, &most, &most_v);
    if (status == FLASH3_UNSUPPORTED) {
      EXPECT_NE(std::string(flash3_last_error()).find("is not built into this library"),
                std::string::npos);
      EXPECT_TRUE(most == 77 && most_v == 78);
      continue;
    }
    EXPECT_EQ(status, FLASH3_OK) << flash3_last_error();
    EXPECT_TRUE(most == 256 && most_v == 256) << most << ' ' << most_v;
  }
}

TEST(Limits, Misuse) {
  int32_t most = 77, most_v = 78;
  const auto error = [&](int backend, int calls, int32_t* dim, int32_t* dim_v) {
    const auto status = flash3_backend_head_dims(
        static_cast<flash3_backend>(backend), static_cast<flash3_head_dims_of>(calls), dim, dim_v);
    EXPECT_EQ(status, FLASH3_INVALID_ARGUMENT);
    return std::string(flash3_last_error());
  };
  EXPECT_EQ(error(FLASH3_BACKEND_CPU, 3, &most, &most_v),
            "calls = 3 but it must be 0 (forward), 1 (forward in FP8) or 2 (backward)");
  EXPECT_EQ(error(FLASH3_BACKEND_AUTO, 0, &most, &most_v),
            "backend = 0 (auto) but it must be 1 (hopper) or 2 (cpu)");
  EXPECT_EQ(error(7, 0, &most, &most_v),
            "backend = 7 but it must be 0 (auto), 1 (hopper) or 2 (cpu)");
  EXPECT_EQ(error(FLASH3_BACKEND_CPU, 0, nullptr, &most_v),
            "head_dim is null; it must point to where the result goes");
  EXPECT_EQ(error(FLASH3_BACKEND_CPU, 0, &most, nullptr),
            "head_dim_v is null; it must point to where the result goes");
  EXPECT_TRUE(most == 77 && most_v == 78);
}

}  // namespace
}  // namespace flash3::test
