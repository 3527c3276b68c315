// SPDX-License-Identifier: Apache-2.0
// The asynchronous warpgroup MMA: how it finds a matrix in shared memory, the instructions that
// order it, and the products.
#pragma once

#include "core/arithmetic.hpp"
#include "hopper/device/kinds.hpp"
#include "hopper/device/ptx/arithmetic.cuh"

namespace flash3::hopper {

// ---- descriptors: PTX ISA 9.7.15.5.1, shared memory layout and matrix descriptor ----

// How rows of a shared-memory tile are swizzled: TMA writes and wgmma reads with the same pattern.
enum class Swizzle : int { k64B = 2, k128B = 1 };  // values: layout_type of the descriptor

FLASH3_HOST_DEVICE constexpr int swizzle_bytes(Swizzle s) { return s == Swizzle::k128B ? 128 : 64; }

// The 64-bit descriptor in halves: only the low one holds the address, so that stepping through a
// tile is one 32-bit addition and the high half stays a constant.
struct Descriptor {
  uint32_t low;
  uint32_t high;

  // The same matrix, `bytes` further (a multiple of 16).
  FLASH3_HOST_DEVICE constexpr Descriptor operator+(int bytes) const {
    return {low + uint32_t(bytes >> 4), high};
  }
};

// A descriptor of address 0. Offsets in bytes.
FLASH3_HOST_DEVICE constexpr Descriptor descriptor_layout(Swizzle swizzle, int leading_offset,
                                                          int stride_offset) {
  return {uint32_t(leading_offset >> 4) << 16, uint32_t(stride_offset >> 4) | uint32_t(swizzle)
                                                                                  << 30};
}

// ---- order ----

// Orders register accesses before the next wgmma. PTX ISA 9.7.15.7.1, wgmma.fence.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes a group of wgmmas. PTX ISA 9.7.15.7.2, wgmma.commit_group.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending groups are in flight. PTX ISA 9.7.15.7.3, wgmma.wait_group.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// ---- products: PTX ISA 9.7.15.5.2 ----

// m64nNk16 of 16-bit operands, with float32 accumulators:
//   ss   D (+)= A·B, both in shared memory; K-major, or MN-major where a flag says so
//   rs   D (+)= A·B, A in registers, B in shared memory, MN-major
// and m64nNk32 of e4m3, whose operands in shared memory are K-major.
template <Element T, int N>
struct Wgmma;

// An inline-asm wgmma lists each of its N / 2 accumulator registers by number, and the other
// operands are numbered behind them: A0 = N / 2, A1 = N / 2 + 1, … A kernel with another N needs a
// row in each of these lists.
// clang-format off
#define FLASH3_REGS_4 "%0, %1, %2, %3"
#define FLASH3_REGS_8 FLASH3_REGS_4 ", %4, %5, %6, %7"
#define FLASH3_REGS_16 FLASH3_REGS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASH3_REGS_24 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
#define FLASH3_REGS_32 FLASH3_REGS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASH3_REGS_40 FLASH3_REGS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FLASH3_REGS_48 FLASH3_REGS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASH3_REGS_56 FLASH3_REGS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FLASH3_REGS_64 FLASH3_REGS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASH3_REGS_72 FLASH3_REGS_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FLASH3_REGS_80 FLASH3_REGS_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FLASH3_REGS_96 FLASH3_REGS_80 \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASH3_REGS_128 FLASH3_REGS_96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define FLASH3_OUT8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                       "+f"(d[i + 6]), "+f"(d[i + 7])
#define FLASH3_OUT16(i) FLASH3_OUT8(i), FLASH3_OUT8(i + 8)
#define FLASH3_OUT32(i) FLASH3_OUT16(i), FLASH3_OUT16(i + 16)
#define FLASH3_OUT_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define FLASH3_OUT_8 FLASH3_OUT8(0)
#define FLASH3_OUT_16 FLASH3_OUT16(0)
#define FLASH3_OUT_24 FLASH3_OUT16(0), FLASH3_OUT8(16)
#define FLASH3_OUT_32 FLASH3_OUT_24, FLASH3_OUT8(24)
#define FLASH3_OUT_40 FLASH3_OUT_32, FLASH3_OUT8(32)
#define FLASH3_OUT_48 FLASH3_OUT_40, FLASH3_OUT8(40)
#define FLASH3_OUT_56 FLASH3_OUT_48, FLASH3_OUT8(48)
#define FLASH3_OUT_64 FLASH3_OUT_56, FLASH3_OUT8(56)
#define FLASH3_OUT_72 FLASH3_OUT_64, FLASH3_OUT8(64)
#define FLASH3_OUT_80 FLASH3_OUT_72, FLASH3_OUT8(72)
#define FLASH3_OUT_96 FLASH3_OUT_80, FLASH3_OUT16(80)
#define FLASH3_OUT_128 FLASH3_OUT_96, FLASH3_OUT32(96)

#define FLASH3_WGMMA(T, TYPE, N, K, MAJOR_AB, MAJOR_B, A0, A1, A2, A3, A4, A5, A6)                                     \
  template <>                                                                                                          \
  struct Wgmma<T, N> {                                                                                                 \
    template <bool kMnMajorA = false, bool kMnMajorB = false>                                                          \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], Descriptor a, Descriptor b, bool accumulate) {        \
      static_assert(K == 16 || (!kMnMajorA && !kMnMajorB));                                                            \
      asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\n"                                                               \
                   "mov.b64 a, {%" #A0 ", %" #A1 "};\nmov.b64 b, {%" #A2 ", %" #A3 "};\nsetp.ne.b32 p, %" #A4 ", 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k" #K ".f32." TYPE "." TYPE " {" FLASH3_REGS_##A0 "}, "     \
                   "a, b, p, 1, 1" MAJOR_AB ";\n}\n"                                                                   \
                   : FLASH3_OUT_##A0 : "r"(a.low), "r"(a.high), "r"(b.low), "r"(b.high), "r"(int(accumulate)),         \
                                       "n"(int(kMnMajorA)), "n"(int(kMnMajorB)));                                      \
    }                                                                                                                  \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t* a, Descriptor b, bool accumulate) {   \
      asm volatile("{\n.reg .pred p;\n.reg .b64 b;\n"                                                                  \
                   "mov.b64 b, {%" #A4 ", %" #A5 "};\nsetp.ne.b32 p, %" #A6 ", 0;\n"                                   \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k" #K ".f32." TYPE "." TYPE " {" FLASH3_REGS_##A0 "}, "     \
                   "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, b, p, 1, 1" MAJOR_B ";\n}\n"                             \
                   : FLASH3_OUT_##A0 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "r"(b.high),            \
                                       "r"(int(accumulate)));                                                          \
    }                                                                                                                  \
  };
