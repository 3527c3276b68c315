// SPDX-License-Identifier: Apache-2.0
// Kernels by type. A family of kernels has a tile table, an array of rows; a kernel is a row and an
// element type that the row holds. Host and device.
#pragma once

#include "cuda/device/types.hpp"

namespace flash3::cuda::sm90 {

// What the kernel of a row is put together from, and its address: specialised beside the policies
// that it names, for the rows that these serve. So a row whose policies are not included does not
// compile.
//
//   static const void* kernel();    for cudaLaunchKernel
template <auto kRow, Element kElement>
struct PoliciesOf;

// The address of the kernel of a row of a table and an element type; null if the row does not hold
// that. cmake/kernel_instances.cmake writes the files that instantiate it (instance.cuh), each of a
// few rows, so that they compile side by side and in seconds. A row without an instance does not
// link.
template <const auto& kTable, int kRow>
const void* kernel_function(Element element);

template <const auto& kTable>
inline constexpr int kRowsOf = sizeof(kTable) / sizeof(kTable[0]);

}  // namespace flash3::cuda::sm90
