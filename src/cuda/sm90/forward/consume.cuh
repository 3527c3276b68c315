// SPDX-License-Identifier: Apache-2.0
// The consumer: one warpgroup, 64 query rows. Per key tile j, in the order of issue
//
//   S_j = Q·K_jᵀ             asynchronous
//   O += P_{j−1}·V_{j−1}     asynchronous: runs under the softmax of S_j (two-stage overlap)
//   wait S_j; mask; maximum
//   wait O; O ·= α_j; P_j = 2^(S_j − m); rounding       (FP8: O is flushed here: output_sums.cuh)
//
// and the warpgroups issue in ping-pong order: one's softmax runs under the other's products.
// FlashAttention-3, §3.1–3.2.
//
// kernel.cuh says what Operands and Store are. The steps are members; consume(), at the end, puts
// them together.
#pragma once

#include "cuda/device/score/mask.cuh"
#include "cuda/device/score/softmax.cuh"
#include "cuda/sm90/forward/traits.cuh"
#include "cuda/sm90/forward/warp_rows.cuh"

namespace flash3::cuda::sm90 {

// How a consumer walks over key tiles: over those of a work tile, of which its rows see ranges of
// keys. list_walk.cuh has the walk over lists.
template <class Traits, bool kLists = Traits::kLists>
struct KeyWalk;
template <class Traits>
struct KeyWalk<Traits, false> {
  static constexpr bool kPassesTiles = false;  // over some without a product
  struct Queries {};                           // Q in registers
  struct OfWorkTile {};

  template <class Consumer>
  static __device__ __forceinline__ OfWorkTile begin(const Consumer&) {
    return {};
  }
  // What there is to know of a key tile, while its scores are under way.
  template <class Consumer, class Tile>
  static __device__ __forceinline__ void read(const Consumer&, Tile&, int) {}
  template <class Tile>
  static __device__ __forceinline__ int number(const Tile& tile) {
    return tile.n;
  }
  template <class Consumer, class Tile>
  static __device__ __forceinline__ void mask(const Consumer& c, Tile& tile) {
    const RowKeys(&rows)[kWarpRows] = c.shared.row_keys[c.warp];
    const RowKeys &upper = rows[c.row % kWarpRows], &lower = rows[c.row % kWarpRows + 8];
    const auto seen = [&](int r) { return Traits::kBand && r == 1 ? lower : upper; };
    const auto view = tile.view();
    // A causal mask's keys end in the tile, and begin before it.
    if constexpr (Consumer::kOneSidedMasks) {
      if (!__any_sync(~0u, upper.first > view.first_key || lower.first > view.first_key))
        return RangeMask<decltype(seen), false>{seen}.apply(view, tile.scores);
    }
    RangeMask<decltype(seen), Traits::kBand>{seen}.apply(view, tile.scores);
  }
};

// What depends on a score's place: nothing. tile_bias.cuh has that of kernels with any of it.
template <class Traits, BiasTerms kTerms = Traits::kConfig.terms>
struct TileBias;
template <class Traits>
struct TileBias<Traits, BiasTerms::kNone> {
  using Score = cuda::Score<Traits::kScore>;  // of 16 bits
  template <class Consumer>
  __device__ __forceinline__ explicit TileBias(const Consumer&) {}
};

template <class Traits, class Operands, class Store>
struct Consumer {
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using KvState = typename Traits::KvState;
  using Walk = KeyWalk<Traits>;
  using Bias = TileBias<Traits>;
  using Rows = FinishedRows<Traits>;
  using OperandsType = Operands;
  using StoreType = Store;
  using Score = typename Operands::Score;
  using Softmax = OnlineSoftmax<Score>;
  static constexpr int kStages = Traits::kStages, kTileN = Traits::kTileN;
  static constexpr bool kOneSoftmax = Operands::kOneSoftmax;
  static constexpr bool kLists = Traits::kLists;
  static constexpr bool kBiased = Traits::kConfig.terms != BiasTerms::kNone;
  static constexpr bool kPassesTiles = Walk::kPassesTiles;
  // Two warpgroups leave time beside first scores, and registers for a second mask; not if split.
  static constexpr bool kDescribeUnderScores = Traits::kWarpgroups == 2 && !Traits::kSplit;
  static constexpr bool kOneSidedMasks = Traits::kBand && kDescribeUnderScores;
  // Where the output is staged in Q's slot and Q has another one, the slot goes back to the loader
  // when the next work tile has begun: the store has time until then.
  static constexpr bool kHoldQ = Store::kInPlaceOfQ && Traits::kQStages > 1;

