// What the Hopper backend plans for a backward: which kernel, how much workspace, which work each
// block has, and what it refuses. Needs no GPU: a plan launches nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "cases/backward_tensors.hpp"
#include "cases/table.hpp"
#include "core/message.hpp"
#include "hopper/backward/params.h"
#include "hopper/backward/select.hpp"

namespace flash3::hopper {
namespace {

BackwardProblem problem_of(const std::string& id) {
  std::string error;
  const auto c = cases::parse_id(id + "/bwd", &error);
  EXPECT_TRUE(c) << error;
  const auto params = cases::make_backward_question(c.value());
  BackwardProblem problem;
  const Status status = make_backward_problem(&params, Pointers::kOptional, &problem);
  EXPECT_TRUE(status.ok()) << status.message();
  return problem;
}

constexpr Device kDevice{0, 132};  // an H100 or H200

Status make_plan(const BackwardProblem& problem, BackwardPlan* plan) {
  return plan_backward(problem, kDevice, plan);
}

BackwardPlan plan_of(const BackwardProblem& problem) {
  BackwardPlan plan;
  const Status status = make_plan(problem, &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  return plan;
}

BackwardPlan plan_of(const std::string& id) { return plan_of(problem_of(id)); }

std::string refusal(const BackwardProblem& problem) {
  BackwardPlan plan;
  const Status status = make_plan(problem, &plan);
  EXPECT_EQ(status.code(), FLASH3_UNSUPPORTED);
  return status.message();
}

void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' in: " << text;
}

TEST(BackwardKernels, HaveNamesOfTheirOwnThatTellTheirRow) {
  std::set<std::string> ids;
  std::set<const void*> functions;
  for (const BackwardKernel& kernel : backward_kernels()) {
    EXPECT_TRUE(ids.insert(kernel.id).second) << kernel.id;
    EXPECT_TRUE(functions.insert(kernel.function).second) << kernel.id;
    const BackwardConfig& c = kernel.config;
    expect_part(kernel.id, kernel.element == Element::kFloat16 ? "bwd_fp16_d" : "bwd_bf16_d");
    expect_part(kernel.id, message("_d", c.head_dim));
    expect_part(kernel.id, c.score == ScoreKind::kSoftcap ? "_softcap_"
                           : c.band                       ? "_band_"
                                                          : "_full_");
    expect_part(kernel.id, message("_", c.tile_m, "x", c.tile_n()));
  }
  EXPECT_EQ(std::ssize(ids), 2 * std::ssize(kBackwardConfigs)) << "fp16 and bf16";
}

TEST(BackwardPlan, TakesTheNarrowestKernelThatHoldsTheHeadDims) {
  const auto cost = [](const BackwardConfig& c) { return c.head_dim + c.head_dim_v; };
  for (const char* mask : {"full", "causal"})
    for (int dim = 1; dim <= kMaxHeadDim; dim += 3)
      for (int dim_v = 1; dim_v <= kMaxHeadDim; dim_v += 3) {
        const BackwardProblem problem =
            problem_of(message("bf16/b1/q300/k300/h2/d", dim, "x", dim_v, "/", mask));
        const BackwardConfig* narrowest = nullptr;
        for (const BackwardConfig& c : kBackwardConfigs)
          if (c.score == ScoreKind::kPlain && c.head_dim >= dim && c.head_dim_v >= dim_v &&
              c.band == (mask[0] == 'c') && (!narrowest || cost(c) < cost(*narrowest)))
            narrowest = &c;
        if (!narrowest) {
          expect_part(refusal(problem), message("head_dim = ", dim, ", head_dim_v = ", dim_v));
          continue;
        }
        const BackwardConfig& taken = plan_of(problem).kernel->config;
        ASSERT_EQ(taken.head_dim, narrowest->head_dim) << dim << "x" << dim_v;
        ASSERT_EQ(taken.head_dim_v, narrowest->head_dim_v) << dim << "x" << dim_v;
        ASSERT_EQ(taken.band, narrowest->band);
      }
}

TEST(BackwardPlan, TakesTheKernelOfTheDtypeAndTheMask) {
  for (const char* dtype : {"fp16", "bf16"}) {
    const auto id = [&](const char* rest) {
      return plan_of(std::string(dtype) + "/b1/" + rest).kernel->id;
    };
    const std::string begin = std::string("bwd_") + dtype + "_d128_";
    EXPECT_EQ(id("q300/k300/h2/d128/full").find(begin + "full_"), 0u);
    EXPECT_EQ(id("q300/k300/h2/d128/causal").find(begin + "band_"), 0u);
    EXPECT_EQ(id("q300/k300/h2/d128/w300:300").find(begin + "full_"), 0u) << "hides no pair";
    EXPECT_EQ(id("q1/k300/h2/d128/causal").find(begin + "full_"), 0u) << "hides no pair";
    EXPECT_EQ(id("q300/k300/h2/d128/w300:298").find(begin + "band_"), 0u) << "hides one pair";
  }
}

TEST(BackwardPlan, TakesTallTilesForManyQueries) {
  const auto tile = [](const char* id) { return plan_of(id).kernel->config.tile_m; };
  EXPECT_EQ(tile("bf16/b1/q8191/k9000/h2/d128/causal"), 64);
  EXPECT_EQ(tile("bf16/b1/q8192/k9000/h2/d128/causal"), 80);
  EXPECT_EQ(tile("bf16/b1/q1/k9000/h2/d128/full"), 80);
}

// Where few blocks add to a query tile, and not all of a head begin with the same one.
TEST(BackwardPlan, BeginsSumsAsZerosButUnderANarrowBand) {
  const auto zeroed = [](const char* id) { return plan_of(id).zeroed; };
  EXPECT_TRUE(zeroed("bf16/b1/q512/k512/h2/d64/full"));
  for (const char* dim : {"64", "128"}) {
    const auto id = [&](const char* begin, const char* mask) {
      return message("bf16/b1/", begin, "/h2/d", dim, "/", mask);
    };
    EXPECT_FALSE(zeroed(id("q2048/k2048", "causal").c_str()));
    EXPECT_TRUE(zeroed(id("q2048/k2049", "causal").c_str()));
    EXPECT_FALSE(zeroed(id("q16384/k16384", "causal+w127:").c_str()));
    EXPECT_FALSE(zeroed(id("q16384/k16384", "causal/chunk2048").c_str()));
    EXPECT_TRUE(zeroed(id("q16384/k16384", "w4096:0").c_str()));
  }
  EXPECT_TRUE(zeroed("bf16/b1/q512/k512/h2/d256/causal")) << "wide";
}

TEST(BackwardPlan, RefusesFloat32) {
  expect_part(refusal(problem_of("fp32/b1/q64/k64/h1/d64/full")), "q.dtype = float32");
}

// Before anything is multiplied in 32 bits.
TEST(BackwardPlan, RefusesWhatItCannotCount) {
  constexpr int64_t kTooMany = int64_t{1} << 30;
  const BackwardProblem fits = problem_of("bf16/b1/q64/k64/h1/d64/full");
  BackwardProblem p = fits;
  p.seq_q = kTooMany;
  expect_part(refusal(p), "seq_q = 1073741824");
  p = fits, p.seq_k = kTooMany;
  expect_part(refusal(p), "seq_k = 1073741824");
  p = fits, p.heads_q = kTooMany;
  expect_part(refusal(p), "heads_q = 1073741824");
  const BackwardConfig& c = plan_of(fits).kernel->config;
  p = fits, p.batch = 1 << 15, p.heads_k = p.heads_q = 1 << 14;
  p.seq_q = 0, p.seq_k = 2 * c.tile_n();
  expect_part(refusal(p), "1073741824 tiles of keys");
  p = fits, p.batch = 1 << 15, p.heads_q = 1 << 15, p.seq_q = c.tile_m;
  expect_part(
      refusal(p),
      message((int64_t{1} << 30) * (c.tile_m / c.dq_queries() * c.head_dim / 64), " blocks of dq"));
}

// The inputs' copies, LSE, delta and the sums of dQ, counters of who adds to them where that is
// counted, deterministic also a ticket; each part on a multiple of 256 bytes, and none over
// another.
TEST(BackwardPlan, WorkspaceHoldsRowsAndCopies) {
  for (const char* id :
       {"bf16/b2/q300/k500/h4x2/d128/causal", "fp16/b1/q1/k1/h1/d64/full",
        "bf16/b3/q129/k77/h3/d100x40/w10:5", "bf16/b2/q200/k300/h4/d64/full/odd",
        "fp16/b1/q65/k65/h2/d72/causal/padded", "bf16/b2/q300/k500/h4x2/d128/causal/deterministic",
        "bf16/b2/q200/k300/h4/d200/causal", "fp16/b2/q200/k300/h4/d200/full/odd/deterministic"}) {
    const BackwardProblem problem = problem_of(id);
    const BackwardPlan plan = plan_of(problem);
    const BackwardConfig& c = plan.kernel->config;
    const int padded_q = plan.query_tiles.tiles * c.tile_m;
    const size_t rows = size_t(problem.batch * problem.heads_q * padded_q);
    EXPECT_GE(padded_q, problem.seq_q) << id;
    EXPECT_LT(padded_q - c.tile_m, problem.seq_q) << id;

    std::map<size_t, size_t> parts = {{plan.lse_offset, 4 * rows},
                                      {plan.delta_offset, 4 * rows},
                                      {plan.dq_offset, 4 * rows * size_t(c.head_dim)}};
    size_t count = 3;
    EXPECT_EQ(plan.counted, problem.deterministic || !plan.zeroed) << id;
    if (plan.counted) {
      parts[plan.turns_offset] = rows / size_t(c.tile_m) * kTurns * sizeof(int);
      ++count;
    }
    if (problem.deterministic) {
      parts[plan.ticket_offset] = sizeof(int);
      ++count;
    }
    ASSERT_EQ(parts.size(), count) << id;
    for (const auto& [copy, view] :
         {std::pair{&plan.q, &problem.q}, std::pair{&plan.k, &problem.k},
          std::pair{&plan.v, &problem.v}, std::pair{&plan.dout, &problem.dout}}) {
      if (!copy->needed) continue;
      EXPECT_GE(copy->row, view->dim) << id;
      parts[copy->offset] = size_t(view->batch * view->seq * view->heads * copy->row) * 2;
      EXPECT_EQ(parts.size(), ++count) << id;
    }
    size_t end = 0;
    for (const auto& [offset, bytes] : parts) {
      EXPECT_EQ(offset, end) << id << ": parts overlap, or leave a gap";
      end = align_up(offset + bytes);
    }
    EXPECT_EQ(plan.workspace_bytes, end) << id;
  }
}

TEST(BackwardPlan, WorkspaceIsLinearInTheLength) {
  const auto bytes = [](const char* length) {
    const std::string n = length;
    return plan_of("bf16/b1/q" + n + "/k" + n + "/h16/d128/causal").workspace_bytes;
  };
  EXPECT_EQ(bytes("81920") - bytes("40960"), bytes("122880") - bytes("81920"));
  EXPECT_LT(bytes("16384"), size_t{16384} * 16384 * 16 * 2 / 50) << "far below 16-bit scores";
}

TEST(BackwardPlan, StoresByTmaWhatEndsOn16Bytes) {
  const auto by_tma = [](const BackwardProblem& problem) {
    const BackwardPlan plan = plan_of(problem);
    return std::pair(plan.dk_by_tma, plan.dv_by_tma);
  };
  EXPECT_EQ(by_tma(problem_of("bf16/b2/q64/k64/h2/d64/full")), std::pair(true, true));
  EXPECT_EQ(by_tma(problem_of("bf16/b2/q64/k64/h2/d64/full/padded")), std::pair(true, true));
  EXPECT_EQ(by_tma(problem_of("bf16/b2/q64/k64/h2/d64/full/odd")), std::pair(false, false));
  EXPECT_EQ(by_tma(problem_of("bf16/b2/q64/k64/h2/d64x60/full")), std::pair(true, false));
  // Aligned rows of 60 elements: the last piece of 16 bytes holds four that are not dv's.
  BackwardProblem problem = problem_of("bf16/b1/q64/k64/h1/d64x60/full");
  problem.dv.stride_seq = 64;
  EXPECT_EQ(by_tma(problem), std::pair(true, false));
}

TEST(BackwardPlan, EmptyCallsHaveNoBlocks) {
  EXPECT_EQ(plan_of("bf16/b0/q64/k64/h2/d64/full").grid, 0);
  EXPECT_EQ(plan_of("bf16/b0/q64/k64/h2/d64/full").workspace_bytes, 0u);
  EXPECT_EQ(plan_of("bf16/b1/q64/k0/h2/d64/full").grid, 0);
  EXPECT_GT(plan_of("bf16/b1/q0/k64/h2/d64/full").grid, 0) << "dk and dv are zeros to write";
  EXPECT_EQ(plan_of("bf16/b1/q0/k64/h2/d64/full").workspace_bytes, 0u);
}

KeyTile work_of(const BackwardProblem& problem, const BackwardPlan& plan, int block) {
  const BackwardConfig& c = plan.kernel->config;
  const KeySchedule schedule = key_schedule(problem, plan);
  return decode_key_tile(schedule, schedule.one_length, schedule.kv_heads, c.tile_n(), c.band,
                         block);
}

const char* const kShapes[] = {
    "bf16/b1/q1/k1/h1/d64/full",
    "bf16/b2/q300/k500/h4x2/d128/full",
    "bf16/b2/q300/k500/h4x2/d128/causal",
    "bf16/b3/q500/k300/h6x3/d64/causal",  // rows that see nothing
    "fp16/b1/q777/k555/h2/d64/w40:7",
    "bf16/b1/q200/k2000/h3/d128/w10:10",  // keys that nobody sees
    "bf16/b2/q1000/k1000/h2/d128/causal+w100:",
    "fp16/b1/q640/k640/h5x1/d128/w:9",
    "bf16/b2/q0/k200/h2/d128/causal",
    "bf16/b2/q300/k400/h4x2/d128/causal/chunk150",
    "fp16/b1/q500/k500/h2/d64/full/chunk70",
    "bf16/b1/q400/k300/h2/d256/w30:5/chunk64",  // chunks of queries without keys
    "bf16/b1/q300/k300/h1/d64/w62:",            // a pair short of a whole step
    "bf16/b1/q300/k300/h1/d64/w:62",
};

TEST(KeyTiles, CoverEveryKeyTileOfEveryHeadOnce) {
  for (const char* id : kShapes) {
    const BackwardProblem problem = problem_of(id);
    const BackwardPlan plan = plan_of(problem);
    const int tile_n = plan.kernel->config.tile_n();
    std::set<std::tuple<int, int, int>> seen;
    for (int block = 0; block < plan.grid; ++block) {
      const KeyTile work = work_of(problem, plan, block);
      EXPECT_TRUE(seen.insert({work.sequence.batch, work.kv_head, work.key}).second) << id;
      EXPECT_TRUE(work.sequence.batch >= 0 && work.sequence.batch < problem.batch) << id;
      EXPECT_TRUE(work.kv_head >= 0 && work.kv_head < problem.heads_k) << id;
      EXPECT_TRUE(work.key >= 0 && work.key < problem.seq_k && work.key % tile_n == 0) << id;
    }
    EXPECT_EQ(std::ssize(seen),
              problem.batch * problem.heads_k * ((problem.seq_k + tile_n - 1) / tile_n))
        << id;
  }
}

// Pair by pair: exactly the tiles from the first to the last query that sees one of the keys.
TEST(KeyTiles, HaveTheQueryTilesThatTheMaskLeaves) {
  for (const char* id : kShapes) {
    const BackwardProblem problem = problem_of(id);
    const BackwardPlan plan = plan_of(problem);
    const BackwardConfig& c = plan.kernel->config;
    for (int block = 0; block < plan.grid; ++block) {
      const KeyTile work = work_of(problem, plan, block);
      const int64_t end = std::min<int64_t>(work.key + c.tile_n(), problem.seq_k);
      int64_t first = problem.seq_q, last = -1;
      for (int64_t i = 0; i < problem.seq_q; ++i)
        for (int64_t j = work.key; j < end; ++j)
          if (problem.mask().sees(i, j)) first = std::min(first, i), last = i;
      if (last < 0) {
        EXPECT_GE(work.query_tile_begin, work.query_tile_end) << id << ", key " << work.key;
      } else {
        EXPECT_EQ(work.query_tile_begin, first / c.tile_m) << id << ", key " << work.key;
        EXPECT_EQ(work.query_tile_end, last / c.tile_m + 1) << id << ", key " << work.key;
      }
    }
  }
}

// Step by step: those that go without a mask have no hidden pair, and no other has none.
TEST(KeyTiles, MaskTheStepsThatTheMaskCutsAlone) {
  for (const char* id : kShapes) {
    const BackwardProblem problem = problem_of(id);
    const BackwardPlan plan = plan_of(problem);
    const BackwardConfig& c = plan.kernel->config;
    if (!c.band) continue;
    const Mask mask = problem.mask();
    for (int block = 0; block < plan.grid; ++block) {
      const KeyTile work = work_of(problem, plan, block);
      for (int key = work.key; key < work.key + c.tile_n(); key += 64) {
        const WholeSteps whole = whole_steps(work, {key, key + 64}, c.step_queries());
        for (int query = work.query_tile_begin * c.tile_m; query < work.query_tile_end * c.tile_m;
             query += c.step_queries()) {
          bool all = key + 64 <= problem.seq_k;
          for (int i = query; i < query + c.step_queries(); ++i)
            for (int j = key; j < key + 64; ++j) all = all && mask.sees(i, j);
          EXPECT_EQ(whole.hold(query), all) << id << ", key " << key << ", query " << query;
        }
      }
    }
  }
}

// Step by step: a warpgroup's walk has those that see one of its 64 keys, from the first to the
// last, and passes by the others of its block's.
TEST(KeyTiles, AreWalkedInTheStepsThatSeeTheKeys) {
  int passed = 0, halves = 0;
  for (const char* id : kShapes) {
    const BackwardProblem problem = problem_of(id);
    const BackwardPlan plan = plan_of(problem);
    const BackwardConfig& c = plan.kernel->config;
    if (!c.band || c.tall()) continue;
    const Mask mask = problem.mask();
    const int step = c.step_queries(), steps = c.tile_m / step;
    for (int block = 0; block < plan.grid; ++block) {
      const KeyTile work = work_of(problem, plan, block);
      for (int key = work.key; key < work.key + c.tile_n(); key += 64) {
        const KeysWalk walk = keys_walk(work, {key, key + 64}, c.tile_m, step);
        SCOPED_TRACE(message(id, ", key ", key));
        int first = 0, end = 0;  // of the steps that see a key
        for (int i = 0; i < work.query_tiles() * steps; ++i) {
          bool seen = false;
          for (int q = work.query_tile_begin * c.tile_m + i * step, n = 0; n < step; ++n)
            for (int j = key; j < std::min<int64_t>(key + 64, problem.seq_k); ++j)
              seen = seen || (q + n < problem.seq_q && mask.sees(q + n, j));
          if (!seen) continue;
          if (end == 0) first = i;
          end = i + 1;
        }
        const int tiles = walk.before + walk.late + walk.whole + walk.early + walk.after;
        EXPECT_EQ(tiles, work.query_tiles());
        EXPECT_TRUE(walk.before >= 0 && walk.whole >= 0 && walk.after >= 0);
        EXPECT_EQ(walk.empty(), end == 0);
        if (end > 0) {
          EXPECT_EQ(walk.before * steps + walk.late, first);
          EXPECT_EQ((tiles - walk.after) * steps - walk.early, end);
        }
        passed += walk.before + walk.after;
        halves += walk.late + walk.early;
      }
    }
  }
  EXPECT_GT(passed, 0);
  EXPECT_GT(halves, 0);
}

// Without a mask the tiles of a head follow one another; under a causal one no block of the heads
// that run together is longer than the one before.
TEST(KeyTiles, ComeInAnOrderThatSharesQueriesAndEndsWithTheShortest) {
  const BackwardProblem full = problem_of("bf16/b2/q1000/k1000/h6/d128/full");
  const BackwardPlan plan = plan_of(full);
  for (int block = 0; block < plan.grid; ++block) {
    const KeyTile work = work_of(full, plan, block);
    EXPECT_EQ(work.sequence.batch * 6 + work.kv_head, block / plan.n_tiles);
  }

  for (const char* id :
       {"bf16/b2/q1000/k1000/h6x2/d128/causal", "bf16/b1/q16384/k16384/h16/d128/causal"}) {
    const BackwardProblem causal = problem_of(id);
    const BackwardPlan band = plan_of(causal);
    const auto length = [&](int block) {
      const KeyTile work = work_of(causal, band, block);
      return work.query_tile_end - work.query_tile_begin;
    };
    const int together = band.kv_heads_at_a_time * band.n_tiles;
    for (int block = 1; block < band.grid; ++block)
      if (block % together != 0) {
        EXPECT_LE(length(block), length(block - 1)) << id << ", " << block;
      }
    EXPECT_GT(length(0), length(band.grid - 1)) << id;
  }
}

// Q, dOut and the sums of dQ of the heads that run together: as many as fit 16 MiB, one at least.
TEST(KeyTiles, RunAsManyHeadsAsTheL2CacheHolds) {
  const auto heads = [](const std::string& rest) {
    return plan_of("bf16/" + rest).kv_heads_at_a_time;
  };
  EXPECT_EQ(heads("b2/q512/k512/h8/d128/causal"), 16) << "all of them";
  EXPECT_EQ(heads("b1/q4096/k4096/h16/d128/causal"), 4) << "4 MiB each";
  EXPECT_EQ(heads("b1/q4096/k4096/h16x4/d128/causal"), 1) << "16 MiB for the queries of each";
  EXPECT_EQ(heads("b1/q65536/k65536/h16/d128/causal"), 1);
  EXPECT_EQ(heads("b1/q512/k512/h8/d128/full"), 1) << "one after the other";
}

// The blocks of a deterministic call on so many multiprocessors: they begin in order as room is
// made, and one whose turn has come adds to its next query tile (of one query head a KV head).
// Returns the steps until all are done.
int64_t walk_in_turn(const BackwardProblem& problem, const BackwardPlan& plan,
                     int multiprocessors) {
  const BackwardConfig& c = plan.kernel->config;
  const KeySchedule schedule = key_schedule(problem, plan);
  struct Block {
    KeyTile work;
    int tile, left;  // query tile, and how many from it on
  };
  std::vector<Block> running;
  std::map<std::pair<int, int>, int> turns;  // of (KV head, query tile)
  int next = 0;
  int64_t steps = 0;
  while (next < plan.grid || !running.empty()) {
    for (; next < plan.grid && std::ssize(running) < multiprocessors; ++next) {
      const KeyTile work = work_of(problem, plan, next);
      running.push_back({work, work.query_tile_begin, work.query_tiles()});
    }
    // What a block adds is seen by the others in the next step.
    const auto before = turns;
    bool moved = std::erase_if(running, [](const Block& b) { return b.left == 0; }) > 0;
    for (Block& b : running) {
      const std::pair at(int(b.work.sequence.batch * problem.heads_k) + b.work.kv_head, b.tile);
      const auto found = before.find(at);
      const int turn = turn_of(schedule, b.work, c.tile_n(), c.band, b.tile);
      if (turn != (found == before.end() ? 0 : found->second)) continue;
      ++turns[at];
      b.tile = b.work.next(b.tile);
      --b.left;
      moved = true;
    }
    if (!moved) {
      ADD_FAILURE() << "all wait, on " << multiprocessors << " multiprocessors";
      return -1;
    }
    ++steps;
  }
  return steps;
}

TEST(DeterministicSums, GiveEveryBlockItsTurn) {
  std::vector<std::string> shapes(std::begin(kShapes), std::end(kShapes));
  // More key tiles than multiprocessors, more than query tiles, and fewer.
  shapes.insert(
      shapes.end(),
      {"bf16/b1/q2048/k20000/h2/d64/full", "bf16/b1/q9000/k700/h8x2/d128/full",
       "bf16/b2/q5000/k20000/h2/d128/causal", "bf16/b1/q9000/k20000/h1/d256/w:100",
       "bf16/b1/q20000/k20000/h1/d128/w100:", "bf16/b1/q20000/k20000/h2/d128/causal/chunk1000",
       "bf16/b1/q9000/k20000/h1/d64/full/chunk3000"});
  for (const std::string& shape : shapes) {
    const BackwardProblem problem = problem_of(shape + "/deterministic");
    const BackwardPlan plan = plan_of(problem);
    EXPECT_TRUE(plan.deterministic);
    SCOPED_TRACE(shape);
    // Whatever other calls leave of the GPU.
    for (const int multiprocessors : {1, 7, kDevice.multiprocessors})
      walk_in_turn(problem, plan, multiprocessors);
  }
}

// In multiples of what the blocks would take if none ever waited.
TEST(DeterministicSums, LetBlocksWaitLittleWhereQueriesAreAsManyAsKeys) {
  for (const auto& [id, allowed] : {std::pair{"bf16/b1/q16384/k16384/h4/d128/full", 1.2},
                                    std::pair{"bf16/b1/q16384/k16384/h4/d128/causal", 1.35},
                                    std::pair{"bf16/b8/q2048/k2048/h4/d64/full", 1.35},
                                    std::pair{"bf16/b1/q8192/k8192/h16/d256/causal+w500:", 1.35}}) {
    const BackwardProblem problem = problem_of(std::string(id) + "/deterministic");
    const BackwardPlan plan = plan_of(problem);
    int64_t tiles = 0;
    for (int block = 0; block < plan.grid; ++block)
      tiles += work_of(problem, plan, block).query_tiles();
    const int blocks = std::min(plan.grid, kDevice.multiprocessors);
    const int64_t steps = walk_in_turn(problem, plan, kDevice.multiprocessors);
    EXPECT_LE(double(steps) * blocks, allowed * double(tiles)) << id;
  }
}

// So that `flash3 verify --backward` on a GPU runs each of them, and stores both ways.
TEST(BackwardPlan, TheCaseTableReachesEveryKernel) {
  std::map<std::string, int> cases_of;
  std::set<bool> by_tma;
  for (const cases::Case& c :
       cases::backward_case_table(cases::Level::kQuick, cases::dtypes_of(FLASH3_BACKEND_HOPPER))) {
    const auto params = cases::make_backward_question(c);
    BackwardProblem problem;
    BackwardPlan plan;
    ASSERT_TRUE(make_backward_problem(&params, Pointers::kOptional, &problem).ok()) << to_id(c);
    if (!make_plan(problem, &plan).ok()) continue;
    ++cases_of[plan.kernel->id];
    by_tma.insert(plan.dk_by_tma);
  }
  for (const BackwardKernel& kernel : backward_kernels())
    EXPECT_GE(cases_of[kernel.id], 1) << kernel.id;
  EXPECT_EQ(by_tma.size(), 2u);
}

}  // namespace
}  // namespace flash3::hopper
