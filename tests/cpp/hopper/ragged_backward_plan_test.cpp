// SPDX-License-Identifier: Apache-2.0
// What the Hopper backend plans for the backward of ragged batches, and the walk of its blocks over
// them, emulated from lengths that lie on the host. Needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "core/arithmetic.hpp"
#include "core/message.hpp"
#include "planned_steps.hpp"

namespace flash3::cuda::sm90 {
namespace {

// A packed call whose sequences have so many rows, of which the first `used` count; the id's q and
// k are max_seqlen.
struct Lengths {
  std::vector<int> q, k, used_q, used_k;
};
class Batch {
 public:
  Batch(const std::string& id, const Lengths& lengths) : problem(backward_problem_of(id)) {
    EXPECT_EQ(problem.batch, std::ssize(lengths.q)) << id;
    set(lengths.q, lengths.used_q, &cu_[0], &used_[0], &problem.sequences_q);
    set(lengths.k, lengths.used_k, &cu_[1], &used_[1], &problem.sequences_k);
  }

  // As varlen/varlen_schedule.cu lists it.
  ListedSequence rows(int b, const VarlenScheduleParams& list) const {
    const SeqInfo s = problem.sequence(b);
    ListedSequence rows{};
    rows.batch = b;
    rows.q_first = int(s.q.first), rows.q_length = int(s.q.length);
    rows.k_first = int(s.k.first), rows.k_length = int(s.k.length);
    rows.k_capacity = int(s.k.capacity);
    rows.tiles = (rows.k_capacity + list.tile_rows - 1) / list.tile_rows;
    rows.groups_at_a_time = std::min(1 + b % 3, list.groups);
    return rows;
  }

  BackwardProblem problem;

