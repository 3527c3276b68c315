// SPDX-License-Identifier: Apache-2.0
// The rules of flash3/mask.h for the making of a mask: what breaks each, and the exact sentence
// that the user reads. mask_call_validation_test.cpp has those of a call that is given one.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "call.hpp"
#include "data_mask_call.hpp"
#include "flash3/plan.hpp"

namespace flash3::test {
namespace {

using P = flash3_mask_params;

// ---- making one ----

struct MakeRule {
  const char* name;
  MaskArguments (*args)(DataMask&);
  void (*breaks)(P&);
  std::string message;
};

MaskArguments band(DataMask&) { return DataMask::band(); }
MaskArguments ranges(DataMask& m) { return m.ranges(); }
MaskArguments documents(DataMask& m) { return m.documents(); }
MaskArguments dense(DataMask& m) { return m.dense(); }
MaskArguments blocks(DataMask& m) { return m.blocks(); }
MaskArguments bits(DataMask& m) { return m.bits(); }
MaskArguments bit_blocks(DataMask& m) { return m.bit_blocks(); }

std::vector<MakeRule> make_rules() {
  const std::string most = " but a size must be from 0 to 2147483647";
  return {
      {"StructSize", band, [](P& p) { p.struct_size = 8; },
       "struct_size = 8 but flash3_mask_params takes " + std::to_string(sizeof(P)) +
           " bytes; set struct_size = sizeof(flash3_mask_params)"},
      {"Batch", band, [](P& p) { p.batch = -1; }, "batch = -1" + most},
      {"Heads", band, [](P& p) { p.heads_q = -2; }, "heads_q = -2" + most},
      {"SeqQ", band, [](P& p) { p.seq_q = int64_t{1} << 31; }, "seq_q = 2147483648" + most},
      {"SeqK", band, [](P& p) { p.seq_k = -5; }, "seq_k = -5" + most},
      {"Pairs", band, [](P& p) { p.batch = p.heads_q = 1 << 16; },
       "batch = 65536 and heads_q = 65536; batch * heads_q must be at most 2147483647"},
      {"Causal", band, [](P& p) { p.causal = 2; }, "causal = 2 but it must be 0 or 1"},
      {"Window", band, [](P& p) { p.window = -1; }, "window = -1 but it must be 0 or 1"},
      {"Chunk", band, [](P& p) { p.chunk = -1; }, "chunk = -1 but it must be at least 0 (0: none)"},
      {"Alignment", band, [](P& p) { p.mask_alignment = 2; },
       "mask_alignment = 2 but it must be 0 (bottom right) or 1 (top left)"},
      {"Backend", band, [](P& p) { p.backend = 3; },
       "backend = 3 but it must be 0 (auto), 1 (hopper) or 2 (cpu)"},
      {"Threads", band, [](P& p) { p.num_threads = -1; },
       "num_threads = -1 but it must be at least 0 (0: one per core)"},
      {"MaxBlocks", band, [](P& p) { p.max_blocks = -1; },
       "max_blocks = -1 but it must be from 0 to 2147483647"},
      {"MaxPartialBlocks", band, [](P& p) { p.max_partial_blocks = int64_t{1} << 40; },
       "max_partial_blocks = 1099511627776 but it must be from 0 to 2147483647"},
      {"TwoSources", ranges,
       [](P& p) {
         static const int32_t numbers[10] = {};
         p.documents = documents_tensor(numbers, 2, 5);
       },
       "ranges is given and documents is given; a mask has at most one source"},
      {"RangesDtype", ranges, [](P& p) { p.ranges.dtype = FLASH3_INT64; },
       "ranges.dtype = 6 but it must be 4 (int32)"},
      {"RangesNdim", ranges, [](P& p) { p.ranges.ndim = 3; },
       "ranges.ndim = 3 but it must be 4, [1 or batch, 1 or heads_q, 2 * n, seq_q]"},
      {"RangesBatch", ranges, [](P& p) { p.ranges.shape[0] = 3; },
       "ranges.shape[0] = 3 but batch = 2; it must be 1, for all, or batch"},
      {"RangesHeads", ranges, [](P& p) { p.ranges.shape[1] = 2; },
       "ranges.shape[1] = 2 but heads_q = 4; it must be 1, for all, or heads_q"},
      {"RangesOdd", ranges, [](P& p) { p.ranges.shape[2] = 3; },
       "ranges.shape[2] = 3 but it must be 2 * n, with n from 1 to 8"},
      {"RangesMany", ranges, [](P& p) { p.ranges.shape[2] = 18; },
       "ranges.shape[2] = 18 but it must be 2 * n, with n from 1 to 8"},
      {"RangesQueries", ranges, [](P& p) { p.ranges.shape[3] = 2; },
       "ranges.shape[3] = 2 but seq_q = 3; they must be the same"},
      {"RangesStride", ranges, [](P& p) { p.ranges.stride[3] = 2; },
       "ranges.stride[3] = 2 but it must be 1; the last dimension of ranges, [1 or batch, 1 or "
       "heads_q, 2 * n, seq_q], must be contiguous"},
      {"RangesNull", ranges, [](P& p) { p.ranges.data = nullptr; },
       "ranges.data is null but ranges has elements; only a tensor with a size of 0 needs no "
       "memory"},
      {"DocumentsNdim", documents, [](P& p) { p.documents.ndim = 1; },
       "documents.ndim = 1 but it must be 2, [1 or batch, seq_k]"},
      {"DocumentsKeys", documents, [](P& p) { p.documents.shape[1] = 4; },
       "documents.shape[1] = 4 but seq_k = 5; they must be the same"},
      {"DenseDtype", dense, [](P& p) { p.dense.dtype = FLASH3_INT32; },
       "dense.dtype = 4 but it must be 7 (uint8)"},
      {"DenseQueries", dense, [](P& p) { p.dense.shape[2] = 4; },
       "dense.shape[2] = 4 but seq_q = 3; they must be the same"},
      {"DenseKeys", dense, [](P& p) { p.dense.shape[3] = 4; },
       "dense.shape[3] = 4 but seq_k = 5; they must be the same"},
      {"NoIndices", blocks, [](P& p) { p.block_indices = {}; },
       "block_counts is given but block_indices is all zero; they belong together"},
      {"NoCounts", blocks, [](P& p) { p.block_counts = {}; },
       "block_indices is given but block_counts is all zero; they belong together"},
      {"BlockRows", blocks, [](P& p) { p.block_rows = 12; },
       "block_rows = 12 but it must be a positive multiple of 8"},
      {"BlockKeys", blocks, [](P& p) { p.block_keys = 0; },
       "block_keys = 0 but it must be a positive multiple of 8"},
      {"BlockCounts", blocks, [](P& p) { p.block_counts.shape[2] = 2; },
       "block_counts.shape[2] = 2 but ceil(seq_q / block_rows) = 1; they must be the same"},
      {"BlockIndices", blocks, [](P& p) { p.block_indices.shape[1] = 4; },
       "block_indices.shape[1] = 4 but block_counts.shape[1] = 1; block_counts and block_indices "
       "must have the same shape"},
      {"BitsAndDense", dense,
       [](P& p) {
         static const uint8_t bytes[3] = {};
         p.bits = mask_bits_tensor(bytes, {1, 1, 3, 1});
       },
       "dense is given and bits is given; a mask has at most one source"},
      {"BitsDtype", bits, [](P& p) { p.bits.dtype = FLASH3_INT32; },
       "bits.dtype = 4 but it must be 7 (uint8)"},
      {"BitsNdim", bits, [](P& p) { p.bits.ndim = 3; },
       "bits.ndim = 3 but it must be 4, [1 or batch, 1 or heads_q, seq_q, ceil(seq_k / 8)]"},
      {"BitsHeads", bits, [](P& p) { p.bits.shape[1] = 2; },
       "bits.shape[1] = 2 but heads_q = 4; it must be 1, for all, or heads_q"},
      {"BitsQueries", bits, [](P& p) { p.bits.shape[2] = 4; },
       "bits.shape[2] = 4 but seq_q = 3; they must be the same"},
      {"BitsKeys", bits, [](P& p) { p.bits.shape[3] = 5; },
       "bits.shape[3] = 5 but ceil(seq_k / 8) = 1; they must be the same"},
      {"BitsNull", bits, [](P& p) { p.bits.data = nullptr; },
       "bits.data is null but bits has elements; only a tensor with a size of 0 needs no memory"},
      {"BitBlocksAlone", bit_blocks, [](P& p) { p.bits = {}; },
       "bit_blocks is given but bits is all zero; bits holds the blocks that bit_blocks names"},
      {"BitBlocksBatch", bit_blocks, [](P& p) { p.bit_blocks.shape[0] = 3; },
       "bit_blocks.shape[0] = 3 but batch = 2; it must be 1, for all, or batch"},
      {"BitBlocksQueries", bit_blocks, [](P& p) { p.bit_blocks.shape[2] = 2; },
       "bit_blocks.shape[2] = 2 but ceil(seq_q / 128) = 1; they must be the same"},
      {"BitBlocksKeys", bit_blocks, [](P& p) { p.bit_blocks.shape[3] = 2; },
       "bit_blocks.shape[3] = 2 but ceil(seq_k / 128) = 1; they must be the same"},
      {"BitBlocksDtype", bit_blocks, [](P& p) { p.bit_blocks.dtype = FLASH3_INT64; },
       "bit_blocks.dtype = 6 but it must be 4 (int32)"},
      {"BlockBitsNdim", bit_blocks, [](P& p) { p.bits.ndim = 4; },
       "bits.ndim = 4 but it must be 3, [blocks, 128, 16] beside bit_blocks"},
      {"BlockBitsDtype", bit_blocks, [](P& p) { p.bits.dtype = FLASH3_INT32; },
       "bits.dtype = 4 but it must be 7 (uint8)"},
      {"BlockBitsRows", bit_blocks, [](P& p) { p.bits.shape[1] = 64; },
       "bits.shape[1] = 64 but FLASH3_MASK_BLOCK = 128; they must be the same"},
      {"BlockBitsKeys", bit_blocks, [](P& p) { p.bits.shape[2] = 128; },
       "bits.shape[2] = 128 but FLASH3_MASK_BLOCK / 8 = 16; they must be the same"},
      {"BlockBitsStride", bit_blocks, [](P& p) { p.bits.stride[1] = -16; },
       "bits.stride[1] = -16 but a stride must be at least 0"},
      {"BlockBitsNull", bit_blocks, [](P& p) { p.bits.data = nullptr; },
       "bits.data is null but bits has elements; only a tensor with a size of 0 needs no memory"},
      {"TooManyBlocks", dense,
       [](P& p) {
         p.seq_q = p.seq_k = p.dense.shape[2] = p.dense.shape[3] = 1 << 27;
         p.dense.shape[0] = p.dense.shape[1] = 1;
         p.dense.stride[0] = p.dense.stride[1] = p.dense.stride[2] = 0;
       },
       "max_blocks = 0 but the mask can have more than 2147483647 blocks; say how many it may "
       "have"},
      {"TooLarge", ranges,
       [](P& p) {
         p.seq_q = p.ranges.shape[3] = 2147483647, p.batch = p.ranges.shape[0] = 1 << 20;
         p.ranges.stride[0] = p.ranges.stride[1] = p.ranges.stride[2] = 0;
         p.max_blocks = 1;
       },
       "the mask of batch 1048576, heads 4, seq_q 2147483647, seq_k 5, 1 blocks and 0 partial ones "
       "takes more than 2^52 bytes"},
  };
}

TEST(DataMaskRules, SayWhatIsWrong) {
  for (const MakeRule& rule : make_rules()) {
    SCOPED_TRACE(rule.name);
    DataMask m;
    P p = rule.args(m).params();
    EXPECT_EQ(flash3_mask_make(&p, &m.mask), FLASH3_OK) << flash3_last_error();
    m.mask.key = 0;
    m.memory.fill(0xAB);
    rule.breaks(p);
    EXPECT_EQ(error_of(flash3_mask_make(&p, &m.mask)), rule.message);
    EXPECT_EQ(m.mask.key, 0u);
    for (const unsigned char byte : m.memory) ASSERT_EQ(byte, 0xAB);
  }
}

TEST(DataMaskRules, OfItsMemory) {
  DataMask m;
  const P p = m.ranges().params();
  size_t bytes = 0;
  EXPECT_EQ(error_of(flash3_mask_size(&p, nullptr)),
            "bytes is null; it must point to where the result goes");
  EXPECT_EQ(error_of(flash3_mask_size(nullptr, &bytes)),
            "params is null; it must point to a flash3_mask_params");
  ASSERT_EQ(flash3_mask_size(&p, &bytes), FLASH3_OK);
  const std::string needs =
      " but this call needs " + std::to_string(bytes) + " bytes, as flash3_mask_size tells";
  EXPECT_EQ(error_of(flash3_mask_make(&p, nullptr)),
            "mask is null; it must point to where the result goes");
  m.mask.size = bytes - 1;
  EXPECT_EQ(error_of(flash3_mask_make(&p, &m.mask)),
            "mask->size = " + std::to_string(bytes - 1) + needs);
  m.mask.size = bytes;
  EXPECT_EQ(flash3_mask_make(&p, &m.mask), FLASH3_OK) << flash3_last_error();
  m.mask.data = nullptr;
  EXPECT_EQ(error_of(flash3_mask_make(&p, &m.mask)), "mask->data is null" + needs);
  m.mask.data = m.memory.data() + 64;
  EXPECT_NE(error_of(flash3_mask_make(&p, &m.mask)).find("but it must be a multiple of 256"),
            std::string::npos);
  // The lists must not lie in what they are made from.
  P overlapping = p;
  m.mask.data = m.memory.data();
  overlapping.ranges.data = m.memory.data() + bytes - 4 * 6;
  EXPECT_EQ(without_addresses(error_of(flash3_mask_make(&overlapping, &m.mask))),
            "mask->data and ranges share memory, but the call writes mask->data; what it writes "
            "must lie in no other tensor of the call");
  P blocks = m.bit_blocks().params();
  ASSERT_EQ(flash3_mask_size(&blocks, &m.mask.size), FLASH3_OK) << flash3_last_error();
  blocks.bits.data = m.memory.data() + 256;
  EXPECT_EQ(without_addresses(error_of(flash3_mask_make(&blocks, &m.mask))),
            "mask->data and bits share memory, but the call writes mask->data; what it writes must "
            "lie in no other tensor of the call");
  // Where only bytes are asked for, no memory is needed.
  P question = p;
  question.ranges.data = nullptr;
  size_t asked = 0;
  EXPECT_EQ(flash3_mask_size(&question, &asked), FLASH3_OK) << flash3_last_error();
  EXPECT_EQ(asked, bytes);
}

// A program of before bits has a shorter struct; what comes after that is not looked at.
TEST(DataMask, OfTheFirstStruct) {
  DataMask m;
  P p = m.dense().params();
  m.make(m.dense());
  const uint64_t key = m.mask.key;
  p.struct_size = offsetof(P, bits);
  p.bits.ndim = 77, p.bit_blocks.ndim = 78;
  ASSERT_EQ(flash3_mask_make(&p, &m.mask), FLASH3_OK) << flash3_last_error();
  EXPECT_EQ(m.mask.key, key);
  p.struct_size = sizeof p;
  EXPECT_NE(flash3_mask_make(&p, &m.mask), FLASH3_OK);
}

TEST(DataMask, TellsWhatItNeeds) {
  DataMask m;
  const flash3_mask* mask = m.make(m.dense());
  EXPECT_EQ(mask->batch, 2);
  EXPECT_EQ(mask->heads, 4);
  EXPECT_EQ(mask->blocks, 8);
  const MaskUse use = mask_use(*mask);
  EXPECT_EQ(use.blocks, 8);
  EXPECT_EQ(use.partial_blocks, 8);
  MaskArguments args = m.dense();
  args.max_blocks = use.blocks, args.max_partial_blocks = use.partial_blocks - 1;
  const size_t smaller = mask_size(args);
  EXPECT_EQ(mask_size(m.dense()) - smaller, 2048u);
  // With less room it is empty, and still says what it needs.
  m.make(args);
  EXPECT_EQ(mask_use(m.mask).partial_blocks, 8);

  int64_t blocks = 0;
  EXPECT_EQ(error_of(flash3_mask_used(nullptr, nullptr, &blocks, &blocks, &blocks)),
            "mask is null; it must be one that was made");
  EXPECT_EQ(error_of(flash3_mask_used(&m.mask, nullptr, nullptr, &blocks, &blocks)),
            "blocks is null; it must point to where the result goes");
  m.mask.seq_k = 6;
  EXPECT_EQ(error_of(flash3_mask_used(&m.mask, nullptr, &blocks, &blocks, &blocks)),
            "mask->key = " + std::to_string(m.mask.key) +
                " but no backend makes that of its fields; flash3_mask_make sets them all");
  m.mask.granularity = 32;
  EXPECT_EQ(error_of(flash3_mask_used(&m.mask, nullptr, &blocks, &blocks, &blocks)),
            "mask->granularity = 32 but it must be 64 or 128");
  m.mask.seq_q = int64_t{1} << 40;
  EXPECT_EQ(error_of(flash3_mask_used(&m.mask, nullptr, &blocks, &blocks, &blocks)),
            "mask->seq_q = 1099511627776 but a size must be from 0 to 2147483647");
}

// What a source shares, the mask shares.
TEST(DataMask, SharesWhatItsSourceShares) {
  DataMask m;
  MaskArguments args = m.ranges();
  args.ranges.shape[0] = 1;
  m.make(args);
  EXPECT_EQ(m.mask.batch, 1);
  EXPECT_EQ(m.mask.heads, 4);
  m.make(m.documents());
  EXPECT_EQ(m.mask.batch, 2);
  EXPECT_EQ(m.mask.heads, 1);
  m.make(DataMask::band());
  EXPECT_EQ(m.mask.batch, 1);
  EXPECT_EQ(m.mask.heads, 1);
  EXPECT_EQ(m.mask.partial_blocks, 0);  // its own range tells each block
}

// Blocks of 64 are told by quarters, but where the keys end in one or the band cuts it.
TEST(DataMask, GivesBlockListsBitsWhereTheyNeedThem) {
  const auto made = [](int rows, int keys, int64_t seq_k, bool causal) {
    DataMask m;
    MaskArguments args = m.blocks();
    args.seq_k = seq_k;
    args.block_rows = rows, args.block_keys = keys;
    args.causal = causal;
    m.make(args);
    return std::pair{m.mask.partial_blocks, m.mask.granularity};
  };
  using Pair = std::pair<int64_t, int32_t>;
  EXPECT_EQ(made(128, 128, 1000, true), (Pair{0, 128}));
  EXPECT_EQ(made(64, 64, 1024, false), (Pair{0, 64}));
  EXPECT_EQ(made(128, 64, 1024, false), (Pair{0, 64}));
  EXPECT_EQ(made(64, 128, 1000, false), (Pair{1, 64}));
  EXPECT_EQ(made(64, 64, 1024, true), (Pair{8, 64}));
  EXPECT_EQ(made(128, 32, 1024, false), (Pair{8, 64}));
}

// A description is what making gives, but for the memory, and needs none.
TEST(DataMaskRules, DescribeWhatIsMade) {
  const auto fields = [](flash3_mask mask) {
    mask.data = nullptr;
    return std::string(reinterpret_cast<const char*>(&mask), sizeof mask);
  };
  for (const auto source : {band, ranges, documents, dense, blocks, bits, bit_blocks}) {
    DataMask m;
    P p = source(m).params();
    ASSERT_EQ(flash3_mask_size(&p, &m.mask.size), FLASH3_OK) << flash3_last_error();
    ASSERT_EQ(flash3_mask_make(&p, &m.mask), FLASH3_OK) << flash3_last_error();
    for (flash3_tensor* t : {&p.ranges, &p.documents, &p.dense, &p.block_counts, &p.block_indices,
                             &p.bits, &p.bit_blocks})
      t->data = nullptr;
    flash3_mask described{};
    ASSERT_EQ(flash3_mask_describe(&p, &described), FLASH3_OK) << flash3_last_error();
    EXPECT_EQ(described.data, nullptr);
    EXPECT_EQ(fields(described), fields(m.mask));
    p.seq_q = -1;
    EXPECT_EQ(error_of(flash3_mask_describe(&p, &described)),
              "seq_q = -1 but a size must be from 0 to 2147483647");
    EXPECT_EQ(fields(described), fields(m.mask));
    EXPECT_EQ(error_of(flash3_mask_describe(&p, nullptr)),
              "mask is null; it must point to where the result goes");
  }
}

}  // namespace
}  // namespace flash3::test
