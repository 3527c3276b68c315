// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>

#include "core/arithmetic.hpp"
#include "core/message.hpp"
#include "cuda/host/cuda_status.hpp"
#include "cuda/quantize/plan.hpp"

namespace flash3::cuda {
namespace {

constexpr int kColumns[] = {64, 128, 256};

// One of q, k and v.
struct Part {
  const char* name;
  const QuantizePart* part;
  const Sequences* sequences;
  bool transforms;  // q and k
  int64_t rotary_offset;

  bool has_wide_scales() const { return part->scale.kind != ScaleKind::kBlock; }
};

struct Parts {
  Part parts[3];  // q, k, v
};

Parts parts_of(const QuantizeProblem& p) {
  const bool transforms = p.rotates || p.rotary.given;
  return {{{"q", &p.q, &p.sequences_q, transforms, p.rotary_offset_q},
           {"k", &p.k, &p.sequences_k, transforms, p.rotary_offset_k},
           {"v", &p.v, &p.sequences_k, false, 0}}};
}

// Sixteen bytes at a time if base, strides and head dim, in whole `unit`s, allow; four if base and
// strides do; or an element's.
template <class T>
QuantizeView<T> view_of(const TensorView& t, int64_t unit) {
  constexpr int64_t kSize = sizeof(T);
  const auto fits = [&](int64_t width) {
    return reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(width) == 0 &&
           t.stride_batch * kSize % width == 0 && t.stride_seq * kSize % width == 0 &&
           t.stride_head * kSize % width == 0;
  };
  const int width = t.dim % unit == 0 && fits(16) ? 16 : fits(4) ? 4 : int(kSize);
  return {static_cast<T*>(t.data), t.stride_batch, t.stride_seq, t.stride_head, width};
}

QuantizedTensor tensor_of(const Part& p, int64_t batch) {
  QuantizedTensor t{};
  t.in = view_of<const unsigned short>(p.part->in, 8);
  t.out = view_of<unsigned char>(p.part->out, 16);
  t.scale = p.part->scale;
  t.sequences = *p.sequences;
  t.batch = int(batch);
  t.heads = int(p.part->in.heads);
  t.dim = int(p.part->in.dim);
  t.transforms = p.transforms;
  t.rotary_offset = p.rotary_offset;
  t.blocks = scale_blocks(t.sequences, batch);
  return t;
}

int64_t wide_scale_count(const Part& p) {
  if (!p.part->given || !p.has_wide_scales()) return 0;
  if (p.part->scale.kind == ScaleKind::kTensor) return 1;
  return p.part->in.batch * (p.part->in.heads / p.part->scale.heads_per_scale);
}

template <Element kElement>
const void* kernel_of(const QuantizePass& pass) {
  return pass.rotating_dim != 0 ? quantize_rotating_kernel_of<kElement>(pass.rotating_dim)
                                : quantize_kernel_of<kElement>(pass.columns, pass.transforms);
}

// The head dim of the rotating kernel that can run a pass: all tensors have it, and 16 bytes can be
// accessed at a time.
int rotating_dim(const QuantizeProblem& problem, const Parts& parts, const QuantizePass& pass) {
  if (!pass.transforms || problem.rotary.given) return 0;
  int dim = 0;
  for (int i = 0; i < 3; ++i) {
    if (!pass.takes_part[i]) continue;
    const QuantizedTensor t = tensor_of(parts.parts[i], problem.batch);
    if (t.in.width != 16 || t.out.width != 16 || (dim != 0 && t.dim != dim)) return 0;
    dim = t.dim;
  }
  return quantize_rotating_kernel_of<Element::kFloat16>(dim) != nullptr ? dim : 0;
}

void prepare_scales(const QuantizeProblem& problem, bool before, Launches* launches) {
  WideScalesParams params{};
  params.before = before;
  const Parts parts = parts_of(problem);
  int64_t all = 0;
  for (int i = 0; i < 3; ++i) {
    const Part& p = parts.parts[i];
    const int64_t count = wide_scale_count(p);
    all += count;
    if (count == 0) continue;
    const bool one = p.part->scale.kind == ScaleKind::kTensor;
    params.tensors[i] = {p.part->scale, count,
                         one ? 1 : int(p.part->in.heads / p.part->scale.heads_per_scale)};
  }
  if (all == 0) return;
  launches->add(runtime_launch<launch_wide_scales>("launching the kernel of the scales", params));
}

void prepare_pass(const QuantizeProblem& problem, const QuantizePlan& plan,
                  const QuantizePass& pass, bool gathers, Launches* launches) {
  auto& params = launches->make<QuantizeParams>();
  params = quantize_params(problem, pass, gathers);
  const Index blocks = quantize_blocks(params);
  if (blocks == 0) return;
  constexpr Index kMaxX = (Index{1} << 31) - 1;  // of a grid
  const Index y = ceil_div(blocks, kMaxX), x = ceil_div(blocks, y);
  const void* kernel = plan.element == Element::kFloat16 ? kernel_of<Element::kFloat16>(pass)
                                                         : kernel_of<Element::kBFloat16>(pass);
  launches->add_kernel(
      {.function = kernel, .blocks = int(x), .threads = pass.columns, .blocks_y = int(y)}, &params,
      "launching the kernel that brings tensors to FP8");
}

}  // namespace

Status plan(const QuantizeProblem& problem, const Device&, size_t*, QuantizePlan* plan) {
  *plan = {};
  const Parts parts = parts_of(problem);
  for (const Part& p : parts.parts)
    if (p.part->given && problem.dtype != FLASH3_FLOAT16 && problem.dtype != FLASH3_BFLOAT16)
      return unsupported(message(p.name, ".dtype = ", dtype_name(problem.dtype),
                                 " but the hopper backend brings float16 and bfloat16 to FP8"));
  plan->element = problem.dtype == FLASH3_FLOAT16 ? Element::kFloat16 : Element::kBFloat16;
  int narrower = 0;
  for (const int columns : kColumns) {
    QuantizePass pass{.columns = columns};
    bool any = false;
    for (int i = 0; i < 3; ++i) {
      const Part& p = parts.parts[i];
      if (!p.part->given || p.part->in.dim > columns || p.part->in.dim <= narrower) continue;
      pass.takes_part[i] = any = true;
      pass.transforms |= p.transforms;
      plan->has_wide_scales |= p.has_wide_scales();
    }
    if (any) {
      pass.rotating_dim = rotating_dim(problem, parts, pass);
      plan->passes[plan->count++] = pass;
    }
    narrower = columns;
  }
  return {};
}

QuantizeParams quantize_params(const QuantizeProblem& problem, const QuantizePass& pass,
                               bool gathers) {
  QuantizeParams params{};
  params.gathers = gathers;
  params.rotates = problem.rotates;
  if (problem.rotates) fill_signs(problem.rotation_seed, params.signs);
  const RotaryView& rotary = problem.rotary;
  if (rotary.given)
    params.rotary = {rotary.cos,        rotary.sin,     rotary.stride_cos,
                     rotary.stride_sin, rotary.dim / 2, rotary.dtype == FLASH3_FLOAT32,
                     rotary.interleaved};
  const Parts parts = parts_of(problem);
  Index blocks = 0;
  for (int i = 0; i < 3; ++i) {
    const Part& p = parts.parts[i];
    if (!pass.takes_part[i] || (gathers && !p.has_wide_scales())) continue;
    QuantizedTensor& t = params.tensors[params.count] = tensor_of(p, problem.batch);
    const Index here =
        t.batch == 0 ? 0 : t.blocks * t.heads * (t.sequences.packed ? Index{1} : Index{t.batch});
    if (here == 0) continue;  // its place goes to the next
    t.first = blocks;
    t.past = blocks += here;
    ++params.count;
  }
  return params;
}

std::string kernel_id(const QuantizePlan& plan, const QuantizePass& pass) {
  const bool rotates = pass.rotating_dim != 0;
  return message("quantize_", plan.element == Element::kFloat16 ? "fp16" : "bf16", "_d",
                 rotates ? pass.rotating_dim : pass.columns,
                 rotates           ? "_rotated"
                 : pass.transforms ? "_transformed"
                                   : "");
}

void explain(const QuantizeProblem& problem, const QuantizePlan& plan, Explanation* out) {
  const Parts parts = parts_of(problem);
  for (int i = 0; i < plan.count; ++i) {
    const QuantizePass& pass = plan.passes[i];
    const QuantizeParams params = quantize_params(problem, pass, false);
    std::string names;
    for (int p = 0; p < 3; ++p)
      if (pass.takes_part[p])
        names += (names.empty() ? "" : ", ") + std::string(parts.parts[p].name);
    out->add("kernel", kernel_id(plan, pass));
    out->add("why",
             message(pass.rotating_dim != 0 ? "it rotates on the tensor cores, for the head dim of "
                                            : "the narrowest that holds the head dims of ",
                     names));
    out->add("grid",
             message(quantize_blocks(params), " blocks of ", pass.columns, " threads, ",
                     kScaleBlock, " tokens of one head each",
                     problem.is_ragged() ? "; those that the lengths leave none end at once" : ""));
    for (int t = 0; t < params.count; ++t)
      if (params.tensors[t].in.width != 16 || params.tensors[t].out.width != 16)
        out->add("access",
                 message("head dim ", params.tensors[t].dim, ": loads of ",
                         params.tensors[t].in.width, ", stores of ", params.tensors[t].out.width,
                         " bytes; 16 take bases, strides and rows of whole 16 bytes"));
  }
  if (problem.rotary.given || problem.rotates)
    out->add("transformed",
             message("q and k", problem.rotary.given ? ", by the rotary tables" : "",
                     problem.rotates ? ", by the rotation of the head dim" : "", "; in registers"));
  out->add("scales", plan.has_wide_scales
                         ? "some are of more than a block: what they are for is read for them first"
                         : "of blocks: everything is read once");
}

Status prepare(const QuantizeProblem& problem, const QuantizePlan& plan, Launches* launches) {
  if (problem.is_empty()) return {};
  if (plan.has_wide_scales) {
    prepare_scales(problem, true, launches);
    for (int i = 0; i < plan.count; ++i)
      prepare_pass(problem, plan, plan.passes[i], true, launches);
    prepare_scales(problem, false, launches);
  }
  for (int i = 0; i < plan.count; ++i) prepare_pass(problem, plan, plan.passes[i], false, launches);
  return {};
}

}  // namespace flash3::cuda
