// The kernels' addresses: one explicit instance per file in instances/, so that files compile in
// parallel and in seconds.
#pragma once

#include "hopper/element.hpp"

namespace flash3::hopper {

template <Element kElement, int kHeadDim, int kHeadDimV, bool kBand, int kTileM>
const void* backward_kernel_function();

}  // namespace flash3::hopper
