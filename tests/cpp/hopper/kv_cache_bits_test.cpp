// SPDX-License-Identifier: Apache-2.0
// On the GPU, a sequence's bits depend on nothing but the sequence. Skipped without a Hopper GPU.
#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "core/arithmetic.hpp"
#include "device_call.hpp"

namespace flash3 {
namespace {

class KvCacheBits : public HopperTest {};

constexpr int kMostKeys = 1500, kLongKeys = 7400, kLongSequence = 999;

// A decode call on sequences out of a pool: what each holds follows from its number alone.
struct Batch {
  std::vector<int> sequences;     // numbers
  int page_size = 16;             // 0: not paged
  uint64_t shuffle = 1;           // of the pages
  int64_t shared_rows = 0;        // the first rows of all lie in the same pages
  std::vector<int> queries = {};  // of each sequence, packed; empty: the shape's
  int most_keys = kMostKeys;      // for which the cache has room
};

struct Shape {
  int queries = 1, heads_q = 8, heads_k = 2, dim = 128;
  float softcap = 0;
  bool causal = true;
  bool chain = false;  // a tree mask that says the same
};

// From 0 to kMostKeys, the shortest ones among them; but one sequence has so many that blocks share
// the tiles of its prompt.
int length_of(int sequence) {
  if (sequence == kLongSequence) return kLongKeys;
  constexpr int kLengths[] = {0, 1, 2, 127, 128, 129, 1000, kMostKeys};
  const auto n = size_t(sequence);
  return n < std::size(kLengths) ? kLengths[n] : int(n * 7919 % 1200);
}

// Keys that a cache of its own has room for.
int room_for(int sequence) { return sequence == kLongSequence ? kLongKeys : kMostKeys; }

class CacheCall {
 public:
  CacheCall(const Shape& s, cases::Memory& memory) : s_(s), memory_(memory) {}

  // out and lse of each sequence, by its number. Rows that no key lies in are NaN.
  std::map<int, Bytes> run(const Batch& batch) {
    const auto count = int64_t(batch.sequences.size());
    const int64_t size = batch.page_size ? batch.page_size : batch.most_keys;
    const int64_t of_sequence = ceil_div(batch.most_keys, size);
    std::vector<int> table(size_t(count * of_sequence)), used, order(table.size() + 3);
    std::iota(order.begin(), order.end(), 0);
    if (batch.page_size) std::shuffle(order.begin(), order.end(), std::mt19937_64(batch.shuffle));
    for (size_t i = 0; i < table.size(); ++i) table[i] = order[i];
    for (int64_t b = 1; b < count; ++b)
      for (int64_t page = 0; page < batch.shared_rows / size; ++page)
        table[size_t(b * of_sequence + page)] = table[size_t(page)];
    const int64_t row_k = s_.heads_k * s_.dim, row_q = s_.heads_q * s_.dim;
    std::vector<int> first_query{0};
    for (size_t b = 0; b < batch.sequences.size(); ++b)
      first_query.push_back(first_query[b] +
                            (batch.queries.empty() ? s_.queries : batch.queries[b]));
    Bytes q(size_t(first_query.back() * row_q) * 2),
        k(order.size() * size_t(size * row_k) * 2, kUnwritten), v = k;
    for (size_t b = 0; b < batch.sequences.size(); ++b) {
      const int sequence = batch.sequences[b], length = length_of(sequence);
      used.push_back(length);
      cases::fill_normal(q.data() + first_query[b] * row_q * 2, FLASH3_BFLOAT16,
                         (first_query[b + 1] - first_query[b]) * row_q, uint64_t(3 * sequence));
      for (Bytes* const to : {&k, &v}) {
        Bytes rows = rows_of(sequence, to == &v);
        if (batch.shared_rows < length)  // what all have there
          cases::fill_normal(rows.data(), FLASH3_BFLOAT16, batch.shared_rows * row_k, 77);
        for (int64_t place = 0; place < length; place += size) {
          const auto page = size_t(table[b * size_t(of_sequence) + size_t(place / size)]);
          const auto rows_here = size_t(std::min<int64_t>(size, length - place));
          std::copy_n(rows.begin() + place * row_k * 2, rows_here * size_t(row_k) * 2,
                      to->begin() + int64_t(page) * size * row_k * 2);
        }
      }
    }
    return run(batch, first_query, q, k, v, used, table, of_sequence);
  }

