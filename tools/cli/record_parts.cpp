// SPDX-License-Identifier: Apache-2.0
#include "cli/record_parts.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cases/runner.hpp"
#include "cli/environment.hpp"
#include "cli/format.hpp"

namespace flash3::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kRepetitions = 1000;
constexpr int64_t kRandomForward = 100'000, kRandomBackward = 50'000;
constexpr double kRandomSeconds = 300;  // of a run; the record is written after each

// Races between warpgroups, blocks and kernels change bits now and then: schedules of every kind,
// several tiles long, and in backwards only what promises the same bits.
const std::vector<std::string> kRepeatedCases = {
    "bf16/b2/q500/k700/h4/d64/full", "fp16/b2/q500/k700/h8x2/d64/causal",
    "fp16/b2/q500/k700/h4/d96/full", "bf16/b2/q500/k700/h8x2/d128/causal",
    "fp16/b2/q700/k500/h4/d128/full", "bf16/b2/q333/k1000/h4x2/d192x128/causal",
    "bf16/b1/q700/k500/h4/d192/full", "fp16/b1/q500/k700/h4/d256/causal",
    "bf16/b1/q500/k700/h4/d256/full", "bf16/b2/q500/k700/h4/d128/causal+w128:/sink",
    "bf16/b1/q5/k3000/h16x1/d128/causal",
    // a long sequence that many blocks share, few queries of every head dim, and KV caches
    "bf16/b1/q1/k50000/h8x1/d128/causal", "fp16/b2/q4/k5000/h8x2/d64/causal",
    "bf16/b2/q1/k5000/h8x1/d192x128/full", "fp16/b3/q2/k5000/h8x2/d256/causal/softcap20",
    "bf16/b9/q1/k5000/h8x1/d128/causal/random/usedk/paged16/append1/rotary",
    "bf16/b9/q3/k2000/h8x2/d64/causal/random/usedk/paged3/leftpad",
    "fp16/b5/q70/k2000/h4x2/d256/causal/random/usedk/paged64/append70/rotary2",
    "bf16/b9/q700/k3000/h8x2/d128/causal/giant/packedq/usedk/paged16/append1/rotary",
    "fp16/b9/q500/k2000/h4/d64/causal/random/packedq/usedk/paged128/softcap20",
    "bf16/b5/q300/k2000/h4x1/d192x128/w500:0/random/usedk/batchidx/leftpad",
    "bf16/b3/q100/k600/h128x2/d128/causal/random/packedq/usedk/paged16",
    // blocks that share the keys of a prompt's tiles
    "bf16/b1/q100/k7300/h2x1/d128/causal/usedk/paged64/append100/rotary",
    "fp16/b2/q20/k7300/h2x1/d64/causal/usedk", "bf16/b1/q20/k7300/h1/d256/full/usedk/softcap20",
    "bf16/b2/q500/k1000/h4/d128/w200:", "bf16/b2/q300/k300/h4/d100/full/odd",
    "bf16/b2/q500/k700/h4/d64/causal/softcap20", "fp16/b2/q500/k700/h4/d128/full/softcap20",
    "bf16/b1/q500/k700/h4/d256/causal/softcap20",
    // ragged batches, and short sequences that share tiles
    "bf16/b9/q700/k700/h4x2/d128/causal/random/packed",
    "fp16/b20/q500/k500/h4x2/d64/full/random/packed",
    "bf16/b300/q16/k16/h4/d128/causal/random/packed",
    "fp16/b300/q40/k40/h4/d128/full/random/packed", "bf16/b300/q16/k16/h4/d64/full/random/packed",
    // FP8
    "e4m3/b2/q500/k700/h4x2/d64/causal/blockscales", "e4m3/b2/q500/k700/h4/d128/full/headscales",
    "e4m3/b2/q500/k700/h4x2/d128/causal/onescale", "e4m3/b1/q500/k700/h4/d192x128/full/blockscales",
    "e4m3/b1/q500/k700/h4/d256/causal/blockscales",
    "e4m3/b2/q500/k5000/h4x2/d64/causal/blockscales",
    "e4m3/b2/q500/k5000/h4x2/d128/full/blockscales",
    "e4m3/b1/q500/k9000/h4/d256/causal/blockscales",
    "e4m3/b1/q500/k5000/h4/d192x128/full/blockscales",
    "e4m3/b9/q700/k700/h4x2/d128/causal/random/packed/blockscales",
    "bf16/b1/q1/k100/h8x1/d128/causal/usedk/kv8",
    "e4m3/b3/q300/k700/h4x2/d128/causal/random/packedq/usedk/paged64/headscales",
    "bf16/b3/q300/k700/h4x2/d128/causal/random/packedq/usedk/paged64/kv8/headscales",
    "bf16/b2/q500/k700/h4x2/d128/causal/fp8",
    "bf16/b2/q500/k700/h4x2/d128/full/quantize/blockscales/rotate",
    "fp16/b2/q500/k700/h4x2/d64/full/quantize/headscales/rotary",
    "bf16/b9/q500/k500/h4/d256/full/random/packed/quantize/blockscales/rotate/rotary2",
    // backward
    "bf16/b2/q500/k700/h4/d64/full/deterministic",
    "fp16/b2/q500/k700/h8x2/d64/causal/deterministic",
    "bf16/b2/q500/k700/h8x2/d128/causal/deterministic",
    "fp16/b2/q700/k500/h4/d128/full/dlse/deterministic",
    "bf16/b1/q333/k700/h4x2/d192x128/causal/deterministic",
    "fp16/b1/q500/k500/h4/d192/full/deterministic",
    "bf16/b2/q500/k1000/h4/d128/w200:/deterministic",
    "bf16/b1/q500/k700/h4/d256/causal/deterministic",
    "bf16/b2/q500/k700/h4/d64/causal/softcap20/deterministic",
    "bf16/b2/q500/k700/h4/d128/causal+w128:/sink/deterministic",
    "bf16/b9/q700/k700/h4x2/d128/causal/random/packed/deterministic",
    "fp16/b300/q16/k16/h4/d64/causal/random/packed/sink/deterministic"};

