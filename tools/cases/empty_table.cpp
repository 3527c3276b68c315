// SPDX-License-Identifier: Apache-2.0
// The part of the table of ragged batches in which tensors have no rows, or sequences no
// tokens or a single one.
#include <iterator>

#include "cases/table.hpp"

namespace flash3::cases {
namespace {

// Which side is empty, and whether its tensors have rows that do not count.
struct Emptiness {
  int64_t seq_q, seq_k;
  Lengths lengths;
};
constexpr Emptiness kEmpty[] = {{24, 0, Lengths::kAll},
                                {0, 24, Lengths::kAll},
                                {0, 0, Lengths::kAll},
                                {24, 24, Lengths::kEmpty},
                                {130, 0, Lengths::kAll},
                                // One token each: packed rows whose stride no sequence steps over.
                                {1, 1, Lengths::kAll}};

struct Packing {
  bool packed_q, packed_k, used_q, used_k;
};
constexpr Packing kPackings[] = {
    {false, false, false, true}, {false, false, true, false}, {false, false, true, true},
    {false, true, false, false}, {true, false, false, false}, {true, true, false, false},
    {true, false, false, true},  {false, true, true, false},  {true, true, true, true}};

constexpr int64_t kDims[] = {64, 128, 256, 100};

}  // namespace

std::vector<Case> empty_cases(std::span<const flash3_dtype> dtypes) {
  std::vector<Case> cases;
  size_t i = 0;
  for (const Emptiness& empty : kEmpty)
    for (const Packing& packing : kPackings)
      for (const flash3_dtype dtype : dtypes)
        for (int options = 0; options < 4; ++options, ++i) {
          Case c;
          c.dtype = dtype;
          c.batch = i % 5 == 0 || empty.seq_q == 1 ? 3 : 1;
          c.seq_q = empty.seq_q, c.seq_k = empty.seq_k, c.lengths = empty.lengths;
          c.packed_q = packing.packed_q, c.packed_k = packing.packed_k;
          c.used_q = packing.used_q, c.used_k = packing.used_k;
          c.max_known = i % 3 != 0 || !(c.packed_q || c.packed_k);
          c.heads_q = 2, c.heads_k = i / 2 % 2 == 0 ? 2 : 1;
          c.head_dim = c.head_dim_v = kDims[(i + i / 4 + i / 16) % std::size(kDims)];
          c.softcap = options == 1 ? 20.f : 0.f;
          c.sink = options == 2 ? Sink::kFloat32 : Sink::kNone;
          c.causal = (i / 4 + i) % 2 == 0;
          if (i % 7 == 0) c.window = true, c.window_left = 9;
          cases.push_back(c);
        }
  return cases;
}

}  // namespace flash3::cases
