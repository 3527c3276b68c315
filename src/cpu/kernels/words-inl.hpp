// SPDX-License-Identifier: Apache-2.0
// Which words an instruction set computes a forward call in.

HWY_BEFORE_NAMESPACE();
namespace flash3::cpu {
namespace {

// Calls what(Words) for the words in which this instruction set computes these dtypes.
template <class What>
auto with_words([[maybe_unused]] const ForwardProblem& p, const What& what) {
#if defined(FLASH3_AMX)
  return what(AmxWords());
#else
  if (p.has_fp8_keys() && p.dtype == FLASH3_FLOAT16) return what(Fp8KeyWords<Fp16>());
  if (p.has_fp8_keys() && p.dtype == FLASH3_BFLOAT16) return what(Fp8KeyWords<Bf16>());
  switch (p.dtype) {
    case FLASH3_FLOAT16: return what(FloatWords<Fp16>());
#if defined(FLASH3_NATIVE_BF16)
    case FLASH3_BFLOAT16: return what(Bf16Words());
#else
    case FLASH3_BFLOAT16: return what(FloatWords<Bf16>());
#endif
    case FLASH3_FLOAT8_E4M3: return what(Fp8Words());
    default: return what(FloatWords<float>());
  }
#endif
}

}  // namespace
}  // namespace flash3::cpu
HWY_AFTER_NAMESPACE();
