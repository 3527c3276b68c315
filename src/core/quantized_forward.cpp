// SPDX-License-Identifier: Apache-2.0
#include "core/quantized_forward.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/arithmetic.hpp"
#include "core/message.hpp"

namespace flash3 {
namespace {

constexpr int64_t kRowBytes = 16;  // rows of FP8 tensors are multiples of it, as TMA wants them

// Cuts a workspace into tensors; without one it only measures.
class WorkspaceArena {
 public:
  explicit WorkspaceArena(void* workspace) : base_(static_cast<char*>(workspace)) {}

  void* take(int64_t bytes) {
    const size_t at = reserve_workspace(static_cast<size_t>(bytes), &used_);
    return base_ ? base_ + at : nullptr;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

// An FP8 tensor of this one's shape, contiguous but for the ends of rows, and scales for its
// blocks.
QuantizePart part_of(const TensorView& in, const Sequences& sequences, WorkspaceArena* arena) {
  const int64_t row = round_up(in.dim, kRowBytes);
  const int64_t batches = sequences.packed ? 1 : in.batch;
  QuantizePart part{true, in, in, {}};
  part.out.stride_head = row;
  part.out.stride_seq = row * in.heads;
  part.out.stride_batch = sequences.packed ? 0 : part.out.stride_seq * sequences.rows;
  part.out.data = arena->take(part.out.stride_seq * sequences.rows * batches);

  const int64_t blocks = scale_blocks(sequences, in.batch);
  part.scale.kind = ScaleKind::kBlock;
  part.scale.stride_block = 1;
  part.scale.stride_head = blocks;
  part.scale.stride_batch = sequences.packed ? 0 : blocks * in.heads;
  part.scale.data = static_cast<float*>(
      arena->take(blocks * in.heads * batches * static_cast<int64_t>(sizeof(float))));
  return part;
}

// The plans of both calls. Where they lie in the workspace follows from each run's own problem.
class QuantizedForwardPlan final : public Plan<ForwardProblem> {
 public:
  QuantizedForwardPlan(size_t tensor_bytes, PlanPointer<QuantizeProblem> quantize,
                       PlanPointer<ForwardProblem> forward)
      : tensor_bytes_(tensor_bytes), quantize_(std::move(quantize)), forward_(std::move(forward)) {}

  size_t workspace_bytes() const override {
    return tensor_bytes_ + std::max(quantize_->workspace_bytes(), forward_->workspace_bytes());
  }

  void explain(const ForwardProblem& problem, Explanation* out) const override {
    const QuantizedForward both = quantized_forward(problem);
    Explanation first;
    quantize_->explain(both.quantize, &first);
    out->add("first", first);
    out->add("FP8 tensors", message(tensor_bytes_, " bytes of the workspace"));
    forward_->explain(both.forward, out);
  }

  Status launch(const ForwardProblem& problem) const override {
    const QuantizedForward both = quantized_forward(problem);
    FLASH3_CHECK(quantize_->launch(both.quantize));
    return forward_->launch(both.forward);
  }

 private:
  size_t tensor_bytes_;
  PlanPointer<QuantizeProblem> quantize_;
  PlanPointer<ForwardProblem> forward_;
};

}  // namespace

Status plan_quantized_forward(const Backend& backend, const ForwardProblem& problem,
                              PlanPointer<ForwardProblem>* plan) {
  const QuantizedForward both = quantized_forward(problem);
  PlanPointer<QuantizeProblem> quantize;
  PlanPointer<ForwardProblem> forward;
  FLASH3_CHECK(backend.plan(both.quantize, &quantize));
  FLASH3_CHECK(backend.plan(both.forward, &forward));
  *plan = std::make_unique<QuantizedForwardPlan>(both.tensor_bytes, std::move(quantize),
                                                 std::move(forward));
  return {};
}

QuantizedForward quantized_forward(const ForwardProblem& p) {
  WorkspaceArena arena(p.workspace);
  QuantizedForward made;

  QuantizeProblem& quantize = made.quantize;
  static_cast<ExecutionContext&>(quantize) = static_cast<const ExecutionContext&>(p);
  quantize.dtype = p.dtype;
  quantize.batch = p.batch;
  quantize.sequences_q = p.sequences_q;
  quantize.sequences_k = p.sequences_k;
  quantize.q = part_of(p.q, p.sequences_q, &arena);
  quantize.k = part_of(p.k, p.sequences_k, &arena);
  quantize.v = part_of(p.v, p.sequences_k, &arena);
  quantize.rotates = true;
  quantize.rotation_seed = p.rotation_seed;

  ForwardProblem& forward = made.forward = p;
  forward.quantizes = false;
  forward.dtype = forward.kv_dtype = FLASH3_FLOAT8_E4M3;
  forward.q = quantize.q.out, forward.k = quantize.k.out, forward.v = quantize.v.out;
  forward.q_scale = quantize.q.scale;
  forward.k_scale = quantize.k.scale;
  forward.v_scale = quantize.v.scale;

  made.tensor_bytes = arena.used();
  for (ExecutionContext* context :
       {static_cast<ExecutionContext*>(&quantize), static_cast<ExecutionContext*>(&forward)}) {
    if (context->workspace) context->workspace = static_cast<char*>(p.workspace) + arena.used();
    context->workspace_size = p.workspace_size > arena.used() ? p.workspace_size - arena.used() : 0;
  }
  return made;
}

}  // namespace flash3