// Small, for the tools slow a kernel down a hundredfold: of every tile and kind of scores one
// dtype, but for the backward's tiles that calls of thousands of queries have. One process for each
// list.
const std::vector<std::vector<std::string>> kSanitizedCases = {
    {"bf16/b2/q200/k300/h4x2/d64/causal/mask:documents.b",
     "fp16/b1/q200/k300/h2/d128/full/mask:ranges3.h", "bf16/b1/q200/k300/h2x1/d192/full/mask:dense",
     "fp16/b1/q129/k300/h2x1/d256/causal/mask:blocks64x64.h",
     "bf16/b1/q200/k300/h2x1/d64/causal/mask:dense/bwd",
     "fp16/b1/q129/k300/h4x2/d128/full/mask:ranges2.h/bwd/deterministic",
     "bf16/b1/q129/k300/h2x1/d192/full/mask:dense.h/bwd",
     "fp16/b1/q200/k300/h2x1/d256/causal/mask:documents/bwd/deterministic",
     "bf16/b1/q129/k300/h2x1/d128/causal/softcap20/mask:dense/bwd",
     "bf16/b1/q129/k300/h2x1/d256/causal/softcap20/mask:dense/bwd"},
    {"bf16/b3/q200/k200/h4x2/d64/causal/random/packed/mask:ranges2",
     "fp16/b3/q200/k300/h2/d128/full/random/usedk/mask:blocks64x64",
     "bf16/b3/q150/k200/h2x1/d256/causal/random/used/mask:dense",
     "e4m3/b3/q200/k200/h2x1/d128/causal/random/packed/mask:documents",
     "bf16/b3/q200/k200/h4x2/d64/causal/random/packed/mask:documents/bwd/deterministic",
     "fp16/b3/q200/k200/h2x1/d128/full/random/used/mask:blocks64x64/bwd/deterministic",
     "bf16/b3/q150/k200/h2/d256/causal/random/packed/mask:dense.h/bwd"},
    {"bf16/b1/q200/k300/h2x1/d64/full", "fp16/b1/q200/k300/h2x1/d64/causal",
     "bf16/b1/q70/k130/h2/d96/full", "fp16/b1/q130/k70/h2/d96/causal",
     "bf16/b1/q200/k300/h2x1/d128/causal", "fp16/b1/q200/k300/h2x1/d128/full",
     "bf16/b1/q5/k300/h8x1/d128/causal", "bf16/b1/q129/k150/h2/d100/w40:20/odd",
     "bf16/b1/q192/k1000/h1/d64/causal"},
    // tiles of three warpgroups, which serve where they fit on the multiprocessors and others do
    // not; synccheck calls it an error that blocks of several tiles never wait for `wanted`
    // (TileRing) where tiles come in order
    {"bf16/b8/q190/k150/h16/d128/full", "fp16/b9/q190/k150/h16/d128/causal",
     "bf16/b9/q190/k200/h16/d96/causal", "fp16/b8/q190/k200/h16/d96/full"},
    {"bf16/b1/q130/k200/h2x1/d192x128/causal", "fp16/b1/q130/k200/h1/d192x128/full",
     "bf16/b1/q130/k200/h1/d192/full", "fp16/b1/q130/k200/h1/d192/causal",
     "bf16/b1/q130/k150/h1/d256/causal", "fp16/b1/q130/k150/h1/d256/full",
     "bf16/b1/q200/k200/h2x1/d64/causal/softcap20", "fp16/b1/q150/k200/h2x1/d128/full/softcap20",
     "bf16/b1/q130/k150/h1/d256/causal/softcap20", "bf16/b1/q150/k200/h2/d128/causal+w64:/sink",
     "fp16/b1/q250/k128/h1/d64/full/softcap20"},
    {"e4m3/b1/q200/k300/h2x1/d64/causal/blockscales", "e4m3/b1/q200/k300/h2x1/d64/full/headscales",
     "e4m3/b1/q200/k300/h2x1/d128/causal/onescale", "e4m3/b1/q200/k300/h1/d128/full/blockscales",
     "e4m3/b1/q130/k200/h1/d192x128/causal", "e4m3/b1/q130/k200/h1/d192/full/blockscales",
     "e4m3/b1/q130/k200/h1/d256/full/blockscales", "e4m3/b1/q130/k200/h1/d256/causal/headscales",
     "e4m3/b1/q130/k200/h1/d128/causal/softcap20/blockscales",
     "e4m3/b1/q192/k1000/h1/d64/causal/blockscales"},
    {"e4m3/b1/q130/k200/h1/d192/causal/blockscales",
     "e4m3/b1/q130/k200/h1/d192x128/full/blockscales",
     "e4m3/b1/q129/k1000/h1/d256/full/blockscales", "e4m3/b1/q150/k1000/h1/d256/causal/blockscales",
     "e4m3/b1/q130/k200/h1/d64/full/softcap20", "e4m3/b1/q130/k200/h1/d192/causal/softcap20",
     "e4m3/b1/q130/k200/h1/d192x128/full/softcap20", "e4m3/b1/q130/k200/h1/d256/causal/softcap20"},
    // FP8 rows that are summed up in two levels
    {"e4m3/b1/q192/k2560/h1/d64/full/blockscales", "e4m3/b1/q128/k2560/h1/d128/causal/blockscales",
     "e4m3/b1/q128/k4500/h1/d256/full"},
    {"bf16/b5/q150/k150/h2x1/d128/causal/random/packed",
     "fp16/b4/q150/k150/h2/d64/full/random/used", "bf16/b60/q16/k16/h2/d128/causal/random/packed",
     "fp16/b40/q16/k16/h2/d64/full/random/packed",
     "e4m3/b5/q150/k150/h2x1/d128/causal/random/packed/blockscales",
     "bf16/b3/q100/k100/h2/d72/full/random/packed/nomax/padded",
     "fp16/b4/q250/k250/h2/d64/full/random/packed", "e4m3/b4/q250/k250/h2/d64/full/random/packed",
     "e4m3/b5/q150/k150/h2x1/d128/full/random/packed"},
    {"bf16/b1/q150/k200/h2x1/d64/full/bwd", "fp16/b1/q200/k150/h2/d64/causal/dlse/deterministic",
     "bf16/b1/q150/k200/h2x1/d128/causal/bwd", "fp16/b1/q150/k200/h1/d128/full/deterministic",
     "bf16/b1/q200/k200/h1/d128/causal/softcap20/bwd",
     "bf16/b1/q150/k150/h2/d64/full/softcap20/bwd",
     "bf16/b1/q150/k200/h2/d128/causal+w64:/sink/deterministic"},
    {"bf16/b1/q130/k150/h1/d192x128/causal/bwd", "fp16/b1/q130/k150/h1/d192/full/deterministic",
     "bf16/b1/q130/k150/h1/d256/causal/bwd", "fp16/b1/q130/k150/h1/d256/full/deterministic",
     "bf16/b1/q130/k100/h1/d256/causal/softcap20/bwd",
     "fp16/b1/q130/k150/h1/d192/causal/deterministic", "bf16/b1/q130/k150/h1/d192x128/full/bwd"},
    {"bf16/b5/q150/k150/h2x1/d128/causal/random/packed/bwd",
     "fp16/b4/q150/k150/h2/d64/full/random/used/sink/deterministic",
     "bf16/b40/q16/k16/h2/d64/causal/random/packed/deterministic",
     "fp16/b3/q100/k100/h2/d72/full/random/packed/nomax/odd/bwd"},
    // more key tiles than multiprocessors, where blocks of the backward are persistent
    {"bf16/b9/q200/k300/h8/d64/full/bwd", "fp16/b9/q200/k200/h8/d64/causal/deterministic",
     "bf16/b9/q150/k260/h8/d128/causal/bwd", "bf16/b20/q70/k300/h4/d64/w40:/bwd",
     "fp16/b40/q16/k16/h6/d64/full/random/packed/bwd", "bf16/b9/q130/k150/h8/d64/full/odd/bwd",
     "fp16/b9/q100/k300/h8/d128/causal/gradfp32/bwd"},
    {"bf16/b1/q130/k200/h2x1/d64/full/quantize/blockscales/rotate",
     "fp16/b1/q130/k200/h2x1/d128/full/quantize/blockscales/rotate/rotary",
     "bf16/b1/q130/k200/h2/d256/full/quantize/headscales/rotary2",
     "fp16/b1/q130/k200/h2/d96/full/quantize/onescale/rotate",
     "bf16/b3/q150/k150/h2/d192/full/random/packed/quantize/blockscales/rotate",
     "bf16/b1/q130/k200/h2x1/d128/causal/fp8"},
    // few queries and KV caches: each way to load, splits, appends
    {"bf16/b2/q1/k1500/h4x1/d128/causal", "fp16/b2/q1/k700/h16x1/d128/full",
     "bf16/b1/q2/k700/h4x1/d64/causal", "fp16/b1/q2/k700/h8x1/d64/causal",
     "bf16/b1/q2/k700/h16x1/d64/causal/softcap20", "bf16/b1/q1/k700/h4x1/d192x128/causal",
     "fp16/b1/q1/k700/h4x1/d256/causal", "bf16/b1/q2/k700/h8x1/d256/causal/softcap20",
     "bf16/b3/q1/k300/h4x1/d128/causal/random/usedk/paged16",
     "bf16/b3/q1/k300/h4x1/d128/causal/random/usedk/paged3/leftpad",
     "bf16/b3/q3/k300/h4x2/d64/causal/random/usedk/paged64/append3/rotary",
     "fp16/b3/q9/k100/h4x2/d40/causal/random/packedq/usedk/batchidx/append9/packednew/rotary2"},
    // latent attention
    {"bf16/b3/q1/k700/h64x1/d64x512/causal/usedk/paged64/qv",
     "fp16/b1/q2/k3000/h16x1/d576x512/causal/usedk/paged64/latent"},
    // prompts on KV caches
    {"bf16/b3/q150/k300/h4x2/d128/causal/random/packedq/usedk/paged16/append9/rotary",
     "fp16/b3/q70/k200/h2/d64/w40:/random/usedk/paged64",
     "bf16/b2/q150/k200/h2x1/d256/causal/random/usedk/batchidx/leftpad",
     "fp16/b3/q150/k200/h4x1/d192x128/full/giant/packedq/usedk/paged128",
     "bf16/b2/q150/k200/h2/d128/causal/random/usedk/paged32/softcap20"},
    // the same of so many heads that no block shares keys, and of so many keys that blocks do
    {"bf16/b1/q20/k200/h128x1/d128/causal/usedk/paged16",
     "fp16/b1/q20/k200/h128x1/d64/w40:/usedk/paged64",
     "bf16/b1/q20/k200/h128x1/d256/full/usedk/batchidx",
     "fp16/b1/q20/k200/h128x1/d192x128/causal/usedk/paged128",
     "bf16/b1/q20/k200/h128x1/d128/causal/usedk/paged32/softcap20",
     "bf16/b2/q20/k7300/h2x1/d128/causal/usedk/paged64", "fp16/b1/q20/k11000/h1/d64/full/usedk",
     "bf16/b1/q20/k7300/h1/d256/causal/usedk/batchidx",
     "fp16/b1/q20/k7300/h1/d192x128/causal/usedk/paged16/append3/rotary",
     "bf16/b1/q20/k7300/h1/d128/full/usedk/softcap20",
     "fp16/b1/q20/k7300/h1/d64/causal/usedk/paged64/softcap20",
     "bf16/b1/q20/k7300/h1/d256/full/usedk/paged64/softcap20"},
    // caches in FP8
    {"bf16/b3/q1/k300/h4x1/d128/causal/random/usedk/paged128/kv8/blockscales",
     "e4m3/b3/q3/k300/h4x2/d64/causal/random/usedk/paged3/headscales",
     "bf16/b2/q2/k900/h8x1/d256/full/usedk/batchidx/leftpad/kv8/onescale",
     "e4m3/b3/q150/k300/h4x2/d128/causal/random/packedq/usedk/paged16/append9/headscales",
     "e4m3/b2/q150/k300/h2/d64/w40:/usedk/paged64",
     "e4m3/b2/q150/k200/h2x1/d256/causal/random/usedk/batchidx/blockscales",
     "e4m3/b2/q150/k200/h2/d192x128/full/usedk/paged128/blockscales",
     "e4m3/b2/q150/k200/h2/d128/causal/usedk/paged32/softcap20",
     "bf16/b3/q150/k300/h4x2/d128/causal/random/packedq/usedk/paged16/append9/kv8/headscales",
     "fp16/b2/q70/k200/h2/d64/w40:/random/usedk/paged64/kv8",
     "bf16/b2/q150/k200/h2x1/d256/causal/random/usedk/batchidx/leftpad/kv8/onescale",
     "fp16/b2/q150/k200/h4x1/d192x128/full/usedk/kv8/blockscales"},
    // keys that no query sees in a tile with others, and tensors of no rows
    {"bf16/b1/q70/k300/h2x1/d64/w40:", "fp16/b1/q70/k300/h2x1/d128/w40:",
     "bf16/b1/q70/k300/h1/d256/w40:", "e4m3/b1/q70/k300/h1/d64/w40:",
     "e4m3/b1/q70/k300/h1/d256/w40:", "bf16/b1/q70/k300/h2x1/d128/w40:/bwd",
     "fp16/b1/q70/k300/h1/d256/w40:/bwd", "bf16/b1/q24/k0/h2/d128/full/usedk",
     "bf16/b1/q24/k0/h2/d256/full/usedk/bwd"}};

