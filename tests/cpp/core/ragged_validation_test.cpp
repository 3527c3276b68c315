// SPDX-License-Identifier: Apache-2.0
// The rules of flash3.h for ragged batches, sinks, softcap and chunks: what breaks each, and the
// exact sentence that the user reads; and what a valid call becomes.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "call.hpp"
#include "core/problem.hpp"

namespace flash3::test {
namespace {

using F = flash3_forward_params;
using B = flash3_backward_params;

// For a RaggedCall.
template <class P>
std::vector<Rule<P>> ragged_rules() {
  return {
      {"CuDtype", [](P& p) { p.cu_seqlens_q.dtype = FLASH3_FLOAT32; },
       "cu_seqlens_q.dtype = 3 but it must be 4 (int32); cu_seqlens_q that is not given is all "
       "zero"},
      {"CuHalfGiven",
       [](P& p) {
         p.cu_seqlens_k = {};
         p.cu_seqlens_k.ndim = 1;
       },
       "cu_seqlens_k.dtype = 0 but it must be 4 (int32); cu_seqlens_k that is not given is all "
       "zero"},
      {"UsedDtype", [](P& p) { p.seqused_k.dtype = FLASH3_FLOAT16; },
       "seqused_k.dtype = 1 but it must be 4 (int32); seqused_k that is not given is all zero"},
      {"CuNdim", [](P& p) { p.cu_seqlens_k.ndim = 2; },
       "cu_seqlens_k.ndim = 2 but it must be 1, [batch + 1]"},
      {"UsedNdim", [](P& p) { p.seqused_q.ndim = 0; },
       "seqused_q.ndim = 0 but it must be 1, [batch]"},
      {"CuOfNothing", [](P& p) { p.cu_seqlens_q.shape[0] = 0; },
       "cu_seqlens_q.shape[0] = 0 but it must be at least 1, one more than there are sequences"},
      {"CuNegativeSize", [](P& p) { p.cu_seqlens_q.shape[0] = -3; },
       "cu_seqlens_q.shape[0] = -3 but a size must be from 0 to 2147483647"},
      {"CuStride", [](P& p) { p.cu_seqlens_q.stride[0] = 2; },
       "cu_seqlens_q.stride[0] = 2 but it must be 1; the last dimension of cu_seqlens_q, [batch + "
       "1], must be contiguous"},
      {"UsedStride", [](P& p) { p.seqused_k.stride[0] = 0; },
       "seqused_k.stride[0] = 0 but it must be 1; the last dimension of seqused_k, [batch], must "
       "be contiguous"},
      {"CuUnaligned", [](P& p) { p.cu_seqlens_q.data = reinterpret_cast<void*>(0x1002); },
       "cu_seqlens_q.data = 0x1002 but it must be a multiple of 4, the size of an int32"},

      {"BatchOfCu", [](P& p) { p.cu_seqlens_k.shape[0] = 4; },
       "cu_seqlens_k.shape[0] - 1 = 3 but cu_seqlens_q.shape[0] - 1 = 2; cu_seqlens_q and "
       "cu_seqlens_k must have the same batch size"},
      {"BatchOfUsedQ", [](P& p) { p.seqused_q.shape[0] = 3; },
       "seqused_q.shape[0] = 3 but cu_seqlens_q.shape[0] - 1 = 2; cu_seqlens_q and seqused_q must "
       "have the same batch size"},
      {"BatchOfUsedK", [](P& p) { p.seqused_k.shape[0] = 1; },
       "seqused_k.shape[0] = 1 but cu_seqlens_q.shape[0] - 1 = 2; cu_seqlens_q and seqused_k must "
       "have the same batch size"},

      {"MaxNegative", [](P& p) { p.max_seqlen_q = -1; },
       "max_seqlen_q = -1 but it must be at least 0 (0: not known)"},
      {"MaxOfKeysNegative", [](P& p) { p.max_seqlen_k = -7; },
       "max_seqlen_k = -7 but it must be at least 0 (0: not known)"},
      {"MaxWithoutCu", [](P& p) { p.cu_seqlens_k = {}; },
       "max_seqlen_k = 5 but cu_seqlens_k is all zero; a maximum goes with packed sequences alone"},

      {"QNotPacked", [](P& p) { p.q.ndim = 4; },
       "q.ndim = 4 but it must be 3, [total_q, heads_q, head_dim]"},
      {"KNotPacked", [](P& p) { p.k.ndim = 4; },
       "k.ndim = 4 but it must be 3, [total_k, heads_k, head_dim]"},
      {"VNotPacked", [](P& p) { p.v.ndim = 4; },
       "v.ndim = 4 but it must be 3, [total_k, heads_k, head_dim_v]"},
      {"OutNotPacked", [](P& p) { p.out.ndim = 4; },
       "out.ndim = 4 but it must be 3, [total_q, heads_q, head_dim_v]"},
      {"LseNotPacked", [](P& p) { p.lse.ndim = 3; },
       "lse.ndim = 3 but it must be 2, [heads_q, total_q]"},
      {"KPackedAlone", [](P& p) { p.cu_seqlens_k = {}, p.max_seqlen_k = 0; },
       "k.ndim = 3 but it must be 4, [batch, seq_k, heads_k, head_dim]; packed sequences need "
       "cu_seqlens_k"},
      {"TotalV", [](P& p) { p.v.shape[0] = 7; },
       "v.shape[0] = 7 but k.shape[0] = 9; k and v must have the same total_k"},
      {"TotalOut", [](P& p) { p.out.shape[0] = 7; },
       "out.shape[0] = 7 but q.shape[0] = 6; q and out must have the same total_q"},
      {"TotalLse", [](P& p) { p.lse.shape[1] = 7; },
       "lse.shape[1] = 7 but q.shape[0] = 6; q and lse must have the same total_q"},
      {"HeadsLse", [](P& p) { p.lse.shape[0] = 7; },
       "lse.shape[0] = 7 but q.shape[1] = 4; q and lse must have the same heads_q"},
      {"HeadsOut", [](P& p) { p.out.shape[1] = 7; },
       "out.shape[1] = 7 but q.shape[1] = 4; q and out must have the same heads_q"},
      {"HeadDimK", [](P& p) { p.k.shape[2] = 7; },
       "k.shape[2] = 7 but q.shape[2] = 8; q and k must have the same head_dim"},
      {"HeadsNotDivisible", [](P& p) { p.k.shape[1] = p.v.shape[1] = 3; },
       "q.shape[1] = 4 but k.shape[1] = 3; heads_q must be a multiple of heads_k"},
      {"TooManyHeads",
       [](P& p) {
         p.cu_seqlens_q.shape[0] = p.cu_seqlens_k.shape[0] = (1 << 29) + 1;
         p.seqused_q.shape[0] = p.seqused_k.shape[0] = 1 << 29;
       },
       "cu_seqlens_q.shape[0] - 1 = 536870912 and q.shape[1] = 4; batch * heads_q must be at most "
       "2147483647"},

      {"SinkDtype", [](P& p) { p.sink.dtype = FLASH3_BFLOAT16; },
       "sink.dtype = 2 but out.dtype = 3; a sink must be 3 (float32) or have the dtype of out, and "
       "one "
       "that is not wanted is all zero"},
      {"SinkNdim", [](P& p) { p.sink.ndim = 2; }, "sink.ndim = 2 but it must be 1, [heads_q]"},
      {"SinkHeads", [](P& p) { p.sink.shape[0] = 2; },
       "sink.shape[0] = 2 but q.shape[1] = 4; q and sink must have the same heads_q"},
      {"SinkStride", [](P& p) { p.sink.stride[0] = 3; },
       "sink.stride[0] = 3 but it must be 1; the last dimension of sink, [heads_q], must be "
       "contiguous"},

      {"SoftcapNan", [](P& p) { p.softcap = std::nanf(""); },
       "softcap = nan but it must be 0 (none) or from 1e-18 to 1e+18"},
      {"SoftcapInfinite", [](P& p) { p.softcap = INFINITY; },
       "softcap = inf but it must be 0 (none) or from 1e-18 to 1e+18"},
      {"SoftcapTooSmall", [](P& p) { p.softcap = 1e-40f; },
       "softcap = 1e-40 but it must be 0 (none) or from 1e-18 to 1e+18"},
      {"SoftcapTooLarge", [](P& p) { p.softcap = 2.5e38f; },
       "softcap = 2.5e+38 but it must be 0 (none) or from 1e-18 to 1e+18"},
      {"SoftcapNegative", [](P& p) { p.softcap = -30.f; },
       "softcap = -30 but it must be 0 (none) or from 1e-18 to 1e+18"},
      {"ChunkNegative", [](P& p) { p.chunk = -8192; },
       "chunk = -8192 but it must be at least 0 (0: none)"},
  };
}

std::vector<Rule<B>> backward_rules() {
  std::vector<Rule<B>> all = ragged_rules<B>();
  const std::vector<Rule<B>> backward = {
      {"DqNotPacked", [](B& p) { p.dq.ndim = 4; },
       "dq.ndim = 4 but it must be 3, [total_q, heads_q, head_dim]"},
      {"TotalDq", [](B& p) { p.dq.shape[0] = 5; },
       "dq.shape[0] = 5 but q.shape[0] = 6; q and dq must have the same shape"},
      {"TotalDlse", [](B& p) { p.dlse.shape[1] = 5; },
       "dlse.shape[1] = 5 but q.shape[0] = 6; q and dlse must have the same total_q"},
      {"LseMissing", [](B& p) { p.lse = {}; },
       "lse is all zero; the backward needs the lse, [heads_q, total_q], that the forward has "
       "written"},
      {"DsinkAlone", [](B& p) { p.sink = {}; },
       "dsink is given but sink is all zero; a gradient needs the sink that it belongs to"},
      {"DsinkDtype", [](B& p) { p.dsink.dtype = FLASH3_FLOAT16; },
       "dsink.dtype = 1 but sink.dtype = 3; sink and dsink must have the same dtype"},
      {"DsinkHeads", [](B& p) { p.dsink.shape[0] = 5; },
       "dsink.shape[0] = 5 but q.shape[1] = 4; q and dsink must have the same heads_q"},
      {"DsinkStride", [](B& p) { p.dsink.stride[0] = 0; },
       "dsink.stride[0] = 0 but it must be 1; the last dimension of dsink, [heads_q], must be "
       "contiguous"},
  };
  all.insert(all.end(), backward.begin(), backward.end());
  return all;
}

class RaggedForward : public testing::TestWithParam<Rule<F>> {};
class RaggedBackward : public testing::TestWithParam<Rule<B>> {};

TEST_P(RaggedForward, IsRefused) {
  RaggedCall call;
  F p = call.forward().params();
  ASSERT_TRUE(flash3_forward_supported(&p) != FLASH3_INVALID_ARGUMENT) << flash3_last_error();
  GetParam().breaks(p);
  EXPECT_EQ(flash3_forward_supported(&p), GetParam().status);
  EXPECT_EQ(flash3_last_error(), GetParam().message);
  EXPECT_EQ(flash3_forward(&p), GetParam().status);
  EXPECT_EQ(flash3_last_error(), GetParam().message);
  for (const float x : call.out) ASSERT_EQ(x, Call::kUntouched);
}

TEST_P(RaggedBackward, IsRefused) {
  RaggedCall call;
  B p = call.backward().params();
  ASSERT_TRUE(flash3_backward_supported(&p) != FLASH3_INVALID_ARGUMENT) << flash3_last_error();
  GetParam().breaks(p);
  EXPECT_EQ(flash3_backward_supported(&p), GetParam().status);
  EXPECT_EQ(flash3_last_error(), GetParam().message);
  EXPECT_EQ(flash3_backward(&p), GetParam().status);
  EXPECT_EQ(flash3_last_error(), GetParam().message);
  for (const float x : call.dq) ASSERT_EQ(x, 0.25f);
}

INSTANTIATE_TEST_SUITE_P(Rules, RaggedForward, testing::ValuesIn(ragged_rules<F>()),
                         [](const auto& test) { return std::string(test.param.name); });
INSTANTIATE_TEST_SUITE_P(Rules, RaggedBackward, testing::ValuesIn(backward_rules()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(RaggedPointers, NullDataIsRefusedOnlyByALaunch) {
  const struct {
    const char* name;
    flash3_tensor Backward::*member;
  } all[] = {{"cu_seqlens_q", &Backward::cu_seqlens_q},
             {"cu_seqlens_k", &Backward::cu_seqlens_k},
             {"seqused_q", &Backward::seqused_q},
             {"seqused_k", &Backward::seqused_k},
             {"sink", &Backward::sink},
             {"dsink", &Backward::dsink}};
  for (const auto& [name, member] : all) {
    RaggedCall call;
    Backward args = call.backward();
    (args.*member).data = nullptr;
    const B p = args.params();
    BackwardProblem problem;
    const Status question = make_backward_problem(&p, Pointers::kOptional, &problem);
    EXPECT_TRUE(question.ok()) << question.message();
    EXPECT_TRUE(problem.is_ragged() && problem.sink.given && problem.dsink.given);
    EXPECT_EQ(make_backward_problem(&p, Pointers::kRequired, &problem).message(),
              std::string(name) + ".data is null but " + name +
                  " has elements; only a tensor with a size of 0 needs no memory");
  }
}

BackwardProblem backward_problem(const Backward& args) {
  const B p = args.params();
  BackwardProblem problem;
  const Status status = make_backward_problem(&p, Pointers::kRequired, &problem);
  EXPECT_TRUE(status.ok()) << status.message();
  return problem;
}

TEST(RaggedProblem, IsTheCall) {
  RaggedCall call;
  Backward args = call.backward();
  args.softcap = 50.f;
  args.chunk = 4;
  args.window_left = 2;
  args.causal = true;
  const BackwardProblem p = backward_problem(args);
  EXPECT_TRUE(p.is_ragged());
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.seq_q, 3);
  EXPECT_EQ(p.seq_k, 5);
  EXPECT_EQ(p.heads_q, 4);
  EXPECT_EQ(p.heads_k, 2);
  EXPECT_EQ(p.head_dim, 8);
  EXPECT_EQ(p.head_dim_v, 16);
  for (const TensorView& t : {p.q, p.dq}) {
    EXPECT_EQ(t.batch, 2);
    EXPECT_EQ(t.seq, 3);
    EXPECT_EQ(t.stride_batch, 0);
    EXPECT_EQ(t.stride_seq, 32);
    EXPECT_EQ(t.stride_head, 8);
  }
  EXPECT_EQ(p.dv.seq, 5);
  EXPECT_EQ(p.dv.stride_seq, 32);
  EXPECT_EQ(p.dv.dim, 16);
  EXPECT_EQ(p.dout.dim, 16);
  for (const LseView& t : {p.lse, p.dlse}) {
    EXPECT_TRUE(t.wanted);
    EXPECT_EQ(t.stride_batch, 0);
    EXPECT_EQ(t.stride_head, 6);
  }
  EXPECT_EQ(p.sequences_q.rows, 6);
  EXPECT_EQ(p.sequences_k.rows, 9);
  EXPECT_EQ(p.sequences_k.cu, call.cu_k.data());
  EXPECT_EQ(p.sequences_k.used, call.used_k.data());
  const SeqInfo last = p.sequence(1);
  EXPECT_EQ(last.q.first, 2);
  EXPECT_EQ(last.q.length, 1);
  EXPECT_EQ(last.q.capacity, 3);
  EXPECT_EQ(last.k.first, 3);
  EXPECT_EQ(last.k.length, 4);
  EXPECT_EQ(last.k.capacity, 5);
  EXPECT_EQ(p.mask(last).row_shift, 3);  // aligned by the sequence's own lengths
  EXPECT_EQ(p.mask(last).band.lo, 1);
  EXPECT_EQ(p.mask(last).band.hi, 3);
  EXPECT_EQ(p.mask(last).chunk, 4);
  EXPECT_EQ(p.sink.data, call.sink.data());
  EXPECT_EQ(p.sink.dtype, FLASH3_FLOAT32);
  EXPECT_EQ(p.dsink.data, call.dsink.data());
  EXPECT_EQ(p.softcap, 50.f);
}

TEST(RaggedProblem, LengthsAreBoundedByTheRowsWhereNoMaximumIsGiven) {
  RaggedCall call;
  Forward args = call.forward();
  args.max_seqlen_q = 0;
  args.max_seqlen_k = 1000;
  const ForwardProblem p = problem_of(args);
  EXPECT_EQ(p.seq_q, 6);
  EXPECT_EQ(p.seq_k, 9);
}

TEST(RaggedProblem, EitherSideMayBePacked) {
  RaggedCall call;
  Forward args = call.forward();
  args.k = tensor(call.k.data(), FLASH3_FLOAT32, {2, 4, 2, 8});
  args.v = tensor(call.v.data(), FLASH3_FLOAT32, {2, 4, 2, 16});
  args.cu_seqlens_k = {}, args.max_seqlen_k = 0;
  ForwardProblem p = problem_of(args);
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.seq_k, 4);
  EXPECT_EQ(p.k.stride_batch, 64);
  EXPECT_EQ(p.sequence(1).k.first, 0);
  EXPECT_EQ(p.sequence(0).k.length, 3);
  EXPECT_EQ(p.sequence(1).k.length, 4);
  EXPECT_EQ(p.sequence(1).k.capacity, 4);

  args.k.shape[0] = 1;
  const F wrong = args.params();
  EXPECT_EQ(make_forward_problem(&wrong, Pointers::kRequired, &p).message(),
            "k.shape[0] = 1 but cu_seqlens_q.shape[0] - 1 = 2; cu_seqlens_q and k must have the "
            "same batch size");

  args = call.forward();
  args.q = tensor(call.q.data(), FLASH3_FLOAT32, {2, 3, 4, 8});
  args.out = tensor(call.out.data(), FLASH3_FLOAT32, {2, 3, 4, 16});
  args.lse = lse_tensor(call.lse.data(), 2, 4, 3);
  args.cu_seqlens_q = {}, args.max_seqlen_q = 0;
  p = problem_of(args);
  EXPECT_EQ(p.q.stride_batch, 96);
  EXPECT_EQ(p.lse.stride_batch, 12);
  EXPECT_EQ(p.sequence(1).q.length, 1);
  EXPECT_EQ(p.sequence(1).k.first, 3);
}

TEST(RaggedProblem, OneLengthIsNotRagged) {
  Call call;
  const ForwardProblem p = problem_of(call.args);
  EXPECT_FALSE(p.is_ragged());
  for (int b = 0; b < 2; ++b) {
    const SeqInfo s = p.sequence(b);
    EXPECT_EQ(s.q.first, 0);
    EXPECT_EQ(s.q.length, 3);
    EXPECT_EQ(s.k.first, 0);
    EXPECT_EQ(s.k.length, 5);
    EXPECT_EQ(s.k.capacity, 5);
  }
}

// A dsink of no rows is 0, which someone has to write.
TEST(RaggedProblem, Emptiness) {
  RaggedCall call;
  Backward args = call.backward();
  for (Tensor* t : {&args.cu_seqlens_q, &args.cu_seqlens_k}) t->shape[0] = 1;
  for (Tensor* t : {&args.seqused_q, &args.seqused_k}) t->shape[0] = 0;
  EXPECT_FALSE(backward_problem(args).is_empty());
  args.dsink = {};
  EXPECT_TRUE(backward_problem(args).is_empty());
  Forward forward = call.forward();
  EXPECT_FALSE(problem_of(forward).is_empty());
  forward.q.shape[0] = forward.out.shape[0] = forward.lse.shape[1] = 0;
  EXPECT_TRUE(problem_of(forward).is_empty());
}

// ---- what explain says of it ----

// "problem" to the line before the backend's own; a batch of no sequences needs no backend.
template <class Args>
std::string explained(Args args) {
  args.cu_seqlens_q.shape[0] = 1;
  args.cu_seqlens_k.shape[0] = 1;
  args.seqused_q = args.seqused_k = {};
  const std::string text = explain(args);
  return text.substr(text.find("problem"));
}

TEST(RaggedExplain, TellsTheCall) {
  RaggedCall call;
  Forward forward = call.forward();
  forward.softmax_scale = 0.25f;
  const std::string sizes =
      "float32, batch 0, seq_q up to 3 of 6 packed rows, seq_k up to 5 of 9 packed rows, heads_q "
      "4, heads_k 2, head_dim 8, head_dim_v 16";
  EXPECT_EQ(explained(forward), "problem: " + sizes +
                                    ", with lse, with float32 sink\n"
                                    "mask: none\nsoftmax_scale: 0.25\n");
  forward.softcap = 30.f;
  forward.causal = true;
  forward.window_left = 7;
  forward.chunk = 16;
  EXPECT_EQ(explained(forward),
            "problem: " + sizes +
                ", with lse, with float32 sink\n"
                "mask: query i sees keys j with i' - 7 <= j <= i' and j / 16 = i' / 16, rounded "
                "down, with i' = i + the sequence's keys - its queries\n"
                "softmax_scale: 0.25\nsoftcap: 30\n");
  Backward backward = call.backward();
  backward.dsink = {};
  backward.softmax_scale = 0.25f;
  backward.window_right = 2;
  EXPECT_EQ(explained(backward),
            "problem: backward, " + sizes +
                ", with dlse, with float32 sink\n"
                "mask: query i sees keys j with j <= i' + 2, with i' = i + the sequence's keys - "
                "its queries\n"
                "softmax_scale: 0.25\n");
}

TEST(RaggedExplain, TellsChunksOfOneLength) {
  Call call({2, 3, 5, 0, 2, 8, 16});  // no query head: no backend
  call.args.chunk = 2;
  EXPECT_NE(explain(call.args).find(
                "\nmask: query i sees keys j with j / 2 = (i + 2) / 2, rounded down\n"),
            std::string::npos)
      << explain(call.args);
  call.args.chunk = 5;
  EXPECT_NE(explain(call.args).find("\nmask: none\n"), std::string::npos);
}

// ---- what the index tensors hold ----

template <class Bend>
std::string lengths_error(const Bend& bend) {
  RaggedCall call;
  Forward args = call.forward();
  bend(call, args);
  return lengths_message(args);
}

TEST(Lengths, Rules) {
  EXPECT_EQ(lengths_error([](RaggedCall&, Forward&) {}), "");
  EXPECT_EQ(lengths_error([](RaggedCall& c, Forward&) { c.cu_q = {1, 3, 6}; }), "");
  EXPECT_EQ(lengths_error([](RaggedCall& c, Forward&) { c.cu_q[0] = -1; }),
            "cu_seqlens_q[0] = -1 but it must be from 0 to 6, the rows of the packed tensors");
  EXPECT_EQ(lengths_error([](RaggedCall& c, Forward&) { c.cu_k[2] = 10; }),
            "cu_seqlens_k[2] = 10 but it must be from 0 to 9, the rows of the packed tensors");
  EXPECT_EQ(lengths_error([](RaggedCall& c, Forward&) { c.cu_q[2] = 1; }),
            "cu_seqlens_q[2] = 1 but cu_seqlens_q[1] = 2; cu_seqlens_q must not decrease");
  EXPECT_EQ(lengths_error([](RaggedCall& c, Forward&) { c.used_q[0] = 3; }),
            "seqused_q[0] = 3 but it must be from 0 to 2, the rows of that sequence");
  EXPECT_EQ(lengths_error([](RaggedCall& c, Forward&) { c.used_k[1] = -2; }),
            "seqused_k[1] = -2 but it must be from 0 to 5, the rows of that sequence");
  EXPECT_EQ(lengths_error([](RaggedCall&, Forward& f) { f.max_seqlen_k = 3; }),
            "max_seqlen_k = 3 but sequence 1 has 4 tokens; no sequence may be longer");
  EXPECT_EQ(lengths_error([](RaggedCall&, Forward& f) { f.max_seqlen_k = 4; }), "");
}

}  // namespace
}  // namespace flash3::test
