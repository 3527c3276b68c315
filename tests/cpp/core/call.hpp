// SPDX-License-Identifier: Apache-2.0
// Small valid calls on host memory that a test can then bend.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <ostream>
#include <regex>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "flash3/flash3.h"
#include "flash3/flash3.hpp"

namespace flash3::test {

struct Sizes {
  int64_t batch = 2, seq_q = 3, seq_k = 5, heads_q = 4, heads_k = 2, head_dim = 8, head_dim_v = 16;
};

// Owns the memory of a float32 call.
class Call {
 public:
  explicit Call(const Sizes& s = {}, bool with_lse = true)
      : q_(fill(s.batch * s.seq_q * s.heads_q * s.head_dim)),
        k_(fill(s.batch * s.seq_k * s.heads_k * s.head_dim)),
        v_(fill(s.batch * s.seq_k * s.heads_k * s.head_dim_v)),
        out(static_cast<size_t>(s.batch * s.seq_q * s.heads_q * s.head_dim_v), kUntouched),
        lse(static_cast<size_t>(s.batch * s.heads_q * s.seq_q), kUntouched) {
    args.q = tensor(q_.data(), FLASH3_FLOAT32, {s.batch, s.seq_q, s.heads_q, s.head_dim});
    args.k = tensor(k_.data(), FLASH3_FLOAT32, {s.batch, s.seq_k, s.heads_k, s.head_dim});
    args.v = tensor(v_.data(), FLASH3_FLOAT32, {s.batch, s.seq_k, s.heads_k, s.head_dim_v});
    args.out = tensor(out.data(), FLASH3_FLOAT32, {s.batch, s.seq_q, s.heads_q, s.head_dim_v});
    if (with_lse) args.lse = lse_tensor(lse.data(), s.batch, s.heads_q, s.seq_q);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  flash3_forward_params params() const { return args.params(); }

  static constexpr float kUntouched = -12345.f;

 private:
  // Values that differ from each other and stay small.
  std::vector<float> fill(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& x : values) {
      state_ = state_ * 1664525u + 1013904223u;
      x = static_cast<float>(state_ >> 8) / (1 << 23) - 1.f;
    }
    return values;
  }

  uint32_t state_ = 1;
  std::vector<float> q_, k_, v_;

 public:
  std::vector<float> out, lse;
  Forward args;
};

// The forward call whose gradients `b` asks for, on the same tensors.
inline Forward forward_of(const Backward& b) {
  return {.q = b.q,
          .k = b.k,
          .v = b.v,
          .out = b.out,
          .lse = b.lse,
          .softmax_scale = b.softmax_scale,
          .causal = b.causal,
          .window_left = b.window_left,
          .window_right = b.window_right,
          .chunk = b.chunk,
          .softcap = b.softcap,
          .sink = b.sink,
          .cu_seqlens_q = b.cu_seqlens_q,
          .cu_seqlens_k = b.cu_seqlens_k,
          .seqused_q = b.seqused_q,
          .seqused_k = b.seqused_k,
          .max_seqlen_q = b.max_seqlen_q,
          .max_seqlen_k = b.max_seqlen_k};
}

// Owns the memory of a float32 backward call: the forward of Call has run, without a mask, and its
// gradients are asked for.
class BackwardCall {
 public:
  explicit BackwardCall(const Sizes& s = {}, bool with_dlse = true)
      : forward_(s),
        dq(static_cast<size_t>(s.batch * s.seq_q * s.heads_q * s.head_dim), Call::kUntouched),
        dk(static_cast<size_t>(s.batch * s.seq_k * s.heads_k * s.head_dim), Call::kUntouched),
        dv(static_cast<size_t>(s.batch * s.seq_k * s.heads_k * s.head_dim_v), Call::kUntouched) {
    dout_.resize(forward_.out.size());
    for (size_t i = 0; i < dout_.size(); ++i) dout_[i] = float(i % 7) - 3.f;
    dlse_.resize(forward_.lse.size());
    for (size_t i = 0; i < dlse_.size(); ++i) dlse_[i] = float(i % 3) - 1.f;

    args.q = forward_.args.q, args.k = forward_.args.k, args.v = forward_.args.v;
    args.out = forward_.args.out, args.lse = forward_.args.lse;
    args.dout = args.out, args.dout.data = dout_.data();
    if (with_dlse) args.dlse = args.lse, args.dlse.data = dlse_.data();
    args.dq = args.q, args.dq.data = dq.data();
    args.dk = args.k, args.dk.data = dk.data();
    args.dv = args.v, args.dv.data = dv.data();
    run_forward();
  }
  BackwardCall(const BackwardCall&) = delete;
  BackwardCall& operator=(const BackwardCall&) = delete;

