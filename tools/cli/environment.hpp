// SPDX-License-Identifier: Apache-2.0
// What the commands share: the backend to use, its memory, what is known about the machine.
#pragma once

#include <exception>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cases/case.hpp"
#include "cases/memory.hpp"
#include "device/device.hpp"
#include "flash3/flash3.h"

namespace flash3::cli {

// "auto": Hopper if there is one, else the CPU. Throws UsageError for an unknown name.
flash3_backend backend_named(const std::string& name);
// The same; throws std::runtime_error, with the reason, for a backend that cannot run here.
flash3_backend resolve_backend(const std::string& name);

// "" if the backend can run here, else why not.
std::string unavailable(flash3_backend backend);
// What the backend runs on, in words.
std::string describe(flash3_backend backend);

std::unique_ptr<cases::Memory> make_memory(flash3_backend backend);

// The cores that this process may run on.
int available_cores();

// The GPU that the Hopper backend uses: the current device. Nothing for the CPU.
std::optional<device::Gpu> gpu_of(flash3_backend backend);

// Throws the library's message unless status is OK: a UsageError where the call breaks a rule, else
// a std::runtime_error.
void check(flash3_status status);

// What to tell the user of it.
std::string sentence_of(const std::exception& e);

// The case that text names, or UsageError.
cases::Case parse_case(const std::string& text);
// Whether the case's id, as "/bf16/…/causal/", has all of the filters.
bool matches(const std::vector<std::string>& filters, const cases::Case& c);
// Drops the cases that do not match. UsageError if none stays.
void keep_matching(const std::vector<std::string>& filters, std::vector<cases::Case>* list);

// What flash3_forward_explain or flash3_backward_explain says; throws with the library's reason.
std::string explanation(const flash3_forward_params& params);
std::string explanation(const flash3_backward_params& params);
std::string explanation(const flash3_quantize_params& params);
// The value of "name: value" in such a text, "" if it is not there.
std::string value_of(const std::string& text, const std::string& name);

// Version, commit, date, host, backend and device: what a result must carry along.
nlohmann::ordered_json metadata(flash3_backend backend);

// `git describe` of the tree that this program was built from.
const char* build_commit();

}  // namespace flash3::cli
