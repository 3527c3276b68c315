// SPDX-License-Identifier: Apache-2.0
// The rules of flash3.h for FP8 tensors, their scales, and flash3_quantize: what breaks each, and
// the exact sentence that the user reads; and what a valid call becomes.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "call.hpp"
#include "core/problem.hpp"
#include "core/quantized_forward.hpp"
#include "flash3/flash3.hpp"

namespace flash3::test {
namespace {

using F = flash3_forward_params;
using Q = flash3_quantize_params;

// Addresses that are never read, each far from the others.
template <class T = void>
T* memory(uintptr_t tensor) {
  return reinterpret_cast<T*>(tensor << 40);
}

// 4 query heads on 2 KV heads, 300 queries, 130 keys, head_dim 8, head_dim_v 16.
F fp8_forward() {
  Forward f;
  f.q = tensor(memory(1), FLASH3_FLOAT8_E4M3, {2, 300, 4, 8});
  f.k = tensor(memory(2), FLASH3_FLOAT8_E4M3, {2, 130, 2, 8});
  f.v = tensor(memory(3), FLASH3_FLOAT8_E4M3, {2, 130, 2, 16});
  f.out = tensor(memory(4), FLASH3_BFLOAT16, {2, 300, 4, 16});
  f.q_scale = scale_tensor(memory<float>(5), 2, 4, 3);
  f.k_scale = scale_tensor(memory<float>(6), 2, 2);
  f.v_scale = scale_tensor(memory<float>(7));
  return f.params();
}

Q quantize_call() {
  Quantize c;
  c.q = tensor(memory(8), FLASH3_BFLOAT16, {2, 300, 4, 8});
  c.k = tensor(memory(9), FLASH3_BFLOAT16, {2, 130, 2, 8});
  c.v = tensor(memory(10), FLASH3_BFLOAT16, {2, 130, 2, 16});
  c.q_out = tensor(memory(11), FLASH3_FLOAT8_E4M3, {2, 300, 4, 8});
  c.k_out = tensor(memory(12), FLASH3_FLOAT8_E4M3, {2, 130, 2, 8});
  c.v_out = tensor(memory(13), FLASH3_FLOAT8_E4M3, {2, 130, 2, 16});
  c.q_scale = scale_tensor(memory<float>(14), 2, 4, 3);
  c.k_scale = scale_tensor(memory<float>(15), 2, 2);
  c.v_scale = scale_tensor(memory<float>(16));
  c.rotary_cos = c.rotary_sin = Tensor{memory(17), FLASH3_FLOAT32, 2, {302, 4, 0, 0}, {4, 1, 0, 0}};
  c.rotary_offset_q = 2, c.rotary_offset_k = 172;
  return c.params();
}

template <class P>
void pack(P* p) {
  p->q = packed_tensor(memory(18), p->q.dtype, {300, 4, 8});
  p->cu_seqlens_q = index_tensor(memory<int32_t>(19), 3);
}

Status make(const F& p, ForwardProblem* problem) {
  return make_forward_problem(&p, Pointers::kRequired, problem);
}
Status make(const Q& p, QuantizeProblem* problem) {
  return make_quantize_problem(&p, Pointers::kRequired, problem);
}

template <class Problem, class P>
void expect_refused(const std::vector<Rule<P>>& rules, P (*call)()) {
  Problem problem;
  P valid = call();
  EXPECT_EQ(make(valid, &problem).message(), "");
  for (const Rule<P>& rule : rules) {
    SCOPED_TRACE(rule.name);
    P p = call();
    rule.breaks(p);
    const Status status = make(p, &problem);
    EXPECT_EQ(status.message(), rule.message);
    EXPECT_EQ(status.code(), rule.status);
  }
}

TEST(Fp8Forward, IsRefused) {
  expect_refused<ForwardProblem, F>(
      {{"OneNotFp8", [](F& p) { p.k.dtype = FLASH3_FLOAT16; },
        "k.dtype = float16 but q.dtype = float8_e4m3; q, k and v must have the same dtype"},
       {"QNotFp8", [](F& p) { p.q.dtype = FLASH3_FLOAT16; },
        "out.dtype = bfloat16 but q.dtype = float16; q and out must have the same dtype"},
       {"VNotFp8", [](F& p) { p.q.dtype = p.v.dtype = FLASH3_BFLOAT16; },
        "v.dtype = bfloat16 but k.dtype = float8_e4m3; k and v must have the same dtype"},
       {"KNotFp8", [](F& p) { p.q.dtype = p.k.dtype = FLASH3_BFLOAT16; },
        "v.dtype = float8_e4m3 but q.dtype = bfloat16; q, k, v and out must have the same dtype"},
       {"QFloat32", [](F& p) { p.q.dtype = p.out.dtype = FLASH3_FLOAT32; },
        "q.dtype = float32 but k.dtype = float8_e4m3; FP8 keys and values need a q of float16, "
        "bfloat16 or float8_e4m3"},
       {"OutFp8", [](F& p) { p.out.dtype = FLASH3_FLOAT8_E4M3; },
        "out.dtype = 5 but it must be 1 (float16), 2 (bfloat16) or 3 (float32)"},
       {"Compute", [](F& p) { p.compute = 2; },
        "compute = 2 but it must be 0 (the dtype of q) or 1 (fp8)"},
       {"ComputeOfFp8", [](F& p) { p.compute = FLASH3_COMPUTE_FP8; },
        "compute = 1 (fp8) but q.dtype = float8_e4m3; it is for q, k and v that the call converts "
        "to FP8"},
       {"ComputeOfFp8Keys",
        [](F& p) { p.q.dtype = FLASH3_BFLOAT16, p.compute = FLASH3_COMPUTE_FP8; },
        "compute = 1 (fp8) but k.dtype = float8_e4m3; it is for q, k and v that the call converts "
        "to FP8"},
       {"Sums", [](F& p) { p.fp8_sums = 3; },
        "fp8_sums = 3 but it must be 0 (auto), 1 (one level) or 2 (two levels)"},
       {"SumsBelow", [](F& p) { p.fp8_sums = -1; },
        "fp8_sums = -1 but it must be 0 (auto), 1 (one level) or 2 (two levels)"},
       {"SumsOf16BitQ",
        [](F& p) {
          p.q.dtype = FLASH3_BFLOAT16, p.q_scale = {};
          p.fp8_sums = FLASH3_FP8_SUMS_TWO_LEVELS;
        },
        "fp8_sums = 2 but q.dtype = bfloat16 and compute = 0; sums of FP8 products are those of an "
        "FP8 q, or of compute = 1 (fp8)"},
       {"RotateOfCompute",
        [](F& p) {
          p.q.dtype = p.k.dtype = p.v.dtype = FLASH3_BFLOAT16;
          p.q_scale = p.k_scale = p.v_scale = {};
          p.compute = FLASH3_COMPUTE_FP8, p.rotate = 1;
        },
        "rotate = 1 and compute = 1 (fp8); the call rotates what it converts to FP8 anyway"},
       {"RotateOfFp8", [](F& p) { p.rotate = 1; },
        "rotate = 1 but q.dtype = float8_e4m3; a rotated tensor must have more than 8 bits",
        FLASH3_UNSUPPORTED},
       {"QScaleOf16Bit", [](F& p) { p.q.dtype = FLASH3_BFLOAT16; },
        "q_scale is given but q.dtype = bfloat16; only FP8 tensors have scales, and one that is "
        "not given is all zero"},
       {"SinkOfNoOut", [](F& p) { p.sink = sink_tensor(memory(20), FLASH3_FLOAT8_E4M3, 4); },
        "sink.dtype = 5 but out.dtype = 2; a sink must be 3 (float32) or have the dtype of out, "
        "and one that is not wanted is all zero"},
       {"ScaleDtype", [](F& p) { p.q_scale.dtype = FLASH3_BFLOAT16; },
        "q_scale.dtype = 2 but it must be 3 (float32)"},
       {"ScaleNdim", [](F& p) { p.k_scale.ndim = 4; },
        "k_scale.ndim = 4 but it must be 1, [1], 2, [batch, heads_k], or 3, [batch, heads, "
        "blocks]"},
       {"ScaleOfTensor", [](F& p) { p.v_scale.shape[0] = 2; },
        "v_scale.shape[0] = 2 but scales of one dimension must be [1], one for the tensor"},
       {"ScaleBatch", [](F& p) { p.k_scale.shape[0] = 3; },
        "k_scale.shape[0] = 3 but q.shape[0] = 2; q and k_scale must have the same batch size"},
       {"ScaleHeads", [](F& p) { p.k_scale.shape[1] = 4; },
        "k_scale.shape[1] = 4 but k.shape[2] = 2; k and k_scale must have the same heads_k"},
       {"BlocksBatch", [](F& p) { p.q_scale.shape[0] = 1; },
        "q_scale.shape[0] = 1 but q.shape[0] = 2; q and q_scale must have the same batch size"},
       {"BlocksHeads", [](F& p) { p.q_scale.shape[1] = 2; },
        "q_scale.shape[1] = 2 but q.shape[2] = 4; q and q_scale must have the same heads"},
       {"Blocks", [](F& p) { p.q_scale.shape[2] = 2; },
        "q_scale.shape[2] = 2 but q.shape[1] = 300; blocks must be 3, seq / 128, rounded up"},
       {"BlocksStride", [](F& p) { p.q_scale.stride[2] = 2; },
        "q_scale.stride[2] = 2 but it must be 1; the last dimension of q_scale, [batch, "
        "heads, blocks], must be contiguous"},
       {"NegativeStride", [](F& p) { p.q_scale.stride[1] = -3; },
        "q_scale.stride[1] = -3 but a stride must be at least 0"},
       {"NoData", [](F& p) { p.v_scale.data = nullptr; },
        "v_scale.data is null but v_scale has elements; only a tensor with a size of 0 needs no "
        "memory"},
       {"PackedBlocksBatch",
        [](F& p) {
          pack(&p);
          p.out = packed_tensor(memory(21), FLASH3_BFLOAT16, {300, 4, 16});
        },
        "q_scale.shape[0] = 2 but q is packed; the scales of its blocks are [1, heads, blocks]"},
       {"PackedBlocks",
        [](F& p) {
          pack(&p);
          p.out = packed_tensor(memory(22), FLASH3_BFLOAT16, {300, 4, 16});
          p.q_scale = scale_tensor(memory<float>(23), 1, 4, 3);
        },
        "q_scale.shape[2] = 3 but q.shape[0] = 300 and cu_seqlens_q.shape[0] - 1 = 2; blocks must "
        "be 4, total / 128 + batch, rounded down"},
       {"ScalesOfOthers",
        [](F& p) {
          p.q.dtype = p.k.dtype = p.v.dtype = FLASH3_BFLOAT16;
          p.compute = FLASH3_COMPUTE_FP8;
        },
        "q_scale is given but q.dtype = bfloat16; only FP8 tensors have scales, and one that is "
        "not given is all zero"}},
      fp8_forward);
}

TEST(Fp8Backward, IsRefusedWithTheReason) {
  flash3_backward_params p{};
  p.struct_size = sizeof p;
  p.q = fp8_forward().q, p.k = fp8_forward().k, p.v = fp8_forward().v;
  BackwardProblem problem;
  const Status status = make_backward_problem(&p, Pointers::kRequired, &problem);
  EXPECT_EQ(status.code(), FLASH3_UNSUPPORTED);
  EXPECT_EQ(status.message(),
            "q.dtype = float8_e4m3 but there is no FP8 backward; it takes the float16, bfloat16 or "
            "float32 tensors from which the FP8 ones were made");
}

TEST(Fp8Forward, BecomesAProblem) {
  F p = fp8_forward();
  ForwardProblem problem;
  ASSERT_EQ(make(p, &problem).message(), "");
  EXPECT_EQ(problem.dtype, FLASH3_FLOAT8_E4M3);
  EXPECT_EQ(problem.out_dtype, FLASH3_BFLOAT16);
  EXPECT_EQ(problem.q_scale.kind, ScaleKind::kBlock);
  EXPECT_EQ(problem.q_scale.offset(1, 3, 2), 1 * 12 + 3 * 3 + 2);
  EXPECT_EQ(problem.k_scale.kind, ScaleKind::kHead);
  EXPECT_EQ(problem.k_scale.offset(1, 1, 5), 3);
  EXPECT_EQ(problem.v_scale.kind, ScaleKind::kTensor);
  EXPECT_EQ(problem.v_scale.offset(1, 1, 5), 0);
  p.q_scale = scale_tensor(memory<float>(24), 2, 2);
  ASSERT_EQ(make(p, &problem).message(), "");
  EXPECT_EQ(problem.q_scale.offset(1, 3, 5), 2 + 1);  // the KV head of query head 3

  p.q_scale = p.k_scale = p.v_scale = {};
  p.fp8_sums = FLASH3_FP8_SUMS_TWO_LEVELS;
  ASSERT_EQ(make(p, &problem).message(), "");
  EXPECT_EQ(problem.q_scale.at(1, 2, 3), 1.f);
  EXPECT_EQ(problem.fp8_sums, FLASH3_FP8_SUMS_TWO_LEVELS);
}

// Two calls over one workspace: tensors apart from each other, all inside.
TEST(QuantizedForward, CutsTheWorkspace) {
  F p = fp8_forward();
  p.q_scale = p.k_scale = p.v_scale = {};
  p.q.dtype = p.k.dtype = p.v.dtype = FLASH3_FLOAT16;
  p.compute = FLASH3_COMPUTE_FP8;
  p.rotation_seed = 99;
  p.fp8_sums = FLASH3_FP8_SUMS_ONE_LEVEL;
  ForwardProblem problem;
  ASSERT_EQ(make(p, &problem).message(), "");
  ASSERT_TRUE(problem.quantizes);
  const QuantizedForward question = quantized_forward(problem);
  EXPECT_EQ(question.forward.q.data, nullptr);
  EXPECT_EQ(question.forward.workspace, nullptr);

  std::vector<unsigned char> workspace(question.tensor_bytes + 100);
  problem.workspace = workspace.data();
  problem.workspace_size = workspace.size();
  const QuantizedForward both = quantized_forward(problem);
  EXPECT_EQ(both.tensor_bytes, question.tensor_bytes);
  EXPECT_FALSE(both.forward.quantizes);
  EXPECT_EQ(both.forward.dtype, FLASH3_FLOAT8_E4M3);
  EXPECT_EQ(both.forward.out_dtype, FLASH3_BFLOAT16);
  EXPECT_EQ(both.forward.fp8_sums, FLASH3_FP8_SUMS_ONE_LEVEL);
  EXPECT_EQ(both.forward.workspace, workspace.data() + both.tensor_bytes);
  EXPECT_EQ(both.forward.workspace_size, 100u);
  EXPECT_EQ(both.quantize.rotation_seed, 99u);
  EXPECT_TRUE(both.quantize.rotates);
  EXPECT_EQ(both.quantize.q.out.data, both.forward.q.data);
  EXPECT_EQ(both.quantize.v.scale.data, both.forward.v_scale.data);
  EXPECT_EQ(both.forward.q.stride_head, 16);  // rows of whole 16 bytes
  EXPECT_EQ(both.forward.v.stride_seq, 2 * 16);

  const auto* base = workspace.data();
  const auto offset = [&](const void* at) { return static_cast<const unsigned char*>(at) - base; };
  const auto round_up = [](int64_t n) { return (n + 255) / 256 * 256; };
  int64_t next = 0;
  const struct {
    const TensorView& tensor;
    const ScaleView& scale;
    int64_t bytes, scales;
  } kParts[] = {{both.forward.q, both.forward.q_scale, 2 * 300 * 4 * 16, 2 * 4 * 3},
                {both.forward.k, both.forward.k_scale, 2 * 130 * 2 * 16, 2 * 2 * 2},
                {both.forward.v, both.forward.v_scale, 2 * 130 * 2 * 16, 2 * 2 * 2}};
  for (const auto& part : kParts) {
    EXPECT_EQ(offset(part.tensor.data), next);
    next += round_up(part.bytes);
    EXPECT_EQ(offset(part.scale.data), next);
    next += round_up(part.scales * 4);
  }
  EXPECT_EQ(static_cast<size_t>(next), both.tensor_bytes);
}

TEST(Quantize, IsRefused) {
  expect_refused<QuantizeProblem, Q>(
      {{"StructSize", [](Q& p) { p.struct_size = 8; },
        "struct_size = 8 but flash3_quantize_params takes " + std::to_string(sizeof(Q)) +
            " bytes; set struct_size = sizeof(flash3_quantize_params)"},
       {"Nothing",
        [](Q& p) {
          p = {};
          p.struct_size = sizeof p;
        },
        "q, k and v are all zero; at least one of them must be given"},
       {"OutOfNothing", [](Q& p) { p.v = {}; },
        "v_out is given but v is all zero; a tensor that is left out has no results"},
       {"ScaleOfNothing", [](Q& p) { p.v = p.v_out = {}; },
        "v_scale is given but v is all zero; a tensor that is left out has no results"},
       {"InIsFp8", [](Q& p) { p.k.dtype = FLASH3_FLOAT8_E4M3; },
        "k.dtype = 5 but it must be 1 (float16), 2 (bfloat16) or 3 (float32)"},
       {"OutIsNot", [](Q& p) { p.k_out.dtype = FLASH3_BFLOAT16; },
        "k_out.dtype = 2 but it must be 5 (float8_e4m3)"},
       {"OutMissing", [](Q& p) { p.q_out = {}; },
        "q_out is all zero; it must be a tensor [batch, seq_q, heads_q, head_dim]"},
       {"OutShape", [](Q& p) { p.q_out.shape[3] = 9; },
        "q_out.shape[3] = 9 but q.shape[3] = 8; q and q_out must have the same shape"},
       {"HeadDim", [](Q& p) { p.v.shape[3] = p.v_out.shape[3] = 257; },
        "v.shape[3] = 257 but a head dim must be from 1 to 256"},
       {"ScaleMissing", [](Q& p) { p.q_scale = {}; },
        "q_scale is all zero; it must be a float32 tensor [1], [batch, heads_k] or [batch, heads, "
        "blocks]"},
       {"Dtypes", [](Q& p) { p.v.dtype = FLASH3_FLOAT16; },
        "v.dtype = float16 but q.dtype = bfloat16; q and v must have the same dtype"},
       {"Batch", [](Q& p) { p.k.shape[0] = p.k_out.shape[0] = 3; },
        "k.shape[0] = 3 but q.shape[0] = 2; q and k must have the same batch size"},
       {"SeqK", [](Q& p) { p.v.shape[1] = p.v_out.shape[1] = 129; },
        "v.shape[1] = 129 but k.shape[1] = 130; k and v must have the same seq_k"},
       {"HeadsK", [](Q& p) { p.v.shape[2] = p.v_out.shape[2] = 1; },
        "v.shape[2] = 1 but k.shape[2] = 2; k and v must have the same heads_k"},
       {"HeadDimOfK", [](Q& p) { p.k.shape[3] = p.k_out.shape[3] = 7; },
        "k.shape[3] = 7 but q.shape[3] = 8; q and k must have the same head_dim"},
       {"Group", [](Q& p) { p.q.shape[2] = p.q_out.shape[2] = p.q_scale.shape[1] = 3; },
        "q.shape[2] = 3 but k.shape[2] = 2; heads_q must be a multiple of heads_k"},
       {"OutOverlaps", [](Q& p) { p.k_out.stride[1] = 0; },
        "k_out.stride[1] = 0 but it must be at least 1, the extent of the dimensions with smaller "
        "strides; the elements of an output must not overlap"},
       {"ScaleOverlaps", [](Q& p) { p.q_scale.stride[1] = 0; },
        "q_scale.stride[1] = 0 but it must be at least 1, the extent of the dimensions with "
        "smaller strides; the elements of an output must not overlap"},
       {"Rotate", [](Q& p) { p.rotate = 3; }, "rotate = 3 but it must be 0 or 1"},
       {"Interleaved", [](Q& p) { p.rotary_interleaved = -1; },
        "rotary_interleaved = -1 but it must be 0 or 1"},
       {"SinMissing", [](Q& p) { p.rotary_sin = {}; },
        "rotary_sin is all zero; it must be a tensor [positions, rotary_dim / 2]"},
       {"RotaryDtype", [](Q& p) { p.rotary_cos.dtype = FLASH3_FLOAT16; },
        "rotary_cos.dtype = float16 but q.dtype = bfloat16; it must be float32 or the dtype of q "
        "and k"},
       {"RotaryDtypes", [](Q& p) { p.rotary_sin.dtype = FLASH3_BFLOAT16; },
        "rotary_sin.dtype = bfloat16 but rotary_cos.dtype = float32; rotary_cos and rotary_sin "
        "must have the same dtype"},
       {"RotaryDim", [](Q& p) { p.rotary_cos.shape[1] = p.rotary_sin.shape[1] = 5; },
        "rotary_cos.shape[1] = 5 but q.shape[3] = 8; it must be from 1 to half of head_dim"},
       {"RotaryOffset", [](Q& p) { p.rotary_offset_q = -1; },
        "rotary_offset_q = -1 but it must be at least 0"},
       {"RotaryReach", [](Q& p) { p.rotary_offset_k = 173; },
        "rotary_cos.shape[0] = 302 but rotary_offset_k = 173 and a sequence of k can have 130 "
        "tokens; the tables must reach the last of them"},
       {"RotaryOfNothing", [](Q& p) { p.q = p.q_out = p.q_scale = p.k = p.k_out = p.k_scale = {}; },
        "rotary_cos is given but q and k are all zero; there is nothing to apply it to"},
       {"Backend", [](Q& p) { p.backend = 7; },
        "backend = 7 but it must be 0 (auto), 1 (hopper) or 2 (cpu)"},
       {"Threads", [](Q& p) { p.num_threads = -2; },
        "num_threads = -2 but it must be at least 0 (0: one per core)"}},
      quantize_call);
}

TEST(Quantize, BecomesAProblem) {
  Q p = quantize_call();
  p.rotate = 1;
  p.q_scale = scale_tensor(memory<float>(25), 2, 2);
  QuantizeProblem problem;
  ASSERT_EQ(make(p, &problem).message(), "");
  EXPECT_EQ(problem.batch, 2);
  EXPECT_TRUE(problem.q.given && problem.k.given && problem.v.given && problem.rotates);
  EXPECT_EQ(problem.q.scale.heads_per_scale, 2);
  EXPECT_EQ(problem.rotary.dim, 8);
  EXPECT_EQ(problem.rotary_offset_k, 172);
  EXPECT_EQ(problem.v.in.dim, 16);
  EXPECT_FALSE(problem.is_empty());

  // k and v alone; what belongs to q is not looked at.
  p.q = p.q_out = p.q_scale = {};
  p.cu_seqlens_q.ndim = 77;
  ASSERT_EQ(make(p, &problem).message(), "");
  EXPECT_FALSE(problem.q.given);
}

// q by itself: its own scales tell the KV heads.
TEST(Quantize, OfQAlone) {
  Q p = quantize_call();
  p.k = p.k_out = p.k_scale = p.v = p.v_out = p.v_scale = {};
  p.q_scale = scale_tensor(memory<float>(26), 2, 2);
  QuantizeProblem problem;
  ASSERT_EQ(make(p, &problem).message(), "");
  EXPECT_EQ(problem.q.scale.heads_per_scale, 2);
  p.q_scale = scale_tensor(memory<float>(27), 2, 3);
  EXPECT_EQ(make(p, &problem).message(),
            "q.shape[2] = 4 but q_scale.shape[1] = 3; heads_q must be a multiple of heads_k");
}

}  // namespace
}  // namespace flash3::test