  flash3_backward_params params() const { return args.params(); }

  // out and lse again, as args now are.
  void run_forward() {
    Forward forward = forward_of(args);
    forward.backend = FLASH3_BACKEND_CPU;
    forward.num_threads = 1;  // no workspace
    flash3::forward(forward);
  }

 private:
  Call forward_;
  std::vector<float> dout_, dlse_;

 public:
  std::vector<float> dq, dk, dv;
  Backward args;
};

// Owns the memory of a float32 call on a KV cache: two sequences in pages of 4, to which tokens are
// appended, with a rotary embedding; 4 query heads on 2 KV heads, head_dim 8, head_dim_v 16.
struct CacheCall {
  static constexpr int64_t kPages = 5, kPageSize = 4, kMaxPages = 3, kPositions = 20;

  // An entry that no key needs may be anything.
  std::array<int32_t, 6> table{3, 1, -77, 0, 4, 2};
  std::array<int32_t, 2> used{5, 9}, leftpad{2, 0}, offsets{1, 4}, batch_idx{4, 1};
  std::array<int32_t, 3> cu_new{0, 1, 3};
  std::vector<float> q = std::vector<float>(2 * 2 * 4 * 8, 0.25f);
  std::vector<float> k = std::vector<float>(kPages * kPageSize * 2 * 8, 0.5f);
  std::vector<float> v = std::vector<float>(kPages * kPageSize * 2 * 16, 1.f);
  std::vector<float> k_new = std::vector<float>(2 * 3 * 2 * 8, 0.75f);
  std::vector<float> v_new = std::vector<float>(2 * 3 * 2 * 16, 2.f);
  std::vector<float> cos = std::vector<float>(kPositions * 3, 0.5f), sin = cos;
  std::vector<float> out = std::vector<float>(2 * 2 * 4 * 16, Call::kUntouched);

  CacheCall() = default;
  CacheCall(const CacheCall&) = delete;
  CacheCall& operator=(const CacheCall&) = delete;

  Forward args() {
    Forward f;
    f.q = tensor(q.data(), FLASH3_FLOAT32, {2, 2, 4, 8});
    f.k = tensor(k.data(), FLASH3_FLOAT32, {kPages, kPageSize, 2, 8});
    f.v = tensor(v.data(), FLASH3_FLOAT32, {kPages, kPageSize, 2, 16});
    f.out = tensor(out.data(), FLASH3_FLOAT32, {2, 2, 4, 16});
    f.page_table = page_table_tensor(table.data(), 2, kMaxPages);
    f.seqused_k = index_tensor(used.data(), 2);
    f.leftpad_k = index_tensor(leftpad.data(), 2);
    f.k_new = tensor(k_new.data(), FLASH3_FLOAT32, {2, 3, 2, 8});
    f.v_new = tensor(v_new.data(), FLASH3_FLOAT32, {2, 3, 2, 16});
    f.rotary_cos = rotary_tensor(cos.data(), FLASH3_FLOAT32, kPositions, 3);
    f.rotary_sin = rotary_tensor(sin.data(), FLASH3_FLOAT32, kPositions, 3);
    f.rotary_offsets = index_tensor(offsets.data(), 2);
    f.causal = true;
    return f;
  }

