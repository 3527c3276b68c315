// SPDX-License-Identifier: Apache-2.0
// flash3_quantize and its questions.
#include "call.hpp"

namespace flash3::fuzz {
namespace {

constexpr Functions<flash3_quantize_params> kQuantize = {
    flash3_quantize_supported, flash3_quantize_workspace, flash3_quantize, flash3_quantize_explain};

flash3_tensor scale(Bytes* bytes, Memory* memory, const Sizes& s, bool of_q) {
  const bool packed = of_q ? s.packed_q : s.packed_k;
  const int64_t seq = of_q ? s.seq_q : s.seq_k, rows = of_q ? s.rows_q : s.rows_k;
  switch (bytes->between(0, 2)) {
    case 0: return memory->output(FLASH3_FLOAT32, {1});
    case 1: return memory->output(FLASH3_FLOAT32, {s.batch, s.heads_k});
    default:
      return memory->output(FLASH3_FLOAT32,
                            {packed ? 1 : s.batch, of_q ? s.heads_q : s.heads_k,
                             packed ? rows / FLASH3_FP8_BLOCK + s.batch
                                    : seq / FLASH3_FP8_BLOCK + (seq % FLASH3_FP8_BLOCK > 0)});
  }
}

flash3_quantize_params make(Bytes* bytes, Memory* memory, bool* whole) {
  flash3_quantize_params p{};
  p.struct_size = sizeof p;
  Sizes s = draw_sizes(bytes, *memory);
  draw_sequences(bytes, memory, &s, &p);
  const auto dtype = bytes->pick({FLASH3_FLOAT32, FLASH3_FLOAT16, FLASH3_BFLOAT16});
  const auto part = [&](const Shape& shape, bool of_q, flash3_tensor* in, flash3_tensor* out,
                        flash3_tensor* scales) {
    if (bytes->between(0, 3) == 3) return;
    *in = memory->input(dtype, shape);
    *out = memory->output(FLASH3_FLOAT8_E4M3, shape);
    *scales = scale(bytes, memory, s, of_q);
  };
  part(s.q(s.dim), true, &p.q, &p.q_out, &p.q_scale);
  part(s.k(s.dim), false, &p.k, &p.k_out, &p.k_scale);
  part(s.k(s.dim_v), false, &p.v, &p.v_out, &p.v_scale);
  if (bytes->flag()) {
    const int64_t pairs = bytes->rarely() ? bytes->between(0, 150) : bytes->between(0, s.dim / 2);
    const int64_t longest = std::max({s.seq_q, s.seq_k, s.rows_q, s.rows_k});
    const Shape table{memory->exists() ? bytes->between(0, longest + 3) : bytes->odd(), pairs};
    const auto of_table = bytes->flag() ? FLASH3_FLOAT32 : dtype;
    p.rotary_cos = memory->input(of_table, table);
    p.rotary_sin = memory->input(of_table, table);
    p.rotary_offset_q = bytes->rarely() ? bytes->odd() : bytes->between(0, 3);
    p.rotary_offset_k = bytes->rarely() ? bytes->odd() : bytes->between(0, 3);
  }
  p.rotary_interleaved = bytes->rarely() ? bytes->raw<int32_t>() : bytes->flag();
  p.rotate = bytes->rarely() ? bytes->raw<int32_t>() : bytes->flag();
  p.rotation_seed = bytes->raw<uint64_t>();
  draw_machine(bytes, &p);
  // Scales of no token are left as they are.
  const bool tokens = s.batch > 0 && s.seq_q > 0 && s.seq_k > 0 && s.heads_q > 0 && s.heads_k > 0;
  *whole = tokens && !s.packed_q && !s.packed_k && p.seqused_q.ndim == 0 && p.seqused_k.ndim == 0;
  return p;
}

}  // namespace
}  // namespace flash3::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return flash3::fuzz::run_target(flash3::fuzz::kQuantize, data, size, flash3::fuzz::make);
}
