// SPDX-License-Identifier: Apache-2.0
// The subcommands of flash3. options.cpp reads the options; each command is one function in a file
// of its name, or in info.cpp, and returns the exit code.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "flash3/flash3.h"

namespace flash3::cli {

inline constexpr int kExitFailure = 1;  // something did not work or did not pass
inline constexpr int kExitUsage = 2;    // bad arguments or bad files

// The user asked for something that makes no sense; exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct InfoOptions {
  bool json = false;
  bool machine_code = false;  // the kernels' hashes instead
};

struct ExplainOptions {
  std::vector<std::string> cases;
  std::string backend = "auto";
  bool json = false;
  bool backward = false;  // of each case
};

struct VerifyOptions {
  std::string level = "quick", backend = "auto";
  std::vector<std::string> cases;    // instead of the table
  std::vector<std::string> filters;  // all must occur in the id
  int jobs = 0;                      // 0: one per core
  int threads = 3;                   // of the CPU backend, in each job
  int repeat = 1;
  bool quiet = false, list = false;
  bool accuracy = false;            // the accuracy experiment instead of the table
  std::vector<int64_t> lengths;     // of its sequences; none: the level's
  std::vector<std::string> inputs;  // files that it runs on too
  bool backward = false;            // the backward's table, or the backward of each case
  bool ragged = false;              // the table of ragged batches
  bool masks = false;               // the table of masks as data
  bool quantize = false;            // the table of flash3_quantize
  bool decode = false;              // the table of KV caches
  double random = 0;                // seconds of random problems instead of the table; 0: none
  std::optional<uint64_t> seed;     // of them; none: a new one
  int64_t count = 0;                // at most so many; 0: as many as there is time for
  std::string record;               // file to note in what has passed; "": run what is asked for
  std::vector<std::string> parts;   // of the record; none: those that it lacks
};

struct VerifyCounts {
  size_t passed = 0, failed = 0;
};

struct RandomCounts {
  int64_t forward = 0, backward = 0, quantize = 0, left_out = 0, failed = 0;
  int64_t all() const { return forward + backward + quantize; }
};

struct BenchOptions {
  std::string suite, backend = "auto";  // no suite: quick, or with `ceiling` none
  std::string dtype;                    // of the suite and the ceiling; "": bf16
  std::vector<std::string> cases, filters;
  bool backward = false;       // of each case, and of the suite
  bool deterministic = false;  // with backward
  bool ceiling = false;
  int ceiling_dim = 128;
  bool ablation = false;  // the paper's ablation instead of cases
  double sustained = 0;   // seconds; 0: samples
  int samples = 30;
  double sample_ms = 12;
  int threads = 0;
  bool naive = false, list = false;
  std::string json_file, csv_file, share_file;
};

struct CompareOptions {
  std::string a, b;  // files of bench --json or --share
  double least = 0;  // of A's speed
};

struct RunOptions {
  std::string input, output, backend = "auto", layout;
  bool causal = false, check = false, json = false;
  bool has_left = false, has_right = false;
  long long window_left = -1, window_right = -1;
  float softmax_scale = 0, softcap = 0;
  long long chunk = 0;
  std::string sink;                      // a tensor of the file; "": none
  std::string dtype, compute;            // "e4m3": of q, k and v; "fp8"; "": those of the file
  std::string cu_seqlens, cu_seqlens_k;  // "0,5,12", or a tensor of the file; "": not ragged
  int threads = 0;
};

struct TraceOptions {
  std::string id;  // of the case
  int block = 0;
  std::string output;  // "": print what the roles do, and write nothing
};

int info(const InfoOptions& options);
int explain(const ExplainOptions& options);
int verify(const VerifyOptions& options);
int verify_random(const VerifyOptions& options, flash3_backend backend);  // verify_random.cpp
VerifyCounts verify_cases(const VerifyOptions& options);  // prints, as verify() does
int record(const VerifyOptions& options);                 // record.cpp
RandomCounts run_random_problems(const VerifyOptions& options, flash3_backend backend,
                                 uint64_t seed);  // prints, as verify_random() does
int bench(const BenchOptions& options);
int compare(const CompareOptions& options);
int bench_ablation(const BenchOptions& options);  // ablation.cpp
int run(const RunOptions& options);
int trace(const TraceOptions& options);

// The command line: its arguments, and which command they ask for.

// What the subcommands do; each returns the exit code. The program offers those that are there.
struct Commands {
  std::function<int(const InfoOptions&)> info;
  std::function<int(const RunOptions&)> run;
  std::function<int(const BenchOptions&)> bench;
  std::function<int(const CompareOptions&)> compare;
  std::function<int(const VerifyOptions&)> verify;
  std::function<int(const ExplainOptions&)> explain;
  std::function<int(const TraceOptions&)> trace;
};

// Runs the command that the arguments name, and returns the exit code. Help goes to `out`, and what
// is wrong with the arguments to `err`. Throws what the command throws.
int parse_and_run(int argc, const char* const* argv, const std::string& version,
                  const Commands& commands, std::ostream& out, std::ostream& err);

}  // namespace flash3::cli
