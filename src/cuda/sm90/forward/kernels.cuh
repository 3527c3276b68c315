// SPDX-License-Identifier: Apache-2.0
// Every forward kernel: what a file of instances includes (cmake/kernel_instances.cmake).
#pragma once

#include "cuda/device/score/softcap.cuh"
#include "cuda/sm90/device/instance.cuh"
#include "cuda/sm90/forward/bias_fp8.cuh"
#include "cuda/sm90/forward/kernel_16bit.cuh"
#include "cuda/sm90/forward/kernel_fp8.cuh"
#include "cuda/sm90/forward/kernel_params.h"
#include "cuda/sm90/forward/kernel_widened.cuh"
#include "cuda/sm90/forward/load_fp8_lists.cuh"
#include "cuda/sm90/forward/load_fp8_pages.cuh"
#include "cuda/sm90/forward/load_list_pages.cuh"
#include "cuda/sm90/forward/load_lists.cuh"
#include "cuda/sm90/forward/load_pages.cuh"
#include "cuda/sm90/forward/softcap_fp8.cuh"
#include "cuda/sm90/forward/tile_bias.cuh"
#include "cuda/sm90/forward/tile_table.hpp"
#include "cuda/sm90/forward/transpose_ahead.cuh"
