// SPDX-License-Identifier: Apache-2.0
// Matrices in shared memory: a warp's loads and stores of fragments, and the asynchronous warpgroup
// MMA: how it finds a matrix, the instructions that order it, and the products.
#pragma once

#include "core/arithmetic.hpp"
#include "cuda/device/ptx/arithmetic.cuh"
#include "cuda/device/types.hpp"

namespace flash3::cuda {

// ---- a warp's fragments: PTX ISA 9.7.14.5.15 ldmatrix, 9.7.14.5.16 stmatrix ----

// Four 8×8 matrices of 16-bit elements, each transposed: lane l holds the address of row l % 8 of
// matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Stores four, not transposed; addresses likewise.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// The same, each matrix stored transposed.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t address, uint32_t a, uint32_t b,
                                                       uint32_t c, uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

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
//   rs   D (+)= A·B, A in registers, B in shared memory, MN-major unless a flag says otherwise
// and m64nNk32 of e4m3, whose operands in shared memory are K-major.
template <Element T, int N>
struct Wgmma {
  static_assert(N % 8 == 0 && 8 <= N && N <= 256, "wgmma has no such N");
  template <bool kMnMajorA = false, bool kMnMajorB = false>
  static __device__ void ss(float (&d)[N / 2], Descriptor a, Descriptor b, bool accumulate);
  template <bool kMnMajorB = true>
  static __device__ void rs(float (&d)[N / 2], const uint32_t* a, Descriptor b, bool accumulate);
};

// An inline-asm wgmma lists each of its N / 2 accumulator registers by number, and the other
// operands are numbered after them: A0 = N / 2, A1 = N / 2 + 1, … CMake writes these lists for
// every N that the hardware has: REGISTERS is a string of the numbers, and the outputs follow it.
// The compiler's pass over host code needs the declarations alone, and is faster with them.
#ifdef __CUDA_ARCH__
// clang-format off
#define FLASH3_WGMMA(T, TYPE, K, MAJOR_AB, MAJOR_B, N, A0, A1, A2, A3, A4, A5, A6, A7, REGISTERS,  \
                     ...)                                                                          \
  template <>                                                                                      \
  struct Wgmma<T, N> {                                                                             \
    template <bool kMnMajorA = false, bool kMnMajorB = false>                                      \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], Descriptor a, Descriptor b,       \
                                              bool accumulate) {                                   \
      static_assert(K == 16 || (!kMnMajorA && !kMnMajorB));                                        \
      asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\n"                                           \
                   "mov.b64 a, {%" #A0 ", %" #A1 "};\nmov.b64 b, {%" #A2 ", %" #A3 "};\n"          \
                   "setp.ne.b32 p, %" #A4 ", 0;\n"                                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k" #K ".f32." TYPE "." TYPE             \
                   " {" REGISTERS "}, a, b, p, 1, 1" MAJOR_AB ";\n}\n"                             \
                   : __VA_ARGS__                                                                   \
                   : "r"(a.low), "r"(a.high), "r"(b.low), "r"(b.high), "r"(int(accumulate)),       \
                     "n"(int(kMnMajorA)), "n"(int(kMnMajorB)));                                    \
    }                                                                                              \
    template <bool kMnMajorB = true>                                                               \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t* a, Descriptor b,  \
                                              bool accumulate) {                                   \
      asm volatile("{\n.reg .pred p;\n.reg .b64 b;\n"                                              \
                   "mov.b64 b, {%" #A4 ", %" #A5 "};\nsetp.ne.b32 p, %" #A6 ", 0;\n"               \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k" #K ".f32." TYPE "." TYPE             \
                   " {" REGISTERS "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, b, p, 1, 1"        \
                   MAJOR_B ";\n}\n"                                                                \
                   : __VA_ARGS__                                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "r"(b.high),          \
                     "r"(int(accumulate)), "n"(int(kMnMajorB)));                                   \
    }                                                                                              \
  };
#define FLASH3_WGMMA_N(N, A0, A1, A2, A3, A4, A5, A6, A7, ...)                                     \
  FLASH3_WGMMA(Element::kFloat16, "f16", 16, ", %" #A5 ", %" #A6, ", %" #A7,                       \
               N, A0, A1, A2, A3, A4, A5, A6, A7, __VA_ARGS__)                                     \
  FLASH3_WGMMA(Element::kBFloat16, "bf16", 16, ", %" #A5 ", %" #A6, ", %" #A7,                     \
               N, A0, A1, A2, A3, A4, A5, A6, A7, __VA_ARGS__)                                     \
  FLASH3_WGMMA(Element::kE4m3, "e4m3", 32, "", "", N, A0, A1, A2, A3, A4, A5, A6, A7, __VA_ARGS__)
// clang-format on
#include "cuda/device/ptx/wgmma_shapes.inc"  // by cmake/wgmma_shapes.cmake
#undef FLASH3_WGMMA
#undef FLASH3_WGMMA_N
#endif

}  // namespace flash3::cuda
