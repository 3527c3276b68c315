// SPDX-License-Identifier: Apache-2.0
// Schedules that the caller keeps (flash3/schedule.h): who may take one, and the making.
#pragma once

#include "core/backend.hpp"
#include "flash3/schedule.h"

namespace flash3 {

// Whether the schedule that the problem was given, if any, is one for this call.
Status check_schedule(const ForwardProblem& problem, const PlannedCall<ForwardProblem>& call);

// Whether the memory that a schedule is to be made in lies in no tensor of the call.
Status check_schedule_aliases(const flash3_forward_params* params, const ForwardProblem& problem,
                              const PlannedCall<ForwardProblem>& call,
                              const flash3_schedule& schedule);

// Lists the work of the problem, whose addresses may be missing but for those of lengths, in
// schedule->data.
Status make_schedule(const ForwardProblem& problem, const PlannedCall<ForwardProblem>& call,
                     flash3_schedule* schedule);

}  // namespace flash3
