// SPDX-License-Identifier: Apache-2.0
// Guarded tensors in the memory that a call runs on.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cases/memory.hpp"
#include "cases/tensors.hpp"

namespace flash3::cases {

// A guarded tensor's bytes, uploaded.
class Upload {
 public:
  Upload(Memory& memory, const GuardedTensor& host)
      : memory_(memory), host_(host), base_(memory.allocate(host.bytes.size())) {
    reset();
  }
  void reset() { memory_.copy_in(base_.get(), host_.bytes.data(), host_.bytes.size()); }
  void download(GuardedTensor* to) const {
    memory_.copy_out(to->bytes.data(), base_.get(), to->bytes.size());
  }
  // Whether no call has written to it, nor around it.
  bool is_unchanged() const {
    GuardedTensor now;
    now.bytes.resize(host_.bytes.size());
    if (!now.bytes.empty()) download(&now);
    return now.bytes == host_.bytes;
  }
  flash3_tensor view() const {
    return host_.bytes.empty() ? flash3_tensor{} : host_.at(base_.get());
  }

 private:
  Memory& memory_;
  const GuardedTensor& host_;
  std::shared_ptr<void> base_;
};

class ExtraUploads {
 public:
  ExtraUploads(Memory& memory, const ExtraTensors& host)
      : sink_(memory, host.sink),
        cu_q_(memory, host.cu_seqlens_q),
        cu_k_(memory, host.cu_seqlens_k),
        used_q_(memory, host.seqused_q),
        used_k_(memory, host.seqused_k),
        q_scale_(memory, host.q_scale),
        k_scale_(memory, host.k_scale),
        v_scale_(memory, host.v_scale) {}
  ExtraViews views() const {
    return {sink_.view(),   cu_q_.view(),    cu_k_.view(),    used_q_.view(),
            used_k_.view(), q_scale_.view(), k_scale_.view(), v_scale_.view()};
  }
  std::vector<std::pair<const char*, const Upload*>> inputs() const {
    return {{"sink", &sink_},        {"cu_seqlens_q", &cu_q_}, {"cu_seqlens_k", &cu_k_},
            {"seqused_q", &used_q_}, {"seqused_k", &used_k_},  {"q_scale", &q_scale_},
            {"k_scale", &k_scale_},  {"v_scale", &v_scale_}};
  }

 private:
  Upload sink_, cu_q_, cu_k_, used_q_, used_k_, q_scale_, k_scale_, v_scale_;
};

using NamedTensors = std::vector<std::pair<const char*, const GuardedTensor*>>;
using NamedUploads = std::vector<std::pair<const char*, const Upload*>>;

// What a call has written where it must not, in words; "" if nothing: around its outputs, as they
// came back, or to its inputs.
inline std::string find_damage(const NamedTensors& outputs, NamedUploads inputs,
                               const ExtraUploads& extra) {
  for (const auto& [name, tensor] : outputs)
    if (const std::string what = tensor->bytes.empty() ? "" : tensor->damage(); !what.empty())
      return std::string(name) + ": " + what;
  for (const auto& input : extra.inputs()) inputs.push_back(input);
  for (const auto& [name, upload] : inputs)
    if (!upload->is_unchanged()) return std::string(name) + " is an input and was overwritten";
  return "";
}

// What a workspace of so many bytes is made from: poisoned, and guarded like a tensor of bytes; [1,
// 1, 1, n/2] of 16-bit elements says the same.
inline GuardedTensor make_workspace(size_t bytes) {
  return make_tensor(FLASH3_FLOAT16, 1, 1, 1, static_cast<int64_t>(bytes + 1) / 2,
                     Layout::kBatchSeq);
}

}  // namespace flash3::cases