// A trial on the CPU, which the gate takes for no record, runs the quick tables, or what a filter
// leaves of them.
bool is_trial(const VerifyOptions& options) { return options.backend == "cpu"; }

Json run_cases(VerifyOptions asked, const std::string& command) {
  asked.quiet = true;
  const VerifyCounts counts = verify_cases(asked);
  if (counts.failed > 0 || counts.passed == 0)
    throw PartFailed(format("{}: {} passed, {} failed", command, counts.passed, counts.failed));
  return {{"command", command}, {"passed", counts.passed}, {"failed", counts.failed}};
}

// What `flash3 verify` runs with these flags.
Json run_table(VerifyOptions asked, const std::string& flags, const char* level = "full") {
  asked.level = is_trial(asked) ? "quick" : level;
  return run_cases(asked, format("flash3 verify{} --level {}", flags, asked.level));
}

Json run_full(const VerifyOptions& options) { return run_table(options, ""); }

Json run_backward(VerifyOptions asked) {
  asked.backward = true;
  return run_table(asked, " --backward");
}

// The long tables of ragged batches take longer than all the rest, and random problems draw more of
// them.
Json run_ragged(VerifyOptions asked) {
  asked.ragged = true;
  return run_table(asked, " --ragged", "quick");
}

Json run_ragged_backward(VerifyOptions asked) {
  asked.ragged = asked.backward = true;
  return run_table(asked, " --ragged --backward", "quick");
}

