// SPDX-License-Identifier: Apache-2.0
// Guarded tensors in the memory that a call runs on.
#pragma once

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cases/mask.hpp"
#include "cases/memory.hpp"
#include "cases/tensors.hpp"

namespace flash3::cases {

// A guarded tensor's bytes, uploaded.
class Upload {
 public:
  Upload(Memory& memory, const GuardedTensor& host)
      : memory_(memory), host_(host), base_(memory.allocate(size())) {
    upload();
  }
  // The host's bytes as they are now.
  void upload() {
    memory_.copy_in(base_.get(), host_.bytes.data(), size());
    pristine_.reset();
  }
  // As it was uploaded.
  void restore() { memory_.copy(base_.get(), pristine(), size()); }
  void download(GuardedTensor* to) const {
    memory_.copy_out(to->bytes.data(), base_.get(), to->bytes.size());
  }
  // Whether no call has written to it, nor around it.
  bool is_unchanged() const { return same_bytes(0, size()); }
  // Whether no call has written around it: of a workspace, which has no gaps.
  bool is_unchanged_around() const {
    const size_t end = host_.offset + static_cast<size_t>(host_.view.shape[host_.view.ndim - 1] *
                                                          element_size(host_.view.dtype));
    return same_bytes(0, host_.offset) && same_bytes(end, size() - end);
  }
  // Remembers what it holds now.
  void keep() {
    if (!kept_) kept_ = memory_.allocate(size());
    memory_.copy(kept_.get(), base_.get(), size());
  }
  bool is_as_kept() const { return size() == 0 || memory_.equal(base_.get(), kept_.get(), size()); }
  flash3_tensor view() const {
    return host_.bytes.empty() ? flash3_tensor{} : host_.at(base_.get());
  }
  const GuardedTensor& host() const { return host_; }

 private:
  size_t size() const { return host_.bytes.size(); }
  // The uploaded bytes beside the tensor, so that repeated calls need no host.
  const void* pristine() const {
    if (!pristine_) {
      pristine_ = memory_.allocate(size());
      memory_.copy_in(pristine_.get(), host_.bytes.data(), size());
    }
    return pristine_.get();
  }
  bool same_bytes(size_t from, size_t bytes) const {
    return bytes == 0 || memory_.equal(static_cast<std::byte*>(base_.get()) + from,
                                       static_cast<const std::byte*>(pristine()) + from, bytes);
  }

  Memory& memory_;
  const GuardedTensor& host_;
  std::shared_ptr<void> base_, kept_;
  mutable std::shared_ptr<void> pristine_;
};

// A workspace of so many bytes, filled with the pattern and guarded like a tensor of bytes; [1,
// 1, 1, n/2] of 16-bit elements says the same.
inline GuardedTensor make_workspace(size_t bytes) {
  return make_tensor(FLASH3_FLOAT16, 1, 1, 1, static_cast<int64_t>(bytes + 1) / 2,
                     Layout::kBatchSeq);
}

// The mask of a case, made where the call runs: from sources there, and between guards.
class MaskUpload {
 public:
  MaskUpload(Memory& memory, std::shared_ptr<const HostMask> host)
      : host_(std::move(host)), bytes_(make_workspace(host_->mask.size)), memory_(memory, bytes_) {
    flash3_mask_params p = host_->params;
    p.backend = FLASH3_BACKEND_AUTO;
    host_->sources.visit([&](const char* name, const GuardedTensor& tensor, auto field) {
      p.*field = sources_.emplace_back(name, Upload(memory, tensor)).second.view();
    });
    p.stream = memory.stream();
    mask_.data = memory_.view().data, mask_.size = host_->mask.size;
    if (flash3_mask_make(&p, &mask_) != FLASH3_OK) throw std::runtime_error(flash3_last_error());
    memory.finish();
    if (!memory_.is_unchanged_around())
      throw std::runtime_error("flash3_mask_make has written outside of the mask's memory");
    memory_.keep();
  }
  const flash3_mask& mask() const { return mask_; }
  bool is_as_made() const { return memory_.is_as_kept(); }
  const std::vector<std::pair<const char*, Upload>>& sources() const { return sources_; }

