// SPDX-License-Identifier: Apache-2.0
// flash3.hpp: what it makes of its arguments, and the way errors come back.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "call.hpp"
#include "core/problem.hpp"
#include "flash3/plan.hpp"
#include "oracle/attention_ref.hpp"

namespace flash3::test {
namespace {

std::vector<int64_t> shape(const Tensor& t) { return {t.shape, t.shape + t.ndim}; }
std::vector<int64_t> stride(const Tensor& t) { return {t.stride, t.stride + t.ndim}; }
using Numbers = std::vector<int64_t>;

TEST(Tensors, Contiguous) {
  float x = 0;
  const Tensor t = tensor(&x, FLASH3_BFLOAT16, {2, 3, 4, 5});
  EXPECT_EQ(t.data, &x);
  EXPECT_EQ(t.dtype, FLASH3_BFLOAT16);
  EXPECT_EQ(shape(t), (Numbers{2, 3, 4, 5}));
  EXPECT_EQ(stride(t), (Numbers{60, 20, 5, 1}));
}

TEST(Tensors, HeadsFirst) {
  const Tensor t = heads_first(tensor(nullptr, FLASH3_FLOAT16, {2, 4, 3, 5}));
  EXPECT_EQ(shape(t), (Numbers{2, 3, 4, 5}));
  EXPECT_EQ(stride(t), (Numbers{60, 5, 15, 1}));
}

TEST(Tensors, Lse) {
  float x = 0;
  const Tensor t = lse_tensor(&x, 2, 4, 3);
  EXPECT_EQ(t.data, &x);
  EXPECT_EQ(t.dtype, FLASH3_FLOAT32);
  EXPECT_EQ(shape(t), (Numbers{2, 4, 3}));
  EXPECT_EQ(stride(t), (Numbers{12, 3, 1}));
}

TEST(Tensors, OfRaggedBatches) {
  float x = 0;
  const int32_t n = 0;
  const Tensor q = packed_tensor(&x, FLASH3_FLOAT16, {7, 4, 5});
  EXPECT_EQ(shape(q), (Numbers{7, 4, 5}));
  EXPECT_EQ(stride(q), (Numbers{20, 5, 1}));
  EXPECT_EQ(q.dtype, FLASH3_FLOAT16);
  const Tensor lse = packed_lse_tensor(&x, 4, 7);
  EXPECT_EQ(shape(lse), (Numbers{4, 7}));
  EXPECT_EQ(stride(lse), (Numbers{7, 1}));
  EXPECT_EQ(lse.dtype, FLASH3_FLOAT32);
  const Tensor cu = index_tensor(&n, 3);
  EXPECT_EQ(cu.data, &n);
  EXPECT_EQ(shape(cu), (Numbers{3}));
  EXPECT_EQ(stride(cu), (Numbers{1}));
  EXPECT_EQ(cu.dtype, FLASH3_INT32);
  const Tensor sink = sink_tensor(&x, FLASH3_BFLOAT16, 4);
  EXPECT_EQ(sink.data, &x);
  EXPECT_EQ(shape(sink), (Numbers{4}));
  EXPECT_EQ(stride(sink), (Numbers{1}));
  EXPECT_EQ(sink.dtype, FLASH3_BFLOAT16);
}

TEST(ForwardArgs, Defaults) {
  const auto p = Forward{}.params();
  EXPECT_EQ(p.struct_size, sizeof(flash3_forward_params));
  EXPECT_EQ(p.softmax_scale, 0.f);
  EXPECT_EQ(p.causal, 0);
  EXPECT_EQ(p.window, 0);
  EXPECT_EQ(p.backend, FLASH3_BACKEND_AUTO);
  EXPECT_EQ(p.num_threads, 0);
  EXPECT_EQ(p.chunk, 0);
  EXPECT_EQ(p.softcap, 0.f);
  EXPECT_EQ(p.max_seqlen_q, 0);
  EXPECT_EQ(p.max_seqlen_k, 0);
  for (const Tensor& t : {p.lse, p.sink, p.cu_seqlens_q, p.cu_seqlens_k, p.seqused_q, p.seqused_k})
    EXPECT_EQ(t.dtype, FLASH3_DTYPE_NONE);
}

TEST(ForwardArgs, RaggedBatchesAndScoreOptionsReachTheirFields) {
  int32_t cu_q = 0, cu_k = 0, used_q = 0, used_k = 0;
  float sink = 0, dsink = 0;
  const auto expect_fields = [&](const auto& p) {
    EXPECT_EQ(p.chunk, 8);
    EXPECT_EQ(p.softcap, 30.f);
    EXPECT_EQ(p.sink.data, &sink);
    EXPECT_EQ(p.cu_seqlens_q.data, &cu_q);
    EXPECT_EQ(p.cu_seqlens_k.data, &cu_k);
    EXPECT_EQ(p.seqused_q.data, &used_q);
    EXPECT_EQ(p.seqused_k.data, &used_k);
    EXPECT_EQ(p.max_seqlen_q, 5);
    EXPECT_EQ(p.max_seqlen_k, 6);
  };
  expect_fields(Forward{.chunk = 8,
                        .softcap = 30.f,
                        .sink = sink_tensor(&sink, FLASH3_FLOAT32, 1),
                        .cu_seqlens_q = index_tensor(&cu_q, 1),
                        .cu_seqlens_k = index_tensor(&cu_k, 1),
                        .seqused_q = index_tensor(&used_q, 1),
                        .seqused_k = index_tensor(&used_k, 1),
                        .max_seqlen_q = 5,
                        .max_seqlen_k = 6}
                    .params());
  const auto b = Backward{.dsink = sink_tensor(&dsink, FLASH3_FLOAT32, 1),
                          .chunk = 8,
                          .softcap = 30.f,
                          .sink = sink_tensor(&sink, FLASH3_FLOAT32, 1),
                          .cu_seqlens_q = index_tensor(&cu_q, 1),
                          .cu_seqlens_k = index_tensor(&cu_k, 1),
                          .seqused_q = index_tensor(&used_q, 1),
                          .seqused_k = index_tensor(&used_k, 1),
                          .max_seqlen_q = 5,
                          .max_seqlen_k = 6}
                     .params();
  expect_fields(b);
  EXPECT_EQ(b.dsink.data, &dsink);
}

TEST(ForwardArgs, EachReachesItsField) {
  int stream = 0, workspace = 0;
  const auto p = Forward{.softmax_scale = 0.5f,
                         .causal = true,
                         .window_left = 7,
                         .backend = FLASH3_BACKEND_CPU,
                         .num_threads = 3,
                         .stream = &stream,
                         .workspace = &workspace,
                         .workspace_size = 9}
                     .params();
  EXPECT_EQ(p.softmax_scale, 0.5f);
  EXPECT_EQ(p.causal, 1);
  EXPECT_EQ(p.window, 1);
  EXPECT_EQ(p.window_left, 7);
  EXPECT_EQ(p.window_right, -1);
  EXPECT_EQ(p.backend, FLASH3_BACKEND_CPU);
  EXPECT_EQ(p.num_threads, 3);
  EXPECT_EQ(p.stream, &stream);
  EXPECT_EQ(p.workspace, &workspace);
  EXPECT_EQ(p.workspace_size, 9u);

  const auto right = Forward{.window_right = 0}.params();
  EXPECT_EQ(right.window, 1);
  EXPECT_EQ(right.window_left, -1);
  EXPECT_EQ(right.window_right, 0);
}

TEST(Errors, ForwardThrowsAndTryForwardReturns) {
  Call call;
  call.args.k.shape[3] = 96;
  constexpr char kMessage[] =
      "k.shape[3] = 96 but q.shape[3] = 8; q and k must have the same head_dim";
  try {
    forward(call.args);
    FAIL() << "forward() did not throw";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), FLASH3_INVALID_ARGUMENT);
    EXPECT_STREQ(e.what(), kMessage);
  }
  const Result result = try_forward(call.args);
  EXPECT_FALSE(result);
  EXPECT_EQ(result.code(), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(result.message(), kMessage);
  EXPECT_EQ(supported(call.args).message(), kMessage);
  EXPECT_THROW(workspace(call.args), Error);
  EXPECT_THROW(explain(call.args), Error);
  EXPECT_THROW(result.or_throw(), Error);
}

TEST(Errors, ResultKeepsItsMessage) {
  Call call;
  call.args.num_threads = -1;
  const Result first = supported(call.args);
  call.args.num_threads = -2;
  const Result second = supported(call.args);
  EXPECT_EQ(first.message().substr(0, 16), "num_threads = -1");
  EXPECT_EQ(second.message().substr(0, 16), "num_threads = -2");
}

TEST(Forward, ComputesWhatTheOracleComputes) {
  Call call;
  call.args.causal = true;
  call.args.window_left = 1;
  EXPECT_TRUE(supported(call.args));
  std::vector<unsigned char> memory(workspace(call.args) + 256);
  auto address = reinterpret_cast<uintptr_t>(memory.data());
  call.args.workspace = memory.data() + (256 - address % 256) % 256;
  call.args.workspace_size = memory.size() - 256;
  forward(call.args);

  const auto p = call.params();
  ForwardProblem problem;
  ASSERT_TRUE(make_forward_problem(&p, Pointers::kRequired, &problem).ok());
  const ReferenceForward expected = attention_ref(problem);
  ASSERT_EQ(expected.out.size(), call.out.size());
  ASSERT_EQ(expected.lse.size(), call.lse.size());
  for (size_t i = 0; i < call.out.size(); ++i) ASSERT_NEAR(call.out[i], expected.out[i], 1e-5);
  for (size_t i = 0; i < call.lse.size(); ++i) ASSERT_NEAR(call.lse[i], expected.lse[i], 1e-5);

  const Result result = try_forward(call.args);
  EXPECT_TRUE(result);
  EXPECT_EQ(result.code(), FLASH3_OK);
  EXPECT_EQ(result.message(), "");
}

TEST(Forward, ExplainIsTheWholeText) {
  Call call;
  const std::string text = explain(call.args);
  EXPECT_EQ(text.find('\0'), std::string::npos);
  EXPECT_EQ(text.substr(0, 9), "backend: ");
  EXPECT_EQ(text.back(), '\n');
}

// Quantize and Forward hand on what FP8 needs: k and v through FP8 give what the oracle gives for
// values that e4m3 holds.
TEST(Quantize, ThenForward) {
  constexpr int64_t kKeys = 130;
  std::vector<float> k(kKeys * 2 * 8), v(kKeys * 2 * 8), out(4 * 8), k_scale(2 * 2), v_scale(2);
  std::vector<float> q(4 * 8, 0.5f);
  for (size_t i = 0; i < k.size(); ++i) {
    k[i] = static_cast<float>(i % 13) - 6;
    v[i] = static_cast<float>(i % 7) * 0.25f;
  }
  std::vector<unsigned char> q8(q.size()), k8(k.size()), v8(v.size());
  float q_scale = 0;
  const auto as = [](void* data, flash3_dtype dtype, int64_t seq, int64_t heads) {
    return tensor(data, dtype, {1, seq, heads, 8});
  };
  const flash3::Quantize call{
      .q = as(q.data(), FLASH3_FLOAT32, 1, 4),
      .k = as(k.data(), FLASH3_FLOAT32, kKeys, 2),
      .v = as(v.data(), FLASH3_FLOAT32, kKeys, 2),
      .q_out = as(q8.data(), FLASH3_FLOAT8_E4M3, 1, 4),
      .k_out = as(k8.data(), FLASH3_FLOAT8_E4M3, kKeys, 2),
      .v_out = as(v8.data(), FLASH3_FLOAT8_E4M3, kKeys, 2),
      .q_scale = scale_tensor(&q_scale),
      .k_scale = scale_tensor(k_scale.data(), 1, 2, scale_blocks(kKeys)),
      .v_scale = scale_tensor(v_scale.data(), 1, 2),
      .backend = FLASH3_BACKEND_CPU,
  };
  EXPECT_TRUE(supported(call));
  EXPECT_EQ(workspace(call), 0u);
  EXPECT_NE(explain(call).find("kernel: cpu_quantize_fp32"), std::string::npos);
  quantize(call);

  Forward f;
  f.q = call.q_out, f.k = call.k_out, f.v = call.v_out;
  f.q_scale = call.q_scale, f.k_scale = call.k_scale, f.v_scale = call.v_scale;
  f.out = as(out.data(), FLASH3_FLOAT32, 1, 4);
  f.backend = FLASH3_BACKEND_CPU;
  std::vector<unsigned char> memory(workspace(f) + 256);
  f.workspace = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
  f.workspace_size = memory.size() - 256;
  forward(f);

  Forward plain = f;
  plain.q = call.q, plain.k = call.k, plain.v = call.v;
  plain.q_scale = plain.k_scale = plain.v_scale = {};
  const auto p = plain.params();
  ForwardProblem problem;
  ASSERT_TRUE(make_forward_problem(&p, Pointers::kRequired, &problem).ok());
  const ReferenceForward expected = attention_ref(problem);
  // The weights alone are rounded, by 1/16 at most, each its own way.
  for (size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], expected.out[i], 0.02) << i;

