// SPDX-License-Identifier: Apache-2.0
// flash3_forward and its questions.
#include "call.hpp"

namespace flash3::fuzz {
namespace {

constexpr Functions<flash3_forward_params> kForward = {
    flash3_forward_supported, flash3_forward_workspace, flash3_forward, flash3_forward_explain};

flash3_tensor scale(Bytes* bytes, Memory* memory, const Sizes& s, bool of_q) {
  const bool packed = of_q ? s.packed_q : s.packed_k;
  const int64_t seq = of_q ? s.seq_q : s.seq_k, rows = of_q ? s.rows_q : s.rows_k;
  switch (bytes->between(0, 3)) {
    case 1: return memory->input(FLASH3_FLOAT32, {1});
    case 2: return memory->input(FLASH3_FLOAT32, {s.batch, s.heads_k});
    case 3:
      return memory->input(FLASH3_FLOAT32,
                           {packed ? 1 : s.batch, of_q ? s.heads_q : s.heads_k,
                            packed ? rows / FLASH3_FP8_BLOCK + s.batch
                                   : seq / FLASH3_FP8_BLOCK + (seq % FLASH3_FP8_BLOCK > 0)});
    default: return {};
  }
}

flash3_forward_params make(Bytes* bytes, Memory* memory, bool* whole) {
  flash3_forward_params p{};
  p.struct_size = sizeof p;
  Sizes s = draw_sizes(bytes, *memory);
  draw_sequences(bytes, memory, &s, &p);
  const auto dtype =
      bytes->pick({FLASH3_FLOAT32, FLASH3_FLOAT16, FLASH3_BFLOAT16, FLASH3_FLOAT8_E4M3});
  const auto out = dtype == FLASH3_FLOAT8_E4M3
                       ? bytes->pick({FLASH3_BFLOAT16, FLASH3_FLOAT16, FLASH3_FLOAT32})
                       : dtype;
  p.q = memory->input(dtype, s.q(s.dim));
  p.k = memory->input(dtype, s.k(s.dim));
  p.v = memory->input(dtype, s.k(s.dim_v));
  p.out = memory->output(out, s.q(s.dim_v));
  if (bytes->flag()) p.lse = memory->output(FLASH3_FLOAT32, s.lse());
  if (bytes->flag()) p.sink = memory->input(bytes->flag() ? FLASH3_FLOAT32 : out, {s.heads_q});
  if (dtype == FLASH3_FLOAT8_E4M3) {
    p.q_scale = scale(bytes, memory, s, true);
    p.k_scale = scale(bytes, memory, s, false);
    p.v_scale = scale(bytes, memory, s, false);
  } else if (bytes->between(0, 3) == 3) {
    p.compute = FLASH3_COMPUTE_FP8;
    p.rotation_seed = bytes->raw<uint64_t>();
  }
  draw_options(bytes, &p);
  draw_machine(bytes, &p);
  if (bytes->rarely()) p.fp8_sums = bytes->raw<int32_t>() % 4;
  if (bytes->rarely()) p.fill_padding = bytes->raw<int32_t>() % 3;
  draw_added(bytes, memory, s, &p);
  *whole = !s.packed_q && p.seqused_q.ndim == 0;
  return p;
}

}  // namespace
}  // namespace flash3::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return flash3::fuzz::run_target(flash3::fuzz::kForward, data, size, flash3::fuzz::make);
}