 private:
  // The keys or values of a sequence; made once, since it is in many batches.
  const Bytes& rows_of(int sequence, bool is_v) {
    Bytes& rows = rows_[{sequence, is_v}];
    if (rows.empty()) {
      const int64_t values = length_of(sequence) * s_.heads_k * s_.dim;
      rows.resize(size_t(values) * 2);
      cases::fill_normal(rows.data(), FLASH3_BFLOAT16, values,
                         uint64_t(3 * sequence + (is_v ? 2 : 1)));
    }
    return rows;
  }

  std::byte* place(const void* from, size_t bytes) {
    buffers_.push_back(memory_.allocate(std::max<size_t>(bytes, 256)));
    if (bytes) memory_.copy_in(buffers_.back().get(), from, bytes);
    return static_cast<std::byte*>(buffers_.back().get());
  }

  std::map<int, Bytes> run(const Batch& batch, const std::vector<int>& first_query, const Bytes& q,
                           const Bytes& k, const Bytes& v, const std::vector<int>& used,
                           const std::vector<int>& table, int64_t of_sequence) {
    buffers_.clear();
    const auto count = int64_t(used.size());
    const int64_t size = batch.page_size ? batch.page_size : batch.most_keys;
    const auto tensor = [&](std::byte* data, int64_t elements, int64_t rows, int64_t heads) {
      return flash3_tensor{data,
                           FLASH3_BFLOAT16,
                           4,
                           {elements, rows, heads, s_.dim},
                           {rows * heads * s_.dim, heads * s_.dim, s_.dim, 1}};
    };
    const auto elements = int64_t(k.size()) / (size * s_.heads_k * s_.dim * 2);
    const Bytes out(q.size(), kUnwritten);
    const int64_t total = first_query.back(), rows = s_.heads_q * s_.queries;
    const Bytes lse(size_t(total * s_.heads_q) * 4, kUnwritten);
    flash3_forward_params p{};
    p.struct_size = sizeof p;
    p.q = tensor(place(q.data(), q.size()), count, s_.queries, s_.heads_q);
    p.k = tensor(place(k.data(), k.size()), batch.page_size ? elements : count, size, s_.heads_k);
    p.v = tensor(place(v.data(), v.size()), batch.page_size ? elements : count, size, s_.heads_k);
    p.out = tensor(place(out.data(), out.size()), count, s_.queries, s_.heads_q);
    p.lse = {place(lse.data(), lse.size()),
             FLASH3_FLOAT32,
             3,
             {count, s_.heads_q, s_.queries},
             {rows, s_.queries, 1}};
    p.seqused_k = {place(used.data(), used.size() * 4), FLASH3_INT32, 1, {count}, {1}};
    if (batch.page_size)
      p.page_table = {place(table.data(), table.size() * 4),
                      FLASH3_INT32,
                      2,
                      {count, of_sequence},
                      {of_sequence, 1}};
    if (!batch.queries.empty()) {
      for (flash3_tensor* const t : {&p.q, &p.out})
        *t = {t->data,
              FLASH3_BFLOAT16,
              3,
              {total, s_.heads_q, s_.dim},
              {s_.heads_q * s_.dim, s_.dim, 1}};
      p.lse = {p.lse.data, FLASH3_FLOAT32, 2, {s_.heads_q, total}, {total, 1}};
      p.cu_seqlens_q = {
          place(first_query.data(), first_query.size() * 4), FLASH3_INT32, 1, {count + 1}, {1}};
      p.max_seqlen_q = s_.queries;
    }
    p.causal = s_.causal && !s_.chain;
    std::vector<uint64_t> words;
    for (int64_t i = 0; i < count * s_.queries; ++i)
      words.push_back((uint64_t{2} << i % s_.queries) - 1);
    if (s_.chain)
      p.tree_mask = {place(words.data(), words.size() * 8),
                     FLASH3_INT64,
                     2,
                     {count, s_.queries},
                     {s_.queries, 1}};
    p.softcap = s_.softcap;
    p.backend = FLASH3_BACKEND_HOPPER;
    p.stream = memory_.stream();
    EXPECT_EQ(flash3_forward_workspace(&p, &p.workspace_size), FLASH3_OK) << flash3_last_error();
    const Bytes scratch(p.workspace_size, kUnwritten);
    p.workspace = place(scratch.data(), scratch.size());
    EXPECT_EQ(flash3_forward(&p), FLASH3_OK) << flash3_last_error();
    memory_.finish();
    Bytes got_out(out.size()), got_lse(lse.size());
    memory_.copy_out(got_out.data(), p.out.data, got_out.size());
    memory_.copy_out(got_lse.data(), p.lse.data, got_lse.size());
    std::map<int, Bytes> results;
    for (size_t b = 0; b < batch.sequences.size(); ++b) {
      const int64_t first = first_query[b], end = first_query[b + 1], row = s_.heads_q * s_.dim * 2;
      Bytes& all = results[batch.sequences[b]];
      all.assign(got_out.begin() + first * row, got_out.begin() + end * row);
      for (int64_t h = 0; h < s_.heads_q; ++h) {
        const int64_t at =
            batch.queries.empty() ? int64_t(b) * rows + h * s_.queries : h * total + first;
        all.insert(all.end(), got_lse.begin() + at * 4, got_lse.begin() + (at + end - first) * 4);
      }
    }
    return results;
  }

