// SPDX-License-Identifier: Apache-2.0
// The forward kernel: shared memory, roles, and what each part of it must have. README.md draws the
// schedule. PoliciesOf (kernel_16bit.cuh, kernel_fp8.cuh, kernel_widened.cuh) names the parts:
//
//   Traits     sizes, shared memory, barriers (traits.cuh)
//   Producer   warpgroup 0: brings Q, K and V into shared memory (load.cuh) and hands out the work
//              tiles
//   Consumer   warpgroups 1…: 64 query rows each, products and softmax (consume.cuh); of Operands,
//              the products, scores and scales, and Store, what becomes of O (kernel_16bit.cuh)
#pragma once

#include "cuda/device/ptx/compiler.cuh"
#include "cuda/sm90/forward/consume.cuh"

namespace flash3::cuda::sm90 {

// What the kernel of a row and an element type is put together from (device/kernel_table.hpp).
template <auto kRow, Element kElement>
struct PoliciesOf;

// std:: is not for device headers.
template <class A, class B>
inline constexpr bool kSameType = false;
template <class A>
inline constexpr bool kSameType<A, A> = true;
template <class A, class B>
concept Same = kSameType<A, B>;

// The producer warpgroup.
template <class Producer, class Traits>
concept ProducerFor = requires(const ForwardParams& params, typename Traits::Shared& shared) {
  { Producer::kTileReaders } -> Same<const int&>;  // threads that read the ring of work tiles
  Producer::init_barriers(shared);                 // one thread: all but the ring's and v_loaded
  Producer::run(params, shared);                   // the whole warpgroup, until there is no tile
};

// What lets consumer warpgroups issue their products in turn (device/pipeline.cuh).
template <class PingPong>
concept PingPongOrder = requires(const PingPong& order) {
  PingPong{0};     // the warpgroup
  order.start();   // once, before the first wait
  order.wait();    // until this warpgroup may issue
  order.arrive();  // lets the next one issue: as often as it waits
  order.finish();  // once, at the end
};

// The number formats of a consumer: an object for each work tile. Tile: Consumer::Tile.
template <class Operands, class Traits, class Tile>
concept OperandsFor =
    requires(Operands& operands, const Operands& read, Tile& tile, const ForwardParams& params,
             typename Traits::Shared& shared, float (&scores)[Traits::kTileN / 2],
             float (&two_rows)[2], Descriptor at, const typename Traits::KvState& state) {
      typename Operands::Score;                                 // device/score/softmax.cuh
      { Operands::kProbabilityRegisters } -> Same<const int&>;  // of P, a thread
      { Operands::kVLayout } -> Same<const Descriptor&>;        // of V's tile
      { Operands::kPassTurn } -> Same<const PassTurn&>;         // when the next one may issue
      { Operands::kOneSoftmax } -> Same<const bool&>;           // one copy, or one each stage
      { Operands::warp_in_warpgroup(0) } -> Same<int>;          // of a thread
      Operands(params, shared, 0, 0);                           // stage of Q, warpgroup
      Operands::issue_scores(scores, at, at);                   // S = Q·Kᵀ
      read.issue_output(tile, at);                              // O += P·V, or O = P·V
      // While the scores are under way: the states of this key tile and of the one before it.
      operands.begin_key_tile(tile, state, state);
      read.scale_scores(tile);                      // before the mask
      { read.changes_output(tile) } -> Same<bool>;  // O, with no maximum raised too
      read.change_output(tile, true, state);        // by alpha, if raised
      read.make_probabilities(tile);                // P of S, rounded
      read.complete_output(tile);                   // after the last product
      read.scale_normalisation(two_rows, state);    // by what O is in units of
    };

// The epilogue of a warpgroup.
template <class Store, class Traits>
concept StoreFor = requires(const ForwardParams& params, const WarpOutput& output, uint8_t* staging,
                            const float (&r_o)[Traits::kHeadDimV / 2]) {
  { Store::kInPlaceOfQ } -> Same<const bool&>;       // staged where Q was
  Store::wait_until_read();                          // before anyone writes there again
  Store::store(params, output, staging, r_o, 0, 0);  // warpgroup, thread
};

// What runs beside a work tile's first product.
struct Meanwhile {
  __device__ void operator()() const {}
};

// The steps that consume() calls, in its order. Kernels of tools replace some of them.
template <class Consumer, class Traits>
concept ConsumerFor =
    PingPongOrder<typename Traits::PingPong> &&
    requires(Consumer& c, const ForwardParams& params, typename Traits::Shared& shared,
             typename Consumer::Tile& tile, float (&two_rows)[2]) {
      typename Consumer::Softmax;
      typename Consumer::Scores;
      typename Consumer::Probabilities;
      typename Consumer::Output;
      Consumer(params, shared, 0);  // the consumer warpgroup
      c.begin();
      { c.tiles.next() } -> Same<bool>;
      c.describe_rows(c.tiles);          // of a work tile
      c.describe_empty_rows(c.tiles);    // of one without keys
      c.find_key_tiles(c.tiles.tile());  // its KeyTileRanges
      c.hand_back(c.tiles);              // the work tile, when it is described
      c.output();                        // the WarpOutput of the rows
      c.skip_masked_tiles(0);            // those that the rows do not see
      c.make_operands();
      c.q_descriptor();
      c.first_key_tile(tile, Meanwhile{});  // P of the last key tile, with which a walk begins
      c.issue_products(tile, 0);            // S of a key tile, O of the one before; stage
      c.run_softmax(tile, 0);               // P of the key tile
      c.finish_output(tile, two_rows, two_rows);  // 1 / sum, LSE
      c.finish();
    };

// ---- the kernel ----

// Policies: the types Traits, Producer and Consumer, as PoliciesOf has them.
template <class Policies>
__global__ void __launch_bounds__(Policies::Traits::kConfig.threads(), 1)
    forward_kernel(const __grid_constant__ typename Policies::Traits::Params params) {
  using Traits = typename Policies::Traits;
  using Producer = typename Policies::Producer;
  using Consumer = typename Policies::Consumer;
  static_assert(ProducerFor<Producer, Traits>);
  static_assert(ConsumerFor<Consumer, Traits>);
  static_assert(OperandsFor<typename Consumer::OperandsType, Traits, typename Consumer::Tile>);
  static_assert(StoreFor<typename Consumer::StoreType, Traits>);
  static_assert(sizeof(typename Traits::Shared) == shared_memory_bytes(Traits::kConfig));
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);

  if (threadIdx.x == 0) {
    Producer::init_barriers(shared);
    mbarrier_init(&shared.v_loaded, 1);
    shared.tiles.init(Producer::kTileReaders + kWarpgroupThreads * Traits::kWarpgroups);
    fence_mbarrier_init();
  }
  __syncthreads();

  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    release_registers<Traits::kConfig.producer_registers()>();
    Producer::run(params, shared);
  } else {
    acquire_registers<Traits::kConfig.consumer_registers()>();
    Consumer consumer(params, shared, warpgroup - 1);
    consume(consumer);
  }
}

}  // namespace flash3::cuda::sm90
