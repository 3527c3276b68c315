// flash3 explain: which kernel a case runs, and why.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "cases/tensors.hpp"
#include "cli/commands.hpp"
#include "cli/environment.hpp"

namespace flash3::cli {

int explain(const ExplainOptions& options) {
  const flash3_backend backend = resolve_backend(options.backend);
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const std::string& id : options.cases) {
    const cases::Case c = parse_case(id);
    auto params = cases::make_question(c);
    params.backend = backend;
    const std::string text = explanation(params);
    if (!options.json) {
      fmt::print("{}case: {}\n{}", &id == &options.cases.front() ? "" : "\n", to_id(c), text);
      continue;
    }
    nlohmann::ordered_json entry{{"case", to_id(c)}};
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);)
      if (const size_t colon = line.find(": "); colon != std::string::npos)
        entry[line.substr(0, colon)] = line.substr(colon + 2);
    all.push_back(entry);
  }
  if (options.json) fmt::print("{}\n", all.dump(2));
  return 0;
}

}  // namespace flash3::cli