  Shape s_;
  cases::Memory& memory_;
  std::vector<std::shared_ptr<void>> buffers_;
  std::map<std::pair<int, bool>, Bytes> rows_;
};

std::vector<int> first_sequences(int count) {
  std::vector<int> all(static_cast<size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// Neither on how many others there are, nor in which order, nor on where its pages lie: not on
// whether it has any.
TEST_F(KvCacheBits, BitsDependOnTheSequenceAlone) {
  constexpr int kMostSequences = 256;
  bool is_first = true;  // the most sequences in other pages too: one shape, for the host's time
  for (const Shape& shape : {Shape{}, Shape{.queries = 2}, Shape{.queries = 5, .dim = 64},
                             Shape{.queries = 16, .heads_q = 4, .heads_k = 1, .dim = 64},
                             Shape{.heads_q = 2, .dim = 256}, Shape{.softcap = 20}}) {
    SCOPED_TRACE(testing::Message() << shape.queries << " queries, " << shape.heads_q << "x"
                                    << shape.heads_k << " heads of " << shape.dim);
    CacheCall call(shape, *memory_);
    const std::map<int, Bytes> expected = call.run({.sequences = first_sequences(kMostSequences)});
    int others = 0;  // what a sequence holds must matter
    for (const auto& [sequence, bytes] : expected) others += bytes != expected.at(0);
    EXPECT_GT(others, kMostSequences - 14);
    const auto compare = [&](const Batch& batch, const char* what) {
      for (const auto& [sequence, bytes] : call.run(batch))
        ASSERT_TRUE(bytes == expected.at(sequence))
            << "sequence " << sequence << " of " << batch.sequences.size() << ", " << what;
    };
    std::mt19937_64 random(5);
    for (int sequence = 0; sequence < 12; ++sequence)
      compare({.sequences = {sequence}, .shuffle = uint64_t(sequence)}, "alone");
    for (const int count : {2, 3, 8, 17, 64, 131, kMostSequences}) {
      Batch batch{.sequences = first_sequences(count), .shuffle = uint64_t(count)};
      std::shuffle(batch.sequences.begin(), batch.sequences.end(), random);
      compare(batch, "in pages of 16");
      const bool is_large = count > 64;
      if (is_large && (!is_first || count < kMostSequences)) continue;
      for (const int page_size : {1, 2, 3, 64, 128, 256}) {
        if (is_large && page_size != 1) continue;
        batch.page_size = page_size;
        compare(batch, "in other pages");
      }
      batch.page_size = 0;
      compare(batch, "not paged");
    }
    is_first = false;
  }
}

// Nor, up to 16, on how many queries look at the same keys.
TEST_F(KvCacheBits, BitsOfAQueryDependOnNoOther) {
  for (const Shape& shape : {Shape{}, Shape{.heads_q = 4, .heads_k = 1, .dim = 64},
                             Shape{.heads_q = 8, .heads_k = 1, .dim = 256}})
    for (const int page_size : {16, 0}) {
      std::map<int, Bytes> alone;
      for (int queries = 1; queries <= 16; ++queries) {
        Shape several = shape;
        several.queries = queries, several.causal = false;
        CacheCall call(several, *memory_);
        auto results = call.run({.sequences = first_sequences(20), .page_size = page_size});
        for (auto& [sequence, bytes] : results) {
          bytes.resize(size_t(shape.heads_q * shape.dim) * 2);  // out of the first query
          if (queries == 1) alone[sequence] = bytes;
          ASSERT_TRUE(bytes == alone.at(sequence))
              << "sequence " << sequence << ", " << queries << " queries, pages of " << page_size;
        }
      }
    }
}

// The words of a row instead of its last key.
TEST_F(KvCacheBits, AChainOfDraftsIsCausal) {
  for (const Shape& shape : {Shape{.queries = 2}, Shape{.queries = 5}, Shape{.queries = 16},
                             Shape{.queries = 16, .heads_q = 4, .heads_k = 1, .dim = 64},
                             Shape{.queries = 9, .heads_q = 8, .heads_k = 1, .dim = 256},
                             Shape{.queries = 7, .softcap = 20}})
    for (const int page_size : {16, 64, 0}) {
      const Batch batch{.sequences = first_sequences(40), .page_size = page_size};
      Shape chain = shape;
      chain.chain = true;
      EXPECT_TRUE(CacheCall(chain, *memory_).run(batch) == CacheCall(shape, *memory_).run(batch))
          << shape.queries << " queries of " << shape.dim << ", pages of " << page_size;
    }
}

// The same holds for prompts, as long as boxes can be made of the pages, whether the cache has room
// for sequences whose tiles blocks share, and has such a one, or not.
TEST_F(KvCacheBits, BitsOfPromptsDependOnTheSequenceAlone) {
  for (const Shape& shape : {Shape{.queries = 40}, Shape{.queries = 150, .heads_k = 8, .dim = 64},
                             Shape{.queries = 17, .heads_q = 2, .dim = 256, .softcap = 20}}) {
    SCOPED_TRACE(testing::Message() << shape.queries << " queries of " << shape.dim);
    CacheCall call(shape, *memory_);
    Batch all{.sequences = first_sequences(40), .most_keys = kLongKeys};
    all.sequences.push_back(kLongSequence);
    const std::map<int, Bytes> expected = call.run(all);
    for (const int sequence : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, kLongSequence}) {
      const auto alone = call.run({.sequences = {sequence},
                                   .shuffle = uint64_t(sequence),
                                   .most_keys = room_for(sequence)});
      EXPECT_TRUE(alone.at(sequence) == expected.at(sequence)) << "sequence " << sequence;
    }
    for (const int page_size : {16, 64, 128, 256})
      for (const int count : {3, 40, 100}) {
        Batch batch{first_sequences(count), page_size, uint64_t(count)};
        if (count == 3) batch.sequences.push_back(kLongSequence), batch.most_keys = 2 * kLongKeys;
        std::shuffle(batch.sequences.begin(), batch.sequences.end(), std::mt19937_64(7));
        for (const auto& [sequence, bytes] : call.run(batch)) {
          if (const auto at = expected.find(sequence); at != expected.end()) {
            ASSERT_TRUE(bytes == at->second)
                << "sequence " << sequence << " of " << count << " in pages of " << page_size;
          }
        }
      }
  }
}

// A sequence beside others that have more queries or fewer has the bits that it has alone.
TEST_F(KvCacheBits, BitsInMixedCallsAreThoseAlone) {
  for (const Shape& most : {Shape{.queries = 150}, Shape{.queries = 17, .heads_q = 2, .dim = 256},
                            Shape{.queries = 40, .heads_k = 8, .dim = 64, .softcap = 20}})
    for (const int page_size : {16, 128, 0}) {
      SCOPED_TRACE(testing::Message()
                   << most.queries << " queries of " << most.dim << ", pages of " << page_size);
      Batch batch{.sequences = first_sequences(40), .page_size = page_size, .most_keys = kLongKeys};
      batch.sequences.push_back(kLongSequence);
      for (const int sequence : batch.sequences)
        batch.queries.push_back(sequence % 3 == 0 ? most.queries - sequence % 2
                                                  : sequence * 5 % 17);
      const auto mixed = CacheCall(most, *memory_).run(batch);
      for (size_t i = 0; i < batch.sequences.size(); ++i) {
        Shape alone = most;
        const int sequence = batch.sequences[i], queries = batch.queries[i];
        // A prompt's bits depend on max_seqlen_q, and on the rows of a k that is no cache.
        if (queries <= 16) alone.queries = queries;
        const auto results = CacheCall(alone, *memory_)
                                 .run({.sequences = {sequence},
                                       .page_size = page_size,
                                       .queries = {queries},
                                       .most_keys = page_size ? room_for(sequence) : kLongKeys});
        ASSERT_TRUE(mixed.at(sequence) == results.at(sequence))
            << "sequence " << sequence << ", " << queries << " queries";
      }
    }
}

// Sequences with pages in common, as of one prompt, give what copies of them give.
TEST_F(KvCacheBits, PagesMayBeShared) {
  CacheCall call({}, *memory_);
  for (const int page_size : {1, 16, 64}) {
    const Batch batch{.sequences = {6, 7, 20, 21}, .page_size = page_size, .shared_rows = 64};
    for (const auto& [sequence, bytes] : call.run(batch)) {
      const auto alone = call.run(
          {.sequences = {sequence}, .page_size = page_size, .shuffle = 9, .shared_rows = 64});
      EXPECT_TRUE(alone.at(sequence) == bytes) << sequence << " in pages of " << page_size;
    }
  }
}

}  // namespace
}  // namespace flash3
