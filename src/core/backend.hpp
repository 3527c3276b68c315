// SPDX-License-Identifier: Apache-2.0
// What a backend answers, and the registry of those built in.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/problem.hpp"
#include "core/status.hpp"

namespace flash3 {

// "name: value" lines in the order in which they are added.
class Explanation {
 public:
  void add(std::string name, std::string value) {
    lines_.emplace_back(std::move(name), std::move(value));
  }
  // The lines of another, each name with a word before it.
  void add(const std::string& word, const Explanation& other) {
    for (const auto& [name, value] : other.lines_) add(word + " " + name, value);
  }
  std::string text() const {
    std::string out;
    for (const auto& [name, value] : lines_) out += name + ": " + value + "\n";
    return out;
  }

 private:
  std::vector<std::pair<std::string, std::string>> lines_;
};

// Stateless; all members may be called from many threads at once.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual flash3_backend id() const = 0;
  virtual const char* name() const = 0;
  // Can this machine run it at all? If not, why.
  virtual Status available() const = 0;
  // What it runs on, in words.
  virtual std::string describe() const = 0;
  // Whether this backend can read and write at address; null counts as yes. Fails where nobody can
  // tell: the device's context is lost.
  virtual Status can_access(const void* address, bool* accessible) const = 0;
  // Memory that no other backend can touch: each of them is refused it, since host code cannot tell
  // device memory from its own.
  virtual Status owns(const void*, bool* owned) const {
    *owned = false;
    return {};
  }

  // The three questions and the launch all rest on one selection function inside the backend. A
  // ForwardProblem that they are given never quantizes: see supports() and its siblings below.
  virtual Status supports(const ForwardProblem& problem) const = 0;
  virtual size_t workspace_size(
      const ForwardProblem& problem) const = 0;  // only after supports() said OK
  virtual void explain(const ForwardProblem& problem, Explanation* out) const = 0;
  // Workspace size and alignment, and pointer accessibility have been checked by the caller
  // (core/dispatch).
  virtual Status forward(const ForwardProblem& problem) const = 0;

  // The same four for the backward.
  virtual Status supports(const BackwardProblem& problem) const = 0;
  virtual size_t workspace_size(const BackwardProblem& problem) const = 0;
  virtual void explain(const BackwardProblem& problem, Explanation* out) const = 0;
  virtual Status backward(const BackwardProblem& problem) const = 0;

  // And for bringing tensors to FP8.
  virtual Status supports(const QuantizeProblem& problem) const = 0;
  virtual size_t workspace_size(const QuantizeProblem& problem) const = 0;
  virtual void explain(const QuantizeProblem& problem, Explanation* out) const = 0;
  virtual Status quantize(const QuantizeProblem& problem) const = 0;
};

// What a backend answers to a call, and its launch. A forward that brings its tensors to FP8 first
// is two calls to a backend (core/quantized_forward.hpp), and one here.
template <AnyProblem P>
Status supports(const Backend& backend, const P& problem);
template <AnyProblem P>
size_t workspace_size(const Backend& backend, const P& problem);
template <AnyProblem P>
void explain(const Backend& backend, const P& problem, Explanation* out);
template <AnyProblem P>
Status launch(const Backend& backend, const P& problem);

// Built-in backends, best first: [hopper,] cpu.
std::span<const Backend* const> backends();

// The backend by id; null if it was not built in.
const Backend* find_backend(flash3_backend id);

// The backend that problem.backend asks for, or for auto the first that is available, can access
// every tensor, and supports the call. On failure *backend is null and the status tells why: for
// auto, each backend's reason.
template <AnyProblem P>
Status select_backend(const P& problem, const Backend** backend);

// The backend `id` if it is built in and this machine can run it; for auto, the first such.
Status available_backend(flash3_backend id, const Backend** backend);

// Whether the backend `id` is built in, available, can access every tensor, and supports the call;
// *backend is set only if so.
template <AnyProblem P>
Status check_backend(const P& problem, flash3_backend id, const Backend** backend);

// Whether problem.workspace is what backend needs for this call.
template <AnyProblem P>
Status check_workspace(const P& problem, const Backend& backend);

const char* backend_name(flash3_backend id);

// Defined by each backend that is built in.
const Backend& cpu_backend();
const Backend& hopper_backend();

}  // namespace flash3
