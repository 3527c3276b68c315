// SPDX-License-Identifier: Apache-2.0
// A KV cache in the CPU forward: every sequence as if its keys were a tensor of its own, what it
// appends in the cache bit for bit, and nothing else written.
#include <limits>

#include "../parsed.hpp"
#include "cache_batch.hpp"
#include "cases/memory.hpp"
#include "cases/runner.hpp"
#include "flash3/plan.h"
#include "oracle/definition.hpp"

namespace flash3::test {
namespace {

// Contiguous results of a sequence alone.
struct Alone {
  cases::GuardedTensor out, lse;

  Alone(const TestTarget& target, ForwardProblem p)
      : out(like(p.out, p.dtype)),
        lse(cases::make_lse(1, p.heads_q, p.seq_q, cases::Layout::kBatchSeq)) {
    write_to(out, &p.out);
    write_to(lse, &p.lse);
    p.num_threads = 1;
    run_on(target, p);
  }
};

// The batch's tensors as they are before a call.
struct Before {
  explicit Before(const CacheBatch& batch) : k(batch.k.bytes), v(batch.v.bytes) {}
  void restore(CacheBatch* batch) const {
    std::copy(k.begin(), k.end(), batch->k.bytes.begin());
    std::copy(v.begin(), v.end(), batch->v.bytes.begin());
    batch->out.fill_pattern(), batch->lse.fill_pattern();
  }
  std::vector<std::byte> k, v;
};

void check_on(CacheBatch& batch, const TestTarget& target, int threads, const Before& expected) {
  SCOPED_TRACE(target.name());
  ForwardProblem p = batch.problem();
  const GatheredCache gathered(p);  // before the call, which writes the cache
  p.num_threads = threads;
  run_on(target, p);
  EXPECT_TRUE(batch.k.bytes == expected.k) << "the keys in the cache";
  EXPECT_TRUE(batch.v.bytes == expected.v) << "the values in the cache";
  EXPECT_EQ(batch.out.damage() + batch.lse.damage(), "");
  for (int64_t b = 0; b < p.batch; ++b) {
    SCOPED_TRACE(testing::Message() << "sequence " << b);
    const ForwardProblem one = one_sequence(gathered.problem(), b);
    const Alone alone(target, one);
    const ReferenceForward ref = attention_ref(one, 1);
    EXPECT_EQ(cases::check_out(alone.out.view, ref).failure, "");
    EXPECT_EQ(cases::check_lse(alone.lse.view, ref).failure, "");
    ForwardProblem by_alone = one;
    write_to(alone.out, &by_alone.out);
    write_to(alone.lse, &by_alone.lse);
    const RowRange rows = rows_of(p.sequences_q, b);
    for (Index i = 0; i < rows.length; ++i) {
      ASSERT_EQ(row_bytes(p.out, p.dtype, b, rows.first + i),
                row_bytes(by_alone.out, p.dtype, 0, i))
          << "out, row " << i;
      ASSERT_EQ(row_bytes(p.lse, p.heads_q, b, rows.first + i),
                row_bytes(by_alone.lse, p.heads_q, 0, i))
          << "lse, row " << i;
    }
    for (Index i = rows.length; i < rows.capacity; ++i)
      for (const std::byte byte : row_bytes(p.out, p.dtype, b, rows.first + i))
        ASSERT_EQ(byte, std::byte{0xFF}) << "out, unused row " << i;
  }
}

void check(const CacheSpec& spec, int threads = 2) {
  CacheBatch batch(spec);
  const Before before(batch);
  append_ref(batch.problem());
  const Before expected(batch);
  for (const TestTarget& target : test_targets(spec.dtype)) {
    before.restore(&batch);
    check_on(batch, target, threads, expected);
  }
}

// What a spec's ids are in a message.
#define TRACE(what) SCOPED_TRACE(testing::Message() << what)

TEST(Cache, PagesOfAnySize) {
  for (const flash3_dtype dtype : {FLASH3_FLOAT32, FLASH3_BFLOAT16, FLASH3_FLOAT16})
    for (const int64_t page_size : {1, 2, 3, 16, 64, 128, 256})
      for (const int64_t queries : {1, 3, 40}) {
        TRACE("dtype " << dtype << ", pages of " << page_size << ", " << queries << " queries");
        CacheSpec spec;
        spec.dtype = dtype, spec.page_size = page_size;
        spec.queries.assign(5, queries);
        spec.used = {70, 0, 1, 300, 129};
        spec.dim = spec.dim_v = 64;  // K and V in place where the queries are few
        check(spec);
        spec.dim = 24, spec.dim_v = 40;
        check(spec);
      }
}

// Every two levels of every two factors meet.
TEST(Cache, OptionsTogether) {
  const std::vector<flash3_dtype> dtypes{FLASH3_BFLOAT16, FLASH3_FLOAT16, FLASH3_FLOAT32};
  const std::vector<int64_t> page_sizes{0, 1, 3, 16, 64};
  const std::vector<std::pair<int64_t, int64_t>> heads{{1, 1}, {4, 4}, {6, 2}, {8, 1}},
      dims{{64, 64}, {24, 40}, {128, 128}, {17, 6}};
  const std::vector<std::vector<int64_t>> queries{
      {1, 1, 1, 1}, {3, 3, 3, 3}, {5, 0, 70, 1}, {20, 20, 20, 20}};
  const std::vector<std::vector<int64_t>> added{{}, {1, 1, 1, 1}, {7, 7, 7, 7}, {5, 0, 70, 1}};
  const std::vector<int64_t> rotary{0, 1, 3};
  const auto size = [](const auto& v) { return static_cast<int>(v.size()); };
  for (const auto& row :
       cases::pairwise({size(dtypes), size(page_sizes), size(heads), size(dims), size(queries),
                        size(added), size(rotary), 2, 2, 2, 5, 2, 2, 2, 2})) {
    const auto at = [&](const auto& v, int factor) { return v[static_cast<size_t>(row[factor])]; };
    CacheSpec s;
    s.dtype = at(dtypes, 0), s.page_size = at(page_sizes, 1);
    std::tie(s.heads_q, s.heads_k) = at(heads, 2);
    std::tie(s.dim, s.dim_v) = at(dims, 3);
    s.queries = at(queries, 4), s.added = at(added, 5);
    s.used = {130, 9, 0, 64};
    s.packed_q = row[4] == 2 || row[7] == 1;
    s.packed_new = row[5] == 3 || row[8] == 1;
    if (!s.added.empty()) s.rotary_pairs = at(rotary, 6);
    s.interleaved = row[7] == 1, s.table_of_dtype = row[8] == 1;
    if (row[9] == 1 && s.rotary_pairs > 0) s.offsets = {3, 0, 40, 11};
    s.causal = row[10] == 1 || row[10] == 2;
    if (row[10] == 2) s.left = 20;
    if (row[10] == 3) s.left = 7, s.right = 2;
    if (row[10] == 4) s.chunk = 16;
    if (row[11] == 1) s.leftpad = {100, 9, 0, 3};
    if (row[12] == 1) s.softcap = 3, s.sink = true;
    s.batch_idx = s.page_size == 0 && row[13] == 1;
    s.rotate = row[14] == 1;
    TRACE("dtype " << s.dtype << ", pages of " << s.page_size << ", heads " << s.heads_q << "x"
                   << s.heads_k << ", dims " << s.dim << "x" << s.dim_v << ", queries " << row[4]
                   << ", added " << row[5] << ", rotary " << s.rotary_pairs << s.interleaved
                   << s.table_of_dtype << ", offsets " << row[9] << ", mask " << row[10]
                   << ", leftpad " << row[11] << ", cap " << s.softcap << ", packed " << s.packed_q
                   << s.packed_new << ", batch_idx " << s.batch_idx << ", rotate " << s.rotate);
    check(s, 1 + row[12] * 3);
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(Cache, PagesMayBeShared) {
  CacheSpec spec;
  spec.shares_first_page = true;
  spec.queries = {1, 1, 1}, spec.used = {40, 33, 16}, spec.added = {1, 1, 1};
  check(spec);
}

// Up to the last place of the cache.
TEST(Cache, AppendFillsTheCache) {
  for (const int64_t page_size : {0, 4, 16}) {
    CacheSpec spec;
    spec.page_size = page_size, spec.capacity = 32;
    spec.queries = {4, 4, 4}, spec.used = {28, 0, 27}, spec.added = {4, 4, 4};
    spec.rotary_pairs = 12;
    check(spec);
  }
}

// The rotation of every head dim is orthogonal: with keys that earlier calls have rotated, scores
// are those without.
TEST(Cache, ARotationLeavesScores) {
  for (const int64_t dim : {1, 2, 3, 24, 64, 80, 127, 128, 200, 256})
    for (const int64_t rotary_pairs : {int64_t{0}, dim / 4}) {
      TRACE("head dim " << dim << ", rotary " << rotary_pairs);
      CacheSpec spec;
      spec.queries = {3, 3, 3}, spec.used = {0, 0, 0}, spec.added = {9, 9, 9};
      spec.dim = dim, spec.rotary_pairs = rotary_pairs;
      CacheBatch plain(spec);
      run_on(test_targets(spec.dtype).front(), plain.problem());
      spec.rotate = true;
      CacheBatch rotated(spec);
      run_on(test_targets(spec.dtype).front(), rotated.problem());
      EXPECT_TRUE(plain.v.bytes == rotated.v.bytes);
      EXPECT_TRUE(dim == 1 || plain.k.bytes != rotated.k.bytes);
      const auto *a = static_cast<const float*>(plain.out.view.data),
                 *b = static_cast<const float*>(rotated.out.view.data);
      cases::for_each_row(plain.out.view, [&](int64_t row) {
        for (int64_t d = 0; d < spec.dim_v; ++d) ASSERT_NEAR(a[row + d], b[row + d], 1e-5);
      });
    }
}

// A call without a cache rotates q as well, also where the keys are split, whose parts share the
// workspace.
TEST(Cache, AQueryIsRotatedWithoutACache) {
  for (const char* const id :
       {"fp32/b1/q3/k5000/h2x1/d24x40/full/rotate", "bf16/b2/q40/k30/h4x2/d64/causal/rotate",
        "fp16/b3/q40/k300/h4x2/d80/causal/random/packed/rotate/seed9",
        "bf16/b3/q4/k300/h4x2/d64/full/random/usedk/kv8/headscales/rotate",
        "fp32/b2/q9/k30/h4x2/d24x40/causal/qv/rotate"}) {
    TRACE(id);
    cases::HostMemory memory;
    const auto result = cases::run_case(cases::parsed(id), memory, {.num_threads = 4});
    EXPECT_EQ(result.failure, "");
  }
}

// Tables that no query or key of a sequence needs are not there to be read.
TEST(Cache, AppendOfNothing) {
  CacheSpec spec;
  spec.queries = {2, 2}, spec.used = {3, 0}, spec.added = {0, 0};
  spec.rotary_pairs = 4;
  check(spec);
}

// Without a query the cache still grows.
TEST(Cache, AppendWithoutQueries) {
  CacheSpec spec;
  spec.queries = {1, 1}, spec.used = {3, 20}, spec.added = {2, 2}, spec.rotary_pairs = 5;
  CacheBatch batch(spec);
  append_ref(batch.problem());
  const Before expected(batch);
  CacheBatch run(spec);
  flash3_forward_params p = run.params();
  p.q.shape[1] = p.out.shape[1] = p.lse.shape[2] = 0;
  ASSERT_EQ(flash3_forward(&p), FLASH3_OK) << flash3_last_error();
  EXPECT_TRUE(run.k.bytes == expected.k && run.v.bytes == expected.v);
}

// Several tiles of keys, and rows that are no whole number of vectors.
TEST(Cache, TilesOfOddRows) {
  for (const flash3_dtype dtype : {FLASH3_FLOAT16, FLASH3_BFLOAT16, FLASH3_FLOAT32})
    for (const int64_t page_size : {1, 4, 100}) {
      CacheSpec spec;
      spec.dtype = dtype, spec.page_size = page_size;
      spec.queries = {3, 3, 3}, spec.used = {1500, 1023, 511}, spec.left = 600;
      spec.dim = 60, spec.dim_v = 157;
      check(spec);
    }
}

TEST(Cache, LongSequencesOfManyQueries) {
  CacheSpec spec;
  spec.queries = {700, 1, 90}, spec.used = {500, 2000, 0}, spec.added = {300, 1, 90};
  spec.packed_q = spec.packed_new = true;
  spec.heads_q = 4, spec.heads_k = 2, spec.dim = spec.dim_v = 64, spec.rotary_pairs = 32;
  for (const flash3_dtype dtype : {FLASH3_BFLOAT16, FLASH3_FLOAT32}) {
    spec.dtype = dtype;
    check(spec, 3);
  }
}

// Neither from its neighbours nor from where its pages lie, nor from the threads.
TEST(Cache, BitsDependOnTheSequenceAlone) {
  for (const flash3_dtype dtype : {FLASH3_FLOAT32, FLASH3_BFLOAT16}) {
    const auto run = [&](const TestTarget& target, CacheSpec spec, int64_t at, int threads) {
      spec.dtype = dtype, spec.dim = spec.dim_v = 64, spec.rotary_pairs = 16;
      CacheBatch batch(spec);
      ForwardProblem p = batch.problem();
      p.num_threads = threads;
      run_on(target, p);
      std::vector<std::byte> bytes;
      for (int64_t i = 0; i < p.seq_q; ++i)
        for (const auto& row : {row_bytes(p.out, dtype, at, i), row_bytes(p.lse, p.heads_q, at, i)})
          bytes.insert(bytes.end(), row.begin(), row.end());
      return bytes;
    };
    int64_t queries = 1;
    const auto spec = [&](std::vector<int64_t> used, std::vector<uint64_t> contents,
                          int64_t page_size, uint64_t shuffle) {
      CacheSpec s;
      s.queries.assign(used.size(), queries), s.added.assign(used.size(), 1);
      s.used = std::move(used), s.contents = std::move(contents);
      s.page_size = page_size, s.shuffle = shuffle;
      return s;
    };
    std::vector<int64_t> lengths(64);  // of a batch whose sequence 40 is the one that is compared
    std::vector<uint64_t> contents(64);
    for (size_t b = 0; b < 64; ++b) lengths[b] = int64_t(b * 7919 % 700), contents[b] = 100 + b;
    lengths[40] = 900, contents[40] = 7;
    for (const TestTarget& target : test_targets(dtype))
      for (queries = 1; queries <= 16; ++queries) {
        TRACE(target.name() << ", " << queries << " queries");
        const auto alone = run(target, spec({900}, {7}, 16, 1), 0, 1);
        EXPECT_EQ(alone, run(target, spec({900}, {7}, 1, 5), 0, 4));
        EXPECT_EQ(alone, run(target, spec({31, 900, 500, 0}, {1, 7, 2, 3}, 16, 3), 1, 2));
        if (queries % 5 != 1) continue;
        for (const int64_t page_size : {0, 3, 16})
          EXPECT_EQ(alone, run(target, spec({900}, {7}, page_size, 2), 0, 1));
        EXPECT_EQ(alone, run(target, spec({1, 1, 5000, 900}, {1, 2, 3, 7}, 64, 4), 3, 3));
        EXPECT_EQ(alone, run(target, spec(lengths, contents, 1, 6), 40, 2));
      }
  }
}

// A NaN in a key that no query sees reaches nothing, nor one in v that this row does not see.
TEST(Cache, UnseenKeysStayUnseen) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const int64_t queries : {2, 30}) {
    CacheSpec spec;
    spec.queries = {queries, queries}, spec.used = {90, 90};
    spec.dim = spec.dim_v = 64, spec.left = 20;
    CacheBatch clean(spec), spoilt(spec);
    const ForwardProblem p = spoilt.problem();
    for (int64_t b = 0; b < 2; ++b)
      for (int64_t place = 0; place < 90 - queries - 20; ++place) {
        const CacheRow row = cache_row(p.cache, b, place);
        store_float(p.k.data, p.dtype, row.element * p.k.stride_batch + row.row * p.k.stride_seq,
                    kNan);
        store_float(p.v.data, p.dtype, row.element * p.v.stride_batch + row.row * p.v.stride_seq,
                    kNan);
      }
    for (const TestTarget& target : test_targets(spec.dtype)) {
      run_on(target, clean.problem());
      run_on(target, spoilt.problem());
      EXPECT_TRUE(clean.out.bytes == spoilt.out.bytes) << target.name();
      EXPECT_TRUE(clean.lse.bytes == spoilt.lse.bytes) << target.name();
    }
  }
}

// One plan, and runs with a cache, a table and a workspace elsewhere.
TEST(Cache, AKeptPlanTakesOtherAddresses) {
  CacheSpec spec;
  spec.queries = {2, 2}, spec.used = {20, 7}, spec.added = {2, 2};
  spec.rotary_pairs = 6, spec.leftpad = {1, 0}, spec.offsets = {3, 4}, spec.rotate = true;
  CacheBatch first(spec);
  flash3_forward_params params = first.params();
  flash3_plan* plan = nullptr;
  ASSERT_EQ(flash3_forward_plan(&params, &plan), FLASH3_OK) << flash3_last_error();
  size_t bytes = 0;
  ASSERT_EQ(flash3_plan_workspace(plan, &bytes), FLASH3_OK);
  EXPECT_EQ(bytes, 2u * 2 * 2 * 24 * 4);  // q with its embedding and rotation
  for (uint64_t shuffle = 1; shuffle < 4; ++shuffle) {
    spec.shuffle = shuffle, spec.contents = {shuffle, 9};
    CacheBatch kept(spec), plain(spec);
    std::vector<std::byte> memory(2 * bytes + 512);
    const auto with_workspace = [&](flash3_forward_params p) {
      const auto at = reinterpret_cast<uintptr_t>(memory.data()) + 255;
      p.workspace = reinterpret_cast<void*>(at / 256 * 256), p.workspace_size = bytes;
      return p;
    };
    const auto run = with_workspace(kept.params()), call = with_workspace(plain.params());
    ASSERT_EQ(flash3_forward_run(plan, &run), FLASH3_OK) << flash3_last_error();
    ASSERT_EQ(flash3_forward(&call), FLASH3_OK) << flash3_last_error();
    EXPECT_TRUE(kept.out.bytes == plain.out.bytes && kept.lse.bytes == plain.lse.bytes);
    EXPECT_TRUE(kept.k.bytes == plain.k.bytes && kept.v.bytes == plain.v.bytes);
    EXPECT_EQ(kept.out.damage(), "");
  }
  params.rotary_interleaved = 1;
  EXPECT_EQ(flash3_forward_run(plan, &params), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(flash3_last_error()),
            "rotary_interleaved = 1 but the plan was made for 0; only addresses, stream and "
            "workspace may change");
  params.rotary_interleaved = 0, params.rotate = 0;
  EXPECT_EQ(flash3_forward_run(plan, &params), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(flash3_last_error()),
            "rotate = 0 but the plan was made for 1; only addresses, stream and workspace may "
            "change");
  flash3_plan_destroy(plan);
}

// What breaks a rule of the lengths is refused before anything is written.
TEST(Cache, WhatBreaksARuleWritesNothing) {
  CacheSpec spec;
  spec.queries = {1, 1}, spec.used = {15, 16}, spec.added = {1, 1}, spec.capacity = 16;
  CacheBatch batch(spec);
  const Before before(batch);
  const auto p = batch.params();
  EXPECT_EQ(flash3_forward(&p), FLASH3_INVALID_ARGUMENT);
  EXPECT_TRUE(batch.k.bytes == before.k && batch.v.bytes == before.v);
  EXPECT_EQ(batch.out.damage(), "");
}

// The gathered problem that the other tests rely on is the definition.
TEST(Cache, OracleIsTheDefinition) {
  std::vector<CacheSpec> all(14);
  for (CacheSpec& s : all) s.queries = {3, 2, 1}, s.used = {12, 0, 7}, s.dim = 12, s.dim_v = 6;
  all[1].added = {2, 2, 2}, all[1].rotary_pairs = 5;
  all[2].added = {2, 2, 2}, all[2].rotary_pairs = 6, all[2].interleaved = true;
  all[2].offsets = {1, 5, 0}, all[2].dtype = FLASH3_BFLOAT16;
  all[3].added = {4, 0, 1}, all[3].packed_new = true, all[3].leftpad = {3, 0, 7};
  all[4].page_size = 0, all[4].batch_idx = true, all[4].leftpad = {3, 0, 7};
  all[5].page_size = 0, all[5].added = {1, 1, 1}, all[5].causal = false, all[5].rotary_pairs = 3;
  all[6].page_size = 3, all[6].packed_q = true, all[6].chunk = 4, all[6].added = {1, 1, 1};
  all[6].rotary_pairs = 1;
  all[7].page_size = 1, all[7].left = 3, all[7].right = 1, all[7].causal = false;
  all[7].added = {2, 1, 0}, all[7].packed_new = true, all[7].rotary_pairs = 2;
  all[8].sink = true, all[8].softcap = 2, all[8].heads_q = 6, all[8].heads_k = 2;
  all[9].page_size = 5, all[9].dtype = FLASH3_FLOAT16, all[9].added = {6, 6, 6};
  all[9].table_of_dtype = true, all[9].rotary_pairs = 6;
  all[10].rotate = true;
  all[11] = all[2], all[11].rotate = true;
  all[12] = all[5], all[12].rotate = true, all[12].dim = 7, all[12].dtype = FLASH3_FLOAT16;
  all[13] = all[6], all[13].rotate = true, all[13].dim = 16;
  for (size_t n = 0; n < all.size(); ++n) {
    if (!all[n].packed_q) all[n].queries = {3, 3, 3};
    CacheBatch batch(all[n]);
    const ReferenceForward oracle = attention_ref(batch.problem());
    const DefinedForward definition = define_forward(batch.params());
    ASSERT_EQ(oracle.out.size(), definition.out.size());
    for (size_t i = 0; i < oracle.out.size(); ++i)
      ASSERT_NEAR(oracle.out[i], definition.out[i], 1e-12) << "spec " << n << ", element " << i;
    for (size_t i = 0; i < oracle.lse.size(); ++i)
      if (oracle.lse[i] != definition.lse[i]) {  // infinities too
        ASSERT_NEAR(oracle.lse[i], definition.lse[i], 1e-12) << "spec " << n << ", lse " << i;
      }
  }
}

}  // namespace
}  // namespace flash3::test
