// SPDX-License-Identifier: Apache-2.0
// A small valid ragged call on host memory, forward or backward, that a test can then bend: two
// sequences in packed tensors, and a sink.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "call.hpp"

namespace flash3::test {

// Owns the memory of a float32 call: 4 query heads on 2 KV heads, head_dim 8, head_dim_v 16.
struct RaggedCall {
  static constexpr int64_t kTotalQ = 6, kTotalK = 9;  // with a row behind the last sequence

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

}  // namespace flash3::test