 private:
  std::shared_ptr<const HostMask> host_;
  std::vector<std::pair<const char*, Upload>> sources_;
  GuardedTensor bytes_;
  Upload memory_;
  flash3_mask mask_{};
};

using NamedTensors = std::vector<std::pair<std::string_view, const GuardedTensor*>>;
using NamedUploads = std::vector<std::pair<std::string_view, const Upload*>>;

class ExtraUploads {
 public:
  ExtraUploads(Memory& memory, const ExtraTensors& host) {
    ExtraTensors::visit(
        [&](const ParamField& field, const GuardedTensor& tensor) {
          parts_.push_back({field.name, field.is_written, Upload(memory, tensor)});
        },
        host);
    if (host.mask) mask_.emplace(memory, host.mask);
  }
  ExtraViews views() const {
    ExtraViews views;
    size_t i = 0;
    ExtraViews::visit(
        [&](const ParamField&, flash3_tensor& view) { view = parts_[i++].upload.view(); }, views);
    views.mask = mask_ ? &mask_->mask() : nullptr;
    return views;
  }
  NamedUploads inputs() const {
    NamedUploads inputs;
    for (const Part& part : parts_)
      if (!part.is_written) inputs.emplace_back(part.name, &part.upload);
    if (mask_)
      for (const auto& [name, upload] : mask_->sources()) inputs.emplace_back(name, &upload);
    return inputs;
  }
  // Those that the call has.
  template <class Visit>
  void visit_outputs(const Visit& visit) {
    for (Part& part : parts_)
      if (part.is_written && !part.upload.host().bytes.empty()) visit(part.name, part.upload);
  }
  bool mask_is_as_made() const { return !mask_ || mask_->is_as_made(); }

 private:
  struct Part {
    std::string_view name;
    bool is_written;
    Upload upload;
  };
  std::vector<Part> parts_;  // in the order of Extra::visit
  std::optional<MaskUpload> mask_;
};

// The outputs of a call: where they lie, and on the host as the first run has left them.
class Outputs {
 public:
  void add(std::string_view name, Upload& upload) {
    parts_.push_back({name, &upload, clone(upload.host())});
  }
  void add(ExtraUploads& extra) {
    extra.visit_outputs([&](std::string_view name, Upload& upload) { add(name, upload); });
  }

  void restore() {
    for (Part& part : parts_) part.upload->restore();
  }
  void download() {
    for (Part& part : parts_) part.upload->download(&part.got);
  }
  void keep() {
    for (Part& part : parts_) part.upload->keep();
  }
  NamedUploads uploads() const {
    NamedUploads uploads;
    for (const Part& part : parts_) uploads.emplace_back(part.name, part.upload);
    return uploads;
  }
  NamedTensors got() const {
    NamedTensors tensors;
    for (const Part& part : parts_) tensors.emplace_back(part.name, &part.got);
    return tensors;
  }

 private:
  struct Part {
    std::string_view name;
    Upload* upload;
    GuardedTensor got;
  };
  std::vector<Part> parts_;
};

// Which input a call has overwritten, in words; "" if none.
inline std::string find_overwritten(NamedUploads inputs, const ExtraUploads& extra) {
  for (const auto& input : extra.inputs()) inputs.push_back(input);
  if (!extra.mask_is_as_made()) return "the mask is an input and was overwritten";
  for (const auto& [name, upload] : inputs)
    if (!upload->is_unchanged()) return std::string(name) + " is an input and was overwritten";
  return "";
}

// What a call has written where it must not, in words; "" if nothing: around its outputs and its
// workspace, as they came back, or to its inputs.
inline std::string find_damage(NamedTensors outputs, const GuardedTensor& workspace,
                               const NamedUploads& inputs, const ExtraUploads& extra) {
  outputs.emplace_back("workspace", &workspace);
  for (const auto& [name, tensor] : outputs)
    if (const std::string what = tensor->bytes.empty() ? "" : tensor->damage(); !what.empty())
      return std::string(name) + ": " + what;
  return find_overwritten(inputs, extra);
}

// What the run-th call did otherwise than the first, whose outputs are kept and were sound.
inline std::string find_difference(int run, const NamedUploads& outputs, const Upload& workspace,
                                   const NamedUploads& inputs, const ExtraUploads& extra) {
  for (const auto& [name, upload] : outputs) {
    if (upload->is_as_kept()) continue;
    GuardedTensor now = clone(upload->host());
    upload->download(&now);
    if (const std::string what = now.damage(); !what.empty())
      return std::string(name) + ": " + what;
    return "run " + std::to_string(run + 1) + " gave other bits than run 1";
  }
  if (!workspace.is_unchanged_around()) return "workspace: written outside its elements";
  return find_overwritten(inputs, extra);
}

}  // namespace flash3::cases
