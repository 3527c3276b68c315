#include "cpu/target.hpp"

#include <array>

namespace flash3 {
namespace {

struct Supported {
  std::array<CpuTarget, 4> targets{CpuTarget::kBaseline};
  size_t count = 1;

  Supported() {
#if defined(__x86_64__)
    // These ask the operating system too: without its support for the registers they say no.
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("bmi2") || !__builtin_cpu_supports("f16c") ||
        !__builtin_cpu_supports("aes") || !__builtin_cpu_supports("pclmul"))
      return;
    targets[count++] = CpuTarget::kAvx2;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
      return;
    targets[count++] = CpuTarget::kAvx3;
    if (__builtin_cpu_supports("avx512bf16")) targets[count++] = CpuTarget::kAvx3Zen4;
#endif
  }
};

}  // namespace

const char* target_name(CpuTarget target) {
  switch (target) {
    case CpuTarget::kBaseline: return "BASELINE";
    case CpuTarget::kAvx2: return "AVX2";
    case CpuTarget::kAvx3: return "AVX3";
    case CpuTarget::kAvx3Zen4: return "AVX3_ZEN4";
  }
  return "unknown";
}

std::span<const CpuTarget> supported_targets() {
  static const Supported supported;
  return {supported.targets.data(), supported.count};
}

}  // namespace flash3
