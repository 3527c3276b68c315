// SPDX-License-Identifier: Apache-2.0
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

}  // namespace
}  // namespace flash3
