// SPDX-License-Identifier: Apache-2.0
// Where a mask says that its documents begin, and the packed batch that these make of a call.
#include "core/documents.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "../parsed.hpp"
#include "cases/backward_tensors.hpp"
#include "cases/mask.hpp"
#include "core/mask_checks.hpp"
#include "harness.hpp"
#include "oracle/attention_ref.hpp"

namespace flash3::test {
namespace {

// A mask of these documents, on the CPU.
struct Documents {
  std::vector<int32_t> numbers;
  flash3_mask_params params{};
  flash3_mask mask{};
  std::shared_ptr<void> memory;

  explicit Documents(std::vector<int32_t> of) : numbers(std::move(of)) {
    const auto keys = static_cast<int64_t>(numbers.size());
    params.struct_size = sizeof params;
    params.batch = params.heads_q = 1, params.seq_q = params.seq_k = keys;
    params.documents = {numbers.data(), FLASH3_INT32, 2, {1, keys}, {keys, 1}};
    params.backend = FLASH3_BACKEND_CPU;
  }
  void make(int64_t max_documents) {
    params.max_documents = max_documents;
    ASSERT_EQ(flash3_mask_size(&params, &mask.size), FLASH3_OK) << flash3_last_error();
    memory = {std::aligned_alloc(256, round_up(mask.size, size_t{256})), std::free};
    mask.data = memory.get();
    ASSERT_EQ(flash3_mask_make(&params, &mask), FLASH3_OK) << flash3_last_error();
  }
  // Where those of queries, or of keys, begin.
  std::vector<int> starts(bool of_keys) const {
    const MaskStarts starts = mask_lists(mask).starts();
    const int* const first = of_keys ? starts.k : starts.q;
    return {first, first + starts.count()};
  }
  int64_t used() const {
    int64_t blocks = 0, partial = 0, documents = -1;
    EXPECT_EQ(flash3_mask_used(&mask, nullptr, &blocks, &partial, &documents), FLASH3_OK);
    return documents;
  }
};

// A document of each length; numbers come again, next to each other never.
std::vector<int32_t> numbers_of(const std::vector<int>& lengths) {
  std::vector<int32_t> numbers;
  for (size_t i = 0; i < lengths.size(); ++i)
    numbers.insert(numbers.end(), static_cast<size_t>(lengths[i]), i % 2 == 0 ? 7 : -3);
  return numbers;
}

TEST(MaskDocuments, BeginWhereTheirRunsDo) {
  for (const std::vector<int>& lengths : {std::vector<int>{1},
                                          {300},
                                          {1, 1, 1, 1},
                                          {127, 1, 128, 1, 700},
                                          {5, 123, 256, 3},
                                          std::vector<int>(400, 1)}) {
    Documents d(numbers_of(lengths));
    std::vector<int> begins{0};
    for (const int n : lengths) begins.push_back(begins.back() + n);
    const auto count = static_cast<int64_t>(lengths.size());
    for (const int64_t more : {int64_t{0}, int64_t{3}}) {
      d.make(count + more);
      const int64_t room = std::min<int64_t>(count + more, begins.back());
      EXPECT_EQ(d.mask.documents, room);
      std::vector<int> expected = begins;
      expected.resize(static_cast<size_t>(room) + 2, begins.back());
      EXPECT_EQ(d.starts(false), expected);
      EXPECT_EQ(d.starts(true), expected);
      EXPECT_EQ(d.used(), count);
    }
  }
}

TEST(MaskDocuments, TooManyLeaveTheMaskEmpty) {
  Documents d(numbers_of({100, 50, 150}));
  d.make(2);
  EXPECT_EQ(d.used(), 3);
  const MaskMemory memory = mask_lists(d.mask).memory();
  EXPECT_EQ(memory.counts->overflow, 1);
  for (Index i = 0; i < memory.shape.lists(); ++i) EXPECT_EQ(memory.lists[i].count, 0);
  EXPECT_EQ(d.starts(false), (std::vector<int>{0, 300, 300, 300}));
  EXPECT_EQ(d.starts(true), (std::vector<int>{0, 0, 0, 300}));
  // So does a block too many.
  d.params.max_blocks = 1;
  d.make(3);
  EXPECT_EQ(d.starts(true), (std::vector<int>{0, 0, 0, 0, 300}));
}

// Room that no call could use takes no memory.
TEST(MaskDocuments, CountForOneSequenceOfQueriesAndKeys) {
  using P = flash3_mask_params;
  const auto documents_of = [](const auto& change) {
    Documents d(numbers_of({100, 50, 150}));
    std::vector<int32_t> cu{0, 300};
    change(d.params, cu);
    d.make(3);
    EXPECT_EQ(d.used(), d.mask.documents);
    return d.mask.documents;
  };
  EXPECT_EQ(documents_of([](P&, auto&) {}), 3);
  EXPECT_EQ(documents_of([](P& p, auto&) { p.batch = 4; }), 3);
  EXPECT_EQ(documents_of([](P& p, auto&) { p.causal = 1; }), 3);
  EXPECT_EQ(documents_of([](P& p, auto&) { p.seq_q = 299; }), 0);
  EXPECT_EQ(documents_of([](P& p, auto&) { p.chunk = 64; }), 0);
  EXPECT_EQ(documents_of([](P& p, auto&) { p.documents = {}; }), 0);
  EXPECT_EQ(documents_of([](P& p, auto& cu) {
              p.cu_seqlens_q = p.cu_seqlens_k = {cu.data(), FLASH3_INT32, 1, {2}, {1}};
            }),
            0);
}

// ---- the packed batch ----

void expect_close(const std::vector<double>& a, const std::vector<double>& b, const char* what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i)
    ASSERT_TRUE(a[i] == b[i] || std::abs(a[i] - b[i]) <= 1e-9 * (1 + std::abs(a[i])))
        << what << "[" << i << "] = " << a[i] << " and " << b[i];
}

struct Call {
  cases::Case c;
  cases::BackwardTensors tensors;
  ForwardProblem forward;
  BackwardProblem backward;

