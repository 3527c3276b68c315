// SPDX-License-Identifier: Apache-2.0
#include "device/ceiling_kernel.cuh"

template struct flash3::device::CeilingInstances<flash3::cuda::Element::kFloat16>;
template struct flash3::device::CeilingInstances<flash3::cuda::Element::kBFloat16>;
template struct flash3::device::CeilingInstances<flash3::cuda::Element::kE4m3>;
