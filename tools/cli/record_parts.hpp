// SPDX-License-Identifier: Apache-2.0
// The parts of `flash3 verify --record`: what a kernel must pass on a GPU before a release. One is
// NVIDIA's compute-sanitizer.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.hpp"

namespace flash3::cli {

struct RecordPart {
  std::string name;
  bool checks_results;  // against the oracle; other parts look at something else
  // Runs it, printing as `flash3 verify` does. What the record keeps: "command", and the counts.
  // before: what it has of this part, {} if nothing; random problems add up. Throws PartFailed.
  nlohmann::ordered_json (*run)(const VerifyOptions& options, const nlohmann::ordered_json& before);
  // What the record lacks where it has this of the part; "" if nothing. None: a part is whole.
  std::string (*missing)(const nlohmann::ordered_json& noted) = nullptr;
};

class PartFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

const std::vector<RecordPart>& record_parts();

// Each list in a process of its own, `flash3 verify --case …`, under memcheck, racecheck, synccheck
// and initcheck; several at a time. The program is the one on PATH, or in $CUDA_HOME/bin. Throws
// PartFailed with what a tool said.
nlohmann::ordered_json run_sanitizer_tools(const VerifyOptions& options,
                                           const std::vector<std::vector<std::string>>& lists);

// What compute-sanitizer's racecheck reports, hazard by hazard, and which of them count.
//
// One kind of hazard is known to be none, in FP8 kernels of long sequences. All threads of a warp
// read the scales of a key tile (begin_key_tile, v_scale); a __syncwarp later one lane arrives for
// its warp at the barrier that the loader waits for before it copies the next scales to their place
// (copy_async, or copy_scale, which stores 1 where a tensor has no scales). That orders the reads
// before the write, but where a warp is converged anyway ptxas leaves nothing of the __syncwarp
// that racecheck could see. Where ptxas merges the reads of two arms, their place in the source is
// the kernel; copy_async() of floats copies scales alone. Shown by a build in which every lane
// arrives: racecheck reports nothing there, and FP8 at head dim 128 is 2 % slower
// (src/cuda/sm90/forward/EXPERIMENTS.md).
//
// A second kind, in the latent kernel: lanes of a warp store raised maxima, and after a __syncwarp
// one lane arrives for its warp at the barrier after which the other warpgroup reads them
// (take_max). Where every lane arrives racecheck reports nothing either, and 64 sequences of 16k
// keys take 3 % longer.
//
// A third, there too: in one run of three racecheck reports the warpgroups' sums at the end of a
// run of keys (end_sums), stored before a barrier of all consumers and read after it. The
// machine code has the barrier: STS, BAR.SYNC 3, 256, LDS.
//
// A fourth, in forward kernels that walk the lists of a mask: all threads of a warp read what the
// producer noted of a key tile (noted_tile), and a __syncwarp later one lane arrives for its warp
// at the barrier that the producer waits for before it notes the next one (note_tile). It is the
// first kind again. One lane alone could read and pass it on, but for that FP8 at head dim 256 has
// no registers.
struct Races {
  int known = 0;        // hazards of these kinds
  std::string unknown;  // the first other one, as it was reported; "" if none
};

// output: of `--racecheck-report hazard`, with a print limit above the number of hazards; unknown
// says so where some were not printed.
Races check_races(const std::string& output);

// The machine code of the Hopper kernels inside a program, as hashes that say whether a kernel is
// still the one that was verified. They cover the instructions, the constants and the size of
// static shared memory; not names, line information or addresses. So two builds of the same kernel
// by one compiler agree, in whichever folder and beside whichever other kernels.

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