 private:
  static void set(const std::vector<int>& rows, const std::vector<int>& used, std::vector<int>* cu,
                  std::vector<int>* kept, Sequences* sequences) {
    cu->assign(1, 0);
    for (const int n : rows) cu->push_back(cu->back() + n);
    sequences->cu = cu->data();
    sequences->rows = cu->back();
    *kept = used;
    sequences->used = kept->data();
  }
  std::vector<int> cu_[2], used_[2];
};

// All blocks' work in order, the longest walk first.
std::vector<KeyTile> all_work(const Batch& batch, const BackwardPlan& plan) {
  const KeySchedule schedule = key_schedule(batch.problem, plan);
  const VarlenScheduleParams list = varlen_schedule_params(batch.problem, plan);
  const BackwardConfig& c = plan.kernel->config;
  std::vector<ListedSequence> rows;
  for (int b = 0; b < list.batch; ++b) rows.push_back(batch.rows(b, list));
  std::stable_sort(rows.begin(), rows.end(),
                   [](const auto& a, const auto& b) { return a.q_length > b.q_length; });
  std::vector<KeyTile> all;
  for (const ListedSequence& s : rows)
    for (int index = 0; index <= s.tiles * list.groups; ++index) {
      const KeyTile work = key_tile_at(schedule, s, schedule.heads_k, c.tile_n, c.band, index);
      EXPECT_EQ(work.valid, index < s.tiles * list.groups);
      if (work.valid) all.push_back(work);
    }
  EXPECT_LE(std::ssize(all), plan.key_tiles);
  return all;
}

int place_in_workspace(const BackwardPlan& plan, const KeyTile& work, int head, int tile) {
  return work.first_query_tile + head * plan.query_tiles.tiles + tile;
}

// 0s and 1s, unused rows on both sides, more queries than keys and fewer.
const Lengths kLengths = {{0, 1, 300, 64, 129, 17, 200, 90},
                          {5, 300, 299, 0, 130, 400, 300, 90},
                          {0, 1, 290, 64, 100, 0, 200, 90},
                          {5, 256, 299, 0, 130, 400, 0, 20}};
const char* const kIds[] = {"bf16/b8/q300/k400/h6x2/d64/full/packed/used",
                            "bf16/b8/q300/k400/h6x2/d128/causal/packed/used",
                            "bf16/b8/q300/k400/h3/d128/causal/packed/used/nomax",
                            "bf16/b8/q300/k400/h6x2/d256/w40:7/packed/used",
                            "bf16/b8/q300/k400/h4/d192x128/causal/chunk50/packed/used",
                            "bf16/b8/q300/k400/h5x1/d128/full/packed/used"};

TEST(RaggedKeyTiles, CoverEveryKeyOfEverySequenceOnceAndAllThatSeesIt) {
  for (const char* id : kIds)
    for (const char* order : {"", "/deterministic"}) {
      const Batch batch(std::string(id) + order, kLengths);
      const BackwardProblem& problem = batch.problem;
      const PlannedBackward plan = plan_of(problem);
      const BackwardConfig& c = plan.kernel->config;
      std::vector<int> keys(size_t(problem.heads_k * problem.sequences_k.rows));
      for (const KeyTile& work : all_work(batch, plan)) {
        const ListedSequence& s = work.sequence;
        ASSERT_TRUE(work.kv_head >= 0 && work.kv_head < problem.heads_k) << id;
        for (int key = work.key; key < std::min(work.key + c.tile_n, s.k_capacity); ++key)
          ++keys[size_t(work.kv_head * problem.sequences_k.rows + s.k_first + key)];
        const Mask mask = problem.mask(problem.sequence(s.batch));
        const int end = std::min(work.key + c.tile_n, s.k_length);
        int first = s.q_length, last = -1;
        for (int i = 0; i < s.q_length; ++i)
          for (int j = work.key; j < end; ++j)
            if (mask.sees(i, j)) first = std::min(first, i), last = i;
        EXPECT_EQ(work.query_tiles(), last < 0 ? 0 : last / c.tile_m + 1 - first / c.tile_m)
            << id << ", sequence " << s.batch << ", key " << work.key;
        if (last >= 0) {
          EXPECT_EQ(work.query_tile_begin, first / c.tile_m) << id << ", sequence " << s.batch;
        }
      }
      EXPECT_EQ(std::count(keys.begin(), keys.end(), 1), std::ssize(keys)) << id;
    }
}

// Each has its own, and the small kernels find whose it is by the first tiles alone.
TEST(RaggedQueryTiles, BelongToOneSequence) {
  for (const char* id : kIds) {
    const Batch batch(id, kLengths);
    const PlannedBackward plan = plan_of(batch.problem);
    const QueryTiles& tiles = plan.query_tiles;
    int used = 0;
    for (int b = 0; b < batch.problem.batch; ++b) {
      const auto first = [&](int sequence) {
        return tiles.first(sequence, int(batch.problem.sequence(sequence).q.first));
      };
      const auto capacity = int(batch.problem.sequence(b).q.capacity);
      for (int tile = first(b); tile < first(b) + (capacity + tiles.tile_m - 1) / tiles.tile_m;
           ++tile, ++used) {
        EXPECT_LT(tile, tiles.tiles) << id;
        int whose = 0;
        for (int other = 0; other < batch.problem.batch; ++other)
          if (first(other) <= tile) whose = other;
        EXPECT_EQ(whose, b) << id << ", tile " << tile;
      }
    }
    EXPECT_GT(used, 0);
  }
}

// The blocks begin in order as room is made; a block adds to its next query tile when the blocks
// before it have, for one head of its KV head.
void walk_in_order(const Batch& batch, const BackwardPlan& plan, int multiprocessors) {
  const KeySchedule schedule = key_schedule(batch.problem, plan);
  const BackwardConfig& c = plan.kernel->config;
  const std::vector<KeyTile> all = all_work(batch, plan);
  struct Block {
    const KeyTile* work;
    int tile, left;
  };
  std::vector<Block> running;
  std::map<int, int> added;
  size_t next = 0;
  while (next < all.size() || !running.empty()) {
    for (; next < all.size() && std::ssize(running) < multiprocessors; ++next)
      running.push_back({&all[next], all[next].query_tile_begin, all[next].query_tiles()});
    bool moved = std::erase_if(running, [](const Block& b) { return b.left == 0; }) > 0;
    for (Block& b : running) {
      if (b.left == 0) continue;
      int& done = added[place_in_workspace(plan, *b.work, b.work->kv_head, b.tile)];
      if (dq_order(schedule, *b.work, c.tile_n, c.band, b.tile) != done) continue;
      ++done;
      b.tile = b.work->next(b.tile);
      --b.left;
      moved = true;
    }
    ASSERT_TRUE(moved) << "all wait, on " << multiprocessors << " multiprocessors";
  }
}

TEST(RaggedDeterministicSums, GiveEveryBlockItsTurn) {
  const Lengths longer = {{2000, 0, 700, 3000, 1, 130, 0, 2500},
                          {2000, 300, 900, 2000, 500, 1, 0, 3000},
                          {2000, 0, 650, 3000, 1, 130, 0, 2500},
                          {1900, 300, 900, 2000, 500, 1, 0, 2700}};
  for (const Lengths* lengths : {&kLengths, &longer})
    for (std::string id : kIds) {
      if (lengths == &longer) id.replace(id.find("q300/k400"), 9, "q3000/k3000");
      SCOPED_TRACE(id);
      const Batch batch(id + "/deterministic", *lengths);
      const PlannedBackward plan = plan_of(batch.problem);
      EXPECT_TRUE(plan.deterministic);
      for (const int multiprocessors : {1, 7, kDevice.multiprocessors})
        walk_in_order(batch, plan, multiprocessors);
    }
}

TEST(RaggedBackwardPlan, TakesTheKernelOfTheMaskAndTheLongest) {
  const auto id = [](const std::string& rest) { return plan_of("bf16/b4/" + rest).kernel->id; };
  EXPECT_EQ(id("q300/k300/h2/d128/full/packed"), "bwd_bf16_d128_full_64x128");
  EXPECT_EQ(id("q300/k300/h2/d128/full/packed/nomax"), "bwd_bf16_d128_full_80x128");
  EXPECT_EQ(id("q300/k300/h2/d128/causal/packed"), "bwd_bf16_d128_band_64x128");
  EXPECT_EQ(id("q1/k300/h2/d128/causal/usedk"), "bwd_bf16_d128_band_64x128")
      << "fewer keys may count";
  EXPECT_EQ(id("q300/k300/h2/d128/full/chunk64/packed"), "bwd_bf16_d128_band_64x128");
  EXPECT_EQ(id("q8192/k300/h2/d128/causal/packed"), "bwd_bf16_d128_band_80x128");
  EXPECT_EQ(id("q300/k300/h2/d128/causal/packed/nomax"), "bwd_bf16_d128_band_80x128")
      << "for all that is known they are long";
}

// The bits of a sequence's gradients may not depend on the others, so neither may the kernel.
TEST(RaggedBackwardPlan, OneKernelWhateverTheBatch) {
  for (const char* rest :
       {"q100/k100/h8x2/d64/causal/packed", "q4096/k4096/h8/d128/full/packed",
        "q512/k512/h8/d128/causal/packed/nomax", "q40/k2000/h8/d256/w9:9/packed"})
    for (const int batch : {2, 100, 1000})
      EXPECT_EQ(plan_of(message("bf16/b", batch, "/", rest)).kernel,
                plan_of(message("bf16/b1/", rest)).kernel)
          << rest << " " << batch;
}

// Lengths are not known to the host, but their sum is.
TEST(RaggedBackwardPlan, HasNoMoreKeyTilesThanRowsCanFill) {
  BackwardProblem problem = backward_problem_of("bf16/b10/q1000/k1000/h4x2/d128/full/packed");
  problem.sequences_k.rows = 3000;
  EXPECT_EQ(plan_of(problem).key_tiles, 2 * (3000 / 128 + 10));
  problem.seq_k = problem.sequences_k.max_length = 100;
  EXPECT_EQ(plan_of(problem).key_tiles, 2 * 10) << "one tile each";
  problem.sequences_k.has_used = true;
  EXPECT_EQ(plan_of(problem).key_tiles, 2 * (3000 / 128 + 10)) << "unused rows too";
  EXPECT_EQ(plan_of("bf16/b10/q1000/k1000/h4x2/d128/full/usedk").key_tiles, 2 * 10 * 8);
  problem.sequences_k.rows = problem.seq_k = problem.sequences_k.max_length = 0;
  EXPECT_EQ(plan_of(problem).key_tiles, 0);
}

TEST(RaggedBackwardPlan, WorkspaceHoldsTheListToo) {
  for (const char* id :
       {"bf16/b8/q300/k400/h6x2/d128/causal/packed", "fp16/b3/q65/k70/h2/d64/full/usedq/odd",
        "bf16/b8/q300/k400/h6x2/d64/full/packedq/deterministic",
        "bf16/b2/q65/k70/h2/d256/causal/packedk/usedk"}) {
    const BackwardProblem problem = backward_problem_of(id);
    const PlannedBackward plan = plan_of(problem);
    const BackwardConfig& c = plan.kernel->config;
    const QueryTiles& t = plan.query_tiles;
    EXPECT_EQ(t.packed, problem.sequences_q.packed);
    const size_t tiles = size_t((t.packed ? 1 : problem.batch) * problem.heads_q * t.tiles),
                 rows = tiles * size_t(c.tile_m), batch = size_t(problem.batch);
    std::map<size_t, size_t> parts = {{plan.lse_offset, 4 * rows},
                                      {plan.delta_offset, 4 * rows},
                                      {plan.dq_offset, 4 * rows * size_t(c.dq_columns())},
                                      {plan.list_offset, batch * sizeof(ListedSequence)},
                                      {plan.first_tile_offset, (batch + 1) * sizeof(int)}};
    size_t count = 5;
    if (plan.counted) {
      parts[plan.semaphores_offset] = tiles * 2 * sizeof(int);
      ++count;
    }
    if (plan.has_ticket()) {
      parts[plan.ticket_offset] = sizeof(int);
      ++count;
    }
    for (const auto& [copy, view, sequences] :
         {std::tuple{&plan.q, &problem.q, &problem.sequences_q},
          std::tuple{&plan.k, &problem.k, &problem.sequences_k},
          std::tuple{&plan.v, &problem.v, &problem.sequences_k},
          std::tuple{&plan.dout, &problem.dout, &problem.sequences_q}}) {
      if (!copy->needed) continue;
      const TensorView all = tensor_rows(*view, *sequences);
      parts[copy->offset] = size_t(all.batch * all.seq * all.heads * copy->row) * 2;
      ++count;
    }
    EXPECT_EQ(parts.size(), count) << id;
    size_t end = 0;
    for (const auto& [offset, bytes] : parts) {
      EXPECT_EQ(offset, end) << id << ": parts overlap, or leave a gap";
      end = round_up(offset + bytes, kWorkspaceAlignment);
    }
    EXPECT_EQ(plan.workspace_bytes, end) << id;
  }
}

// TMA counts the rows of a padded batch in one go, which needs even steps; others are copied, or
// stored element by element.
TEST(RaggedBackwardPlan, CopiesWhatHasNoEvenSteps) {
  BackwardProblem problem = backward_problem_of("bf16/b3/q50/k50/h4/d64/full/usedk");
  EXPECT_FALSE(plan_of(problem).k.needed);
  EXPECT_TRUE(plan_of(problem).dk_by_tma);
  problem.k.stride_batch += 8;
  problem.dk.stride_batch += 8;
  const PlannedBackward plan = plan_of(problem);
  EXPECT_TRUE(plan.k.needed);
  EXPECT_FALSE(plan.v.needed);
  EXPECT_FALSE(plan.dk_by_tma);
  EXPECT_TRUE(plan.dv_by_tma);
}

TEST(RaggedBackwardPlan, RefusesMoreRowsThanItCanCount) {
  BackwardProblem problem = backward_problem_of("bf16/b2/q64/k64/h1/d64/full/packed");
  problem.sequences_q.rows = int64_t{1} << 30;
  PlannedBackward plan;
  const Status status = cuda::sm90::plan(problem, kDevice, &plan);
  EXPECT_EQ(status.code(), FLASH3_UNSUPPORTED);
  EXPECT_NE(status.message().find("1073741824 and 128 rows of a ragged batch"), std::string::npos)
      << status.message();
}

// The sinks' gradient sums over all tiles: none where no sequence has a row.
TEST(RaggedBackwardPlan, EmptyBatchesHaveNoTiles) {
  BackwardProblem problem = backward_problem_of("bf16/b4/q64/k64/h2/d64/full/packed/sink");
  problem.sequences_q.rows = problem.seq_q = problem.sequences_q.max_length = 0;
  EXPECT_EQ(plan_of(problem).query_tiles.tiles, 0);
  EXPECT_GT(plan_of(problem).grid, 0) << "dk and dv are zeros to write";
  problem.batch = 0;
  EXPECT_EQ(plan_of(problem).grid, 0);
  EXPECT_EQ(plan_of(problem).workspace_bytes, 0u);
}

}  // namespace
}  // namespace flash3::cuda::sm90
