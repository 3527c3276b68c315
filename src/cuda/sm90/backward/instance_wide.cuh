// SPDX-License-Identifier: Apache-2.0
// What the generated file of a kernel with wide tiles includes.
#pragma once

#include "cuda/sm90/backward/consume_wide.cuh"
#include "cuda/sm90/backward/kernel.cuh"