  plain.compute = FLASH3_COMPUTE_FP8;
  plain.rotation_seed = 7;
  EXPECT_EQ(plain.params().rotation_seed, 7u);
  EXPECT_EQ(plain.params().rotate, 0);
  plain.rotate = true;
  EXPECT_EQ(plain.params().rotate, 1);
  plain.rotate = false;
  EXPECT_NE(explain(plain).find("computed in float8_e4m3"), std::string::npos);
  EXPECT_GT(workspace(plain), 2u * kKeys * 2 * 8);

  flash3::Quantize wrong = call;
  wrong.rotary_cos = wrong.rotary_sin = Tensor{q.data(), FLASH3_FLOAT32, 2, {3, 1}, {1, 1}};
  wrong.rotary_offset_k = 9;
  EXPECT_EQ(try_quantize(wrong).message().substr(0, 44),
            "rotary_cos.shape[0] = 3 but rotary_offset_k ");
}

TEST(Wrapper, APlanRunsWithOtherAddresses) {
  constexpr size_t kElements = 6;
  float q[2][kElements] = {{1, 2, 3, 4, 5, 6}, {6, 5, 4, 3, 2, 1}}, out[2][kElements] = {};
  float direct[kElements] = {};
  const auto args = [&](float* in, float* to) {
    const Tensor x = tensor(in, FLASH3_FLOAT32, {1, 3, 1, 2});
    return Forward{.q = x,
                   .k = x,
                   .v = x,
                   .out = tensor(to, FLASH3_FLOAT32, {1, 3, 1, 2}),
                   .causal = true,
                   .backend = FLASH3_BACKEND_CPU};
  };
  const Plan plan(args(nullptr, nullptr));
  EXPECT_EQ(plan.workspace(), workspace(args(q[0], out[0])));
  EXPECT_EQ(plan.explain(), explain(args(q[0], out[0])));
  alignas(16) float aligned[2][8], results[2][8];
  for (int i = 0; i < 2; ++i) {
    std::copy_n(q[i], kElements, aligned[i]);
    plan.run(args(aligned[i], results[i]));
    forward(args(aligned[i], direct));
    EXPECT_TRUE(std::equal(direct, direct + kElements, results[i])) << i;
  }
  Forward other = args(aligned[0], results[0]);
  other.causal = false;
  const Result result = plan.try_run(other);
  EXPECT_EQ(result.code(), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(result.message().find("causal = 0 but the plan was made for 1"), 0u);
  EXPECT_THROW(plan.run(other), Error);
}

}  // namespace
}  // namespace flash3::test
