// SPDX-License-Identifier: Apache-2.0
// Tensors of the least and of the largest extents.
//
// Tensors of no rows, with lengths that say so, on each side and with data pointers or none: out
// and gradients are 0, lse is −∞ or the sink. Skipped without a Hopper GPU.

#include <limits>

#include "device_call.hpp"

namespace flash3 {
namespace {

class ZeroRows : public HopperTest, public testing::WithParamInterface<const char*> {
 protected:
  static std::string dims() { return GetParam(); }

  // Calls look(call, what) after the call has run, once with data pointers of empty tensors that
  // are null and once with others.
  template <class Look>
  void run(const std::string& id, const Look& look) {
    for (const bool null : {true, false}) {
      const std::string what = id + (null ? ", null data" : ", data");
      DeviceCall call(id, *memory_);
      if (null)
        for (const Slot& slot : slots_of(&call.params))
          if (bytes_of(*slot.tensor) == 0) slot.tensor->data = nullptr;
      ASSERT_EQ(flash3::supported(call.params), FLASH3_OK) << what << ": " << flash3_last_error();
      ASSERT_EQ(flash3::run(call.params), FLASH3_OK) << what << ": " << flash3_last_error();
      const cudaError_t error = cudaDeviceSynchronize();
      ASSERT_EQ(error, cudaSuccess) << what << ": " << cudaGetErrorString(error);
      look(call, what);
      if (HasFatalFailure()) return;
    }
  }

