// SPDX-License-Identifier: Apache-2.0
// What a call writes shares no memory with its other tensors, its workspace or its schedule; views
// that lie between each other are no such thing.

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "call.hpp"
#include "core/alias_checks.hpp"
#include "core/kept.hpp"
#include "core/pointers.hpp"
#include "flash3/plan.h"

namespace flash3::test {
namespace {

const std::string kRule = "; what it writes must lie in no other tensor of the call";

// What the functions say of a call; "" if it is right. They say it alike.
std::string refusal(const Forward& args) {
  const auto p = args.params();
  const bool refused = flash3_forward_supported(&p) != FLASH3_OK;
  const std::string text = refused ? flash3_last_error() : "";
  EXPECT_TRUE(!refused || flash3_forward(&p) == FLASH3_INVALID_ARGUMENT);
  return without_addresses(text);
}
std::string refusal(const Backward& args) {
  const auto p = args.params();
  return without_addresses(flash3_backward_supported(&p) == FLASH3_OK ? "" : flash3_last_error());
}

TEST(Aliases, OfAForwardCallAreRefused) {
  Call call({.head_dim = 16});
  const auto error = [&](auto&& change) {
    Forward args = call.args;
    args.backend = FLASH3_BACKEND_CPU;
    change(args);
    return refusal(args);
  };
  EXPECT_EQ(error([](Forward&) {}), "");
  for (const auto& [name, member] :
       {std::pair{"q", &Forward::q}, {"k", &Forward::k}, {"v", &Forward::v}}) {
    EXPECT_EQ(error([&](Forward& f) { f.out.data = (f.*member).data; }),
              "out and " + std::string(name) + " share memory, but the call writes out" + kRule);
    EXPECT_EQ(error([&](Forward& f) { f.lse.data = (f.*member).data; }),
              "lse and " + std::string(name) + " share memory, but the call writes lse" + kRule);
  }
  EXPECT_EQ(error([](Forward& f) { f.lse.data = f.out.data; }),
            "out and lse share memory, but the call writes both" + kRule);
  // By one element.
  EXPECT_EQ(
      error([](Forward& f) { f.lse.data = static_cast<float*>(f.out.data) + 2 * 3 * 4 * 16 - 1; }),
      "out and lse share memory, but the call writes both" + kRule);
  for (const float x : call.out) EXPECT_EQ(x, Call::kUntouched);
}

TEST(Aliases, OfLengthsAndSinksAreRefused) {
  RaggedCall call;
  const auto forward_error = [&](flash3_tensor Forward::*member) {
    Forward f = call.forward();
    f.backend = FLASH3_BACKEND_CPU;
    (f.*member).data = f.out.data;
    return refusal(f);
  };
  const auto names = [](const char* name) {
    return "out and " + std::string(name) + " share memory, but the call writes out" + kRule;
  };
  EXPECT_EQ(forward_error(&Forward::cu_seqlens_q), names("cu_seqlens_q"));
  EXPECT_EQ(forward_error(&Forward::seqused_k), names("seqused_k"));
  EXPECT_EQ(forward_error(&Forward::sink), names("sink"));
  Backward b = call.backward();
  b.backend = FLASH3_BACKEND_CPU;
  EXPECT_EQ(refusal(b), "");
  b.dsink.data = b.sink.data;
  EXPECT_EQ(refusal(b), "dsink and sink share memory, but the call writes dsink" + kRule);
}

TEST(Aliases, OfABackwardCallAreRefused) {
  BackwardCall call({.head_dim = 16});
  const auto error = [&](flash3_tensor Backward::*of, flash3_tensor Backward::*as) {
    Backward args = call.args;
    args.backend = FLASH3_BACKEND_CPU;
    (args.*of).data = (args.*as).data;
    return refusal(args);
  };
  EXPECT_EQ(error(&Backward::dk, &Backward::dv),
            "dk and dv share memory, but the call writes both" + kRule);
  EXPECT_EQ(error(&Backward::dq, &Backward::q),
            "dq and q share memory, but the call writes dq" + kRule);
  EXPECT_EQ(error(&Backward::dq, &Backward::dout),
            "dq and dout share memory, but the call writes dq" + kRule);
  EXPECT_EQ(error(&Backward::dv, &Backward::lse),
            "dv and lse share memory, but the call writes dv" + kRule);
  EXPECT_EQ(error(&Backward::k, &Backward::v), "");  // only read
  EXPECT_EQ(error(&Backward::out, &Backward::dout), "");
}

// A part of a buffer that holds three tensors side by side: [batch, seq, parts, heads, dim] or, by
// heads, [batch, seq, heads, parts, dim].
flash3_tensor part_of(std::vector<float>* buffer, int64_t seq, int64_t heads, int64_t dim,
                      int64_t part, bool by_heads) {
  const int64_t row = 3 * heads * dim;
  flash3_tensor t = tensor(buffer->data() + part * (by_heads ? dim : heads * dim), FLASH3_FLOAT32,
                           {2, seq, heads, dim});
  t.stride[0] = seq * row, t.stride[1] = row, t.stride[2] = by_heads ? 3 * dim : dim;
  return t;
}

void run(Backward args) {
  args.workspace_size = workspace(args);
  std::vector<unsigned char> memory(args.workspace_size + 256);
  args.workspace =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
  backward(args);
}

TEST(Aliases, PackedGradientsAreNone) {
  const Sizes sizes{
      .seq_q = 5, .seq_k = 5, .heads_q = 2, .heads_k = 2, .head_dim = 8, .head_dim_v = 8};
  for (const bool by_heads : {false, true}) {
    BackwardCall call(sizes);
    std::vector<float> packed(2 * 5 * 3 * 2 * 8, Call::kUntouched);
    Backward args = call.args;
    args.backend = FLASH3_BACKEND_CPU;
    run(args);
    args.dq = part_of(&packed, 5, 2, 8, 0, by_heads);
    args.dk = part_of(&packed, 5, 2, 8, 1, by_heads);
    args.dv = part_of(&packed, 5, 2, 8, 2, by_heads);
    run(args);
    for (const auto& [of, plain] :
         {std::pair{&args.dq, &call.dq}, {&args.dk, &call.dk}, {&args.dv, &call.dv}})
      for (int64_t i = 0; i < 2 * 5 * 2 * 8; ++i) {
        const int64_t at =
            i / 80 * of->stride[0] + i / 16 % 5 * of->stride[1] + i / 8 % 2 * of->stride[2] + i % 8;
        EXPECT_EQ(static_cast<float*>(of->data)[at], (*plain)[static_cast<size_t>(i)]);
      }
    args.dk.data = static_cast<float*>(args.dk.data) + 1;  // into the next part
    EXPECT_EQ(refusal(args), "dk and dv share memory, but the call writes both" + kRule);
  }
}

TEST(Aliases, OfACacheThatGrows) {
  CacheCall call;
  EXPECT_EQ(refusal(call.args()), "");
  std::vector<float> pages(2 * CacheCall::kPages * CacheCall::kPageSize * 2 * 16, 0.5f);
  const auto in_pages = [&](int64_t first, int64_t dim) {
    flash3_tensor t = tensor(pages.data() + first, FLASH3_FLOAT32,
                             {CacheCall::kPages, CacheCall::kPageSize, 2, dim});
    t.stride[0] = 2 * CacheCall::kPageSize * 2 * 16, t.stride[1] = 2 * 16, t.stride[2] = 16;
    return t;
  };
  Forward f = call.args();
  // A page of keys, a page of values; rows of keys are half as long as those of values.
  f.k = in_pages(0, 8), f.v = in_pages(CacheCall::kPageSize * 2 * 16, 16);
  EXPECT_EQ(refusal(f), "");
  const std::string both = "k and v share memory, but the call writes both" + kRule +
                           ", but for v in the rows of k where k_new alone is given";
  f.v = in_pages(0, 16);
  EXPECT_EQ(refusal(f), both);
  f.v = in_pages(CacheCall::kPageSize * 2 * 16 - 16, 16);  // the last head of a page of keys
  EXPECT_EQ(refusal(f), both);
  f.v = in_pages(0, 16), f.v.stride[0] /= 2;  // other strides
  EXPECT_EQ(refusal(f), both);
  f.k_new = f.v_new = f.rotary_cos = f.rotary_sin = f.rotary_offsets = {};
  EXPECT_EQ(refusal(f), "");  // only read

  // Pages of one pool, as transformers has them: values begin a page after the keys, and the table
  // names every other page.
  const int64_t page = CacheCall::kPageSize * 2 * 16;
  f = call.args();
  f.k = in_pages(0, 8), f.v = in_pages(page, 16);
  f.k.stride[0] = f.v.stride[0] = page;
  EXPECT_EQ(refusal(f), "");

  f = call.args();
  f.k_new.data = f.k.data;
  EXPECT_EQ(refusal(f), "k and k_new share memory, but the call writes k" + kRule);
}

TEST(Aliases, OfQuantizeAndMergeAreRefused) {
  std::vector<float> memory(1024), scales(64);
  Quantize c;
  c.q = tensor(memory.data(), FLASH3_FLOAT32, {1, 16, 2, 8});
  c.q_out = tensor(memory.data() + 256, FLASH3_FLOAT8_E4M3, {1, 16, 2, 8});
  c.q_scale = scale_tensor(scales.data());
  c.backend = FLASH3_BACKEND_CPU;
  const auto quantize_error = [&] {
    const auto p = c.params();
    return without_addresses(flash3_quantize(&p) == FLASH3_OK ? "" : flash3_last_error());
  };
  EXPECT_EQ(quantize_error(), "");
  c.q_out.data = memory.data() + 255;
  EXPECT_EQ(quantize_error(), "q_out and q share memory, but the call writes q_out" + kRule);
  c.q_out.data = memory.data() + 256, c.q_scale.data = memory.data() + 300;
  EXPECT_EQ(quantize_error(), "q_out and q_scale share memory, but the call writes both" + kRule);

  Merge m{.out_parts = tensor(memory.data(), FLASH3_FLOAT32, {3, 2, 4, 8}),
          .lse_parts = lse_tensor(scales.data(), 3, 4, 2),
          .out = packed_tensor(memory.data() + 128, FLASH3_FLOAT32, {2, 4, 8}),
          .lse = packed_lse_tensor(scales.data() + 24, 4, 2),
          .backend = FLASH3_BACKEND_CPU};
  const auto p = m.params();
  EXPECT_EQ(flash3_merge(&p), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(without_addresses(flash3_last_error()),
            "out and out_parts share memory, but the call writes out" + kRule);
}

TEST(Aliases, OfAPlansRunAreRefused) {
  Call call({.head_dim = 16});
  call.args.backend = FLASH3_BACKEND_CPU, call.args.num_threads = 1;
  auto p = call.params();
  flash3_plan* plan = nullptr;
  ASSERT_EQ(flash3_forward_plan(&p, &plan), FLASH3_OK) << flash3_last_error();
  for (const flash3_tensor& input : {p.q, p.k, p.v}) {
    p.out.data = input.data;
    EXPECT_EQ(flash3_forward_run(plan, &p), FLASH3_INVALID_ARGUMENT);
    EXPECT_NE(std::string(flash3_last_error()).find(kRule), std::string::npos);
  }
  for (const float x : call.out) EXPECT_EQ(x, Call::kUntouched);
  p.out.data = call.out.data();
  EXPECT_EQ(flash3_forward_run(plan, &p), FLASH3_OK) << flash3_last_error();
  flash3_plan_destroy(plan);

  p.out.data = p.q.data;
  EXPECT_EQ(flash3_forward_plan(&p, &plan), FLASH3_INVALID_ARGUMENT);
}

TEST(Aliases, OfAWorkspaceAreRefused) {
  BackwardCall call;
  call.args.backend = FLASH3_BACKEND_CPU;
  auto p = call.args.params();
  ASSERT_EQ(flash3_backward_workspace(&p, &p.workspace_size), FLASH3_OK);
  std::vector<unsigned char> memory(p.workspace_size + 512);
  const auto aligned = (reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256;
  p.workspace = reinterpret_cast<void*>(aligned);
  ASSERT_EQ(flash3_backward(&p), FLASH3_OK) << flash3_last_error();
  flash3_plan* plan = nullptr;
  ASSERT_EQ(flash3_backward_plan(&p, &plan), FLASH3_OK);

  const std::string sentence = "dq and workspace share memory, but the call writes both" + kRule;
  p.dq.data = reinterpret_cast<void*>(aligned + p.workspace_size - 16);
  EXPECT_EQ(flash3_backward(&p), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(without_addresses(flash3_last_error()), sentence);
  EXPECT_EQ(flash3_backward_run(plan, &p), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(without_addresses(flash3_last_error()), sentence);
  // A caller whose params are of the first version, too.
  p.struct_size = offsetof(flash3_backward_params, workspace_size) + sizeof p.workspace_size;
  EXPECT_EQ(flash3_backward(&p), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(without_addresses(flash3_last_error()), sentence);
  flash3_plan_destroy(plan);

  p = call.args.params();
  ASSERT_EQ(flash3_backward_workspace(&p, &p.workspace_size), FLASH3_OK);
  p.workspace = reinterpret_cast<void*>(aligned);
  p.q.data = reinterpret_cast<void*>(aligned);
  EXPECT_EQ(flash3_backward(&p), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(without_addresses(flash3_last_error()),
            "workspace and q share memory, but the call writes workspace" + kRule);
}

// ---- against bytes counted one by one ----

// A tensor somewhere in a few hundred bytes.
flash3_tensor random_tensor(std::mt19937* random, std::vector<unsigned char>* memory, bool output) {
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>((*random)() % static_cast<uint64_t>(n));
  };
  flash3_tensor t{};
  constexpr flash3_dtype kDtypes[] = {FLASH3_FLOAT8_E4M3, FLASH3_FLOAT16, FLASH3_FLOAT32,
                                      FLASH3_INT64};
  t.dtype = kDtypes[below(4)];
  t.ndim = static_cast<int32_t>(1 + below(4));
  std::vector<int> order;
  for (int d = 0; d < t.ndim; ++d) order.push_back(d);
  std::shuffle(order.begin(), order.end(), *random);
  int64_t extent = 1;
  for (const int d : order) {
    t.shape[d] = 1 + below(4);
    t.stride[d] = output ? extent + below(3) : below(2 * extent + 3);
    if (t.shape[d] == 1 && below(4) == 0) t.stride[d] = INT64_MAX;  // is never used
    if (t.shape[d] > 1) extent += (t.shape[d] - 1) * t.stride[d];
  }
  t.data = memory->data() + below(40) * 8 + below(8 / dtype_size(t.dtype)) * dtype_size(t.dtype);
  return t;
}

// The bytes of its elements.
std::vector<uintptr_t> bytes_of(const flash3_tensor& t) {
  std::vector<uintptr_t> bytes;
  int64_t index[4] = {};
  for (;;) {
    int64_t offset = 0;
    for (int d = 0; d < t.ndim; ++d)
      if (t.shape[d] > 1) offset += index[d] * t.stride[d];
    for (int64_t i = 0; i < dtype_size(t.dtype); ++i)
      bytes.push_back(reinterpret_cast<uintptr_t>(t.data) +
                      static_cast<uintptr_t>(offset * dtype_size(t.dtype) + i));
    int d = t.ndim - 1;
    while (d >= 0 && ++index[d] == t.shape[d]) index[d--] = 0;
    if (d < 0) break;
  }
  std::sort(bytes.begin(), bytes.end());
  return bytes;
}

TEST(Aliases, AreThoseThatShareAByte) {
  std::mt19937 random(11);
  std::vector<unsigned char> memory(1 << 14);
  int shared = 0, interleaved = 0;
  for (int i = 0; i < 20000; ++i) {
    const flash3_tensor a = random_tensor(&random, &memory, true),
                        b = random_tensor(&random, &memory, i % 2 == 0);
    const std::vector<uintptr_t> of_a = bytes_of(a), of_b = bytes_of(b);
    std::vector<uintptr_t> common;
    std::set_intersection(of_a.begin(), of_a.end(), of_b.begin(), of_b.end(),
                          std::back_inserter(common));
    CallMemory both;
    both.add("a", a, true);
    both.add("b", b, i % 4 == 0);
    ASSERT_EQ(both.check().ok(), common.empty()) << i;
    shared += !common.empty();
    interleaved += common.empty() && of_a.front() < of_b.back() && of_b.front() < of_a.back();

    CallMemory with_region;
    with_region.add("a", a, false);
    const unsigned char* begin = memory.data() + random() % 300;
    const size_t size = random() % 20;
    with_region.add("workspace", begin, size, true);
    const auto first = reinterpret_cast<uintptr_t>(begin);
    const bool inside = std::any_of(of_a.begin(), of_a.end(),
                                    [&](uintptr_t x) { return x >= first && x < first + size; });
    ASSERT_EQ(with_region.check().ok(), !inside) << i;

    CallMemory reads;
    reads.add("a", a, false);
    reads.add("b", b, false);
    ASSERT_TRUE(reads.check().ok());
  }
  EXPECT_GT(shared, 5000);
  EXPECT_GT(interleaved, 500);
}

// Sizes of calls that people make are decided: nothing is given up.
TEST(Aliases, OfLargeTensorsAreFound) {
  const int64_t seq = 100000, heads = 64, dim = 128, row = 3 * heads * dim;
  flash3_tensor q{reinterpret_cast<void*>(uintptr_t{1} << 40),
                  FLASH3_BFLOAT16,
                  4,
                  {8, seq, heads, dim},
                  {seq * row, row, dim, 1}};
  flash3_tensor out = q;
  for (const auto& [offset, apart] : {std::pair{heads * dim, true},
                                      {heads * dim - 1, false},
                                      {2 * heads * dim, true},
                                      {2 * heads * dim + 1, false},
                                      {row, false},
                                      {3 * row - 1, false}}) {
    out.data = static_cast<uint16_t*>(q.data) + offset;
    CallMemory memory;
    memory.add("q", q, false), memory.add("out", out, true);
    EXPECT_EQ(memory.check().ok(), apart) << offset;
  }
}

}  // namespace
}  // namespace flash3::test

namespace flash3 {
namespace {

// The list of a call's addresses has every tensor of its params once.

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
