// SPDX-License-Identifier: Apache-2.0
// The vector vocabulary of the kernels: element loads, exp2, conversions, and the two kinds of
// operand that a matrix product takes. Included once per instruction set, by attention-inl.hpp.
//
// Operands are rows of 32-bit words: one float, or (native bf16) two bfloat16 that neighbour each
// other along the summed dimension. Everything above them is the same code.

HWY_BEFORE_NAMESPACE();
namespace flash3::cpu {
namespace {  // internal linkage: two instruction sets must never share a function

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F32>;
using U16 = hn::Rebind<uint16_t, F32>;  // as many lanes as F32
using VecF = hn::Vec<F32>;
using VecU = hn::Vec<U32>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(F32()));

// Register blocking of the matrix products: kVectorRows × (kPanelVectors · kLanes) accumulators.
constexpr int kVectorRows = 6;
// Two numbers, of which Highway chooses one. NOLINTNEXTLINE(misc-redundant-expression)
constexpr int kPanelVectors = HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON ? 4 : 2;
constexpr int kPanel = kPanelVectors * kLanes;
static_assert(kKeyAlignment % kPanel == 0);

HWY_INLINE VecF set(float x) { return hn::Set(F32(), x); }

// 2^f for |f| ≤ ½, relative error 1.3e-7 (minimax, degree 5, the constant made 1 so that 2^0 = 1).
HWY_INLINE VecF exp2_of_fraction(VecF f) {
  auto p = set(1.3276472e-3f);
  p = hn::MulAdd(p, f, set(9.6755410e-3f));
  p = hn::MulAdd(p, f, set(5.5507131e-2f));
  p = hn::MulAdd(p, f, set(2.4022120e-1f));
  p = hn::MulAdd(p, f, set(6.9314694e-1f));
  return hn::MulAdd(p, f, set(1.f));
}

// 2^x for x ≤ 0 or a little above; exactly 0 for −∞, NaN for NaN.
HWY_INLINE VecF exp2(VecF x) {
#if HWY_TARGET == HWY_AVX3
  const VecF fraction{_mm512_reduce_ps(x.raw, 0)};  // x − nearest integer; 0 for ±∞
  const VecF integer = hn::Sub(x, fraction);        // scalef itself would round down
  return VecF{_mm512_scalef_ps(exp2_of_fraction(fraction).raw, integer.raw)};
#else
  // Below −127 the result is 0. Compare and select rather than Max, which may swallow a NaN.
  const auto lowest = set(-127.f);
  x = hn::IfThenElse(hn::Lt(x, lowest), lowest, x);
  // Adding 1.5 · 2^23 rounds to an integer and leaves it, biased, in the low mantissa bits.
  const auto magic = set(12582912.f + 127.f);
  const auto biased = hn::Add(x, magic);
  const auto fraction = hn::Sub(x, hn::Sub(biased, magic));
  const auto power = hn::BitCast(F32(), hn::ShiftLeft<23>(hn::BitCast(U32(), biased)));
  return hn::Mul(exp2_of_fraction(fraction), power);
#endif
}

struct Tanh {
  VecF value, slope;  // tanh x and 1 − tanh² x
};

// Relative error of the value below 4e-7, absolute one of the slope too. 1 − e loses what tanh is
// near zero, where a polynomial (of degree 4 in x², minimax for |x| < 0.625) takes over. NaN for
// NaN.
HWY_INLINE Tanh tanh(VecF x) {
  const VecF size = hn::Abs(x), one = set(1.f);
  const VecF e = exp2(hn::Mul(size, set(-2.f * float(kLog2E))));
  const VecF r = hn::Div(one, hn::Add(one, e)), large = hn::Mul(hn::Sub(one, e), r);
  const VecF square = hn::Mul(x, x);
  auto p = set(-5.70498872745e-3f);
  p = hn::MulAdd(p, square, set(2.06390887954e-2f));
  p = hn::MulAdd(p, square, set(-5.37397155531e-2f));
  p = hn::MulAdd(p, square, set(1.33314422036e-1f));
  p = hn::MulAdd(p, square, set(-3.33332819422e-1f));
  const VecF small = hn::MulAdd(hn::Mul(p, square), x, x);
  return {hn::IfThenElse(hn::Lt(size, set(0.625f)), small, hn::CopySign(large, x)),
          hn::Mul(hn::Mul(set(4.f), e), hn::Mul(r, r))};
}

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};
struct E4m3 {
  uint8_t bits;
};

#if HWY_TARGET == HWY_SCALAR