  // Every element of this tensor; want(head) tells which value.
  template <class Want>
  static void expect_all(DeviceCall& call, std::string_view name, const std::string& what,
                         const Want& want) {
    const flash3_tensor t = *slot_of(&call.params, name).tensor;
    const Bytes bytes = call.download(call.part(name));
    const int head_dim = t.dtype == FLASH3_FLOAT32 ? t.ndim - 2 : -1;  // lse
    int64_t wrong = 0;
    cases::for_each_row(t, [&](int64_t row) {
      const int64_t head =
          head_dim < 0 ? 0 : row / t.stride[head_dim] % std::max<int64_t>(t.shape[head_dim], 1);
      for (int64_t i = 0; i < t.shape[t.ndim - 1]; ++i)
        wrong += load_float(bytes.data(), t.dtype, row + i) != want(head);
    });
    EXPECT_EQ(wrong, 0) << what << ": elements of " << name;
  }
  static constexpr auto kZero = [](int64_t) { return 0.f; };
  static constexpr auto kNothing = [](int64_t) { return -std::numeric_limits<float>::infinity(); };
};

// What a call may say of its empty side, k's and v's: nothing, or that its length is 0.
constexpr const char* kEmptyKeys[] = {"",        "/usedk",       "/packedk",       "/packedk/usedk",
                                      "/packed", "/packed/used", "/packedk/nomax", "/used"};

TEST_P(ZeroRows, ForwardOfNoKeys) {
  const TimeLimit limit;
  for (const char* const type : {"bf16", "fp16", "e4m3"})
    for (const auto& [heads, mask] : {std::pair{"/h2", "/full"}, std::pair{"/h8x2", "/causal"}})
      for (const char* const cap : {"", "/softcap30"})
        for (const char* const sink : {"", "/sink"})
          for (const char* const lengths : kEmptyKeys) {
            if (std::string_view(lengths) == "/packed/used") continue;  // rows left unwritten
            const std::string id =
                std::string(type) + "/b1/q24/k0" + heads + dims() + mask + lengths + sink + cap;
            run(id, [&](DeviceCall& call, const std::string& what) {
              expect_all(call, "out", what, kZero);
              if (*sink == 0) {
                expect_all(call, "lse", what, kNothing);
                return;
              }
              const Bytes sinks = call.part("sink").host;
              expect_all(call, "lse", what, [&](int64_t head) {
                return load_float(sinks.data(), FLASH3_FLOAT32, head);
              });
            });
            if (HasFatalFailure()) return;
          }
}

TEST_P(ZeroRows, ForwardThatQuantizesNoKeys) {
  const TimeLimit limit;
  for (const char* const lengths : kEmptyKeys) {
    if (std::string_view(lengths) == "/packed/used") continue;
    run("bf16/b2/q24/k0/h2" + dims() + "/full" + lengths + "/fp8",
        [&](DeviceCall& call, const std::string& what) {
          expect_all(call, "out", what, kZero);
          expect_all(call, "lse", what, kNothing);
        });
    if (HasFatalFailure()) return;
  }
}

// Nothing is to be written.
TEST_P(ZeroRows, ForwardOfNoQueries) {
  const TimeLimit limit;
  for (const char* const type : {"bf16", "e4m3"})
    for (const char* const keys : {"/k0", "/k100"})
      for (const char* const lengths : {"", "/usedq", "/packedq", "/packedq/usedq", "/packed",
                                        "/packed/used", "/used", "/packedq/nomax"})
        for (const char* const cap : {"", "/softcap30"}) {
          run(std::string(type) + "/b2/q0" + keys + "/h4x2" + dims() + "/causal" + lengths + cap,
              [](DeviceCall&, const std::string&) {});
          if (HasFatalFailure()) return;
        }
}

TEST_P(ZeroRows, BackwardOfNoKeys) {
  const TimeLimit limit;
  for (const char* const type : {"bf16", "fp16"})
    for (const char* const order : {"/bwd", "/deterministic"})
      for (const char* const cap : {"", "/softcap30"})
        for (const char* const lengths : kEmptyKeys) {
          run(std::string(type) + "/b2/q24/k0/h4x2" + dims() + "/causal" + lengths + cap + order,
              [](DeviceCall& call, const std::string& what) {
                expect_all(call, "dq", what, kZero);
              });
          if (HasFatalFailure()) return;
        }
}

TEST_P(ZeroRows, BackwardOfNoQueries) {
  const TimeLimit limit;
  for (const char* const type : {"bf16", "fp16"})
    for (const char* const order : {"/bwd", "/deterministic"})
      for (const char* const cap : {"", "/softcap30"})
        for (const char* const lengths : {"", "/usedq", "/packedq", "/packedq/usedq", "/packed",
                                          "/packed/used", "/used", "/packedq/nomax"}) {
          run(std::string(type) + "/b2/q0/k100/h4x2" + dims() + "/full" + lengths + cap + order,
              [](DeviceCall& call, const std::string& what) {
                expect_all(call, "dk", what, kZero);
                expect_all(call, "dv", what, kZero);
              });
          if (HasFatalFailure()) return;
        }
}

// What is left is as if the empty tensors were not there.
TEST_P(ZeroRows, Quantize) {
  const TimeLimit limit;
  for (const char* const sizes : {"/b2/q24/k0", "/b2/q0/k24", "/b2/q0/k0"})
    for (const char* const lengths : {"", "/used", "/packed", "/packed/used"})
      for (const char* const scales : {"/onescale", "/headscales", "/blockscales"})
        for (const char* const rotation : {"", "/rotate", "/rotary"}) {
          // Gaps after the tokens that count would need longer tables than the case has.
          if (std::string_view(rotation) == "/rotary" &&
              std::string_view(lengths) == "/packed/used")
            continue;
          const std::string id = std::string("bf16") + sizes + "/h4x2" + dims() + "/full" +
                                 lengths + "/quantize" + scales + rotation;
          run(id, [&](DeviceCall& call, const std::string& what) {
            DeviceCall other(id, *memory_);
            auto& p = std::get<flash3_quantize_params>(other.params);
            for (flash3_tensor* const t : {&p.q, &p.k, &p.v}) {
              if (bytes_of(*t) > 0) continue;
              const bool is_q = t == &p.q, is_k = t == &p.k;
              *t = {};
              (is_q ? p.q_out : is_k ? p.k_out : p.v_out) = {};
              (is_q ? p.q_scale : is_k ? p.k_scale : p.v_scale) = {};
            }
            if (p.q.ndim + p.k.ndim + p.v.ndim > 0) other.run();
            for (const char* const name :
                 {"q_out", "k_out", "v_out", "q_scale", "k_scale", "v_scale"}) {
              if (slot_of(&other.params, name).tensor) {
                EXPECT_TRUE(call.download(call.part(name)) == other.download(other.part(name)))
                    << what << ": " << name;
              } else if (std::string_view(name).ends_with("_scale") &&
                         std::string_view(scales) != "/blockscales") {
                expect_all(call, name, what, [](int64_t) { return 1.f; });
              }
            }
          });
          if (HasFatalFailure()) return;
        }
}

INSTANTIATE_TEST_SUITE_P(Dims, ZeroRows,
                         testing::Values("/d64", "/d96", "/d128", "/d192", "/d256", "/d192x128",
                                         "/d72x40"),
                         [](const auto& test) { return std::string(test.param + 1); });

// Offsets of more than 2^31 and 2^32 elements in every tensor of every kind of call: each dimension
// of one tensor after the other is so far apart, and tensors of so many elements are full of
// copies. The same bits as those of the compact call. Skipped without a Hopper GPU.

class Huge : public HopperTest, public testing::WithParamInterface<const char*> {};
class HugeCopies : public HopperTest, public testing::WithParamInterface<const char*> {};

constexpr int64_t kFar = (int64_t{1} << 31) + 4096;  // elements between any two of few
constexpr size_t kArena = (size_t{2 * kFar} + (size_t{1} << 24)) * sizeof(float);

// t with this dimension that far apart that its elements lie beyond 2^32, the others compact; no
// data. Fewer than three along it: beyond 2^31. odd: with strides that TMA cannot take.
flash3_tensor spread(flash3_tensor t, int far, bool odd) {
  int64_t extent = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    if (d == far) continue;
    t.stride[d] = extent;
    extent *= t.shape[d];
  }
  const int64_t steps = std::max<int64_t>(2, t.shape[far] - 1);
  t.stride[far] = (2 * kFar / steps + 63) / 64 * 64 + odd;
  EXPECT_GE(t.stride[far], extent);
  return t;
}

// Row by row; to or from the compact tensor of a part.
void copy_rows(const flash3_tensor& to, const flash3_tensor& from, cudaStream_t stream) {
  std::vector<int64_t> at;
  cases::for_each_row(from, [&](int64_t row) { at.push_back(row); });
  const int64_t size = cases::element_size(to.dtype);
  size_t i = 0;
  cases::for_each_row(to, [&](int64_t row) {
    ASSERT_EQ(
        cudaMemcpyAsync(static_cast<std::byte*>(to.data) + row * size,
                        static_cast<std::byte*>(from.data) + at[i++] * size,
                        size_t(to.shape[to.ndim - 1] * size), cudaMemcpyDeviceToDevice, stream),
        cudaSuccess);
  });
}

TEST_P(Huge, EachDimensionOfEachTensor) {
  const TimeLimit limit;
  if (!has_free_memory(kArena + (size_t{2} << 30)))
    GTEST_SKIP() << "needs 20 GB of free device memory";
  const auto arena = memory_->allocate(kArena);
  DeviceCall call(GetParam(), *memory_);
  const auto stream = static_cast<cudaStream_t>(memory_->stream());
  call.run();
  const auto expected = call.outputs();
  int tried = 0;
  for (const Slot& slot : slots_of(&call.params)) {
    const flash3_tensor compact = *slot.tensor;
    for (int d = 0; d < compact.ndim - 1; ++d) {
      if (compact.shape[d] < 2) continue;
      const std::string what = std::string(GetParam()) + ": " + slot.name + ".stride[" +
                               std::to_string(d) + "] of " + std::to_string(compact.shape[d]);
      AnyParams params = call.params;
      flash3_tensor& far = *slot_of(&params, slot.name).tensor;
      const bool odd = call.the_case().layout == cases::Layout::kOdd;
      far = spread(compact, d, odd);
      ASSERT_LT(bytes_of(far), kArena) << what;
      ASSERT_GT(cases::span_of(far), int64_t{1} << 31) << what;
      far.data = static_cast<std::byte*>(arena.get()) + odd * cases::element_size(far.dtype);
      call.reset();
      copy_rows(far, compact, stream);  // an output: unwritten
      size_t bytes = 0;
      ASSERT_EQ(workspace(params, &bytes), FLASH3_OK) << what << ": " << flash3_last_error();
      const auto scratch = memory_->allocate(bytes);  // may need another copy than the compact call
      std::visit([&](auto& p) { p.workspace = scratch.get(), p.workspace_size = bytes; }, params);
      ASSERT_EQ(flash3::run(params), FLASH3_OK) << what << ": " << flash3_last_error();
      if (slot.output) copy_rows(compact, far, stream);
      const cudaError_t error = cudaDeviceSynchronize();
      ASSERT_EQ(error, cudaSuccess) << what << ": " << cudaGetErrorString(error);
      EXPECT_TRUE(call.outputs() == expected) << what;
      ++tried;
    }
  }
  EXPECT_GE(tried, 6);
}

// dq and dk of GQA, lse, scales for heads and blocks, tables of a rotary embedding, wide heads.
constexpr const char* kSpread[] = {
    "bf16/b3/q200/k300/h6x3/d128/causal",
    "fp16/b3/q200/k300/h6x3/d64/full/odd",
    "bf16/b3/q130/k200/h6x3/d256/causal/softcap30",
    "bf16/b3/q200/k300/h6x3/d192x128/full/packed/used",
    "bf16/b3/q40/k40/h3/d64/causal/packed",
    "e4m3/b3/q200/k300/h6x3/d128/causal/blockscales",
    "e4m3/b3/q200/k300/h6x3/d64/full/packed/blockscales",
    "e4m3/b3/q130/k200/h6x3/d256/full/headscales",
    "bf16/b3/q200/k300/h6x3/d128/causal/fp8",
    "bf16/b3/q200/k300/h6x3/d128/full/quantize/blockscales/rotate",
    "bf16/b3/q200/k300/h6x3/d64/full/quantize/headscales/rotary",
    "fp16/b3/q200/k300/h6x3/d96/full/quantize/blockscales/packed",
    "bf16/b3/q200/k300/h6x3/d128/causal/deterministic/dlse",
    "fp16/b3/q200/k300/h6x3/d64/full/deterministic/odd/dlse",
    "bf16/b3/q130/k200/h6x3/d256/causal/deterministic",
    "bf16/b3/q200/k300/h6x3/d192x128/causal/deterministic/packed/used/dlse",
};
INSTANTIATE_TEST_SUITE_P(Calls, Huge, testing::ValuesIn(kSpread));

// A batch of copies of one element, of more than 2^31 elements of data in each tensor that counts:
// each copy must have the outputs of the one.
TEST_P(HugeCopies, HaveTheResultsOfOne) {
  const TimeLimit limit;
  DeviceCall one(GetParam(), *memory_);
  one.run();
  AnyParams params = one.params;
  int64_t smallest = int64_t{1} << 40;
  for (const char* const name : {"q", "k", "v"})
    smallest = std::min(smallest, cases::span_of(*slot_of(&params, name).tensor));
  const int64_t copies = (int64_t{1} << 31) / smallest + 3;

  size_t needed = size_t{1} << 30;
  for (const Slot& slot : slots_of(&params)) needed += size_t(copies) * bytes_of(*slot.tensor);
  for (const Slot& slot : slots_of(&params)) slot.tensor->shape[0] = copies;
  for (const Slot& slot : slots_of(&params)) {
    ASSERT_GE(slot.tensor->ndim, 2) << slot.name;
    slot.tensor->stride[0] = slot.tensor->stride[1] * slot.tensor->shape[1];
  }
  size_t bytes = 0;
  AnyParams question = params;  // the memory so far is that of one element
  for (const Slot& slot : slots_of(&question)) slot.tensor->data = nullptr;
  ASSERT_EQ(workspace(question, &bytes), FLASH3_OK) << flash3_last_error();
  if (!has_free_memory(needed + bytes))
    GTEST_SKIP() << "needs " << ((needed + bytes) >> 30) << " GiB of free device memory";

  std::vector<std::shared_ptr<void>> buffers;
  for (const Slot& slot : slots_of(&params)) {
    const size_t piece = one.part(slot.name).host.size(), all = piece * size_t(copies);
    auto* const to = static_cast<std::byte*>(buffers.emplace_back(memory_->allocate(all)).get());
    if (slot.output) {
      ASSERT_EQ(cudaMemset(to, int(kUnwritten), all), cudaSuccess);
    } else {  // ever twice as many
      ASSERT_EQ(cudaMemcpy(to, slot.tensor->data, piece, cudaMemcpyDeviceToDevice), cudaSuccess);
      for (size_t done = piece; done < all; done *= 2)
        ASSERT_EQ(cudaMemcpy(to + done, to, std::min(done, all - done), cudaMemcpyDeviceToDevice),
                  cudaSuccess);
    }
    slot.tensor->data = to;
  }
  buffers.push_back(memory_->allocate(bytes));
  std::visit([&](auto& p) { p.workspace = buffers.back().get(), p.workspace_size = bytes; },
             params);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // the copies ran on another stream
  ASSERT_EQ(flash3::run(params), FLASH3_OK) << flash3_last_error();
  const cudaError_t error = cudaDeviceSynchronize();
  ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
  for (const Slot& slot : slots_of(&params)) {
    if (!slot.output) continue;
    const Bytes want = one.download(one.part(slot.name));
    Bytes got(want.size());
    for (const int64_t i : {int64_t{0}, copies / 2, copies - 2, copies - 1}) {
      memory_->copy_out(got.data(),
                        static_cast<std::byte*>(slot.tensor->data) + size_t(i) * got.size(),
                        got.size());
      EXPECT_TRUE(got == want) << slot.name << " of copy " << i << " of " << copies;
    }
  }
}

// 16-bit forwards and ragged backwards of that size stand in the tests of their own.
constexpr const char* kCopied[] = {
    "e4m3/b1/q128/k128/h32/d128/causal/blockscales",
    "bf16/b1/q128/k128/h32/d128/causal/fp8",
    "bf16/b1/q128/k128/h32/d128/full/quantize/blockscales/rotate",
    "bf16/b1/q128/k128/h32/d128/full/quantize/headscales",
    "bf16/b1/q128/k128/h32/d128/causal/deterministic",
};
INSTANTIATE_TEST_SUITE_P(Calls, HugeCopies, testing::ValuesIn(kCopied));

}  // namespace
}  // namespace flash3
