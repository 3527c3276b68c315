// SPDX-License-Identifier: Apache-2.0
// The rules of flash3.h for what multi-head latent attention needs: a second part of the queries,
// wide heads, and values that are a part of their keys.
#pragma once

#include "core/tensor_checks.hpp"
#include "flash3/limits.h"

namespace flash3 {

// The largest head dims of valid calls; a backend may take less.
DimLimits limits_of(flash3_head_dims_of calls);
DimLimits forward_limits(const flash3_forward_params& params);

// qv against q, v and what else the call has.
Status check_qv(const flash3_forward_params& params, const Field& q, const Field& v,
                Pointers pointers);

// Of an append without v_new: that v may be a part of k's rows, as far as their sizes tell.
Status check_values_in_keys(const Field& k, const Field& v);

// Of an append without v_new: that v is a part of k's rows. By their addresses, which a plan's
// owner may change. With v_new they share no memory, as check_aliases() sees.
Status check_shared_rows(const ForwardProblem& problem);

}  // namespace flash3
