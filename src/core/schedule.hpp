// SPDX-License-Identifier: Apache-2.0
// Schedules that the caller keeps (flash3/schedule.h): who may take one, and the making.
#pragma once

#include "core/backend.hpp"
#include "flash3/schedule.h"

namespace flash3 {

// Whether the schedule that the problem was given, if any, is one for this call.
Status check_schedule(const ForwardProblem& problem, const PlannedCall<ForwardProblem>& call);

// Lists the work of the problem, whose addresses may be missing but for those of lengths, in
// schedule->data.
Status make_schedule(const ForwardProblem& problem, const PlannedCall<ForwardProblem>& call,
                     flash3_schedule* schedule);

}  // namespace flash3
