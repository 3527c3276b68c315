// SPDX-License-Identifier: Apache-2.0
// The list of a call's addresses has every tensor of its params once.
#include "core/pointers.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace flash3 {
namespace {

template <class P>
class VisitPointers : public testing::Test {};
using Problems = testing::Types<ForwardProblem, BackwardProblem, QuantizeProblem, MergeProblem>;
TYPED_TEST_SUITE(VisitPointers, Problems);

TYPED_TEST(VisitPointers, AreThoseOfEveryTensor) {
  using Params = typename ParamsOf<TypeParam>::type;
  std::set<std::string> tensors, visited;
  for (const ParamField& field : FieldsOf<Params>::kFields)
    if (field.kind == FieldKind::kTensor) tensors.emplace(field.name);

  TypeParam problem{};
  Params params{};
  std::set<const void*> addresses;
  const Status status = visit_pointers(
      problem, [&](const char* name, auto member, auto*& address, const char* access) -> Status {
        EXPECT_TRUE(visited.insert(name).second) << name << " is visited twice";
        EXPECT_TRUE(addresses.insert(&address).second) << name << " has another's address";
        const ParamField* const field = find_field<Params>(name);
        if (!field) return {FLASH3_INTERNAL_ERROR, name};
        EXPECT_EQ(field->tensor(&params), &(params.*member)) << name;
        EXPECT_EQ(std::string(access), field->is_written ? kWrite : kRead) << name;
        return {};
      });
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(visited, tensors);
}

// A failure ends the walk, also at the tensors that come last.
TYPED_TEST(VisitPointers, EndWithTheFirstFailure) {
  using Params = typename ParamsOf<TypeParam>::type;
  for (size_t last = 1; last <= count_tensors<Params>(); ++last) {
    TypeParam problem{};
    size_t count = 0;
    const Status status =
        visit_pointers(problem, [&](const char* name, auto, auto*&, const char*) -> Status {
          return ++count == last ? Status(FLASH3_INVALID_ARGUMENT, name) : Status();
        });
    EXPECT_FALSE(status.ok()) << last;
    EXPECT_EQ(count, last);
  }
}

}  // namespace
}  // namespace flash3
