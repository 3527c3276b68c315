#include "cli/suites.hpp"

#include "cli/commands.hpp"

namespace flash3::cli {
namespace {

cases::Case self_attention(flash3_dtype dtype, int64_t batch, int64_t seq, int64_t hidden,
                           int64_t head_dim, bool causal) {
  cases::Case c;
  c.dtype = dtype;
  c.batch = batch;
  c.seq_q = c.seq_k = seq;
  c.heads_q = c.heads_k = hidden / head_dim;
  c.head_dim = c.head_dim_v = head_dim;
  c.causal = causal;
  return c;
}

std::vector<cases::Case> sweep(flash3_dtype dtype, int64_t tokens, int64_t hidden, int64_t first,
                               int64_t last) {
  std::vector<cases::Case> suite;
  for (const int64_t head_dim : {64, 128, 256})
    for (const bool causal : {false, true})
      for (int64_t seq = first; seq <= last; seq *= 2)
        suite.push_back(self_attention(dtype, tokens / seq, seq, hidden, head_dim, causal));
  return suite;
}

std::vector<cases::Case> windows(flash3_dtype dtype, int64_t tokens, int64_t hidden) {
  std::vector<cases::Case> suite;
  for (const int64_t head_dim : {64, 128}) {
    cases::Case c = self_attention(dtype, 1, tokens, hidden, head_dim, true);
    for (int64_t left = 128; left < tokens; left *= 2) {
      c.window = true, c.window_left = left;
      suite.push_back(c);
    }
    c.window = false, c.window_left = -1;
    suite.push_back(c);
  }
  return suite;
}

}  // namespace

std::vector<cases::Case> bench_suite(const std::string& name, flash3_backend backend,
                                     flash3_dtype dtype) {
  const bool gpu = backend == FLASH3_BACKEND_HOPPER;
  const int64_t tokens = gpu ? 16384 : 4096;
  const int64_t hidden = gpu ? 2048 : 512;
  if (name == "quick") return sweep(dtype, tokens, hidden, tokens / 4, tokens / 4);
  if (name == "forward") return sweep(dtype, tokens, hidden, 512, tokens);
  if (name == "backward") {
    std::vector<cases::Case> suite = sweep(dtype, tokens, hidden, 512, tokens);
    for (cases::Case& c : suite) c.backward = true;
    return suite;
  }
  if (name == "window") return gpu ? windows(dtype, 32768, hidden) : windows(dtype, 2048, 128);
  throw UsageError("suite '" + name + "' is not one of quick, forward, backward, window");
}

}  // namespace flash3::cli
