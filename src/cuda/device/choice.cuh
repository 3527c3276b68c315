// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace flash3::cuda {

// A type, by a condition: std:: is not for device headers.
template <bool kFirst, class First, class Second>
struct ChoiceOf {
  using Type = First;
};
template <class First, class Second>
struct ChoiceOf<false, First, Second> {
  using Type = Second;
};
template <bool kFirst, class First, class Second>
using Choice = typename ChoiceOf<kFirst, First, Second>::Type;

}  // namespace flash3::cuda
