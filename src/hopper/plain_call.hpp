// What the kernels leave to other backends: one function for forward and backward.
#pragma once

#include "core/message.hpp"
#include "core/problem.hpp"

namespace flash3::hopper {

inline Status check_plain(const Problem& p) {
  if (p.is_ragged())
    return unsupported(
        "cu_seqlens or seqused is given but the hopper backend computes sequences of one length "
        "only");
  if (p.softcap > 0.f)
    return unsupported(
        message("softcap = ", p.softcap, " but the hopper backend computes plain scores only"));
  if (p.mask_rule.chunk > 0)
    return unsupported(
        message("chunk = ", p.mask_rule.chunk, " but the hopper backend masks by windows only"));
  return {};
}

}  // namespace flash3::hopper
