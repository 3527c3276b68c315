// SPDX-License-Identifier: Apache-2.0
// A small valid backward call on host memory that a test can then bend: the forward of call.hpp has
// run, without a mask, and its gradients are asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "call.hpp"

namespace flash3::test {

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

// Owns the memory of a float32 call.
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

}  // namespace flash3::test