  // The same without pages: a cache of five elements with four rows each.
  Forward elements() {
    Forward f = args();
    f.page_table = {};
    f.cache_batch_idx = index_tensor(batch_idx.data(), 2);
    f.k_new = f.v_new = f.rotary_cos = f.rotary_sin = f.rotary_offsets = {};
    used = {3, 4};
    return f;
  }
};

// Owns the memory of a float32 ragged call, forward or backward: two sequences in packed tensors,
// and a sink; 4 query heads on 2 KV heads, head_dim 8, head_dim_v 16.
struct RaggedCall {
  static constexpr int64_t kTotalQ = 6, kTotalK = 9;  // with a row after the last sequence

  std::array<int32_t, 3> cu_q{0, 2, 5}, cu_k{0, 3, 8};
  std::array<int32_t, 2> used_q{2, 1}, used_k{3, 4};
  std::vector<float> q = std::vector<float>(kTotalQ * 4 * 8, 0.25f);
  std::vector<float> k = std::vector<float>(kTotalK * 2 * 8, 0.5f);
  std::vector<float> v = std::vector<float>(kTotalK * 2 * 16, 1.f);
  std::vector<float> out = std::vector<float>(kTotalQ * 4 * 16, Call::kUntouched);
  std::vector<float> lse = std::vector<float>(4 * kTotalQ, Call::kUntouched);
  std::vector<float> dout = out, dlse = lse, dq = q, dk = k, dv = v;
  std::vector<float> sink = std::vector<float>(4, -1.f), dsink = sink;

  RaggedCall() = default;
  RaggedCall(const RaggedCall&) = delete;
  RaggedCall& operator=(const RaggedCall&) = delete;

  Forward forward() {
    Forward f;
    f.q = packed_tensor(q.data(), FLASH3_FLOAT32, {kTotalQ, 4, 8});
    f.k = packed_tensor(k.data(), FLASH3_FLOAT32, {kTotalK, 2, 8});
    f.v = packed_tensor(v.data(), FLASH3_FLOAT32, {kTotalK, 2, 16});
    f.out = packed_tensor(out.data(), FLASH3_FLOAT32, {kTotalQ, 4, 16});
    f.lse = packed_lse_tensor(lse.data(), 4, kTotalQ);
    set_sequences(&f);
    return f;
  }

  Backward backward() {
    const Forward f = forward();
    Backward b;
    b.q = f.q, b.k = f.k, b.v = f.v, b.out = f.out, b.lse = f.lse;
    b.dout = f.out, b.dlse = f.lse, b.dq = f.q, b.dk = f.k, b.dv = f.v;
    b.dout.data = dout.data(), b.dlse.data = dlse.data();
    b.dq.data = dq.data(), b.dk.data = dk.data(), b.dv.data = dv.data();
    b.dsink = sink_tensor(dsink.data(), FLASH3_FLOAT32, 4);
    set_sequences(&b);
    return b;
  }

