// Prints what the library supports, as Markdown, by asking the functions that decide it when a call
// is made: plan_forward for Hopper, the CPU backend's supports(). Needs no GPU: a plan launches
// nothing. support_matrix.py puts the text into README.md.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "cases/tensors.hpp"
#include "core/backend.hpp"
#include "core/message.hpp"
#include "hopper/forward/select.hpp"

namespace flash3 {
namespace {

using cases::Case;
using hopper::ForwardConfig;
using hopper::ForwardKernel;
using hopper::ForwardPlan;

constexpr flash3_dtype kDtypes[] = {FLASH3_FLOAT16, FLASH3_BFLOAT16, FLASH3_FLOAT32};
constexpr hopper::Device kDevice{0, 132};  // an H100 or H200; only the grid depends on it

struct Answer {
  bool supported = false, copied = false;
  const ForwardKernel* kernel = nullptr;  // Hopper's
};

ForwardProblem problem_of(const Case& c) {
  const auto params = cases::make_question(c);
  ForwardProblem problem;
  const Status status = make_forward_problem(&params, Pointers::kOptional, &problem);
  if (!status.ok()) {
    std::fprintf(stderr, "%s: %s\n", to_id(c).c_str(), status.message().c_str());
    std::exit(1);
  }
  return problem;
}

Answer ask_hopper(const Case& c) {
  ForwardPlan plan;
  Answer answer;
  answer.supported = hopper::plan_forward(problem_of(c), kDevice, &plan).ok();
  answer.copied = plan.q.needed || plan.k.needed || plan.v.needed;
  answer.kernel = plan.kernel;
  return answer;
}

Answer ask_cpu(const Case& c) {
  Answer answer;
  answer.supported = cpu_backend().supports(problem_of(c)).ok();
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

// What a user may ask for: supported if every one of these cases is.
struct Feature {
  const char* name;
  std::vector<std::string> cases;  // ids without the dtype
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
    {"head_dim = head_dim_v = 1 … 256", {}},
    {"head_dim ≠ head_dim_v, each 1 … 256", {}},
    {"LSE", {"b2/q512/k512/h8/d128/causal", "b2/q512/k512/h8/d128/causal/nolse"}},
    {"[batch, seq, heads, dim] and [batch, heads, seq, dim]",
     {"b2/q512/k512/h8/d128/causal/bshd", "b2/q512/k512/h8/d128/causal/bhsd"}},
    {"row gaps of whole 16 bytes", {"b2/q512/k512/h8/d128/causal/padded"}},
    {"strides of any size, bases on any element", {"b2/q512/k512/h8/d128/causal/odd"}},
    {"empty batch, empty Q, empty K",
     {"b0/q512/k512/h8/d128/causal", "b2/q0/k512/h8/d128/causal", "b2/q512/k0/h8/d128/causal"}},
    {"tensors of more than 2³¹ elements", {"b1/q30000000/k512/h1/d128/full"}},
};

std::vector<Case> cases_of(const Feature& feature, flash3_dtype dtype) {
  const std::string prefix = message(cases::short_name(dtype), "/");
  std::vector<Case> list;
  for (const std::string& id : feature.cases) list.push_back(parse(prefix + id));
  if (!list.empty()) return list;
  const bool differ = std::string_view(feature.name).find("≠") != std::string_view::npos;
  const Case any = parse(prefix + "b2/q512/k512/h8/d128/causal");
  for (int64_t dim = 1; dim <= kMaxHeadDim; ++dim)
    for (int64_t dim_v = 1; dim_v <= kMaxHeadDim; ++dim_v)
      if ((dim != dim_v) == differ) list.push_back(with_head_dims(any, dim, dim_v));
  return list;
}

// "fp16, bf16"; "–" if no dtype can do it.
std::string cell(const Feature& feature, Answer (*ask)(const Case&)) {
  std::string text;
  int copied = 0, dims_off_8 = 0, count = 0;
  for (const flash3_dtype dtype : kDtypes) {
    bool all = true;
    for (const Case& c : cases_of(feature, dtype)) {
      const Answer answer = ask(c);
      all &= answer.supported;
      if (!answer.supported) continue;
      copied += answer.copied;
      dims_off_8 += c.head_dim % 8 != 0 || c.head_dim_v % 8 != 0;
      ++count;
    }
    if (all) text += message(text.empty() ? "" : ", ", cases::short_name(dtype));
  }
  if (text.empty()) return "–";
  if (copied == 0) return text;
  if (copied == count) return text + "; inputs are copied first";
  if (copied == dims_off_8) return text + "; copied first where a head dim is not a multiple of 8";
  return text + "; some are copied first";
}

void print_features() {
  std::printf("| | hopper (compute capability 9.0) | cpu |\n| --- | --- | --- |\n");
  for (const Feature& feature : kFeatures)
    std::printf("| %s | %s | %s |\n", feature.name, cell(feature, ask_hopper).c_str(),
                cell(feature, ask_cpu).c_str());
}

// The head dims for which plan_forward takes this kernel, or another of the same group of rows.
std::string head_dims_of(const ForwardKernel& kernel) {
  int64_t first = 0, last = 0, low = 0, high = 0, low_v = 0, high_v = 0;
  const Case any = parse(message(kernel.element == hopper::Element::kFloat16 ? "fp16" : "bf16",
                                 "/b2/q512/k512/h8/d128/", kernel.config.band ? "causal" : "full"));
  for (int64_t dim = 1; dim <= kMaxHeadDim; ++dim) {
    for (int64_t dim_v = 1; dim_v <= kMaxHeadDim; ++dim_v) {
      const ForwardKernel* taken = ask_hopper(with_head_dims(any, dim, dim_v)).kernel;
      if (!taken || taken->config.head_dim != kernel.config.head_dim ||
          taken->config.head_dim_v != kernel.config.head_dim_v) {
        continue;
      }
      if (dim == dim_v) last = dim, first = first ? first : dim;
      high = dim, low = low ? low : dim;
      high_v = std::max(high_v, dim_v), low_v = low_v ? std::min(low_v, dim_v) : dim_v;
    }
  }
  if (first > 0) return message(first, "–", last);
  return message(low, "–", high, " with head_dim_v ", low_v, "–", high_v);
}

// fp16 and bf16 kernels have the same shapes: the table has one row for both, and says so only if
// it is so.
void print_kernels() {
  const auto kernels = hopper::forward_kernels();
  const size_t half = kernels.size() / 2;
  std::printf(
      "| kernel | head_dim | tile, queries × keys | consumer warpgroups | stages of K and V | "
      "shared memory | registers, producer / consumer |\n"
      "| --- | --- | --- | --- | --- | --- | --- |\n");
  for (size_t i = 0; i < half; ++i) {
    const ForwardKernel &fp16 = kernels[i], &bf16 = kernels[half + i];
    const ForwardConfig& c = fp16.config;
    const std::string shape = fp16.id.substr(std::string_view("fwd_fp16").size());
    if (fp16.id != "fwd_fp16" + shape || bf16.id != "fwd_bf16" + shape) {
      std::fprintf(stderr, "%s and %s are not a pair\n", fp16.id.c_str(), bf16.id.c_str());
      std::exit(1);
    }
    std::printf("| `fwd_{fp16,bf16}%s` | %s | %d × %d | %d | %d | %.1f KiB | %d / %d |\n",
                shape.c_str(), head_dims_of(fp16).c_str(), c.tile_m(), c.tile_n, c.warpgroups,
                c.stages, c.shared_bytes() / 1024.0, c.producer_registers(),
                c.consumer_registers());
  }
}

}  // namespace
}  // namespace flash3

int main() {
  flash3::print_features();
  std::printf("\n");
  flash3::print_kernels();
}
