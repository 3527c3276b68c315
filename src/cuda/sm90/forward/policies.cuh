// SPDX-License-Identifier: Apache-2.0
// What a forward kernel is put together from, and what each part must have. A kernel's parts are
// named by PoliciesOf (kernel_16bit.cuh, kernel_fp8.cuh, kernel_widened.cuh):
//
//   Traits     sizes, shared memory, barriers            traits.cuh
//   Producer   warpgroup 0: loads, hands out work tiles   load.cuh
//   Consumer   the others: the steps of consume()         consume.cuh, of
//     Operands   products, scores and scales              operands_16bit.cuh
//     Store      what becomes of O                        store.cuh
#pragma once

#include "cuda/sm90/forward/params.h"
#include "cuda/sm90/forward/traits.cuh"
#include "cuda/sm90/forward/warp_rows.cuh"

namespace flash3::cuda::sm90 {

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
      typename Operands::Score;                                 // device/online_softmax.cuh
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

}  // namespace flash3::cuda::sm90