HWY_INLINE VecF load(const float* p) { return set(*p); }
HWY_INLINE VecF load(const Bf16* p) { return set(bfloat16_to_float(p->bits)); }
HWY_INLINE VecF load(const Fp16* p) { return set(float16_to_float(p->bits)); }
HWY_INLINE VecF load(const E4m3* p) { return set(e4m3_to_float(p->bits)); }
HWY_INLINE void store(VecF x, float* p) { *p = hn::GetLane(x); }
HWY_INLINE void store(VecF x, Bf16* p) { p->bits = float_to_bfloat16(hn::GetLane(x)); }
HWY_INLINE void store(VecF x, Fp16* p) { p->bits = float_to_float16(hn::GetLane(x)); }

#else

// kLanes elements, as float.
HWY_INLINE VecF load(const float* p) { return hn::LoadU(F32(), p); }
HWY_INLINE VecF load(const Bf16* p) {
  const auto bits = hn::PromoteTo(U32(), hn::LoadU(U16(), &p->bits));
  return hn::BitCast(F32(), hn::ShiftLeft<16>(bits));
}
#if HWY_TARGET == HWY_EMU128 || (HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2)
// Without an instruction for it. Highway's own way out truncates, and takes NaN for a number.
HWY_INLINE VecF load(const Fp16* p) {
  float values[kLanes];
  for (int i = 0; i < kLanes; ++i) values[i] = float16_to_float(p[i].bits);
  return hn::LoadU(F32(), values);
}
HWY_INLINE void store(VecF x, Fp16* p) {
  float values[kLanes];
  hn::StoreU(x, F32(), values);
  for (int i = 0; i < kLanes; ++i) p[i].bits = float_to_float16(values[i]);
}
#else
HWY_INLINE VecF load(const Fp16* p) {
  const hn::Rebind<hwy::float16_t, F32> f16;
  return hn::PromoteTo(F32(), hn::LoadU(f16, reinterpret_cast<const hwy::float16_t*>(p)));
}
HWY_INLINE void store(VecF x, Fp16* p) {  // to nearest even; NaN stays NaN
  const hn::Rebind<hwy::float16_t, F32> f16;
  hn::StoreU(hn::DemoteTo(f16, x), f16, reinterpret_cast<hwy::float16_t*>(p));
}
#endif

// As e4m3_to_float.
HWY_INLINE VecF load(const E4m3* p) {
  const hn::Rebind<uint8_t, F32> u8;
  const auto code = hn::PromoteTo(U32(), hn::LoadU(u8, &p->bits));
  const auto size = hn::And(code, hn::Set(U32(), 0x7Fu));
  const auto sign = hn::ShiftLeft<24>(hn::And(code, hn::Set(U32(), 0x80u)));
  const auto normal = hn::Add(hn::ShiftLeft<20>(size), hn::Set(U32(), 120u << 23));
  const auto steps = hn::ConvertTo(F32(), hn::BitCast(hn::RebindToSigned<U32>(), size));  // of 2^-9
  const auto small = hn::BitCast(U32(), hn::Mul(steps, set(0x1p-9f)));
  auto value = hn::IfThenElse(hn::Lt(size, hn::Set(U32(), 8u)), small, normal);
  value = hn::IfThenElse(hn::Eq(size, hn::Set(U32(), uint32_t{kE4m3Nan})),
                         hn::Set(U32(), 0x7FC00000u), value);
  return hn::BitCast(F32(), hn::Or(value, sign));
}

// Rounded to nearest even; NaN stays NaN.
HWY_INLINE void store(VecF x, float* p) { hn::StoreU(x, F32(), p); }
HWY_INLINE void store(VecF x, Bf16* p) {
  const auto bits = hn::BitCast(U32(), x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(U32(), 1u));
  const auto up = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(U32(), 0x7FFFu)), odd));
  const auto nan = hn::RebindMask(U32(), hn::IsNaN(x));
  const auto rounded = hn::IfThenElse(nan, hn::Set(U32(), 0x7FC0u), up);
  const auto narrow = hn::DemoteTo(U16(), hn::BitCast(hn::RebindToSigned<U32>(), rounded));
  hn::StoreU(narrow, U16(), &p->bits);
}

#endif

// The same for the first `count` elements only: memory after them is neither read nor written.
template <class T>
HWY_INLINE VecF load_first(const T* p, int count) {
  if (count >= kLanes) return load(p);
  T copy[kLanes] = {};
  std::copy_n(p, count, copy);
  return load(copy);
}
template <class T>
HWY_INLINE void store_first(VecF x, T* p, int count) {
  if (count >= kLanes) return store(x, p);
  T copy[kLanes];
  store(x, copy);
  std::copy_n(copy, count, p);
}

struct Nothing {};

