// SPDX-License-Identifier: Apache-2.0
// What the explanations of forward and backward plans share.
#pragma once

#include <string>

#include "core/plan.hpp"
#include "cuda/device/types.hpp"
#include "cuda/sm90/host/packed_copy.hpp"

namespace flash3::cuda::sm90 {

// Which tiles run mask code, and why.
std::string explain_mask(const Problem& problem);

void explain_scores(ScoreKind score, BiasTerms terms, Explanation* out);

// Nothing where the kernel reads the caller's own tensor.
void explain_copy(const char* name, const PackedCopy& copy, Explanation* out);

// What a block takes. Config: a row of a tile table. more_registers: of other roles.
template <class Config>
void explain_block(const Config& config, Explanation* out, const std::string& more_registers = "") {
  out->add("shared memory", std::to_string(shared_memory_bytes(config)) + " bytes a block");
  out->add("registers", std::to_string(config.producer_registers()) + " a producer thread, " +
                            std::to_string(config.consumer_registers()) + " a consumer thread" +
                            more_registers);
}

}  // namespace flash3::cuda::sm90
