// SPDX-License-Identifier: Apache-2.0
// Prints what the library supports, as Markdown, by asking the functions that decide it when a call
// is made: plan() of the Hopper families and of the CPU backend. Needs no GPU: a plan launches
// nothing. support_matrix.py puts the text into docs/support.md.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cases/backward_tensors.hpp"
#include "core/backend.hpp"
#include "core/message.hpp"
#include "cuda/sm90/backward/plan.hpp"
#include "cuda/sm90/select.hpp"

namespace flash3 {
namespace {

using cases::Case;
using cuda::sm90::BackwardKernel;
using cuda::sm90::BackwardPlan;
using cuda::sm90::DecodeKernel;
using cuda::sm90::ForwardKernel;
using cuda::sm90::ForwardSteps;

constexpr flash3_dtype kDtypes[] = {FLASH3_FLOAT16, FLASH3_BFLOAT16, FLASH3_FLOAT32,
                                    FLASH3_FLOAT8_E4M3};
constexpr cuda::Device kDevice{0, 132, {9, 0}};  // an H100 or H200; only the grid depends on it

struct HeadDims {
  int64_t dim = 0, dim_v = 0;
  bool operator==(const HeadDims&) const = default;
};

struct Answer {
  bool supported = false, copied = false;
  HeadDims tile;  // of Hopper's kernel
};

void check(const Case& c, const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", to_id(c).c_str(), status.message().c_str());
  std::exit(1);
}

// Nothing if no backend can ever take it.
std::optional<ForwardProblem> forward_problem(const Case& c) {
  const auto params = cases::make_question(c);
  ForwardProblem problem;
  const Status status = make_forward_problem(&params, Pointers::kOptional, &problem);
  const bool is_wide = std::max(c.head_dim, c.head_dim_v) > kMaxHeadDim;  // no FP8 call may be
  if (status.code() == FLASH3_UNSUPPORTED || (is_wide && !status.ok())) return {};
  check(c, status);
  return problem;
}

std::optional<BackwardProblem> backward_problem(const Case& c) {
  const auto params = cases::make_backward_question(c);
  BackwardProblem problem;
  const Status status = make_backward_problem(&params, Pointers::kOptional, &problem);
  if (status.code() == FLASH3_UNSUPPORTED) return {};
  check(c, status);
  return problem;
}

// What a step copies first, and its tile.
template <class Plan>
void add_step(const Plan& plan, Answer* answer) {
  if constexpr (requires { plan.q; })
    answer->copied = plan.q.needed || plan.k.needed || plan.v.needed;
  if (plan.kernel) answer->tile = {plan.kernel->config.head_dim, plan.kernel->config.head_dim_v};
}

Answer ask_hopper(const Case& c) {
  Answer answer;
  size_t workspace = 0;
  if (c.backward) {
    const auto problem = backward_problem(c);
    if (!problem) return {};
    BackwardPlan plan;
    answer.supported = cuda::sm90::plan(*problem, kDevice, &workspace, &plan).ok();
    add_step(plan, &answer);
    return answer;
  }
  const auto problem = forward_problem(c);
  if (!problem) return {};
  ForwardSteps steps;
  answer.supported = cuda::sm90::plan(*problem, kDevice, &workspace, &steps).ok();
  if (steps.decode) add_step(*steps.decode, &answer);
  if (steps.forward) add_step(*steps.forward, &answer);  // the one of a call's prompts
  return answer;
}

template <AnyProblem P>
bool cpu_supports(const P& problem) {
  PlanPointer<P> plan;
  return cpu_backend().plan(problem, &plan).ok();
}

Answer ask_cpu(const Case& c) {
  Answer answer;
  if (!c.backward) {
    const auto problem = forward_problem(c);
    answer.supported = problem && cpu_supports(*problem);
  } else if (const auto problem = backward_problem(c)) {
    answer.supported = cpu_supports(*problem);
  }
  return answer;
}

Case parse(const std::string& id) {
  std::string error;
  const auto c = cases::parse_id(id, &error);
  if (!c) {
    std::fprintf(stderr, "%s\n", error.c_str());
    std::exit(1);
  }
  return *c;
}

Case with_head_dims(Case c, int64_t dim, int64_t dim_v) {
  c.head_dim = dim, c.head_dim_v = dim_v;
  return c;
}

enum class Dims { kAsGiven, kEqual, kDifferent, kAny };

// What a user may ask for: supported if every one of these cases is.
struct Feature {
  const char* name;
  std::vector<std::string> cases;  // ids without the dtype
  Dims dims = Dims::kAsGiven;      // others: each case with all such head dims from 1
};

const Feature kFeatures[] = {
    {"full attention", {"b2/q512/k512/h8/d128/full"}},
    {"causal mask", {"b2/q512/k512/h8/d128/causal"}},
    {"sliding window, causal or not",
     {"b2/q512/k512/h8/d128/w100:50",
      "b2/q512/k512/h8/d128/causal+w128:", "b2/q512/k512/h8/d128/w:33"}},
    {"GQA, MQA", {"b2/q512/k512/h8x2/d128/causal", "b2/q512/k512/h8x1/d128/causal"}},
    {"seq_q ≠ seq_k, masks aligned to the bottom right",
     {"b2/q129/k1000/h8/d128/causal", "b2/q1000/k129/h8/d128/causal"}},
    {"head_dim = head_dim_v = 1 … 256", {"b2/q512/k512/h8/d128/causal"}, Dims::kEqual},
    {"head_dim ≠ head_dim_v, each 1 … 256", {"b2/q512/k512/h8/d128/causal"}, Dims::kDifferent},
    {"head_dim 1 … 576 with head_dim_v 1 … 512, one of them above 256",
     {"b2/q512/k512/h8/d257x1/full", "b2/q512/k512/h8/d1x257/causal", "b2/q512/k512/h8/d512/causal",
      "b2/q512/k512/h8x2/d576x512/full", "b2/q1/k512/h8x1/d512/full"}},
    {"out in float32", {"b2/q512/k512/h8/d128/causal/outfp32"}},
    {"LSE", {"b2/q512/k512/h8/d128/causal", "b2/q512/k512/h8/d128/causal/nolse"}},
    {"[batch, seq, heads, dim] and [batch, heads, seq, dim]",
     {"b2/q512/k512/h8/d128/causal/bshd", "b2/q512/k512/h8/d128/causal/bhsd"}},
    {"row gaps of whole 16 bytes", {"b2/q512/k512/h8/d128/causal/padded"}},
    {"strides of any size, bases on any element", {"b2/q512/k512/h8/d128/causal/odd"}},
    {"empty batch, empty Q, empty K",
     {"b0/q512/k512/h8/d128/causal", "b2/q0/k512/h8/d128/causal", "b2/q512/k0/h8/d128/causal"}},
    {"tensors of more than 2³¹ elements", {"b1/q30000000/k512/h1/d128/full"}},
    {"ragged batches: packed, padded, with seqused; one side or both",
     {"b9/q300/k300/h8/d128/causal/random/packed", "b9/q300/k400/h8/d64/full/random/packed/used",
      "b9/q300/k300/h8x2/d128/causal/random/used", "b9/q300/k400/h8/d128/full/random/packedq",
      "b9/q300/k400/h8/d128/full/random/packedk/nomax"}},
    {"sinks, float32 or of the tensors' dtype",
     {"b2/q512/k512/h8/d64/causal/sink", "b2/q512/k512/h8/d64/causal+w128:/sink16"}},
    {"softcap", {"b2/q512/k512/h8/d128/causal/softcap30", "b2/q512/k512/h8/d256/full/softcap50"}},
    {"chunks", {"b2/q512/k512/h8/d128/causal/chunk128", "b2/q512/k512/h8/d128/full/chunk100"}},
    {"few queries, of 256 keys or more",
     {"b2/q1/k512/h8/d128/full", "b2/q2/k5000/h8x2/d64/causal",
      "b9/q1/k300/h8x2/d80/causal/usedk"}},
    {"KV cache: pages of any size, `cache_batch_idx`, `leftpad_k`, any number of queries",
     {"b3/q1/k300/h8x2/d128/causal/usedk/paged16", "b3/q200/k300/h8x2/d64/causal/usedk/paged1",
      "b3/q200/k300/h8x2/d128/causal/packedq/usedk/paged16",
      "b3/q200/k300/h8/d256/full/usedk/batchidx/leftpad",
      "b3/q5/k300/h8/d192x128/w100:/usedk/batchidx", "b3/q1/k300/h8/d256/full/usedk/leftpad",
      "b3/q1/k300/h8/d128/causal/usedk/paged256/softcap30/sink"}},
    {"KV cache: append, with a rotary embedding or without",
     {"b3/q1/k300/h8x2/d128/causal/usedk/paged16/append1",
      "b3/q9/k300/h8x2/d80/causal/usedk/append9/packednew/rotary",
      "b3/q1/k300/h8x2/d128/causal/usedk/batchidx/append1/offsets/rotary2"}},
    {"KV cache: the rotation of q and of what is appended",
     {"b3/q1/k300/h8x2/d128/causal/usedk/paged16/append1/rotary/rotate",
      "b3/q9/k300/h8x2/d80/causal/usedk/append9/packednew/rotate",
      "b3/q200/k300/h8x2/d64/causal/usedk/paged64/rotate"}},
    {"KV cache: a tree of up to 64 drafts for the mask",
     {"b3/q7/k300/h8x2/d128/full/usedk/paged16/append7/tree",
      "b3/q64/k300/h8x2/d64/full/packedq/usedk/batchidx/tree"}},
    {"masks as data: ranges, documents, blocks, a byte for each pair",
     {"b2/q300/k500/h8x2/d128/full/mask:ranges3.h", "b2/q300/k300/h8/d64/causal/mask:documents.b",
      "b1/q300/k500/h8x2/d256/full/mask:blocks64x64", "b2/q300/k500/h8x2/d96/w100:/mask:dense"}},
    {"ALiBi, biases by distance",
     {"b2/q300/k500/h8x2/d128/causal/alibi_slopes=batch_heads",
      "b2/q300/k500/h8x2/d256/causal/bias_table=hd",
      "b2/q300/k500/h8/d96/causal/softcap20/alibi_slopes=heads/bias_table=d",
      "b3/q1/k300/h8x2/d128/causal/usedk/paged16/alibi_slopes=heads",
      "b2/q300/k500/h8x2/d64/full/mask:dense/bias_table=d"}},
    {"biases by pair",
     {"b2/q300/k500/h8/d64/full/bias=hqk",
      "b2/q300/k500/h8/d96/causal/softcap20/alibi_slopes=heads/bias=bk/bias_table=d"}},
    {"dropout, with its gradients",
     {"b2/q300/k500/h8x2/d128/causal/dropout0.1/bwd", "b2/q300/k500/h8/d64/full/dropout0.5/bwd",
      "b2/q300/k500/h8x2/d256/causal/softcap20/dropout0.1/bwd"}},
    {"backward: masks as data",
     {"b2/q300/k500/h8x2/d128/full/mask:ranges3.h/bwd",
      "b2/q300/k300/h8/d64/causal/mask:documents.b/bwd",
      "b1/q300/k500/h8x2/d256/full/mask:blocks64x64/bwd",
      "b2/q300/k500/h8x2/d96/w100:/mask:dense/bwd"}},
    {"backward: ALiBi, biases and their gradients",
     {"b2/q300/k500/h8x2/d128/causal/alibi_slopes=batch_heads/bwd/dadded",
      "b2/q300/k500/h8/d64/full/bias=hqk/bwd/dadded",
      "b2/q300/k500/h8x2/d256/causal/bias_table=hd/bwd/dadded",
      "b2/q300/k500/h8/d96/causal/softcap20/alibi_slopes=heads/bias=bk/bias_table=d/bwd/dadded"}},
    {"backward: masks, GQA and lengths as above",
     {"b2/q512/k512/h8/d128/full/bwd", "b2/q512/k512/h8/d128/causal/bwd",
      "b2/q512/k512/h8/d128/w100:50/bwd", "b2/q512/k512/h8/d128/causal+w128:/bwd",
      "b2/q512/k512/h8x2/d128/causal/bwd", "b2/q512/k512/h8x1/d128/causal/bwd",
      "b2/q129/k1000/h8/d128/causal/bwd", "b2/q1000/k129/h8/d128/causal/bwd",
      "b0/q512/k512/h8/d128/causal/bwd", "b2/q0/k512/h8/d128/causal/bwd",
      "b2/q512/k0/h8/d128/causal/bwd", "b1/q30000000/k512/h1/d128/full/bwd"}},
    {"backward: head_dim and head_dim_v, each 1 … 256",
     {"b2/q512/k512/h8/d128/full/bwd", "b2/q512/k512/h8/d128/causal/bwd"},
     Dims::kAny},
    {"backward: gradients in float32", {"b2/q512/k512/h8/d128/causal/gradfp32"}},
    {"backward: gradient of LSE", {"b2/q512/k512/h8/d128/causal/dlse"}},
    {"backward: dense layouts, and row gaps of whole 16 bytes",
     {"b2/q512/k512/h8/d128/causal/bshd/bwd", "b2/q512/k512/h8/d128/causal/bhsd/bwd",
      "b2/q512/k512/h8/d128/causal/padded/bwd"}},
    {"backward: strides of any size, bases on any element",
     {"b2/q512/k512/h8/d128/causal/odd/bwd"}},
    {"backward: deterministic",
     {"b2/q512/k512/h8/d128/full/deterministic", "b2/q512/k512/h8/d64/causal/deterministic"}},
    {"backward: sinks",
     {"b2/q512/k512/h8/d64/causal+w128:/sink/bwd", "b2/q512/k512/h8/d128/full/sink16/bwd"}},
    {"backward: softcap",
     {"b2/q512/k512/h8/d128/causal/softcap30/bwd", "b2/q512/k512/h8/d256/full/softcap50/bwd"}},
    {"backward: ragged batches, chunks",
     {"b9/q300/k300/h8/d128/causal/random/packed/bwd",
      "b9/q300/k400/h8/d64/full/random/used/deterministic",
      "b2/q512/k512/h8/d128/causal/chunk128/bwd"}},
};

std::vector<Case> cases_of(const Feature& feature, flash3_dtype dtype) {
  const std::string prefix = message(cases::short_name(dtype), "/");
  std::vector<Case> list;
  for (const std::string& id : feature.cases) {
    const Case c = parse(prefix + id);
    if (feature.dims == Dims::kAsGiven) {
      list.push_back(c);
      continue;
    }
    for (int64_t dim = 1; dim <= kMaxHeadDim; ++dim)
      for (int64_t dim_v = 1; dim_v <= kMaxHeadDim; ++dim_v)
        if (feature.dims == Dims::kAny || (dim == dim_v) == (feature.dims == Dims::kEqual))
          list.push_back(with_head_dims(c, dim, dim_v));
  }
  return list;
}

// "fp16, bf16"; "–" if no dtype can do it.
std::string cell(const Feature& feature, Answer (*ask)(const Case&)) {
  std::string text;
  int copied = 0, dims_off_16_bytes = 0, count = 0;
  for (const flash3_dtype dtype : kDtypes) {
    bool all = true;
    for (const Case& c : cases_of(feature, dtype)) {
      const Answer answer = ask(c);
      all &= answer.supported;
      if (!answer.supported) continue;
      copied += answer.copied;
      const int64_t size = dtype_size(dtype);
      dims_off_16_bytes += c.head_dim * size % 16 != 0 || c.head_dim_v * size % 16 != 0;
      ++count;
    }
    if (all) text += message(text.empty() ? "" : ", ", cases::short_name(dtype));
  }
  if (text.empty()) return "–";
  if (copied == 0) return text;
  if (copied == count) return text + "; inputs are copied first";
  if (copied == dims_off_16_bytes)
    return text + "; copied first where a head dim is not a multiple of 16 bytes";
  return text + "; some are copied first";
}

void print_features() {
  std::printf("| | hopper (compute capability 9.0) | cpu |\n| --- | --- | --- |\n");
  for (const Feature& feature : kFeatures)
    std::printf("| %s | %s | %s |\n", feature.name, cell(feature, ask_hopper).c_str(),
                cell(feature, ask_cpu).c_str());
}

// Hopper's tile for all head dims, as calls with this id have them: kernels share the calls.
const std::vector<HeadDims>& tiles_of(const std::string& calls, int64_t step) {
  static std::map<std::string, std::vector<HeadDims>> asked;
  std::vector<HeadDims>& tiles = asked[calls];
  if (!tiles.empty()) return tiles;
  const Case any = parse(calls);
  for (int64_t dim = step; dim <= kMaxHeadDim; dim += step)
    for (int64_t dim_v = step; dim_v <= kMaxHeadDim; dim_v += step)
      tiles.push_back(ask_hopper(with_head_dims(any, dim, dim_v)).tile);
  return tiles;
}

// The head dims for which Hopper takes a kernel with such a tile; calls: an id with the mask of the
// kernel. step: multiples of so many alone.
std::string head_dims_of(const HeadDims& tile, const std::string& calls, int64_t step = 1) {
  int64_t first = 0, last = 0, low = 0, high = 0, low_v = 0, high_v = 0;
  auto found = tiles_of(calls, step).begin();
  for (int64_t dim = step; dim <= kMaxHeadDim; dim += step) {
    for (int64_t dim_v = step; dim_v <= kMaxHeadDim; dim_v += step) {
      if (*found++ != tile) continue;
      if (dim == dim_v) last = dim, first = first ? first : dim;
      high = dim, low = low ? low : dim;
      high_v = std::max(high_v, dim_v), low_v = low_v ? std::min(low_v, dim_v) : dim_v;
    }
  }
  const std::string multiples = step == 1 ? "" : message(", multiples of ", step);
  if (first > 0) return message(first, "–", last, multiples);
  return message(low, "–", high, " with head_dim_v ", low_v, "–", high_v, multiples);
}

int tile_m(const ForwardKernel& kernel) { return kernel.config.tile_m(); }
int tile_m(const BackwardKernel& kernel) { return kernel.config.tile_m; }
int tile_n(const ForwardKernel& kernel) { return kernel.config.tile_n; }
int tile_n(const BackwardKernel& kernel) { return kernel.config.tile_n; }
// Caches whose rows TMA cannot address are for the decode kernels.
bool is_paged(const ForwardKernel& kernel) { return kernel.config.paged; }
bool is_paged(const BackwardKernel&) { return false; }
bool is_split(const ForwardKernel& kernel) { return kernel.config.split; }
bool is_split(const BackwardKernel&) { return false; }
// Rows of caches are whole 16 bytes.
int dim_step(const ForwardKernel& kernel) {
  return kernel.config.paged ? 16 / kernel.config.element_bytes() : 1;
}
int dim_step(const BackwardKernel&) { return 1; }
int consumers(const ForwardKernel& kernel) { return kernel.config.warpgroups; }
int consumers(const BackwardKernel&) { return cuda::sm90::kConsumerWarpgroups; }
std::string stages(const ForwardKernel& kernel) {
  const cuda::sm90::ForwardConfig& c = kernel.config;
  return c.fp8() ? message(c.stages, ", ", c.raw_v_stages) : message(c.stages);
}
std::string stages(const BackwardKernel&) { return message(cuda::sm90::kQueryStages); }
std::string more_registers(const ForwardKernel&) { return {}; }
std::string more_registers(const BackwardKernel& kernel) {
  const cuda::sm90::BackwardConfig& c = kernel.config;
  return c.wide ? message(", of dQ ", c.dq_registers()) : "";
}

// What the calls of a kernel's row have: the terms that it adds, a softcap, a mask as lists.
template <class Config>
std::string options_of(const Config& c) {
  std::string options = c.score == cuda::ScoreKind::kSoftcap ? "/softcap30" : "";
  switch (c.terms) {
    case cuda::BiasTerms::kNone: break;
    case cuda::BiasTerms::kAny: options += "/alibi_slopes=heads/bias_table=hd"; break;
    case cuda::BiasTerms::kSlopes: options += "/alibi_slopes=heads"; break;
    case cuda::BiasTerms::kTable: options += "/bias_table=hd"; break;
    case cuda::BiasTerms::kPairs: options += "/bias=hqk"; break;
    case cuda::BiasTerms::kDropout: options += "/dropout0.1"; break;
  }
  return options + (c.lists ? message("/mask:blocks", c.tile_n, "x", c.tile_n) : "");
}

// The kernels of these dtypes have the same shapes, dtype by dtype: the table has one row for all,
// and says so only if it is so. `family` is what ids begin with, `suffix` what a case's id ends in.
template <class Kernel>
void print_kernels(std::span<const Kernel> kernels, const std::vector<std::string>& dtypes,
                   const std::string& family, const char* staged, const char* suffix) {
  std::string names;
  for (const std::string& dtype : dtypes) names += (names.empty() ? "" : ",") + dtype;
  if (dtypes.size() > 1) names = "{" + names + "}";
  const size_t count = kernels.size() / dtypes.size();
  std::printf(
      "| kernel | head_dim | tile, queries × keys | consumer warpgroups | stages of %s | "
      "shared memory | registers, producer / consumer |\n"
      "| --- | --- | --- | --- | --- | --- | --- |\n",
      staged);
  for (size_t i = 0; i < count; ++i) {
    const Kernel& first = kernels[i];
    const auto& c = first.config;
    const std::string shape = first.id.substr(family.size() + 1 + dtypes[0].size());
    for (size_t d = 0; d < dtypes.size(); ++d) {
      const std::string& id = kernels[d * count + i].id;
      if (id == family + "_" + dtypes[d] + shape) continue;
      std::fprintf(stderr, "%s is not %s of another dtype\n", id.c_str(), first.id.c_str());
      std::exit(1);
    }
    const std::string calls =
        message(dtypes[0],
                is_split(first)   ? "/b1/q17/k1/h1/d128/"
                : is_paged(first) ? "/b1/q17/k1/h128/d128/"
                                  : "/b2/q512/k512/h8/d128/",
                c.band ? "causal" : "full", is_paged(first) ? "/usedk/batchidx" : "", options_of(c),
                suffix);
    std::printf("| `%s_%s%s` | %s | %d × %d | %d | %s | %.1f KiB | %d / %d%s |\n", family.c_str(),
                names.c_str(), shape.c_str(),
                head_dims_of({c.head_dim, c.head_dim_v}, calls, dim_step(first)).c_str(),
                tile_m(first), tile_n(first), consumers(first), stages(first).c_str(),
                shared_memory_bytes(c) / 1024.0, c.producer_registers(), c.consumer_registers(),
                more_registers(first).c_str());
  }
}

// The table of the decode kernels, which all have the same roles.
void print_decode_kernels() {
  std::printf(
      "| kernel | head_dim | tile, query rows × keys | stages of K and V | shared memory |\n"
      "| --- | --- | --- | --- | --- |\n");
  for (const DecodeKernel& kernel : cuda::sm90::decode_kernels()) {
    if (kernel.element != cuda::Element::kBFloat16) continue;
    const auto& c = kernel.config;
    const std::string family = "decode_bf16";
    const std::string dims =
        head_dims_of({c.head_dim, c.head_dim_v}, "bf16/b2/q1/k512/h8/d128/full");
    std::printf("| `decode_{fp16,bf16}%s` | %s | %d × %d | %d | %.1f KiB |\n",
                kernel.id.substr(family.size()).c_str(),
                c.latent ? "576, or with qv 64; head_dim_v 512" : dims.c_str(), c.rows, c.tile_n,
                c.stages, c.shared_bytes() / 1024.0);
  }
}

}  // namespace
}  // namespace flash3

int main() {
  flash3::print_features();
  const auto forward = flash3::cuda::sm90::forward_kernels();
  const size_t fp8 =
      size_t(std::ranges::count_if(forward, [](const flash3::cuda::sm90::ForwardKernel& kernel) {
        return kernel.config.fp8();
      }));
  const std::vector<std::string> dtypes = {"fp16", "bf16"};
  std::printf("\n");
  flash3::print_kernels(forward.first(forward.size() - fp8), dtypes, "fwd", "K and V", "");
  std::printf("\n");
  flash3::print_kernels(forward.last(fp8), {"e4m3"}, "fwd", "K and V, of V as it comes", "");
  std::printf("\n");
  flash3::print_kernels(flash3::cuda::sm90::backward_kernels(), dtypes, "bwd", "Q and of dOut",
                        "/bwd");
  std::printf("\n");
  flash3::print_decode_kernels();
}