// Words of one float.
template <class T>
struct FloatWords {
  using Element = T;                 // of k and v
  using QueryWords = FloatWords<T>;  // what q is loaded with
  static constexpr int kElements = 1;
  static constexpr int kStripRows = kVectorRows;  // that the products of packed operands take
  static constexpr int kDepth = 1;                // what their depth must be a multiple of
  static constexpr bool kScaled = false;          // k and v have scales
  using Unit = Nothing;                           // what they need for as long as a task runs

  static HWY_INLINE VecF multiply_add(VecF a, VecF b, VecF sum) { return hn::MulAdd(a, b, sum); }
  // kLanes words of a row, the summed dimension along the row.
  static HWY_INLINE VecF load_along(const T* p) { return load(p); }
  // kLanes words, the summed dimension across rows. (One row: next is not used.)
  static HWY_INLINE VecF load_across(const T* row, const T*) { return load(row); }
  // 2 · kLanes probabilities as words.
  static HWY_INLINE void store_weights(VecF first, VecF second, float* p) {
    hn::StoreU(first, F32(), p);
    hn::StoreU(second, F32(), p + kLanes);
  }
  static HWY_INLINE float weight(const float* words, int64_t j) { return words[j]; }
};

// FP8: words of one float, which holds an e4m3 value, scaled when it is packed. Weights are those
// that e4m3 has when they are multiplied by kE4m3WeightScale.
struct Fp8Words : FloatWords<E4m3> {
  using QueryWords = Fp8Words;
  static constexpr bool kScaled = true;

  // For 0 ≤ p, hardly above 1; NaN stays NaN.
  static HWY_INLINE VecF rounded(VecF p) {
    static_assert(kE4m3WeightScale == 256.f);
    const auto bits = hn::BitCast(U32(), p);
    const auto odd = hn::And(hn::ShiftRight<20>(bits), hn::Set(U32(), 1u));
    const auto up = hn::Add(hn::Add(bits, hn::Set(U32(), 0x7FFFFu)), odd);
    const VecF normal = hn::BitCast(F32(), hn::And(up, hn::Set(U32(), 0xFFF00000u)));
    // 64 has steps of 2^-17, those of e4m3 below 2^-6 · 1 / 256.
    const VecF small = hn::Sub(hn::Add(p, set(64.f)), set(64.f));
    return hn::IfThenElse(hn::Or(hn::Lt(p, set(0x1p-14f)), hn::IsNaN(p)), small, normal);
  }
  static HWY_INLINE void store_weights(VecF first, VecF second, float* p) {
    FloatWords<E4m3>::store_weights(rounded(first), rounded(second), p);
  }
};

// FP8 keys and values under a q of 16 bits: weights stay as they are.
template <class Q>
struct Fp8KeyWords : FloatWords<E4m3> {
  using QueryWords = FloatWords<Q>;
  static constexpr bool kScaled = true;
};

#if defined(FLASH3_NATIVE_BF16)
// Words of two bfloat16; products are summed in float32.
struct Bf16Words {
  using Element = Bf16;
  using QueryWords = Bf16Words;
  static constexpr int kElements = 2;
  static constexpr int kStripRows = kVectorRows;
  static constexpr int kDepth = 1;
  static constexpr bool kScaled = false;
  using Unit = Nothing;

  static HWY_INLINE VecF multiply_add(VecF a, VecF b, VecF sum) {
#if defined(__clang__) && __clang_major__ < 17
    asm("" : "+v"(a.raw));  // clang 16 crashes where it folds a broadcast into the instruction
#endif
    return VecF{_mm512_dpbf16_ps(sum.raw, (__m512bh)a.raw, (__m512bh)b.raw)};
  }
  static HWY_INLINE VecF load_along(const Bf16* p) {
    return hn::LoadU(F32(), reinterpret_cast<const float*>(p));
  }
  static HWY_INLINE VecF load_across(const Bf16* row, const Bf16* next) {
    const auto low = hn::PromoteTo(U32(), hn::LoadU(U16(), &row->bits));
    const auto high = hn::PromoteTo(U32(), hn::LoadU(U16(), &next->bits));
    return hn::BitCast(F32(), hn::Or(low, hn::ShiftLeft<16>(high)));
  }
  static HWY_INLINE void store_weights(VecF first, VecF second, float* p) {
    _mm512_storeu_ps(p, (__m512)_mm512_cvtne2ps_pbh(second.raw, first.raw));
  }
  static HWY_INLINE float weight(const float* words, int64_t j) {
    return bfloat16_to_float(reinterpret_cast<const uint16_t*>(words)[j]);
  }
};
#endif

}  // namespace
}  // namespace flash3::cpu
HWY_AFTER_NAMESPACE();
