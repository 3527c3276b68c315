// SPDX-License-Identifier: Apache-2.0
// The rules of flash3.h for a KV cache, for tokens that are appended to it, and for their rotary
// embedding and rotation; core/problem.cpp calls them in this order. A call without any of it
// passes them all.
#pragma once

#include "core/tensor_checks.hpp"

namespace flash3 {

// Which fields go together, and the index tensors each by itself.
Status check_cache_fields(const flash3_forward_params& params, Pointers pointers);

Status check_cache_dtypes(const flash3_forward_params& params);

// What check_shapes() checks: pages and elements of a cache are not the batch.
Status check_cache_shapes(const flash3_forward_params& params, const Field& q, const Field& k,
                          const Field& v, const Field& out, const Extent& batch_q,
                          const Extent& batch_k);

// k_new, v_new and the rotary tables against q, k and v, which are outputs then.
Status check_append(const flash3_forward_params& params, const Field& q, const Field& k,
                    const Field& v, Pointers pointers);

// Whether q and k_new can be rotated, if they are to be.
Status check_rotation(const flash3_forward_params& params, const Field& q);

Status check_cache_options(const flash3_forward_params& params);

// What the index tensors hold: for check_lengths().
Status check_cache_places(const Problem& problem);

// The fields of a problem whose params have passed. Pages tell how many keys a sequence can have,
// which the other fields follow from.
void fill_pages(const flash3_forward_params& params, Problem* problem);
void fill_append(const flash3_forward_params& params, Problem* problem);

}  // namespace flash3