Json run_masks(VerifyOptions asked) {
  asked.masks = true;
  return run_table(asked, " --masks");
}

Json run_masks_backward(VerifyOptions asked) {
  asked.masks = asked.backward = true;
  return run_table(asked, " --masks --backward");
}

Json run_quantize(VerifyOptions asked) {
  asked.quantize = true;
  return run_table(asked, " --quantize");
}

Json run_merges(const VerifyOptions& options) {
  const flash3_backend backend = backend_named(options.backend);
  const auto memory = make_memory(backend);
  int passed = 0;
  for (const cases::MergeCase& c : cases::merge_case_table()) {
    if (const std::string failure = check_merge(c, *memory, backend); !failure.empty())
      throw PartFailed(format("merge of {}: {}", to_text(c), failure));
    ++passed;
  }
  return passed;
}

// The table of KV caches, and what merges parts.
Json run_decode(VerifyOptions asked) {
  asked.decode = true;
  Json result = run_table(asked, " --decode");
  result["merges"] = run_merges(asked);
  return result;
}

Json run_accuracy(VerifyOptions asked) {
  asked.accuracy = true;
  return run_cases(asked, "flash3 verify --accuracy");
}

// Each run has a seed of its own, the next number if none is asked for.
Json run_random(const VerifyOptions& options, const Json& before) {
  VerifyOptions asked = options;
  asked.quiet = true;
  if (asked.random == 0) asked.random = is_trial(asked) ? 1 : kRandomSeconds;
  Json runs = before.value("runs", Json::array());
  uint64_t next = 1;
  for (const Json& run : runs) {
    const auto seed = run.at("seed").get<uint64_t>();
    if (asked.seed == seed)
      throw UsageError(format("the record has the random problems of seed {}", seed));
    next = std::max(next, seed + 1);
  }
  const uint64_t seed = asked.seed.value_or(next);
  const RandomCounts counts = run_random_problems(asked, backend_named(asked.backend), seed);
  if (counts.failed > 0 || counts.all() == 0)
    throw PartFailed(
        format("random: {} problems, {} failed, seed {}", counts.all(), counts.failed, seed));
  runs.push_back({{"seed", seed}, {"seconds", asked.random}});
  const auto sum = [&](const char* key, int64_t more) {
    return before.value(key, int64_t{0}) + more;
  };
  return {{"command", "flash3 verify --random … --seed …"},
          {"passed", sum("passed", counts.all())},
          {"failed", 0},
          {"forward", sum("forward", counts.forward)},
          {"backward", sum("backward", counts.backward)},
          {"quantize", sum("quantize", counts.quantize)},
          {"runs", runs}};
}

