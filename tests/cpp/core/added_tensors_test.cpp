// SPDX-License-Identifier: Apache-2.0
// The rules that the comments of flash3.h state for tensors, for each of added_fields(): the exact
// sentence for what breaks one, and which backends take it.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "call.hpp"
#include "core/added_checks.hpp"
#include "core/problem.hpp"

namespace flash3::test {
namespace {

constexpr Sizes kSizes;
constexpr const char* kMust = "; q and ";
constexpr int64_t kDistance = 3;

flash3_tensor contiguous(flash3_dtype dtype, const std::vector<int64_t>& shape, void* data) {
  flash3_tensor t{data, dtype, static_cast<int32_t>(shape.size()), {}, {}};
  int64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0; stride *= shape[d])
    t.shape[d] = shape[d], t.stride[d] = stride;
  return t;
}

// Calls check(params of a valid call with the tensor, the tensor in it, its field, its shape) for
// each shape of each tensor.
template <class Params, class CallOf, class Check>
void for_each_shape(CallOf& call, const Check& check) {
  std::vector<float> memory(256, 0.5f), more = memory;
  for (const ParamField& field : added_fields<Params>()) {
    if (field.kind != FieldKind::kTensor) continue;
    for (int64_t i = 0; i < count_words(field.shapes); ++i) {
      const std::string shape(word_at(field.shapes, i));
      SCOPED_TRACE(std::string(field.name) + "=" + shape);
      Params p = call.args.params();
      p.backend = FLASH3_BACKEND_CPU;
      flash3_tensor& t = *field.tensor(&p);
      const auto made = [&](flash3_dtype dtype, void* data) {
        return contiguous(
            dtype == FLASH3_DTYPE_NONE ? FLASH3_FLOAT32 : dtype,
            shape_of_added(shape, kSizes.batch, kSizes.heads_q,
                           std::vector<int64_t>{kSizes.batch, kSizes.heads_q, kSizes.seq_q},
                           kSizes.seq_k, kDistance),
            data);
      };
      t = made(field.dtype, memory.data());
      if (const ParamField* like = find_field<Params>(field.like))
        *like->tensor(&p) = made(like->dtype, more.data());
      check(p, t, field, shape);
    }
  }
}

Status problem_of(const flash3_forward_params& p) {
  ForwardProblem problem;
  return make_forward_problem(&p, Pointers::kRequired, &problem);
}
Status problem_of(const flash3_backward_params& p) {
  BackwardProblem problem;
  return make_backward_problem(&p, Pointers::kRequired, &problem);
}

// What is said of a size that does not agree; broken(change) is the error of a changed tensor.
template <class Broken>
void expect_sizes(const Broken& broken, const flash3_tensor& t, const std::string& name,
                  const std::string& shape) {
  const auto with = [&](int dim, int64_t size) {
    return broken([&](flash3_tensor* x) { x->shape[dim] = size; });
  };
  const auto part = [&](int dim) { return name + ".shape[" + std::to_string(dim) + "]"; };
  const auto or_one = [&](int dim, const char* other, const char* what) {
    return part(dim) + " = 9 but q.shape[" + other + "; " + name + " must have the " + what +
           " of q, or 1";
  };
  if (is_of_pairs(shape)) {
    EXPECT_EQ(with(0, 9), or_one(0, "0] = 2", "batch size"));
    EXPECT_EQ(with(1, 9), or_one(1, "2] = 4", "heads_q"));
    EXPECT_EQ(with(2, 9), or_one(2, "1] = 3", "seq_q"));
    EXPECT_EQ(with(3, 4),
              part(3) + " = 4 but k.shape[1] = 5; " + name + " and k must have the same seq_k");
    return;
  }
  if (is_of_distances(shape)) {
    EXPECT_EQ(with(0, 9), or_one(0, "2] = 4", "heads_q"));
    EXPECT_EQ(with(1, 6), part(1) +
                              " = 6 but it must be 2 * D + 1, an entry for each distance "
                              "from -D to D");
    return;
  }
  if (shape == "state") {
    EXPECT_EQ(with(0, 3), part(0) + " = 3 but it must be 2: a seed and an offset");
    return;
  }
  const int heads = shape == "rows" ? 1 : t.ndim - 1;
  EXPECT_EQ(with(heads, 3),
            part(heads) + " = 3 but q.shape[2] = 4" + kMust + name + " must have the same heads_q");
  if (t.ndim > 1) {
    EXPECT_EQ(with(0, 3), part(0) + " = 3 but q.shape[0] = 2" + kMust + name +
                              " must have the same batch size");
  }
}

template <class Params, class CallOf>
void expect_rules() {
  CallOf call;
  for_each_shape<Params>(call, [](Params p, flash3_tensor& t, const ParamField& field,
                                  const std::string& shape) {
    const std::string name(field.name), last = std::to_string(t.ndim - 1);
    const auto error = [&] { return problem_of(p).message(); };
    EXPECT_EQ(error(), "");
    const flash3_tensor good = t;
    const auto broken = [&](const auto& change) {
      flash3_tensor& own = *field.tensor(&p);
      change(&own);
      const std::string text = error();
      own = good;
      return text;
    };
    *field.tensor(&p) = good;
    const auto wrong_dtype = broken([](flash3_tensor* x) { x->dtype = FLASH3_INT32; });
    EXPECT_EQ(wrong_dtype, name + ".dtype = int32 but it must be " +
                               (field.dtype != FLASH3_DTYPE_NONE ? dtype_name(field.dtype)
                                : field.like.empty()             ? "float16, bfloat16 or float32"
                                                     : "float32 or the dtype of bias, float32") +
                               "; a " + name + " that is not " +
                               (field.is_written ? "wanted" : "given") + " is all zero");
    EXPECT_EQ(broken([](flash3_tensor* x) { x->ndim = 3, x->shape[0] = 77; })
                  .find(name + (has_word(field.shapes, "rows") ? ".shape[0] = 77 but "
                                                               : ".ndim = 3 but it must be ")),
              0u);
    expect_sizes(broken, t, name, shape);
    if (!field.any_strides) {
      EXPECT_EQ(broken([&](flash3_tensor* x) {
                  x->stride[x->ndim - 1] = 2;
                }).find(name + ".stride[" + last + "] = 2 but it must be 1"),
                0u);
    }
    EXPECT_EQ(broken([&](flash3_tensor* x) {
                x->stride[x->ndim - 1] = -1;
              }).find(name + ".stride[" + last + "] = -1 but a stride must be at least 0"),
              0u);
    if (const ParamField* like = find_field<Params>(field.like)) {
      Params without = p;
      *like->tensor(&without) = {};
      EXPECT_EQ(problem_of(without).message(), name + " is given but " + std::string(field.like) +
                                                   " is all zero; it is the gradient of " +
                                                   std::string(field.like));
    }
    EXPECT_EQ(broken([&](flash3_tensor* x) { x->data = nullptr; }).find(name + ".data is null"),
              0u);
    // One row for all sequences, or one that all heads share, is fine to read and wrong to write.
    if (t.ndim > 1 && t.shape[0] > 1) {
      EXPECT_EQ(broken([&](flash3_tensor* x) { x->stride[0] = 0; }).empty(), !field.is_written);
    }
    for (int64_t i = 0; i < count_words(field.without); ++i) {
      const std::string other(word_at(field.without, i));
      const ParamField* const of = find_field<Params>(other);
      if (!of || of->kind != FieldKind::kTensor) continue;
      static const int64_t words[64] = {};
      Params both = p;
      *of->tensor(&both) = other == "qv" ? p.out
                                         : contiguous(of->dtype, {kSizes.batch, kSizes.seq_q},
                                                      const_cast<int64_t*>(words));
      EXPECT_EQ(problem_of(both).message(),
                name + " is given and " + other + " is given; a call takes one of the two");
    }
  });
}

TEST(AddedTensors, OfForwardCallsKeepTheirRules) { expect_rules<flash3_forward_params, Call>(); }
TEST(AddedTensors, OfBackwardCallsKeepTheirRules) {
  expect_rules<flash3_backward_params, BackwardCall>();
}

// A backend that has no kernels for one says so by name, and the others take it.
struct Named {
  flash3_backend of;
  flash3_backend id() const { return of; }
  const char* name() const { return flash3_backend_name(of); }
};

TEST(AddedTensors, AreRefusedByBackendsWithoutKernelsForThem) {
  Call call;
  for_each_shape<flash3_forward_params>(call, [](const flash3_forward_params& p, flash3_tensor&,
                                                 const ParamField& field, const std::string&) {
    ForwardProblem problem;
    ASSERT_TRUE(make_forward_problem(&p, Pointers::kRequired, &problem).ok());
    EXPECT_EQ(check_added_on(problem, Named{FLASH3_BACKEND_CPU}).message(), "");
    const Status status = check_added_on(problem, Named{FLASH3_BACKEND_HOPPER});
    EXPECT_EQ(status.message(),
              field.is_cpu_alone ? std::string(field.name) +
                                       " is given but the hopper backend has no kernels that take "
                                       "it; the cpu backend has"
                                 : "");
    EXPECT_EQ(status.code(), field.is_cpu_alone ? FLASH3_UNSUPPORTED : FLASH3_OK);
  });
}

}  // namespace
}  // namespace flash3::test