 private:
  template <class Args>
  void set_sequences(Args* args) {
    args->cu_seqlens_q = index_tensor(cu_q.data(), 3);
    args->cu_seqlens_k = index_tensor(cu_k.data(), 3);
    args->seqused_q = index_tensor(used_q.data(), 2);
    args->seqused_k = index_tensor(used_k.data(), 2);
    args->max_seqlen_q = 3;
    args->max_seqlen_k = 5;
    args->sink = sink_tensor(sink.data(), FLASH3_FLOAT32, 4);
  }
};

// What a valid forward call becomes, for tests of what it then means.

inline ForwardProblem problem_of(const Forward& args, Pointers pointers = Pointers::kRequired) {
  const auto p = args.params();
  ForwardProblem problem;
  const Status status = make_forward_problem(&p, pointers, &problem);
  EXPECT_TRUE(status.ok()) << status.message();
  return problem;
}

// What is said of the index tensors of the call; "" if nothing.
inline std::string lengths_message(const Forward& args) {
  const Status status = check_lengths(problem_of(args));
  EXPECT_EQ(status.code(), status.ok() ? FLASH3_OK : FLASH3_INVALID_ARGUMENT);
  return status.message();
}

// The rules that forward and backward calls have in common: what breaks each, and the exact
// sentence that the user reads.

// A sentence about memory, without the addresses that differ each time.
inline std::string without_addresses(const std::string& sentence) {
  return std::regex_replace(sentence, std::regex(" at 0x[0-9a-f]+"), "");
}

constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

// P: flash3_forward_params or flash3_backward_params.
template <class P>
struct Rule {
  const char* name;
  std::function<void(P&)> breaks;
  std::string message;
  flash3_status status = FLASH3_INVALID_ARGUMENT;
};

template <class P>
void PrintTo(const Rule<P>& rule, std::ostream* os) {
  *os << rule.name;
}

// For a call of the sizes in call.hpp. `params`: the name of P.
template <class P>
std::vector<Rule<P>> shared_rules(const std::string& params) {
  constexpr bool kForward = std::same_as<P, flash3_forward_params>;
  const auto bad_enum = static_cast<flash3_dtype>(99);
  const size_t first_version = offsetof(P, cu_seqlens_q);  // what version 0.1 had
  const std::string takes = " but " + params + " takes " + std::to_string(sizeof(P)) +
                            " bytes; set struct_size = sizeof(" + params + ")";
  return {
      {"StructSizeNotSet", [](P& p) { p.struct_size = 0; }, "struct_size = 0" + takes},
      {"StructSizeTooSmall", [=](P& p) { p.struct_size = first_version - 1; },
       "struct_size = " + std::to_string(first_version - 1) + takes},
      {"StructSizeGarbage", [](P& p) { p.struct_size = 0xDEADBEEF00; },
       "struct_size = 956397711104" + takes},

      {"QMissing", [](P& p) { p.q = {}; },
       "q is all zero; it must be a tensor [batch, seq_q, heads_q, head_dim]"},
      {"KMissing", [](P& p) { p.k = {}; },
       "k is all zero; it must be a tensor [batch, seq_k, heads_k, head_dim]"},
      {"VMissing", [](P& p) { p.v = {}; },
       "v is all zero; it must be a tensor [batch, seq_k, heads_k, head_dim_v]"},
      {"OutMissing", [](P& p) { p.out = {}; },
       "out is all zero; it must be a tensor [batch, seq_q, heads_q, head_dim_v]"},

      {"QDtypeNone", [](P& p) { p.q.dtype = FLASH3_DTYPE_NONE; },
       "q.dtype = 0 but it must be 1 (float16), 2 (bfloat16), 3 (float32) or, of a forward call, 5 "
       "(float8_e4m3)"},
      {"VDtypeUnknown", [=](P& p) { p.v.dtype = bad_enum; },
       "v.dtype = 99 but it must be 1 (float16), 2 (bfloat16), 3 (float32) or, of a forward call, "
       "5 "
       "(float8_e4m3)"},
      {"QNdim", [](P& p) { p.q.ndim = 3; },
       "q.ndim = 3 but it must be 4, [batch, seq_q, heads_q, head_dim]; packed sequences need "
       "cu_seqlens_q"},
      {"OutNdim", [](P& p) { p.out.ndim = 5; },
       "out.ndim = 5 but it must be 4, [batch, seq_q, heads_q, head_dim_v]"},
      {"LseNdim", [](P& p) { p.lse.ndim = 4; },
       "lse.ndim = 4 but it must be 3, [batch, heads_q, seq_q]"},

      {"NegativeSize", [](P& p) { p.k.shape[1] = -5; },
       "k.shape[1] = -5 but a size must be from 0 to 2147483647"},
      {"HugeSeq", [](P& p) { p.q.shape[1] = kMaxSize + 1; },
       "q.shape[1] = 2147483648 but a size must be from 0 to 2147483647"},
      {"HugeBatch", [](P& p) { p.v.shape[0] = kHuge; },
       "v.shape[0] = 9223372036854775807 but a size must be from 0 to 2147483647"},
      {"NegativeLseSize", [](P& p) { p.lse.shape[2] = -1; },
       "lse.shape[2] = -1 but a size must be from 0 to 2147483647"},

      {"BatchK", [](P& p) { p.k.shape[0] = 7; },
       "k.shape[0] = 7 but q.shape[0] = 2; q and k must have the same batch size"},
      {"BatchV", [](P& p) { p.v.shape[0] = 7; },
       "v.shape[0] = 7 but q.shape[0] = 2; q and v must have the same batch size"},
      {"BatchOut", [](P& p) { p.out.shape[0] = 7; },
       "out.shape[0] = 7 but q.shape[0] = 2; q and out must have the same batch size"},
      {"SeqV", [](P& p) { p.v.shape[1] = 7; },
       "v.shape[1] = 7 but k.shape[1] = 5; k and v must have the same seq_k"},
      {"HeadsV", [](P& p) { p.v.shape[2] = 7; },
       "v.shape[2] = 7 but k.shape[2] = 2; k and v must have the same heads_k"},
      {"HeadDimK", [](P& p) { p.k.shape[3] = 7; },
       "k.shape[3] = 7 but q.shape[3] = 8; q and k must have the same head_dim"},
      {"SeqOut", [](P& p) { p.out.shape[1] = 7; },
       "out.shape[1] = 7 but q.shape[1] = 3; q and out must have the same seq_q"},
      {"HeadsOut", [](P& p) { p.out.shape[2] = 7; },
       "out.shape[2] = 7 but q.shape[2] = 4; q and out must have the same heads_q"},
      {"HeadDimOut", [](P& p) { p.out.shape[3] = 7; },
       "out.shape[3] = 7 but v.shape[3] = 16; v and out must have the same head_dim_v"},
      {"BatchLse", [](P& p) { p.lse.shape[0] = 7; },
       "lse.shape[0] = 7 but q.shape[0] = 2; q and lse must have the same batch size"},
      {"HeadsLse", [](P& p) { p.lse.shape[1] = 7; },
       "lse.shape[1] = 7 but q.shape[2] = 4; q and lse must have the same heads_q"},
      {"SeqLse", [](P& p) { p.lse.shape[2] = 7; },
       "lse.shape[2] = 7 but q.shape[1] = 3; q and lse must have the same seq_q"},

      {"HeadDimZero", [](P& p) { p.q.shape[3] = p.k.shape[3] = 0; },
       kForward ? "q.shape[3] = 0 but head_dim must be from 1 to 576"
                : "q.shape[3] = 0 but head_dim must be from 1 to 256"},
      {"HeadDimTooLarge", [](P& p) { p.q.shape[3] = p.k.shape[3] = 577; },
       kForward ? "q.shape[3] = 577 but head_dim must be from 1 to 576"
                : "q.shape[3] = 577 but head_dim must be from 1 to 256"},
      {"HeadDimVZero", [](P& p) { p.v.shape[3] = p.out.shape[3] = 0; },
       kForward ? "v.shape[3] = 0 but head_dim_v must be from 1 to 512"
                : "v.shape[3] = 0 but head_dim_v must be from 1 to 256"},
      {"HeadDimVTooLarge", [](P& p) { p.v.shape[3] = p.out.shape[3] = 513; },
       kForward ? "v.shape[3] = 513 but head_dim_v must be from 1 to 512"
                : "v.shape[3] = 513 but head_dim_v must be from 1 to 256"},
      {"HeadsNotDivisible", [](P& p) { p.k.shape[2] = p.v.shape[2] = 3; },
       "q.shape[2] = 4 but k.shape[2] = 3; heads_q must be a multiple of heads_k"},
      {"MoreKvHeads", [](P& p) { p.k.shape[2] = p.v.shape[2] = 8; },
       "q.shape[2] = 4 but k.shape[2] = 8; heads_q must be a multiple of heads_k"},
      {"NoKvHeads", [](P& p) { p.k.shape[2] = p.v.shape[2] = 0; },
       "q.shape[2] = 4 but k.shape[2] = 0; heads_q must be a multiple of heads_k"},
      {"TooManyHeads",
       [](P& p) {
         for (flash3_tensor* t : {&p.q, &p.k, &p.v, &p.out}) t->shape[0] = 1 << 29;
       },
       "q.shape[0] = 536870912 and q.shape[2] = 4; batch * heads_q must be at most 2147483647"},

      {"NegativeStride", [](P& p) { p.q.stride[1] = -32; },
       "q.stride[1] = -32 but a stride must be at least 0"},
      {"LastStrideK", [](P& p) { p.k.stride[3] = 2; },
       "k.stride[3] = 2 but it must be 1; the last dimension of k, [batch, seq_k, heads_k, "
       "head_dim], must be contiguous"},
      {"LastStrideOut", [](P& p) { p.out.stride[3] = 0; },
       "out.stride[3] = 0 but it must be 1; the last dimension of out, [batch, seq_q, heads_q, "
       "head_dim_v], must be contiguous"},
      {"LastStrideLse", [](P& p) { p.lse.stride[2] = 2; },
       "lse.stride[2] = 2 but it must be 1; the last dimension of lse, [batch, heads_q, seq_q], "
       "must be contiguous"},
      {"StrideProductOverflows", [](P& p) { p.v.stride[1] = kHuge / 2; },
       "v takes more than 2^56 bytes; shape x stride = 2 x 160 + 5 x "
       "4611686018427387903 + 2 x 16 + 16 x 1"},
      {"BytesOverflow", [](P& p) { p.k.stride[0] = kHuge / 4; },
       "k takes more than 2^56 bytes; shape x stride = 2 x 2305843009213693951 + 5 x 16 "
       "+ 2 x 8 + 8 x 1"},
      {"ScaleNan", [](P& p) { p.softmax_scale = std::nanf(""); },
       "softmax_scale = nan but it must be 0 (1/sqrt(head_dim)) or from 1e-18 to 1e+18"},
      {"ScaleInfinite", [](P& p) { p.softmax_scale = INFINITY; },
       "softmax_scale = inf but it must be 0 (1/sqrt(head_dim)) or from 1e-18 to 1e+18"},
      {"ScaleNegative", [](P& p) { p.softmax_scale = -0.125f; },
       "softmax_scale = -0.125 but it must be 0 (1/sqrt(head_dim)) or from 1e-18 to 1e+18"},
      {"ScaleTooSmall", [](P& p) { p.softmax_scale = 9e-19f; },
       "softmax_scale = 9e-19 but it must be 0 (1/sqrt(head_dim)) or from 1e-18 to 1e+18"},
      {"ScaleDenormal", [](P& p) { p.softmax_scale = 1e-45f; },
       "softmax_scale = 1e-45 but it must be 0 (1/sqrt(head_dim)) or from 1e-18 to 1e+18"},
      {"ScaleTooLarge", [](P& p) { p.softmax_scale = 3e38f; },
       "softmax_scale = 3e+38 but it must be 0 (1/sqrt(head_dim)) or from 1e-18 to 1e+18"},
      {"Causal", [](P& p) { p.causal = 2; }, "causal = 2 but it must be 0 or 1"},
      {"Window", [](P& p) { p.window = -1; }, "window = -1 but it must be 0 or 1"},
      {"Backend", [](P& p) { p.backend = 3; },
       "backend = 3 but it must be 0 (auto), 1 (hopper) or 2 (cpu)"},
      {"BackendNegative", [](P& p) { p.backend = -1; },
       "backend = -1 but it must be 0 (auto), 1 (hopper) or 2 (cpu)"},
      {"Threads", [](P& p) { p.num_threads = -4; },
       "num_threads = -4 but it must be at least 0 (0: one per core)"},
  };
}

}  // namespace flash3::test