  using View = QueriesByKeys<kTileN / 2>;
  using Scores = typename View::Scores;
  using Probabilities = uint32_t[Operands::kProbabilityRegisters];
  using Output = float[Traits::kHeadDimV / 2];

  // One work tile. Its arrays are variables of consume(): in one object with them, or in a function
  // further in, the compiler promotes to registers later, and ptxas sees another program.
  struct Tile {
    KeyTileRanges keys;
    Operands operands;
    int n;  // the present key tile
    Descriptor q;
    typename Walk::Queries& queries;
    Softmax& softmax;
    Scores& scores;  // S, then P
    Probabilities& probabilities;
    Output& output;
    float (&alpha)[2];     // what the thread's two rows of `output` are to be multiplied by
    int row, key_in_tile;  // of element 0 of `scores`
    typename Walk::OfWorkTile walked;
    Bias bias;

    __device__ __forceinline__ View view() const {
      return {row, Walk::number(*this) * kTileN + key_in_tile};
    }
  };

  const ForwardParams& params;
  typename Traits::Shared& shared;
  const int warpgroup;

  TileReader tiles{shared.tiles};
  const typename Traits::PingPong ping_pong{warpgroup};
  const int thread = thread_in_warpgroup();
  const int row = thread / 32 * 16 + thread % 32 / 4;  // this thread has rows row and row + 8
  const int key_in_tile = thread % 4 * 2;              // and of each 8 keys this one and the next
  const Descriptor k = descriptor(KTile::kMajorK, shared.k);
  const Descriptor v = descriptor(Operands::kVLayout, shared.v);
  int warp = 0;            // among all consumer warps
  KvState k_state = {};    // V is where K was one tile ago
  KvState pending_v = {};  // kPassesTiles: V of the tile whose P is there, the first that is held
  typename Traits::QState q_state = {};
  bool previous_q_is_held = false;

  __device__ __forceinline__ Consumer(const ForwardParams& p, typename Traits::Shared& s, int w)
      : params(p), shared(s), warpgroup(w) {}

  __device__ __forceinline__ void begin() {
    if constexpr (!kPassesTiles) ping_pong.start();
    warp = 4 * warpgroup + Operands::warp_in_warpgroup(thread);
  }
  __device__ __forceinline__ void finish() {
    if (kHoldQ && previous_q_is_held) Store::wait_until_read();  // memory must outlive its stores
    if constexpr (!kPassesTiles) ping_pong.finish();
  }

  __device__ __forceinline__ WarpOutput output() const {
    return {params, shared.warp_queries[warp]};
  }

  // Chunks cost divisions, and short sequences share tiles in chunks only. Both stand apart: a
  // consumer that jumps over them waits for its next instructions.
  static __device__ __forceinline__ bool has_chunks(const WorkTile& work) {
    return Traits::kBand && uniform(work.mask.chunk) != 0;
  }

  __device__ __forceinline__ KeyTileRanges find_key_tiles(const WorkTile& work) const {
    return has_chunks(work) ? find_key_tiles<Traits::kSlots>(work, work.mask)
                            : find_key_tiles<false>(work, work.mask.without_chunks());
  }
  template <bool kSlots>
  __device__ __forceinline__ KeyTileRanges find_key_tiles(const WorkTile& work,
                                                          const TileMask& mask) const {
    // Numbers that are known to be uniform: branches on them then need no convergence barrier, and
    // addresses of stages stay in uniform registers.
    const TileMask::Range loaded{uniform(work.key_tile_begin), uniform(work.key_tile_end)};
    const TileMask::Range queries = warpgroup_queries(params, work, warpgroup);
    const int k_length = work.sequence.k_length;
    TileMask::Range seen = loaded;
    if constexpr (kLists) return {loaded, seen, {}};  // each key tile tells
    if constexpr (Traits::kSkipMaskedTiles)
      seen = seen_tiles(mask, k_length, queries, loaded, kTileN);
    const bool in_slots = kSlots && params.schedule.slot_rows != 0;
    const TileMask::Range unmasked =
        unmasked_tiles<Traits::kBand>(mask, k_length, in_slots, queries, kTileN);
    return {loaded, seen, {uniform(unmasked.begin), uniform(unmasked.end)}};
  }

