// SPDX-License-Identifier: Apache-2.0
// JSON that others wrote, read within limits, and JSON that others read.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace flash3::cli {

// What a JSON file may take. An object keeps its names in their order and looks for each new one
// among them all, so their comparisons are counted.
struct JsonLimits {
  uint64_t bytes = 100'000'000;
  size_t depth = 16;  // of arrays and objects in each other
  uint64_t comparisons = 20'000'000;
};

// Throws FileError, which names the file and the limit, or says what is not JSON. comparisons: that
// were made, if not null.
nlohmann::ordered_json read_json(const std::string& path, const JsonLimits& limits = {},
                                 uint64_t* comparisons = nullptr);

// With control characters and all that is not ASCII escaped, and bytes that are no UTF-8 replaced.
// indent: of a level; -1: one line.
std::string json_text(const nlohmann::ordered_json& value, int indent);

// A report, likewise, with a row on a line, so that a change of one measurement changes one line:
// each member of the object, and each element of one that is an array or object of such.
std::string report_text(const nlohmann::ordered_json& report);

}  // namespace flash3::cli
