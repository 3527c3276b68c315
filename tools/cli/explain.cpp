// SPDX-License-Identifier: Apache-2.0
// flash3 explain: which kernel a case runs, and why.
#include <nlohmann/json.hpp>
#include <sstream>

#include "cases/backward_tensors.hpp"
#include "cases/mask.hpp"
#include "cases/quantize_runner.hpp"
#include "cli/commands.hpp"
#include "cli/environment.hpp"
#include "cli/format.hpp"
#include "cli/json_file.hpp"

namespace flash3::cli {
namespace {

std::string explanation_of(const cases::Case& c, flash3_backend backend) {
  const auto ask = [&](auto params) {
    params.backend = backend;
    return explanation(params);
  };
  if (c.quantize) return ask(cases::make_quantize_question(c));
  return c.backward ? ask(cases::make_backward_question(c)) : ask(cases::make_question(c));
}

// What the case's mask holds: a line, or nothing.
std::string mask_line(const cases::Case& c) {
  const cases::MaskFacts* const facts = mask_facts(c);
  if (!facts) return "";
  const int64_t blocks = facts->full + facts->quarters + facts->ranges + facts->bits;
  return format(
      "mask blocks: {} of {} are listed: {} full, {} by quarters, {} by ranges, {} by bits; {:.2f} "
      "% "
      "of all pairs are seen\n",
      blocks, facts->all_blocks, facts->full, facts->quarters, facts->ranges, facts->bits,
      100 * seen_share(c));
}

}  // namespace

int explain(const ExplainOptions& options) {
  const flash3_backend backend = resolve_backend(options.backend);
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const std::string& id : options.cases) {
    cases::Case c = parse_case(id);
    c.backward |= options.backward;
    const std::string text = explanation_of(c, backend) + mask_line(c);
    if (!options.json) {
      print("{}case: {}\n{}", &id == &options.cases.front() ? "" : "\n", to_id(c), text);
      continue;
    }
    nlohmann::ordered_json entry{{"case", to_id(c)}};
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);)
      if (const size_t colon = line.find(": "); colon != std::string::npos)
        entry[line.substr(0, colon)] = line.substr(colon + 2);
    all.push_back(entry);
  }
  if (options.json) print("{}\n", json_text(all, 2));
  return 0;
}

}  // namespace flash3::cli
