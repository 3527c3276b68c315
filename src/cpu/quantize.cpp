// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "core/arithmetic.hpp"
#include "core/convert.hpp"
#include "core/interrupt.hpp"
#include "cpu/parallel.hpp"
#include "cpu/row_transforms.hpp"
#include "cpu/rows.hpp"

namespace flash3::cpu {
namespace {

// One of q, k and v.
struct Work {
  const QuantizePart* part;
  const Sequences* sequences;
  bool rotates;  // q and k: rotary embedding, rotation
  Index offset;

  bool has_wide_scales() const { return part->given && part->scale.kind != ScaleKind::kBlock; }
  Index blocks_of_one() const { return ceil_div(sequences->max_length, kScaleBlock); }
  Index blocks() const {
    return part->given ? part->in.batch * part->in.heads * blocks_of_one() : 0;
  }
  // Scales that the amax of a block goes to: of the tensor, or of each sequence and KV head.
  Index heads_of_scales() const { return part->in.heads / part->scale.heads_per_scale; }
  Index scales() const {
    if (!has_wide_scales()) return 0;
    return part->scale.kind == ScaleKind::kTensor ? 1 : part->in.batch * heads_of_scales();
  }
  Index scale_number(Index batch, Index head) const {
    if (part->scale.kind == ScaleKind::kTensor) return 0;
    return batch * heads_of_scales() + head / part->scale.heads_per_scale;
  }
};

struct Works {
  Work q, k, v;
};

Works works_of(const QuantizeProblem& p) {
  return {{&p.q, &p.sequences_q, true, p.rotary_offset_q},
          {&p.k, &p.sequences_k, true, p.rotary_offset_k},
          {&p.v, &p.sequences_k, false, 0}};
}

// The tokens of one block as float32, rotated, and what becomes of them.
class BlockBuffer {
 public:
  explicit BlockBuffer(const QuantizeProblem& problem)
      : p_(problem),
        rotation_q_(problem.rotation_seed, problem.q.in.dim),
        rotation_k_(problem.rotation_seed, problem.k.in.dim),
        values_(kScaleBlock * kMaxHeadDim) {}

  // Block `index` of (part, batch, head), in the order in which blocks() counts them. False if no
  // token of it counts.
  bool load(const Work& work, Index index) {
    const QuantizePart& part = *work.part;
    block_ = index % work.blocks_of_one();
    head_ = index / work.blocks_of_one() % part.in.heads;
    batch_ = index / work.blocks_of_one() / part.in.heads;
    rows_ = rows_of(*work.sequences, batch_);
    const Index first = block_ * kScaleBlock;
    count_ = std::clamp<Index>(rows_.length - first, 0, kScaleBlock);
    for (Index i = 0; i < count_; ++i) {
      float* row = &values_[static_cast<size_t>(i * part.in.dim)];
      const Index at = offset(part.in, i);
      for (Index d = 0; d < part.in.dim; ++d) row[d] = load_float(part.in.data, p_.dtype, at + d);
      if (!work.rotates) continue;
      if (p_.rotary.given) apply_rope(p_.rotary, work.offset + first + i, row);
      if (p_.rotates) (&part == &p_.q ? rotation_q_ : rotation_k_).apply(row);
    }
    return count_ > 0;
  }

  Index batch() const { return batch_; }
  Index head() const { return head_; }

  // The bits of the largest size: of floats without a sign they are in the order of the values,
  // with infinity and NaN above all.
  unsigned amax_bits(const Work& work) const {
    unsigned largest = 0;
    for (Index i = 0; i < count_ * work.part->in.dim; ++i)
      largest = std::max(largest, float_bits(values_[static_cast<size_t>(i)]) & 0x7FFFFFFFu);
    return largest;
  }

  void set_scale(const Work& work, float scale) const {
    const Index number = scale_block(*work.sequences, rows_, batch_, block_ * kScaleBlock);
    const ScaleView& view = work.part->scale;
    view.data[view.offset(batch_, head_, number)] = scale;
  }

  void store(const Work& work, float scale) const {
    const float factor = reciprocal_of_scale(scale);
    const TensorView& out = work.part->out;
    for (Index i = 0; i < count_; ++i) {
      const float* row = &values_[static_cast<size_t>(i * out.dim)];
      auto* codes = static_cast<unsigned char*>(out.data) + offset(out, i);
      for (Index d = 0; d < out.dim; ++d) codes[d] = float_to_e4m3(row[d] * factor);
    }
  }

 private:
  Index offset(const TensorView& t, Index i) const {
    return batch_ * t.stride_batch + (rows_.first + block_ * kScaleBlock + i) * t.stride_seq +
           head_ * t.stride_head;
  }

