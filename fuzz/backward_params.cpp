// SPDX-License-Identifier: Apache-2.0
// flash3_backward and its questions.
#include "call.hpp"

namespace flash3::fuzz {
namespace {

constexpr Functions<flash3_backward_params> kBackward = {
    flash3_backward_supported, flash3_backward_workspace, flash3_backward, flash3_backward_explain};

flash3_backward_params make(Bytes* bytes, Memory* memory, bool* whole) {
  flash3_backward_params p{};
  p.struct_size = sizeof p;
  Sizes s = draw_sizes(bytes, *memory);
  draw_sequences(bytes, memory, &s, &p);
  const auto dtype = bytes->pick({FLASH3_FLOAT32, FLASH3_FLOAT16, FLASH3_BFLOAT16});
  p.dout = memory->input(dtype, s.q(s.dim_v));
  if (bytes->flag()) p.dlse = memory->input(FLASH3_FLOAT32, s.lse());
  p.q = memory->input(dtype, s.q(s.dim));
  p.k = memory->input(dtype, s.k(s.dim));
  p.v = memory->input(dtype, s.k(s.dim_v));
  p.out = memory->input(dtype, s.q(s.dim_v));
  p.lse = memory->input(FLASH3_FLOAT32, s.lse());
  p.dq = memory->output(dtype, s.q(s.dim));
  p.dk = memory->output(dtype, s.k(s.dim));
  p.dv = memory->output(dtype, s.k(s.dim_v));
  if (bytes->flag()) {
    const auto of_sink = bytes->flag() ? FLASH3_FLOAT32 : dtype;
    p.sink = memory->input(of_sink, {s.heads_q});
    if (bytes->flag()) p.dsink = memory->output(of_sink, {s.heads_q});
  }
  draw_options(bytes, &p);
  p.deterministic = bytes->rarely() ? bytes->raw<int32_t>() : bytes->flag();
  draw_machine(bytes, &p);
  if (bytes->rarely()) p.fill_padding = bytes->raw<int32_t>() % 3;
  draw_added(bytes, memory, s, &p);
  *whole = !s.packed_q && !s.packed_k;  // unused tokens get gradients too, which are 0
  return p;
}

}  // namespace
}  // namespace flash3::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return flash3::fuzz::run_target(flash3::fuzz::kBackward, data, size, flash3::fuzz::make);
}