  explicit Call(const std::string& id)
      : c(cases::parsed(id + "/bwd/dlse")), tensors(cases::make_backward_tensors(c)) {
    auto views = tensors.views();
    forward = to_problem(
        cases::make_params(c, views.q, views.k, views.v, views.out, views.lse, views.extra));
    const auto params = cases::make_backward_params(c, views);
    const Status status = make_backward_problem(&params, Pointers::kRequired, &backward);
    EXPECT_TRUE(status.ok()) << status.message();
  }
  const MaskPairs* pairs() const { return tensors.extra.mask_pairs(); }
};

TEST(MaskDocuments, PackedTheyMeanTheSame) {
  for (const char* rest :
       {"/h4x2/d24/full/mask:documents", "/h2x1/d16x24/causal/mask:documents/sink",
        "/h2/d16/w40:20/mask:documents/softcap20/scale0.5",
        "/h2/d16/causal+w60:/mask:documents/mask_alignment=1"}) {
    const Call call(std::string("fp32/b1/q300/k300") + rest);
    SCOPED_TRACE(to_id(call.c));
    ASSERT_TRUE(may_pack_documents(call.forward) && may_pack_documents(call.backward));
    const ReferenceForward wanted = attention_ref(call.forward, 1, call.pairs());
    const ReferenceForward packed = attention_ref(with_packed_documents(call.forward), 1);
    expect_close(wanted.out, packed.out, "out");
    expect_close(wanted.lse, packed.lse, "lse");
    const ReferenceBackward gradients = attention_backward_ref(call.backward, 1, call.pairs());
    const ReferenceBackward own = attention_backward_ref(with_packed_documents(call.backward), 1);
    expect_close(gradients.dq, own.dq, "dq");
    expect_close(gradients.dk, own.dk, "dk");
    expect_close(gradients.dv, own.dv, "dv");
    expect_close(gradients.dsink, own.dsink, "dsink");
  }
}

// What a backend writes of the packed batch lies where the call's tensors have it.
TEST(MaskDocuments, PackedTheyAreWrittenToTheSamePlaces) {
  Call call("fp32/b1/q300/k300/h4x2/d24/causal/mask:documents/bhsd");
  const TestTarget target = test_targets(FLASH3_FLOAT32).front();
  const auto results = [&](const ForwardProblem& problem) {
    call.tensors.out.fill_pattern(), call.tensors.lse.fill_pattern();
    run_on(target, problem);
    const auto views = call.tensors.views();
    std::vector<double> all;
    for (const flash3_tensor& t : {views.out, views.lse})
      for (int64_t i = 0; i < 300 * 4 * (t.ndim == 4 ? 24 : 1); ++i)
        all.push_back(static_cast<double>(static_cast<const float*>(t.data)[i]));
    return all;
  };
  const std::vector<double> wanted = results(call.forward),
                            packed = results(with_packed_documents(call.forward));
  ASSERT_EQ(wanted.size(), packed.size());
  for (size_t i = 0; i < wanted.size(); ++i) ASSERT_NEAR(wanted[i], packed[i], 1e-4) << i;
}

TEST(MaskDocuments, PackedAnEmptyMaskHidesAll) {
  Call call("fp32/b1/q300/k300/h2/d16/full/mask:documents");
  const cases::HostMask& host = *call.tensors.extra.mask;
  flash3_mask_params p = host.sources.params(call.c);
  ASSERT_GT(p.max_documents, 1);
  p.max_documents -= 1, p.backend = FLASH3_BACKEND_CPU;
  flash3_mask mask = host.mask;
  ASSERT_EQ(flash3_mask_make(&p, &mask), FLASH3_OK) << flash3_last_error();
  call.forward.mask_lists = call.backward.mask_lists = mask_lists(mask);
  const ReferenceForward out = attention_ref(with_packed_documents(call.forward), 1);
  for (const double x : out.out) ASSERT_EQ(x, 0);
  for (const double x : out.lse) ASSERT_EQ(x, -std::numeric_limits<double>::infinity());
  const BackwardProblem packed = with_packed_documents(call.backward);
  const ReferenceBackward gradients = attention_backward_ref(packed, 1);
  for (const auto* all : {&gradients.dq, &gradients.dk, &gradients.dv})
    for (const double x : *all) ASSERT_EQ(x, 0);
  // Each row is of a sequence, or the kernels of packed batches would leave it as it is.
  for (const Sequences& sequences : {packed.sequences_q, packed.sequences_k}) {
    Index rows = 0;
    for (Index b = 0; b < packed.batch; ++b) rows += rows_of(sequences, b).length;
    EXPECT_EQ(rows, 300);
  }
}

TEST(MaskDocuments, WhatCountsPlacesIsNotPacked) {
  for (const char* id : {"fp32/b2/q300/k300/h2/d16/full/mask:documents",
                         "fp32/b1/q300/k299/h2/d16/full/mask:documents",
                         "fp32/b1/q300/k300/h2/d16/causal/chunk64/mask:documents",
                         "fp32/b1/q300/k300/h2/d16/full/mask:ranges2",
                         "fp32/b1/q300/k300/h2/d16/full/mask:documents/bias=hqk",
                         "fp32/b1/q300/k300/h2/d16/full/mask:documents/bias_table=hd",
                         "fp32/b1/q300/k300/h2/d16/full/mask:documents/alibi_slopes=heads",
                         "fp32/b1/q300/k300/h2/d16/full/mask:documents/dropout0.25"}) {
    const Call call(id);
    EXPECT_FALSE(may_pack_documents(call.forward)) << id;
    EXPECT_FALSE(may_pack_documents(call.backward)) << id;
  }
}

}  // namespace
}  // namespace flash3::test