  const QuantizeProblem& p_;
  const Rotation rotation_q_, rotation_k_;
  std::vector<float> values_;
  Index batch_ = 0, head_ = 0, block_ = 0, count_ = 0;
  RowRange rows_;
};

// Calls each(buffer, work, number of the work) for the blocks of works that take part and that have
// tokens, on at most as many threads as there are buffers.
template <class Takes, class Each>
Status for_each_block(const Works& works, std::vector<BlockBuffer>* buffers, const Takes& takes,
                      const Each& each) {
  const Work* all[] = {&works.q, &works.k, &works.v};
  Index blocks = 0;
  for (const Work* work : all) blocks += takes(*work) ? work->blocks() : 0;
  const auto threads =
      static_cast<int>(std::clamp<Index>(blocks, 1, static_cast<Index>(buffers->size())));
  std::atomic<Index> next{0};
  Interrupt interrupt;
  run_workers(threads, [&](int worker) {
    BlockBuffer& buffer = (*buffers)[static_cast<size_t>(worker)];
    for (Index index; !interrupt.ends(worker) && (index = next.fetch_add(1)) < blocks;)
      for (int w = 0; w < 3; ++w) {
        if (!takes(*all[w])) continue;
        const Index of_work = all[w]->blocks();
        if (index >= of_work) {
          index -= of_work;
          continue;
        }
        if (buffer.load(*all[w], index)) each(buffer, *all[w], w);
        break;
      }
  });
  return interrupt.status();
}

void raise(std::atomic<unsigned>* largest, unsigned value) {
  unsigned now = largest->load();
  while (now < value && !largest->compare_exchange_weak(now, value)) {
  }
}

// The scales of more than a block: from all that they are for.
using Amaxes = std::vector<std::atomic<unsigned>>;

void write_wide_scales(const Work& work, const Amaxes& amaxes) {
  const ScaleView& view = work.part->scale;
  for (Index i = 0; i < work.scales(); ++i) {
    const Index heads = view.kind == ScaleKind::kTensor ? 1 : work.heads_of_scales();
    view.data[i / heads * view.stride_batch + i % heads * view.stride_head] =
        scale_of_amax(float_of(amaxes[static_cast<size_t>(i)].load()));
  }
}

}  // namespace

QuantizePlan plan_quantize(const QuantizeProblem& p) {
  constexpr double kWorkOfElement = 8;  // in multiply-adds; 8 more for the rotation
  const Works works = works_of(p);
  QuantizePlan plan;
  double elements = 0;
  for (const Work* work : {&works.q, &works.k, &works.v}) {
    plan.blocks += work->blocks();
    plan.has_wide_scales |= work->has_wide_scales();
    if (!work->part->given) continue;
    const Index rows = work->sequences->packed ? work->sequences->rows
                                               : work->part->in.batch * work->sequences->rows;
    elements += static_cast<double>(rows * work->part->in.heads * work->part->in.dim);
  }
  plan.threads = threads_for(elements * kWorkOfElement * (p.rotates ? 2 : 1), p.num_threads);
  plan.threads = static_cast<int>(std::clamp<Index>(plan.blocks, 1, plan.threads));
  return plan;
}

Status run_quantize(const QuantizeProblem& p, const QuantizePlan& plan) {
  if (p.is_empty()) return {};
  if (p.is_ragged()) FLASH3_CHECK(check_lengths(p));
  const Works works = works_of(p);
  // All that can fail comes before the first scale is written.
  std::vector<BlockBuffer> buffers;
  buffers.reserve(static_cast<size_t>(plan.threads));
  for (int i = 0; i < plan.threads; ++i) buffers.emplace_back(p);
  Amaxes amaxes[3] = {Amaxes(static_cast<size_t>(works.q.scales())),
                      Amaxes(static_cast<size_t>(works.k.scales())),
                      Amaxes(static_cast<size_t>(works.v.scales()))};
  FLASH3_CHECK(for_each_block(
      works, &buffers, [](const Work& work) { return work.has_wide_scales(); },
      [&](const BlockBuffer& buffer, const Work& work, int w) {
        const Index number = work.scale_number(buffer.batch(), buffer.head());
        raise(&amaxes[w][static_cast<size_t>(number)], buffer.amax_bits(work));
      }));
  if (works.q.has_wide_scales()) write_wide_scales(works.q, amaxes[0]);
  if (works.k.has_wide_scales()) write_wide_scales(works.k, amaxes[1]);
  if (works.v.has_wide_scales()) write_wide_scales(works.v, amaxes[2]);
  return for_each_block(
      works, &buffers, [](const Work&) { return true; },
      [&](const BlockBuffer& buffer, const Work& work, int w) {
        if (work.has_wide_scales()) {
          const Index number = work.scale_number(buffer.batch(), buffer.head());
          const unsigned bits = amaxes[w][static_cast<size_t>(number)].load();
          return buffer.store(work, scale_of_amax(float_of(bits)));
        }
        const float scale = scale_of_amax(float_of(buffer.amax_bits(work)));
        buffer.set_scale(work, scale);
        buffer.store(work, scale);
      });
}

}  // namespace flash3::cpu