  // Notes what the rows of the source's work tile are.
  template <class Tiles>
  __device__ __forceinline__ void describe_rows(const Tiles& source) const {
    const WorkTile& work = source.tile();
    if constexpr (kLists) {
      describe_rows<false, false>(source, {});
    } else if (has_chunks(work)) {
      describe_rows<Traits::kSlots, true>(source, work.mask);
    } else {
      describe_rows<false, true>(source, work.mask.without_chunks());
    }
  }
  // Of a work tile without keys: only what its output needs.
  template <class Tiles>
  __device__ __forceinline__ void describe_empty_rows(const Tiles& source) const {
    describe_rows<Traits::kBand && Traits::kSlots, false>(source, {});
  }
  template <bool kSlots, bool kKeys, class Tiles>
  __device__ __forceinline__ void describe_rows(const Tiles& source, const TileMask& mask) const {
    const WorkTile& work = source.tile();
    // FP8 has no register in which a row could wait for the next work tile.
    const int lane = Traits::kSlots ? thread % 32 : hide_from_optimizer(thread % 32);
    const int warp_in_warpgroup = warp - 4 * warpgroup;
    const RowsOfWarp rows =
        rows_of_warp<kSlots>(params, work, source.slots(), warpgroup, warp_in_warpgroup);
    if (lane == 0) shared.warp_queries[warp] = {*rows.sequence, rows.query, work.head_group};
    if constexpr (kKeys)
      note_keys<Traits::kBand>(params, work, mask, rows, warp_in_warpgroup, lane,
                               shared.row_keys[warp]);
  }
  // Nobody reads the description any more.
  template <class Tiles>
  __device__ __forceinline__ void hand_back(Tiles& source) const {
    Rows::note(*this, source);
    __syncwarp();
    source.release();
  }

  __device__ __forceinline__ Operands make_operands() const {
    return {params, shared, q_state.stage, warpgroup};
  }
  __device__ __forceinline__ Descriptor q_descriptor() const {
    return descriptor(QTile::kMajorK, shared.q[q_state.stage][warpgroup]);
  }

  // P of the first key tile; no other product runs beside its scores, but `meanwhile` does.
  template <class Meanwhile>
  __device__ __forceinline__ void first_key_tile(Tile& tile, const Meanwhile& meanwhile) {
    if constexpr (kPassesTiles)
      Walk::first_scores(*this, tile, meanwhile);
    else
      first_scores(tile, meanwhile);
    begin_softmax(tile);
    tile.operands.make_probabilities(tile);
  }
  template <class Meanwhile>
  __device__ __forceinline__ void first_scores(Tile& tile, const Meanwhile& meanwhile) {
    wait(&shared.q_barriers[warpgroup].full[q_state.stage], q_state.phase, "q_full");
    wait(&shared.k_barriers.full[k_state.stage], k_state.phase, "k_full");
    issue_scores(tile.scores, tile.q, k_state.stage);
    if (kHoldQ && previous_q_is_held) release_q(1 - q_state.stage);
    Walk::read(*this, tile, k_state.stage);
    meanwhile();
    if constexpr (kBiased) tile.bias.read(tile);
    tile.operands.begin_key_tile(tile, k_state, k_state);
    wgmma_wait<0>();
    fence_operand(tile.scores);
    release(&shared.k_barriers.empty[k_state.stage], thread);
    k_state.advance();
  }

  // Starts S of this key tile and O of the one before it.
  __device__ __forceinline__ void issue_products(Tile& tile, int stage) {
    wait(&shared.k_barriers.full[stage], k_state.phase, "k_full");
    ping_pong.wait();
    issue_scores(tile.scores, tile.q, stage);
    issue_output(tile, v_state_at(stage));
    Walk::read(*this, tile, stage);
    if constexpr (kBiased) tile.bias.read(tile);
  }

