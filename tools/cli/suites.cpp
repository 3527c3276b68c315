#include "cli/suites.hpp"

#include "cli/commands.hpp"

namespace flash3::cli {

std::vector<cases::Case> bench_suite(const std::string& name, flash3_backend backend) {
  const bool gpu = backend == FLASH3_BACKEND_HOPPER;
  const int64_t tokens = gpu ? 16384 : 4096;
  const int64_t hidden = gpu ? 2048 : 512;
  int64_t first = 512, last = tokens;
  if (name == "quick")
    first = last = tokens / 4;
  else if (name != "forward")
    throw UsageError("suite '" + name + "' is not one of quick, forward");

  std::vector<cases::Case> suite;
  for (const int64_t head_dim : {64, 128, 256})
    for (const bool causal : {false, true})
      for (int64_t seq = first; seq <= last; seq *= 2) {
        cases::Case c;
        c.batch = tokens / seq;
        c.seq_q = c.seq_k = seq;
        c.heads_q = c.heads_k = hidden / head_dim;
        c.head_dim = c.head_dim_v = head_dim;
        c.causal = causal;
        suite.push_back(c);
      }
  return suite;
}

}  // namespace flash3::cli
