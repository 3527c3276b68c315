// SPDX-License-Identifier: Apache-2.0
// Case ids: what parses has a name, which parses as the same case.
#include <cmath>

#include "bytes.hpp"
#include "cases/case.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace flash3::cases;
  const std::string id(reinterpret_cast<const char*>(data), size);
  std::string error;
  const auto c = parse_id(id, &error);
  FUZZ_CHECK(c.has_value() == error.empty(), id);
  if (!c) return 0;
  const std::string name = to_id(*c);
  const auto again = parse_id(name, &error);
  FUZZ_CHECK(again.has_value(), error);
  FUZZ_CHECK(to_id(*again) == name, id + " is " + name);
  const bool is_number = !std::isnan(c->softmax_scale) && !std::isnan(c->softcap);
  FUZZ_CHECK(*again == *c || !is_number, id + " is " + name);
  return 0;
}
