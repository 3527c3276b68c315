// SPDX-License-Identifier: Apache-2.0
// A kernel of nothing but attention's two products, operands at rest in shared memory. It is made
// of the blocks that the attention kernels are made of, so that it issues the same instructions.

#include "cuda/device/ptx/arithmetic.cuh"
#include "cuda/device/ptx/compiler.cuh"
#include "cuda/sm90/device/tile.cuh"
#include "cuda/sm90/forward/kernel_fp8.cuh"
#include "device/ceiling_instances.hpp"

namespace flash3::device {

using cuda::Descriptor;
using cuda::Element;

// What the kernel and its launch agree on.
template <Element kElement_, int kHeadDim_, int kKeys_>
struct CeilingTraits {
  static constexpr Element kElement = kElement_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kBytes = cuda::element_bytes(kElement);
  static constexpr bool kFp8 = kElement == Element::kE4m3;
  static constexpr int kWarpgroups = 2;
  static constexpr int kThreads = kWarpgroups * cuda::kWarpgroupThreads;
  static constexpr int kStages = 2;  // tiles of K and of V one after the other, as in a real ring
  // Stages in a pass of the loop. ptxas gives each its own registers for the scores.
  static constexpr int kUnroll = kFp8 && kHeadDim > 192 ? 1 : kStages;
  // O starts again after so many key tiles, as it does for sequences of a few thousand keys: an
  // accumulator that only grew would soon swallow what is added, and that costs less energy.
  static constexpr int kRounds = 64;

  static constexpr int kScores = kThreads * kKeys / 2;

  using QTile = cuda::sm90::SharedTile<cuda::sm90::kWarpgroupRows, kHeadDim, kBytes>;
  using KTile = cuda::sm90::SharedTile<kKeys, kHeadDim, kBytes>;
  // An FP8 product reads V along the keys: there it lies transposed.
  using VTile = cuda::sm90::SharedTile<kFp8 ? kHeadDim : kKeys, kFp8 ? kKeys : kHeadDim, kBytes>;

  struct Shared {
    uint8_t q[kWarpgroups][QTile::kBytes];
    uint8_t k[kStages][KTile::kBytes];
    uint8_t v[kStages][VTile::kBytes];
  };
  // Operations of both products, of all warpgroups of a block, in kRounds.
  static constexpr double kFlops =
      2. * 2 * kRounds * kWarpgroups * cuda::sm90::kWarpgroupRows * kKeys * kHeadDim;
};

// `data`: sizeof(Shared) bytes of N(0, 1) values in kElement. They are copied as they lie: whatever
// the layout makes of random values is random. `scores`: kScores values of N(0, 1), for P.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    ceiling_kernel(const uint4* data, const float* scores, int rounds, CeilingBlock* blocks) {
  using namespace cuda;
  using namespace cuda::sm90;
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  constexpr Element kElement = Traits::kElement;
  static_assert(Traits::kThreads <= sizeof(CeilingBlock::sink) / sizeof(float));
  static_assert(Traits::kRounds % Traits::kStages == 0);

  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);
  for (int i = threadIdx.x; i < int(sizeof shared / sizeof *data); i += Traits::kThreads) {
    reinterpret_cast<uint4*>(shared_bytes)[i] = data[i];
  }
  fence_shared_for_async_proxy();
  __syncthreads();

  const Descriptor q = descriptor(QTile::kMajorK, shared.q[warpgroup_index()]);
  const Descriptor k = descriptor(KTile::kMajorK, shared.k);
  const Descriptor v = descriptor(Traits::kFp8 ? VTile::kMajorK : VTile::kMajorMN, shared.v);
  float r_s[Traits::kKeys / 2];
  uint32_t r_p[Traits::kKeys * Traits::kBytes / 8];
  float r_o[Traits::kHeadDim / 2];

  // Probabilities before their sum divides them, e^(s − max): about 4 is the largest of thousands
  // of N(0, 1) scores. In FP8 times 2⁶, as the kernels have them.
  constexpr float kScale = float(kLog2E), kMax = Traits::kFp8 ? 4.f - 6 / kScale : 4.f;
#pragma unroll
  for (int i = 0; i < Traits::kKeys / 2; ++i) {
    r_s[i] = exp2_approx(kScale * (scores[threadIdx.x + i * Traits::kThreads] - kMax));
  }
  if constexpr (Traits::kFp8) {
    pack_fp8_probabilities(r_s, r_p);
  } else {
    pack_probabilities<kElement>(r_s, r_p);
  }

  float sink = 0;
  __syncthreads();
  const long long begin = clock64();
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (float& o : r_o) o = 0;
    // One product is in flight while the next is issued, across passes too.
    const auto products = [&](int stage) {
      issue_abt<kElement, QTile, KTile>(r_s, q, k + stage * KTile::kBytes);
      wgmma_wait<1>();
      fence_operand(r_o);
      fence_operand(r_p);
      const Descriptor v_stage = v + stage * VTile::kBytes;
      if constexpr (Traits::kFp8) {
        issue_fp8_pv<VTile, Traits::kKeys>(r_o, r_p, v_stage);
      } else {
        issue_add_ab<kElement, VTile>(r_o, r_p, v_stage);
      }
      wgmma_wait<1>();
      fence_operand(r_s);
      // NOTE: ptxas drops a wgmma whose result is never read, volatile or not. It would also put
      // this addition off past the next product, copy r_s for that, and serialise all wgmmas for
      // want of registers. A trap for what a square never is holds it here, and costs nothing;
      // order_before(), for any number, would serialise them too.
      sink += r_s[0];
      asm volatile(
          "{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p trap;\n}" ::"f"(sink * sink)
          : "memory");
    };
#pragma unroll 1
    for (int i = 0; i < Traits::kRounds; i += Traits::kUnroll) {
      if constexpr (Traits::kUnroll == 1) {
        products(i % Traits::kStages);
      } else {
        products(0);
        products(1);
      }
    }
    wgmma_wait<0>();
    fence_operand(r_o);
    fence_operand(r_p);
    sink += r_o[0];
  }
  __syncthreads();
  CeilingBlock& block = blocks[blockIdx.x];
  if (threadIdx.x == 0) block.cycles += clock64() - begin;
  block.sink[threadIdx.x] = sink;
}

template <Element kElement, int kHeadDim, int kKeys>
CeilingInstance ceiling_instance() {
  using Traits = CeilingTraits<kElement, kHeadDim, kKeys>;
  return {reinterpret_cast<const void*>(ceiling_kernel<Traits>),
          sizeof(typename Traits::Shared),
          Traits::kScores,
          Traits::kThreads,
          kHeadDim,
          kKeys,
          Traits::kFlops};
}

template <Element kElement>
const CeilingInstance CeilingInstances<kElement>::all[3] = {
    ceiling_instance<kElement, 64, 128>(), ceiling_instance<kElement, 128, 128>(),
    ceiling_instance<kElement, 256, kElement == Element::kE4m3 ? 128 : 80>()};

}  // namespace flash3::device

template struct flash3::device::CeilingInstances<flash3::cuda::Element::kFloat16>;
template struct flash3::device::CeilingInstances<flash3::cuda::Element::kBFloat16>;
template struct flash3::device::CeilingInstances<flash3::cuda::Element::kE4m3>;
