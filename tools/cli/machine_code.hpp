// SPDX-License-Identifier: Apache-2.0
// The machine code of the Hopper kernels inside a program, as hashes that say whether a kernel is
// still the one that was verified. They cover the instructions, the constants and the size of
// static shared memory; not names, line information or addresses. So two builds of the same kernel
// by one compiler agree, in whichever folder and beside whichever other kernels.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace flash3::cli {

struct KernelCode {
  std::string name;      // of its file if it is alone there ("fwd_bf16_d128_full_128x128"), else of
                         // the function ("preprocess_kernel<(Element)1, 8, 64>")
  std::string function;  // as the compiler spells it
  std::string source;    // "src/cuda/….cu"
  std::string hash;      // 16 hexadecimal digits
};

// The library's kernels in a program (an ELF file's bytes), sorted by name; empty if it was built
// without CUDA. It leaves out the kernels that only measure. Throws
// std::runtime_error where the fat binary is none that it can read.
std::vector<KernelCode> machine_code(std::string_view program);

// The kernels of this program.
std::vector<KernelCode> own_machine_code();

// The nvcc that compiled the kernels, "13.0.88"; "" without CUDA.
const char* kernel_compiler();

}  // namespace flash3::cli
