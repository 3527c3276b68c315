// SPDX-License-Identifier: Apache-2.0
#include "cpu/bias_gradients.hpp"

#include <algorithm>
#include <new>

#include "core/convert.hpp"

namespace flash3::cpu {
namespace {

constexpr size_t kCacheLine = 64;

size_t whole_lines(int64_t elements, size_t element) {
  return round_up(static_cast<size_t>(elements) * element, kCacheLine);
}

// Where row `row` of [batch, head, row] begins.
Index offset_of(const BiasView& t, Index row) {
  return t.offset(row / (t.heads * t.rows), row / t.rows % t.heads, row % t.rows);
}

}  // namespace

size_t BiasSums::table_offset() const {
  const BiasView& t = p_.dbias;
  return has_sums() ? whole_lines(t.batch * t.heads * t.rows * t.keys, sizeof(float)) : 0;
}
size_t BiasSums::table_bytes() const {
  const BiasTableView& t = p_.dbias_table;
  return t.given ? whole_lines(p_.heads_q * t.entries(), sizeof(float)) : 0;
}
size_t BiasSums::turns_bytes() const {
  return p_.dbias_table.given ? whole_lines(p_.heads_k, sizeof(std::atomic<int>)) : 0;
}

BiasView BiasSums::pairs(void* base) const {
  BiasView sums = p_.dbias;
  if (!has_sums() || !sums.data) return sums;
  sums.data = base, sums.dtype = FLASH3_FLOAT32;
  const auto stride = [](Index size, Index of) { return size > 1 ? of : 0; };
  sums.stride_key = 1;
  sums.stride_row = stride(sums.rows, sums.keys);
  sums.stride_head = stride(sums.heads, sums.rows * sums.keys);
  sums.stride_batch = stride(sums.batch, sums.heads * sums.rows * sums.keys);
  return sums;
}
float* BiasSums::table(void* base) const {
  return reinterpret_cast<float*>(static_cast<char*>(base) + table_offset());
}
std::atomic<int>* BiasSums::turns(void* base) const {
  return reinterpret_cast<std::atomic<int>*>(static_cast<char*>(base) + table_offset() +
                                             table_bytes());
}

BiasGradients BiasSums::of(void* base, Index kv_head, int turn) const {
  BiasGradients to;
  to.pairs = pairs(base);
  if (!p_.dbias_table.data) return to;
  to.table = table(base) + kv_head * p_.queries_per_kv_head() * p_.dbias_table.entries();
  to.turn = turns(base) + kv_head;
  to.own_turn = turn;
  return to;
}

void BiasSums::clear_row(void* base, Index row) const {
  for (const BiasView& t : {pairs(base), p_.dbias}) {
    const Index first = offset_of(t, row);
    for (Index j = 0; j < t.keys; ++j) store_float(t.data, t.dtype, first + j * t.stride_key, 0.f);
    if (!has_sums()) return;
  }
}

void BiasSums::finish_row(void* base, Index row) const {
  const BiasView sums = pairs(base), &to = p_.dbias;
  const float* from = static_cast<const float*>(sums.data) + offset_of(sums, row);
  const Index first = offset_of(to, row);
  for (Index j = 0; j < to.keys; ++j)
    store_float(to.data, to.dtype, first + j * to.stride_key, from[j]);
}

void BiasSums::clear_table(void* base) const {
  if (!p_.dbias_table.data) return;
  std::fill_n(table(base), p_.heads_q * p_.dbias_table.entries(), 0.f);
  for (Index h = 0; h < p_.heads_k; ++h) new (turns(base) + h) std::atomic<int>(0);
}

void BiasSums::finish_table(void* base) const {
  const BiasTableView& to = p_.dbias_table;
  if (!to.data) return;
  const Index summed = to.heads == 1 ? p_.heads_q : 1;  // query heads of a row
  for (Index h = 0; h < to.heads; ++h)
    for (Index i = 0; i < to.entries(); ++i) {
      float sum = 0;
      for (Index n = 0; n < summed; ++n) sum += table(base)[(h + n) * to.entries() + i];
      to.data[h * to.stride_head + i] = sum;
    }
}

}  // namespace flash3::cpu
