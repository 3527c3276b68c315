// SPDX-License-Identifier: Apache-2.0
// The rules that forward and backward calls have in common: what breaks each, and the exact
// sentence that the user reads.
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>
#include <functional>
#include <limits>
#include <ostream>
#include <regex>
#include <string>
#include <vector>

#include "flash3/flash3.h"

namespace flash3::test {

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
