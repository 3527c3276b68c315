// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "cases/case.hpp"
#include "cases/runner.hpp"
#include "core/dropout.hpp"
#include "core/message.hpp"
#include "flash3/dropout.h"

namespace flash3::cases {

std::string check_dropout_mask(const Case& c, Memory& memory, const RunOptions& options) {
  const int64_t batch = std::min<int64_t>(c.batch, 2), heads = std::min<int64_t>(c.heads_q, 3),
                seq_q = std::min<int64_t>(c.seq_q, 70), seq_k = std::min<int64_t>(c.seq_k, 130);
  const auto size = static_cast<size_t>(batch * heads * seq_q * seq_k);
  if (size == 0) return "";
  const std::shared_ptr<void> kept = memory.allocate(size);
  memory.fill(kept.get(), std::byte{0xFF}, size);
  flash3_dropout_mask_params params{};
  params.struct_size = sizeof params;
  params.kept = {kept.get(),
                 FLASH3_UINT8,
                 4,
                 {batch, heads, seq_q, seq_k},
                 {heads * seq_q * seq_k, seq_q * seq_k, seq_k, 1}};
  params.dropout_p = c.dropout;
  params.dropout_seed = c.seed, params.dropout_offset = c.seed / 2;
  params.backend = options.backend;
  params.num_threads = options.num_threads;
  params.stream = memory.stream();
  if (flash3_dropout_mask(&params) != FLASH3_OK)
    return message("flash3_dropout_mask: ", flash3_last_error());
  memory.finish();
  std::vector<uint8_t> got(size);
  memory.copy_out(got.data(), kept.get(), size);
  const PhiloxKey key = dropout_key(params.dropout_seed, params.dropout_offset);
  const unsigned threshold = dropout_threshold(c.dropout);
  for (size_t i = 0; i < size; ++i) {
    const auto j = static_cast<int64_t>(i) % seq_k, row = static_cast<int64_t>(i) / seq_k;
    const bool wanted = dropout_keeps(key, threshold, static_cast<unsigned>(row / seq_q),
                                      static_cast<int>(row % seq_q), static_cast<int>(j));
    if (got[i] != uint8_t{wanted})
      return message("flash3_dropout_mask: element ", i, " is ", int{got[i]}, " but must be ",
                     int{wanted});
  }
  return "";
}

}  // namespace flash3::cases
