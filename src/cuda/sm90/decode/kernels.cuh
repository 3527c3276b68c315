// SPDX-License-Identifier: Apache-2.0
// Every decode kernel: what a file of instances includes (cmake/kernel_instances.cmake).
#pragma once

#include "cuda/sm90/decode/kernel.cuh"
#include "cuda/sm90/decode/latent/kernel.cuh"
#include "cuda/sm90/device/instance.cuh"
