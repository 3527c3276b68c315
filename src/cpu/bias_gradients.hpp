// SPDX-License-Identifier: Apache-2.0
// The gradients of what is added to scores, on the CPU: what tasks of the backward add to, and what
// becomes of it. All sums are float32, in an order that no number of threads changes.
//
//   dbias          an element has one owner, a work unit of the backward: units that would share
//                  elements are one. Where it is a sum and is to be 16-bit, the sums are in the
//                  workspace.
//   dbias_table    each task sums up its own part in its scratch; those of a KV head are then added
//                  in the order of the units.
//   dalibi_slopes  a term for each row, which its blocks of keys add to in their order, as to dQ;
//                  then the terms of a head in the order of its rows (backward.cpp).
#pragma once

#include <atomic>
#include <cstddef>

#include "core/problem.hpp"

namespace flash3::cpu {

// What a task adds to, besides dK, dV and dQ.
struct BiasGradients {
  BiasView pairs;                    // dbias, or its sums; without data: not wanted
  float* slope_terms = nullptr;      // [packed row] of its KV head; null: not wanted
  float* table = nullptr;            // [query head of its KV head][entry]; null: not wanted
  std::atomic<int>* turn = nullptr;  // of the tasks that add to the table: whose it is
  int own_turn = 0;
};

// The sums of dbias and of dbias_table in the workspace.
class BiasSums {
 public:
  explicit BiasSums(const BackwardProblem& p) : p_(p) {}

  size_t bytes() const { return table_offset() + table_bytes() + turns_bytes(); }

  // What a task of this KV head adds to; `turn`: its number among those that add to the table.
  BiasGradients of(void* base, Index kv_head, int turn) const;

  // Rows of dbias or its sums that are to be cleared, or written from them, one by one.
  Index rows() const { return p_.dbias.data ? p_.dbias.batch * p_.dbias.heads * p_.dbias.rows : 0; }
  void clear_row(void* base, Index row) const;
  void finish_row(void* base, Index row) const;
  bool finishes_rows() const { return has_sums(); }

  void clear_table(void* base) const;
  void finish_table(void* base) const;

 private:
  bool has_sums() const {
    return p_.dbias.given && p_.dbias.is_summed() && p_.dbias.dtype != FLASH3_FLOAT32;
  }
  size_t table_offset() const;  // after the sums of dbias
  size_t table_bytes() const;
  size_t turns_bytes() const;
  BiasView pairs(void* base) const;
  float* table(void* base) const;
  std::atomic<int>* turns(void* base) const;

  const BackwardProblem& p_;
};

}  // namespace flash3::cpu
