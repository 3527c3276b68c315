// SPDX-License-Identifier: Apache-2.0
// What the generated file of a kernel includes whose consumers have 64 keys each.
#pragma once

#include "cuda/sm90/backward/consume.cuh"
#include "cuda/sm90/backward/kernel.cuh"
