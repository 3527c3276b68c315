// SPDX-License-Identifier: Apache-2.0
// What the generated file of a kernel with wide tiles includes.
#pragma once

#include "hopper/backward/consume_wide.cuh"
#include "hopper/backward/kernel.cuh"
