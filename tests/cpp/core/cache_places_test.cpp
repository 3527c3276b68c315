// SPDX-License-Identifier: Apache-2.0
// What the index tensors of a call on a KV cache hold: where pages, tokens and positions lie, and
// the sentence about the one that lies elsewhere.
#include <gtest/gtest.h>

#include <string>

#include "call.hpp"
#include "problem_of.hpp"

namespace flash3::test {
namespace {

template <class Bend>
std::string places_error(const Bend& bend) {
  CacheCall call;
  Forward args = call.args();
  bend(call, args);
  return lengths_message(args);
}

TEST(CachePlaces, OfPages) {
  using C = CacheCall;
  EXPECT_EQ(places_error([](C&, Forward&) {}), "");
  EXPECT_EQ(places_error([](C& c, Forward&) { c.table[1] = 5; }),
            "page_table[0][1] = 5 but it must be from 0 to 4, the pages of k and v");
  EXPECT_EQ(places_error([](C& c, Forward&) { c.table[3] = -1; }),
            "page_table[1][0] = -1 but it must be from 0 to 4, the pages of k and v");
  // Pages of padding alone are not looked at.
  EXPECT_EQ(places_error([](C& c, Forward&) { c.table[3] = -1, c.leftpad[1] = 4; }), "");
  EXPECT_EQ(places_error([](C& c, Forward&) { c.leftpad[0] = 6; }),
            "leftpad_k[0] = 6 but it must be from 0 to 5, the keys of that sequence");
  EXPECT_EQ(places_error([](C& c, Forward&) { c.leftpad[1] = -1; }),
            "leftpad_k[1] = -1 but it must be from 0 to 9, the keys of that sequence");
  EXPECT_EQ(places_error([](C& c, Forward&) { c.used[1] = 13; }),
            "seqused_k[1] = 13 but it must be from 0 to 12, the rows of that sequence");
}

TEST(CachePlaces, OfNewTokens) {
  using C = CacheCall;
  EXPECT_EQ(places_error([](C& c, Forward&) { c.used[1] = 10; }),
            "seqused_k[1] = 10 and 3 keys of k_new are appended but sequence 1 can have at most 12 "
            "keys");
  EXPECT_EQ(places_error([](C&, Forward& f) { f.max_seqlen_k = 11; }),
            "seqused_k[1] = 9 and 3 keys of k_new are appended but sequence 1 can have at most 11 "
            "keys");
  EXPECT_EQ(places_error([](C& c, Forward&) { c.table[1] = 2; }),
            "sequences 0 and 1 both append a key to k[2][1]; no two sequences may write one row");
  const auto packed = [](C& c, Forward& f) {
    f.k_new = packed_tensor(c.k_new.data(), FLASH3_FLOAT32, {3, 2, 8});
    f.v_new = packed_tensor(c.v_new.data(), FLASH3_FLOAT32, {3, 2, 16});
    f.cu_seqlens_k_new = index_tensor(c.cu_new.data(), 3);
  };
  EXPECT_EQ(places_error(packed), "");
  EXPECT_EQ(places_error([&](C& c, Forward& f) { packed(c, f), c.cu_new[2] = 4; }),
            "cu_seqlens_k_new[2] = 4 but it must be from 0 to 3, the rows of the packed tensors");
  EXPECT_EQ(places_error([&](C& c, Forward& f) { packed(c, f), c.cu_new[2] = 0; }),
            "cu_seqlens_k_new[2] = 0 but cu_seqlens_k_new[1] = 1; cu_seqlens_k_new must not "
            "decrease");
}

TEST(CachePlaces, OfPositions) {
  using C = CacheCall;
  EXPECT_EQ(places_error([](C& c, Forward&) { c.offsets = {0, 17}; }), "");
  EXPECT_EQ(places_error([](C& c, Forward&) { c.offsets[1] = 18; }),
            "rotary_offsets[1] = 18 but rotary_cos.shape[0] = 20; the tables must have a position "
            "for each of the 3 tokens from there on");
  EXPECT_EQ(places_error([](C& c, Forward&) { c.offsets[0] = -1; }),
            "rotary_offsets[0] = -1 but rotary_cos.shape[0] = 20; the tables must have a position "
            "for each of the 3 tokens from there on");
  EXPECT_EQ(places_error([](C&, Forward& f) {
              f.rotary_offsets = {};
              f.rotary_cos.shape[0] = f.rotary_sin.shape[0] = 11;
            }),
            "seqused_k[1] = 9 but rotary_cos.shape[0] = 11; the tables must have a position for "
            "each of the 3 tokens from there on");
  // Without a mask all queries are at the first new token's position.
  const auto one_new = [](C&, Forward& f) {
    f.rotary_offsets = {};
    f.k_new.shape[1] = f.v_new.shape[1] = 1;
    f.rotary_cos.shape[0] = f.rotary_sin.shape[0] = 10;
  };
  EXPECT_EQ(places_error([&](C& c, Forward& f) { one_new(c, f), f.causal = false; }), "");
  EXPECT_EQ(places_error(one_new),
            "seqused_k[1] = 9 but rotary_cos.shape[0] = 10; the tables must have a position for "
            "each of the 2 tokens from there on");
}

TEST(CachePlaces, OfElements) {
  CacheCall call;
  const Forward args = call.elements();
  EXPECT_EQ(lengths_message(args), "");
  call.batch_idx[1] = 5;
  EXPECT_EQ(lengths_message(args),
            "cache_batch_idx[1] = 5 but it must be from 0 to 4, the elements of k and v");
  call.batch_idx[1] = -1;
  EXPECT_EQ(lengths_message(args),
            "cache_batch_idx[1] = -1 but it must be from 0 to 4, the elements of k and v");
}

}  // namespace
}  // namespace flash3::test