std::string missing_random(const Json& noted) {
  const auto forward = noted.at("forward").get<int64_t>();
  const auto backward = noted.at("backward").get<int64_t>();
  if (forward >= kRandomForward && backward >= kRandomBackward) return "";
  return format("{} of {} forward problems, {} of {} backward ones", forward, kRandomForward,
                backward, kRandomBackward);
}

Json run_repeat(VerifyOptions asked) {
  asked.repeat = is_trial(asked) ? 2 : kRepetitions;
  asked.cases = kRepeatedCases;
  Json result = run_cases(asked, format("flash3 verify --repeat {} --case …", asked.repeat));
  result["repetitions"] = asked.repeat;
  return result;
}

Json run_sanitizer(const VerifyOptions& asked) {
  return run_sanitizer_tools(asked, kSanitizedCases);
}

}  // namespace

const std::vector<RecordPart>& record_parts() {
  static const std::vector<RecordPart> parts = {
      {"full", true, [](const VerifyOptions& o, const Json&) { return run_full(o); }},
      {"backward", true, [](const VerifyOptions& o, const Json&) { return run_backward(o); }},
      {"ragged", true, [](const VerifyOptions& o, const Json&) { return run_ragged(o); }},
      {"ragged-backward", true,
       [](const VerifyOptions& o, const Json&) { return run_ragged_backward(o); }},
      {"masks", true, [](const VerifyOptions& o, const Json&) { return run_masks(o); }},
      {"masks-backward", true,
       [](const VerifyOptions& o, const Json&) { return run_masks_backward(o); }},
      {"quantize", true, [](const VerifyOptions& o, const Json&) { return run_quantize(o); }},
      {"decode", true, [](const VerifyOptions& o, const Json&) { return run_decode(o); }},
      {"accuracy", true, [](const VerifyOptions& o, const Json&) { return run_accuracy(o); }},
      {"random", true, run_random, missing_random},
      {"repeat", true, [](const VerifyOptions& o, const Json&) { return run_repeat(o); }},
      {"sanitizer", false, [](const VerifyOptions& o, const Json&) { return run_sanitizer(o); }},
  };
  return parts;
}

}  // namespace flash3::cli