  // P of this key tile; O of the one before it comes in between.
  __device__ __forceinline__ void run_softmax(Tile& tile, int stage) {
    wait_for_scores(tile, stage);
    const bool raised = find_maxima(tile);
    wait_for_output(tile, v_stage_at(stage));
    finish_softmax(tile, raised, stage);
  }
  __device__ __forceinline__ void wait_for_scores(Tile& tile, int stage) {
    tile.operands.begin_key_tile(tile, {stage, k_state.phase}, v_state_at(stage));
    if constexpr (Operands::kPassTurn == PassTurn::kAtIssue) ping_pong.arrive();
    wgmma_wait<1>();
    fence_operand(tile.scores);
    if constexpr (Operands::kPassTurn == PassTurn::kWithScores) ping_pong.arrive();
    release(&shared.k_barriers.empty[stage], thread);
  }
  __device__ __forceinline__ bool find_maxima(Tile& tile) {
    const bool raised = begin_softmax(tile);
    if constexpr (Operands::kPassTurn == PassTurn::kWithMaxima) ping_pong.arrive();
    return raised;
  }
  __device__ __forceinline__ void finish_softmax(Tile& tile, bool rescale, int stage) {
    // One branch for all that seldom happens to O.
    if (rescale || tile.operands.changes_output(tile))
      tile.operands.change_output(tile, rescale, v_state_at(stage));
    tile.operands.make_probabilities(tile);
  }

  // The last key tile's part of O, the normalisation, the store.
  __device__ __forceinline__ void finish_output(Tile& tile, float (&inverse_sum)[2],
                                                float (&lse)[2]) {
    const KvState last_v = kPassesTiles ? pending_v : k_state.behind(1);
    issue_output(tile, last_v);
    Rows rows;
    rows.begin(*this, tile, last_v, inverse_sum, lse);
    if constexpr (!Store::kInPlaceOfQ) {
      release_q(q_state.stage);
      q_state.advance();
    }
    wgmma_wait<0>();
    fence_operand(tile.output);
    if constexpr (kPassesTiles)
      Walk::release_v(*this);
    else
      release(&shared.v_barriers.empty[last_v.stage], thread);
    tile.operands.complete_output(tile);
    skip_masked_tiles(tile.keys.seen.begin - tile.keys.loaded.begin);

    rows.finish(*this, tile, inverse_sum, lse, [&] {
      Store::store(params, output(), shared.q[q_state.stage][warpgroup], tile.output, warpgroup,
                   thread);
    });
    if constexpr (Store::kInPlaceOfQ) {
      if (!kHoldQ) release_q(q_state.stage);
      previous_q_is_held = kHoldQ;
      q_state.advance();
    }
  }

  // Key tiles that other warpgroups' rows see and these do not: their stages go back unread.
  __device__ __forceinline__ void skip_masked_tiles(int key_tiles) {
    if constexpr (Traits::kSkipMaskedTiles) {
      for (; key_tiles > 0; --key_tiles) {
        wait(&shared.k_barriers.full[k_state.stage], k_state.phase, "k_full");
        release(&shared.k_barriers.empty[k_state.stage], thread);
        wait(&shared.v_barriers.full[k_state.stage], k_state.phase, "v_full");
        release(&shared.v_barriers.empty[k_state.stage], thread);
        k_state.advance();
        ping_pong.wait();
        ping_pong.arrive();
      }
    }
  }

  // Where V is while K is at this stage: one behind.
  static __device__ __forceinline__ int v_stage_at(int stage) {
    return (stage + kStages - 1) % kStages;
  }
  __device__ __forceinline__ KvState v_state_at(int stage) const {
    return {v_stage_at(stage), stage == 0 ? k_state.phase ^ 1 : k_state.phase};
  }

  // Starts S = Q·Kᵀ; K is there.
  __device__ __forceinline__ void issue_scores(Scores& scores, Descriptor q, int stage) const {
    Operands::issue_scores(scores, q, k + stage * KTile::kBytes);
  }
  // Starts O += P·V.
  __device__ __forceinline__ void issue_output(Tile& tile, const KvState& v_state) {
    wait(&shared.v_barriers.full[v_state.stage], v_state.phase, "v_full");
    tile.operands.issue_output(tile, v + v_state.stage * VTile::kBytes);
  }
  __device__ __forceinline__ void wait_for_output(Tile& tile, int v_stage) {
    wgmma_wait<0>();
    fence_operand(tile.output);
    fence_operand(tile.probabilities);
    release(&shared.v_barriers.empty[v_stage], thread);
  }

