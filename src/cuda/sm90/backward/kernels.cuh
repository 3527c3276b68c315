// SPDX-License-Identifier: Apache-2.0
// Every backward kernel: what a file of instances includes (cmake/kernel_instances.cmake).
#pragma once

#include "cuda/device/score/softcap.cuh"
#include "cuda/sm90/backward/consume.cuh"
#include "cuda/sm90/backward/consume_wide.cuh"
#include "cuda/sm90/backward/kernel.cuh"
#include "cuda/sm90/backward/kernel_params.h"
#include "cuda/sm90/backward/lists.cuh"
#include "cuda/sm90/backward/tile_bias.cuh"
#include "cuda/sm90/backward/tile_table.hpp"
#include "cuda/sm90/device/instance.cuh"
