// SPDX-License-Identifier: Apache-2.0
#include "cpu/target.hpp"

#include <array>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#endif
#endif

namespace flash3::cpu {
namespace {

#if defined(__x86_64__)
// Asks the processor, then the operating system: Linux gives a process the 8 KB of tiles per thread
// only on request, once for the whole process. "" if it did.
std::string request_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) ||
      (edx & (kAmxBf16 | kAmxTile)) != (kAmxBf16 | kAmxTile))
    return "the processor has no AMX-TILE and AMX-BF16";
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return "";
  return std::string("the operating system does not allow AMX: ") + std::strerror(errno);
#else
  return "how to ask this operating system for AMX is not known";
#endif
}

// Clang's __builtin_cpu_supports does not know every name that GCC's knows. Conversions are AVX
// instructions: a check for AVX2 has already asked the operating system.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0;
}
#endif

struct Supported {
  std::array<CpuTarget, 5> targets{CpuTarget::kBaseline};
  size_t count = 1;
  std::string why_no_amx = "the processor has no AVX-512 with BF16";

  Supported() {
#if defined(__x86_64__)
    // These ask the operating system too: without its support for the registers they say no.
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("bmi2") || !has_f16c() || !__builtin_cpu_supports("aes") ||
        !__builtin_cpu_supports("pclmul"))
      return;
    targets[count++] = CpuTarget::kAvx2;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
      return;
    targets[count++] = CpuTarget::kAvx3;
    if (!__builtin_cpu_supports("avx512bf16")) return;
    targets[count++] = CpuTarget::kAvx3Zen4;
    why_no_amx = request_amx();
    if (why_no_amx.empty()) targets[count++] = CpuTarget::kAmx;
#endif
  }
};

const Supported& supported() {
  static const Supported supported;
  return supported;
}

}  // namespace

const char* target_name(CpuTarget target) {
  switch (target) {
    case CpuTarget::kBaseline: return "BASELINE";
    case CpuTarget::kAvx2: return "AVX2";
    case CpuTarget::kAvx3: return "AVX3";
    case CpuTarget::kAvx3Zen4: return "AVX3_ZEN4";
    case CpuTarget::kAmx: return "AMX";
  }
  return "unknown";
}

std::span<const CpuTarget> supported_targets() {
  return {supported().targets.data(), supported().count};
}

CpuTarget best_target(flash3_dtype dtype) {
  const CpuTarget best = supported_targets().back();
  return best == CpuTarget::kAmx && dtype != FLASH3_BFLOAT16 ? CpuTarget::kAvx3Zen4 : best;
}

bool has_fast_dot_products() {
#if defined(__x86_64__)
  static const bool is_amd = (__builtin_cpu_init(), __builtin_cpu_is("amd") != 0);
  return is_amd && supported().targets[supported().count - 1] >= CpuTarget::kAvx3Zen4;
#else
  return false;
#endif
}

const std::string& why_no_amx() { return supported().why_no_amx; }

}  // namespace flash3::cpu
