// SPDX-License-Identifier: Apache-2.0
// What flash3_mask_make is given, drawn from a fuzzer's bytes: lengths, any source, sizes.
#pragma once

#include <functional>

#include "call.hpp"
#include "flash3/mask.h"

namespace flash3::fuzz {

inline constexpr int64_t kBlock = FLASH3_MASK_BLOCK;

// The lengths of a call and its mask.
struct Lengths {
  flash3_tensor cu_q{}, cu_k{}, used_q{}, used_k{};
  int64_t rows_q = 0, rows_k = 0;        // of packed tensors
  int64_t longest_q = 0, longest_k = 0;  // max_seqlen, where packed
  bool sound = true;                     // they break no rule, so the oracle knows what is seen

  bool any() const { return cu_q.ndim + cu_k.ndim + used_q.ndim + used_k.ndim > 0; }

  template <class Params>
  void give(Params* p) const {
    p->cu_seqlens_q = cu_q, p->cu_seqlens_k = cu_k;
    p->seqused_q = used_q, p->seqused_k = used_k;
    if constexpr (requires { p->max_seqlen_q; })
      p->max_seqlen_q = longest_q, p->max_seqlen_k = longest_k;
  }
};

// Whether no sequence reaches out of the rows, into the next or above the longest, and none uses
// more than it has.
inline bool are_sound(const flash3_tensor& cu, const flash3_tensor& used, int64_t batch,
                      int64_t rows, int64_t longest) {
  const auto entry = [](const flash3_tensor& t, int64_t i) {
    return int64_t{static_cast<const int32_t*>(t.data)[i]};
  };
  for (int64_t b = 0; b < batch; ++b) {
    int64_t length = longest;
    if (cu.ndim > 0) {
      const int64_t begin = entry(cu, b), end = entry(cu, b + 1);
      if (begin < 0 || end < begin || end > rows || end - begin > longest) return false;
      length = end - begin;
    }
    if (used.ndim > 0 && (entry(used, b) < 0 || entry(used, b) > length)) return false;
  }
  return true;
}

// Draws them, and what seq_q and seq_k of the mask are then.
inline Lengths draw_lengths(Bytes* bytes, Memory* memory, flash3_mask_params* p) {
  Sizes sizes{};
  sizes.batch = p->batch, sizes.seq_q = p->seq_q, sizes.seq_k = p->seq_k;
  const uint8_t packed = bytes->byte();
  sizes.packed_q = packed & 1, sizes.packed_k = packed & 2;
  flash3_forward_params call{};
  draw_sequences(bytes, memory, &sizes, &call);
  call.max_seqlen_q = std::max<int64_t>(call.max_seqlen_q, 0);
  call.max_seqlen_k = std::max<int64_t>(call.max_seqlen_k, 0);
  Lengths l{call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q,    call.seqused_k,  sizes.rows_q,
            sizes.rows_k,      call.max_seqlen_q, call.max_seqlen_k, memory->exists()};
  l.give(p);
  if (!memory->exists()) return l;
  const auto side = [&](const flash3_tensor& cu, const flash3_tensor& used, int64_t rows,
                        int64_t given, int64_t* longest) {
    if (cu.ndim > 0) *longest = given > 0 ? std::min(given, rows) : rows;
    l.sound = l.sound && are_sound(cu, used, p->batch, rows, *longest);
  };
  side(l.cu_q, l.used_q, l.rows_q, l.longest_q, &p->seq_q);
  side(l.cu_k, l.used_k, l.rows_k, l.longest_k, &p->seq_k);
  return l;
}

inline int64_t blocks_in(int64_t size, int64_t block) { return size / block + (size % block != 0); }

inline void draw_sizes_of_mask(Bytes* bytes, bool exists, flash3_mask_params* p) {
  if (!exists) {
    const auto size = [&] { return bytes->flag() ? bytes->between(0, 3) : bytes->odd(); };
    p->batch = size(), p->heads_q = size(), p->seq_q = size(), p->seq_k = size();
    return;
  }
  const auto tokens = [&] {
    return bytes->flag() ? bytes->pick<int64_t>({1, 127, 128, 129, 200, 256, 257, 0})
                         : bytes->between(0, 60);
  };
  p->seq_q = tokens(), p->seq_k = bytes->rarely() ? bytes->between(0, 600) : tokens();
  const bool many = p->seq_q * p->seq_k > (1 << 15);
  p->batch = bytes->between(0, many ? 1 : 2);
  p->heads_q = bytes->between(0, many ? 2 : 4);
}

// Integers around [0, most], and now and then any.
inline std::function<double()> draw_integers(Bytes* bytes, int64_t most) {
  const bool garbage = bytes->flag();
  const auto kept = static_cast<uint32_t>(bytes->between(1, 40));  // so often the last one again
  return [=, state = bytes->raw<uint32_t>(), last = int32_t{0}]() mutable -> double {
    constexpr int32_t kAny[] = {INT32_MIN, INT32_MAX, -1, 1 << 30, INT32_MAX - 1, -1000, 128, 0};
    const auto next = [&] { return (state = state * 1664525u + 1013904223u) >> 8; };
    if (next() % kept != 0) return last;
    const bool any = garbage && next() % 4 == 0;
    const int64_t around = next() % (static_cast<uint64_t>(most) + 4);
    return last = any ? kAny[next() % std::size(kAny)] : static_cast<int32_t>(around - 2);
  };
}

// Bytes in runs of 0, 255 and anything.
inline std::function<double()> draw_bytes(Bytes* bytes) {
  const auto kept = static_cast<uint32_t>(bytes->between(1, 60));
  return [=, state = bytes->raw<uint32_t>(), kind = uint32_t{0}]() mutable -> double {
    const auto next = [&] { return (state = state * 1664525u + 1013904223u) >> 8; };
    if (next() % kept == 0) kind = next() % 4;
    return kind == 0 ? 0 : kind == 1 ? 255 : next() % 256;
  };
}

inline void draw_source(Bytes* bytes, Memory* memory, const Lengths& lengths,
                        flash3_mask_params* p) {
  const int64_t batch = bytes->flag() ? 1 : p->batch, heads = bytes->flag() ? 1 : p->heads_q;
  const int64_t seq_q = p->seq_q, seq_k = p->seq_k;
  const auto integers = [&](const Shape& shape, int64_t most) {
    return memory->input(FLASH3_INT32, shape, false, draw_integers(bytes, most));
  };
  const auto of_bytes = [&](const Shape& shape) {
    return memory->input(FLASH3_UINT8, shape, false, draw_bytes(bytes));
  };
  switch (bytes->between(0, 6)) {
    case 0: break;
    case 1: {
      const int64_t bounds = 2 * bytes->between(1, 8);
      p->ranges = integers(lengths.cu_q.ndim > 0 ? Shape{1, heads, bounds, lengths.rows_q}
                                                 : Shape{batch, heads, bounds, seq_q},
                           seq_k);
      break;
    }
    case 2:
      p->documents =
          integers(lengths.cu_k.ndim > 0 ? Shape{1, lengths.rows_k} : Shape{batch, seq_k}, 3);
      break;
    case 3: p->dense = of_bytes({batch, heads, seq_q, seq_k}); break;
    case 4: {
      const auto size = [&] {
        return static_cast<int32_t>(
            8 * (bytes->flag() ? bytes->pick({1, 16, 8, 32}) : bytes->between(1, 50)));
      };
      p->block_rows = size(), p->block_keys = size();
      const int64_t rows = blocks_in(seq_q, p->block_rows), keys = blocks_in(seq_k, p->block_keys);
      p->block_counts = integers({batch, heads, rows}, keys);
      p->block_indices = integers({batch, heads, rows, bytes->between(0, 12)}, keys);
      break;
    }
    case 5: p->bits = of_bytes({batch, heads, seq_q, blocks_in(seq_k, 8)}); break;
    case 6: {
      const int64_t blocks = bytes->between(0, 4);
      p->bits = of_bytes({blocks, kBlock, kBlock / 8});
      p->bit_blocks =
          integers({batch, heads, blocks_in(seq_q, kBlock), blocks_in(seq_k, kBlock)}, blocks);
      break;
    }
  }
}

inline flash3_mask_params draw_params(Bytes* bytes, Memory* memory, bool with_lengths,
                                      Lengths* lengths) {
  flash3_mask_params p{};
  p.struct_size = sizeof p;
  draw_sizes_of_mask(bytes, memory->exists(), &p);
  if (with_lengths) *lengths = draw_lengths(bytes, memory, &p);
  draw_source(bytes, memory, *lengths, &p);
  draw_window(bytes, &p);
  if (bytes->between(0, 3) == 3) p.chunk = draw_number(bytes);
  if (bytes->between(0, 3) == 3) p.mask_alignment = FLASH3_ALIGN_TOP_LEFT;
  if (bytes->rarely()) p.max_blocks = bytes->flag() ? bytes->between(0, 9) : bytes->odd();
  if (bytes->rarely()) p.max_partial_blocks = bytes->flag() ? bytes->between(0, 9) : bytes->odd();
  if (bytes->rarely()) p.max_documents = bytes->flag() ? bytes->between(0, 9) : bytes->odd();
  draw_machine(bytes, &p);
  return p;
}

}  // namespace flash3::fuzz