  // Masks the scores and raises the rows' maxima; true if O must be rescaled.
  __device__ __forceinline__ bool begin_softmax(Tile& tile) {
    tile.operands.scale_scores(tile);
    const auto mask = [&] { Walk::mask(*this, tile); };
    bool masked = tile.n < tile.keys.unmasked.begin || tile.n >= tile.keys.unmasked.end;
    if constexpr (kLists) masked = tile.walked.seen.masked;
    if constexpr (Score::kCapped) {
      return Score::Mod::begin_tile(tile.softmax, tile.scores, tile.alpha, masked, mask);
    } else {
      if constexpr (kBiased)
        tile.bias.apply(tile, masked, mask);
      else if (masked)
        mask();
      return tile.softmax.begin_tile(tile.scores, tile.alpha);
    }
  }

  // Each warp releases Q for itself, when its rows of the output have left the same place.
  __device__ __forceinline__ void release_q(int stage) {
    if (thread % 32 != 0) return;
    Store::wait_until_read();
    arrive(&shared.q_barriers[warpgroup].empty[stage]);
  }
};

// All key tiles but the first: products and softmax side by side.
template <class Consumer>
__device__ __forceinline__ void run_key_tiles(Consumer& c, typename Consumer::Tile& tile) {
#pragma unroll 1
  while (--tile.n >= tile.keys.seen.begin) {
    // With the stage a constant, all addresses are.
    as_constant_then<Consumer::kStages, Consumer::kOneSoftmax>(
        c.k_state.stage, [&](int stage) { c.issue_products(tile, stage); },
        [&](int stage) { c.run_softmax(tile, stage); });
    c.k_state.advance();
  }
}

// The block's work tiles, one after the other.
template <class Consumer>
__device__ __forceinline__ void consume(Consumer& c) {
  c.begin();
  while (uniform(c.tiles.next())) {
    // Rows are described under the first product where that leaves time, else at once.
    if constexpr (!Consumer::kDescribeUnderScores) c.describe_rows(c.tiles);
    const KeyTileRanges keys = c.find_key_tiles(c.tiles.tile());
    const bool is_empty = keys.loaded.begin >= keys.loaded.end;
    if (Consumer::kDescribeUnderScores && is_empty) c.describe_empty_rows(c.tiles);
    if (!Consumer::kDescribeUnderScores || is_empty) c.hand_back(c.tiles);
    if (is_empty) {
      store_empty(c.params, c.output(), c.thread);
      Consumer::Rows::pass(c);
      continue;
    }
    c.skip_masked_tiles(keys.loaded.end - keys.seen.end);
    typename Consumer::Probabilities probabilities;
    typename Consumer::Output output = {};
    float alpha[2];
    typename Consumer::Softmax softmax{Consumer::Score::of(c.params)};
    typename Consumer::Scores scores;
    typename Consumer::Walk::Queries queries;
    typename Consumer::Tile tile{.keys = keys,
                                 .operands = c.make_operands(),
                                 .n = keys.seen.end - 1,  // from the last to the first
                                 .q = c.q_descriptor(),
                                 .queries = queries,
                                 .softmax = softmax,
                                 .scores = scores,
                                 .probabilities = probabilities,
                                 .output = output,
                                 .alpha = alpha,
                                 .row = c.row,
                                 .key_in_tile = c.key_in_tile,
                                 .walked = Consumer::Walk::begin(c),
                                 .bias = typename Consumer::Bias(c)};
    c.first_key_tile(tile, [&] {
      if constexpr (!Consumer::kDescribeUnderScores) return;
      c.describe_rows(c.tiles);
      c.hand_back(c.tiles);
    });
    if constexpr (Consumer::kPassesTiles)
      Consumer::Walk::run(c, tile);
    else
      run_key_tiles(c, tile);
    float inverse_sum[2], lse[2];
    c.finish_output(tile, inverse_sum, lse);
  }
  c.finish();
}

}  // namespace flash3::cuda::sm90