#define FLASH3_WGMMA_N(N, A0, A1, A2, A3, A4, A5, A6)                                                                  \
  FLASH3_WGMMA(Element::kFloat16, "f16", N, 16, ", %" #A5 ", %" #A6, ", 1", A0, A1, A2, A3, A4, A5, A6)                \
  FLASH3_WGMMA(Element::kBFloat16, "bf16", N, 16, ", %" #A5 ", %" #A6, ", 1", A0, A1, A2, A3, A4, A5, A6)              \
  FLASH3_WGMMA(Element::kE4m3, "e4m3", N, 32, "", "", A0, A1, A2, A3, A4, A5, A6)
FLASH3_WGMMA_N(8, 4, 5, 6, 7, 8, 9, 10)
FLASH3_WGMMA_N(16, 8, 9, 10, 11, 12, 13, 14)
FLASH3_WGMMA_N(32, 16, 17, 18, 19, 20, 21, 22)
FLASH3_WGMMA_N(48, 24, 25, 26, 27, 28, 29, 30)
FLASH3_WGMMA_N(64, 32, 33, 34, 35, 36, 37, 38)
FLASH3_WGMMA_N(80, 40, 41, 42, 43, 44, 45, 46)
FLASH3_WGMMA_N(96, 48, 49, 50, 51, 52, 53, 54)
FLASH3_WGMMA_N(112, 56, 57, 58, 59, 60, 61, 62)
FLASH3_WGMMA_N(128, 64, 65, 66, 67, 68, 69, 70)
FLASH3_WGMMA_N(144, 72, 73, 74, 75, 76, 77, 78)
FLASH3_WGMMA_N(160, 80, 81, 82, 83, 84, 85, 86)
FLASH3_WGMMA_N(192, 96, 97, 98, 99, 100, 101, 102)
FLASH3_WGMMA_N(256, 128, 129, 130, 131, 132, 133, 134)
// clang-format on

#undef FLASH3_WGMMA
#undef FLASH3_WGMMA_N

}  // namespace flash3::hopper
