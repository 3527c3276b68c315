// SPDX-License-Identifier: Apache-2.0
#include "device/ceiling_kernel.cuh"

template struct flash3::device::CeilingInstances<flash3::hopper::Element::kFloat16>;
template struct flash3::device::CeilingInstances<flash3::hopper::Element::kBFloat16>;
template struct flash3::device::CeilingInstances<flash3::hopper::Element::kE4m3>;
