// SPDX-License-Identifier: Apache-2.0
// The tensors that a case has no member for (AddedOptions): which it may have, and what is in them.
#pragma once

#include "cases/case.hpp"
#include "cases/tensors.hpp"

namespace flash3::cases {

// Whether a case may have this tensor beside what it has already. An input needs finite scores: a
// weight of 0 times an infinity is NaN, and which weights are 0 depends on the precision.
bool goes_with(const Case& c, const ParamField& tensor);

// Whether kernels of the backend take the tensors that the case has, and its dropout.
bool takes_added_tensors(flash3_backend backend, const Case& c);

// One of them as the case gives it, without data, or the gradient of one; all zero: the case has
// none. Those of rows lie as lse does, and so do those of pairs. Without a dtype of its own alone
// it has one that the seed tells: out's if it is 1.
flash3_tensor added_view(const Case& c, const ParamField& field, const CaseSequences& sequences);

// Makes those of a forward call: inputs are of all sizes from N(0, 1) down to a 128th of it, in
// biases −∞ now and then, and in a state any integers; outputs have the pattern. In ragged batches
// what belongs to no token is forbidden, but for rows of outputs that the call fills.
void add_added(const Case& c, const CaseSequences& sequences, ExtraTensors* tensors);

}  // namespace flash3::cases
