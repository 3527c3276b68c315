// SPDX-License-Identifier: Apache-2.0
#include "cpu/backward.hpp"

#include <algorithm>
#include <atomic>
#include <new>

#include "core/arithmetic.hpp"
#include "core/convert.hpp"
#include "core/interrupt.hpp"
#include "core/message.hpp"
#include "cpu/parallel.hpp"

namespace flash3::cpu {
namespace {

constexpr size_t kCacheLine = 64;

size_t whole_lines(size_t bytes) { return round_up(bytes, kCacheLine); }

// What comes after kAvx3 are products of bfloat16.
CpuTarget target_of(flash3_dtype dtype, CpuTarget target) {
  return dtype == FLASH3_BFLOAT16 ? target : std::min(target, CpuTarget::kAvx3);
}

// The fastest. Nothing but products, the backward is as fast as these are, so that dot products pay
// only where they are issued often enough.
CpuTarget fastest_target(flash3_dtype dtype) {
  const CpuTarget best = target_of(dtype, best_target(dtype));
  return best == CpuTarget::kAvx3Zen4 && !has_fast_dot_products() ? CpuTarget::kAvx3 : best;
}

const BackwardKernel* kernel_of(CpuTarget target) {
  switch (target) {
#if defined(__x86_64__)
    case CpuTarget::kAvx2: return &kAvx2Backward;
    case CpuTarget::kAvx3: return &kAvx3Backward;
    case CpuTarget::kAvx3Zen4: return &kAvx3Zen4Backward;
    case CpuTarget::kAmx: return &kAmxBackward;
#endif
    default: return &kBaselineBackward;
  }
}

// Five arrays of the keys and three of the rows stay within a second-level cache of a megabyte or
// two.
TileShape largest_tile(const BackwardProblem& p) {
  const int64_t rows = p.seq_q * p.queries_per_kv_head();
  const int keys = p.mask_lists.given ? kMaskBlock  // a block of keys lies in one of the mask
                   : std::max(p.head_dim, p.head_dim_v) <= 128 ? kMaxBackwardKeys
                                                               : 256;
  if (!p.is_ragged())
    return {even_part(rows, kMaxBackwardRows, kBackwardStrip),
            even_part(p.seq_k, keys, kKeyAlignment)};
  // Each sequence cuts these for itself.
  return {even_part(std::min<int64_t>(rows, kMaxBackwardRows), kMaxBackwardRows, kBackwardStrip),
          even_part(std::min<int64_t>(p.seq_k, keys), keys, kKeyAlignment)};
}

// Blocks of keys of all sequences; at most that many where their lengths are not known yet.
int64_t key_blocks(const BackwardProblem& p, int keys) {
  const int64_t all = p.batch * ceil_div(p.seq_k, keys);
  return p.sequences_k.packed ? std::min<int64_t>(all, most_keys(p) / keys + p.batch) : all;
}

// Multiply-adds of the five products for so many pairs of a row and a key.
double work_of(const BackwardProblem& p, double pairs) {
  return pairs * (3. * p.head_dim + 2. * p.head_dim_v);
}

// The workspace: the block of keys that comes next, the sums of dQ, what the rows add to dsink, and
// each thread's scratch. A sequence has its place in the first three by its first query, so that
// nothing needs to be summed up over the sequences before it.
class Space {
 public:
  explicit Space(const BackwardProblem& p)
      : p_(p),
        rows_(most_queries(p) * p.queries_per_kv_head() + p.batch * kRowsBetween),
        blocks_(most_queries(p) * p.queries_per_kv_head() / kMaxBackwardRows + p.batch) {}

  size_t shared_bytes() const { return biases_offset() + BiasSums(p_).bytes(); }

  std::atomic<int>* next_keys(const Sequence& s, int64_t kv_head) const {
    return static_cast<std::atomic<int>*>(p_.workspace) + kv_head * blocks_ +
           first_row(s) / kMaxBackwardRows + s.batch;
  }
  float* dq(const Sequence& s, int64_t kv_head) const {
    return reinterpret_cast<float*>(bytes() + next_keys_bytes()) +
           row(s, kv_head) * dq_stride(p_.head_dim);
  }
  // Null if dsink is not wanted.
  float* sink_terms(const Sequence& s, int64_t kv_head) const {
    if (!p_.dsink.data) return nullptr;
    return reinterpret_cast<float*>(bytes() + next_keys_bytes() + dq_bytes()) + row(s, kv_head);
  }
  // Null if dalibi_slopes is not wanted.
  float* slope_terms(const Sequence& s, int64_t kv_head) const {
    if (!p_.dalibi_slopes.data) return nullptr;
    return reinterpret_cast<float*>(bytes() + next_keys_bytes() + dq_bytes() + sink_bytes()) +
           row(s, kv_head);
  }
  // Where BiasSums are.
  void* biases() const { return bytes() + biases_offset(); }
  void* scratch(size_t size, int worker) const {
    return bytes() + shared_bytes() + size * static_cast<size_t>(worker);
  }

 private:
  // The last strip of a sequence's rows may reach so far beyond them.
  static constexpr int64_t kRowsBetween = kBackwardStrip - 1;

  char* bytes() const { return static_cast<char*>(p_.workspace); }
  size_t next_keys_bytes() const {
    return whole_lines(static_cast<size_t>(p_.heads_k * blocks_) * sizeof(std::atomic<int>));
  }
  size_t dq_bytes() const {
    return whole_lines(static_cast<size_t>(p_.heads_k * rows_ * dq_stride(p_.head_dim)) *
                       sizeof(float));
  }
  size_t terms_bytes(bool wanted) const {
    return wanted ? whole_lines(static_cast<size_t>(p_.heads_k * rows_) * sizeof(float)) : 0;
  }
  size_t sink_bytes() const { return terms_bytes(p_.dsink.given); }
  size_t biases_offset() const {
    return next_keys_bytes() + dq_bytes() + sink_bytes() + terms_bytes(p_.dalibi_slopes.given);
  }
  int64_t first_row(const Sequence& s) const {
    return (p_.sequences_q.packed ? s.q.first : s.batch * p_.seq_q) * p_.queries_per_kv_head();
  }
  int64_t row(const Sequence& s, int64_t kv_head) const {
    return kv_head * rows_ + first_row(s) + s.batch * kRowsBetween;
  }

  const BackwardProblem& p_;
  const int64_t rows_, blocks_;  // of one KV head
};

void clear_row(const BackwardProblem& p, const TensorView& t, int64_t offset) {
  for (int64_t d = 0; d < t.dim; ++d) store_float(t.data, p.gradient_dtype, offset + d, 0.f);
}

// What rows that see no key have instead of a task: no dQ, and their part in dsink.
void finish_blind_rows(const BackwardProblem& p, const Space& space, const Sequence& s,
                       Index kv_head, Range rows) {
  float *terms = space.sink_terms(s, kv_head), *slope_terms = space.slope_terms(s, kv_head);
  for (Index r = rows.begin; r < rows.end; ++r) {
    if (slope_terms) slope_terms[r] = 0;
    const PackedRow row = packed_row(p.queries_per_kv_head(), kv_head, r);
    const auto offset = [&](const TensorView& t) {
      return row_offset(t, s.batch, s.q, row.query, row.head);
    };
    clear_row(p, p.dq, offset(p.dq));
    if (!terms) continue;
    float delta = 0;
    for (int d = 0; d < p.head_dim_v; ++d)
      delta += load_float(p.dout.data, p.dtype, offset(p.dout) + d) *
               load_float(p.out.data, p.dtype, offset(p.out) + d);
    if (p.dlse.data) delta -= p.dlse.data[row_offset(p.dlse, s, row.query, row.head)];
    terms[r] = sink_term(p, row.head, p.lse.data[row_offset(p.lse, s, row.query, row.head)], delta);
  }
}

// Everything of a sequence that no task does: blind rows, and tokens that do not count.
void finish_rest(const BackwardProblem& p, const BackwardPlan& plan, const Space& space,
                 const Sequence& s) {
  const BackwardBlocks blocks(p, s, plan.tile.keys);
  for (Index kv_head = 0; kv_head < p.heads_k; ++kv_head) {
    for (Index i = 0; i < blocks.row_blocks(); ++i)
      if (blocks.key_blocks_of(kv_head, i).empty())
        finish_blind_rows(p, space, s, kv_head, blocks.rows_of(i));
    for (Index j = s.k.length; j < s.k.capacity; ++j) {
      clear_row(p, p.dk, row_offset(p.dk, s.batch, s.k, j, kv_head));
      clear_row(p, p.dv, row_offset(p.dv, s.batch, s.k, j, kv_head));
    }
  }
  for (Index i = s.q.length; i < s.q.capacity; ++i)
    for (Index head = 0; head < p.heads_q; ++head)
      clear_row(p, p.dq, row_offset(p.dq, s.batch, s.q, i, head));
}

// Packed rows that see some of these keys, more or less: of the first KV head, where a mask has its
// own for each.
double rows_that_see(const BackwardBlocks& blocks, Range keys) {
  if (!blocks.masked) return static_cast<double>(blocks.rows_that_see(keys).size());
  Index rows = 0;
  for (Index i = 0; i < blocks.row_blocks(); ++i)
    if (blocks.sees(0, i, keys.begin / blocks.tile.keys)) rows += blocks.rows_of(i).size();
  return static_cast<double>(rows);
}

// The work units of a call: blocks of keys, of all sequences at once and of all KV heads at once
// where these share elements of dbias.
class Units {
 public:
  explicit Units(const BackwardProblem& p)
      : all_sequences_(BackwardBlocks::shares_keys(p)),
        all_heads_(p.dbias.given && p.dbias.sums_heads),
        batch_(p.batch),
        heads_(p.heads_k) {}

  // Every block of the list is done once for each lane.
  Index lanes() const { return all_heads_ ? 1 : heads_; }
  // At most, where lengths are not known.
  Index most(const BackwardProblem& p, int keys) const {
    return lanes() * (all_sequences_ ? ceil_div(p.seq_k, keys) : key_blocks(p, keys));
  }
  bool all_sequences() const { return all_sequences_; }
  Index heads_of_lane() const { return all_heads_ ? heads_ : 1; }

  // Those of a unit.
  Range sequences(const Block& block) const {
    return all_sequences_ ? Range{0, batch_} : Range{block.sequence, block.sequence + 1};
  }
  Range kv_heads(Index lane) const { return all_heads_ ? Range{0, heads_} : Range{lane, lane + 1}; }

 private:
  const bool all_sequences_, all_heads_;
  const Index batch_, heads_;
};

// Which block of keys comes next at each block of rows: the first that it sees begins.
void start_rows(const BackwardProblem& p, const Space& space, const BackwardBlocks& blocks) {
  for (Index i = 0; i < blocks.row_blocks(); ++i)
    for (Index h = 0; h < p.heads_k; ++h)
      new (space.next_keys(blocks.sequence, h) + i)
          std::atomic<int>(static_cast<int>(blocks.key_blocks_of(h, i).begin));
}

// Blocks of keys. A sequence's come in the order of its keys, since what is left of it is less from
// one to the next. Where tasks add to dbias_table the sequences follow each other, so that the size
// of a block does not change the order of its sums.
WorkList list_blocks(const BackwardProblem& p, const BackwardPlan& plan, const Space& space) {
  const Units units(p);
  WorkList list(units.lanes());
  const bool in_order = p.dbias_table.given;
  std::vector<double> costs;
  const auto list_all = [&](Index b) {
    double left = 0;
    for (const double cost : costs) left += cost;
    for (size_t j = 0; j < costs.size(); ++j) {
      list.add({b, static_cast<Index>(j), costs[j], in_order ? 0 : left});
      left -= costs[j];
    }
    costs.clear();
  };
  for (Index b = 0; b < p.batch; ++b) {
    const BackwardBlocks blocks(p, sequence_of(p, b), plan.tile.keys);
    start_rows(p, space, blocks);
    costs.resize(std::max(costs.size(), static_cast<size_t>(blocks.key_blocks())));
    for (Index j = 0; j < blocks.key_blocks(); ++j) {
      const Range keys = blocks.keys_of(j);
      const double rows = rows_that_see(blocks, keys) + 1;
      costs[static_cast<size_t>(j)] += static_cast<double>(units.heads_of_lane()) *
                                       work_of(p, rows * static_cast<double>(keys.size()));
    }
    if (!units.all_sequences()) list_all(b);
  }
  if (units.all_sequences()) list_all(0);
  return list;
}

// The units of a list as they run: in an order that leaves no sum to chance.
class UnitRunner {
 public:
  UnitRunner(const BackwardProblem& p, const BackwardPlan& plan, const Space& space,
             const WorkList& list)
      : p_(p), plan_(plan), space_(space), list_(list), units_(p), sums_(p) {
    int turn = 0;
    for (Index unit = 0; unit < list.units(); unit += units_.lanes()) {
      first_turns_.push_back(turn);
      const Block& block = list.block_of(unit);
      const Range sequences = units_.sequences(block);
      for (Index b = sequences.begin; b < sequences.end; ++b)
        turn += blocks_of(b).key_blocks() > block.index;
    }
  }

  void run(Index unit, void* scratch) const {
    const Block& block = list_.block_of(unit);
    int turn = first_turns_[static_cast<size_t>(unit / units_.lanes())];
    const Range sequences = units_.sequences(block), heads = units_.kv_heads(list_.lane_of(unit));
    for (Index b = sequences.begin; b < sequences.end; ++b) {
      const BackwardBlocks blocks = blocks_of(b);
      if (block.index >= blocks.key_blocks()) continue;
      for (Index head = heads.begin; head < heads.end; ++head) {
        const Sequence& s = blocks.sequence;
        BackwardTask task{&p_,
                          blocks,
                          head,
                          block.index,
                          space_.dq(s, head),
                          space_.sink_terms(s, head),
                          space_.next_keys(s, head),
                          sums_.of(space_.biases(), head, turn)};
        task.biases.slope_terms = space_.slope_terms(s, head);
        plan_.kernel->run(task, scratch);
      }
      ++turn;
    }
  }

 private:
  BackwardBlocks blocks_of(Index b) const {
    return BackwardBlocks(p_, sequence_of(p_, b), plan_.tile.keys);
  }

  const BackwardProblem& p_;
  const BackwardPlan& plan_;
  const Space& space_;
  const WorkList& list_;
  const Units units_;
  const BiasSums sums_;
  // Of each block: the number of its first task among those of a KV head.
  std::vector<int> first_turns_;
};

// Σ of the terms of a head's rows in a sequence, in their order, and so always the same bits.
double sum_terms(const BackwardProblem& p, const float* terms, Index length, Index head) {
  const Index group = p.queries_per_kv_head();
  double sum = 0;
  for (Index i = 0; i < length; ++i) sum += terms[i * group + head % group];
  return sum;
}

void sum_sink_terms(const BackwardProblem& p, const Space& space) {
  for (Index head = 0; head < p.heads_q; ++head) {
    double sum = 0;
    for (Index b = 0; b < p.batch; ++b) {
      const Sequence s = sequence_of(p, b);
      sum += sum_terms(p, space.sink_terms(s, head / p.queries_per_kv_head()), s.q.length, head);
    }
    store_float(p.dsink.data, p.dsink.dtype, head, static_cast<float>(0 - sum));
  }
}

void sum_slope_terms(const BackwardProblem& p, const Space& space) {
  const HeadsView& to = p.dalibi_slopes;
  for (Index head = 0; head < p.heads_q; ++head) {
    double sum = 0;
    for (Index b = 0; b < p.batch; ++b) {
      const Sequence s = sequence_of(p, b);
      if (to.of_batch) sum = 0;
      sum += sum_terms(p, space.slope_terms(s, head / p.queries_per_kv_head()), s.q.length, head);
      to.data[to.offset(b, head)] = static_cast<float>(sum);
    }
    if (p.batch == 0 && !to.of_batch) to.data[to.offset(0, head)] = 0;
  }
}

// The biases' gradients, and their sums in the workspace, become 0.
void clear_biases(const BackwardProblem& p, const Space& space, int threads) {
  const BiasSums sums(p);
  sums.clear_table(space.biases());
  std::atomic<int64_t> next{0};
  run_workers(sums.rows() > 1 ? threads : 1, [&](int) {
    for (int64_t row; (row = next.fetch_add(1)) < sums.rows();) sums.clear_row(space.biases(), row);
  });
}

void finish_biases(const BackwardProblem& p, const Space& space, int threads) {
  const BiasSums sums(p);
  sums.finish_table(space.biases());
  if (p.dalibi_slopes.data) sum_slope_terms(p, space);
  if (!sums.finishes_rows()) return;
  std::atomic<int64_t> next{0};
  run_workers(sums.rows() > 1 ? threads : 1, [&](int) {
    for (int64_t row; (row = next.fetch_add(1)) < sums.rows();)
      sums.finish_row(space.biases(), row);
  });
}

}  // namespace

BackwardPlan plan_backward(const BackwardProblem& p, std::optional<CpuTarget> target) {
  BackwardPlan plan;
  plan.target = target ? target_of(p.dtype, *target) : fastest_target(p.dtype);
  plan.kernel = kernel_of(plan.target);
  plan.tile = largest_tile(p);
  if (p.is_empty()) {
    plan.why = "no gradient element: nothing to run";
    return plan;
  }
  // Masked pairs too.
  const double pairs = static_cast<double>(most_queries(p)) * static_cast<double>(p.seq_k) *
                       static_cast<double>(p.heads_q);
  plan.threads = threads_for(work_of(p, pairs), p.num_threads);

  // Several blocks of keys per thread balance the load. But small blocks use what is loaded of Q
  // and dOut less often: with 128 keys a tenth of the speed is lost, with 64 a quarter.
  const Units units(p);
  const int largest = plan.tile.keys;
  const auto too_few = [&](int64_t per_thread) {
    return units.most(p, plan.tile.keys) < per_thread * plan.threads;
  };
  // Where all sequences add to dbias and to dbias_table, the size of a block is the order of sums.
  const bool is_fixed = units.all_sequences() && p.dbias_table.given;
  if (is_fixed) plan.tile.keys = std::min(plan.tile.keys, 2 * kKeyAlignment);
  while (!is_fixed && plan.tile.keys > kKeyAlignment && too_few(plan.tile.keys > 128 ? 4 : 1))
    plan.tile.keys = round_up(plan.tile.keys / 2, kKeyAlignment);
  plan.tasks = units.most(p, plan.tile.keys);
  plan.threads =
      static_cast<int>(std::clamp<int64_t>(plan.threads, 1, std::max<int64_t>(1, plan.tasks)));
  plan.why = message(p.is_ragged() ? "blocks of the sequences' keys, the longest sequence first, "
                                     "short ones together,"
                                   : message(plan.tasks, " blocks of keys"),
                     " for ", plan.threads, plan.threads > 1 ? " threads" : " thread",
                     plan.tile.keys < largest ? ": small ones, to share them evenly" : "");

  plan.scratch_size = whole_lines(plan.kernel->scratch_bytes(p, plan.tile));
  plan.workspace_size =
      Space(p).shared_bytes() + plan.scratch_size * static_cast<size_t>(plan.threads);
  return plan;
}

Status run_backward(const BackwardProblem& p, const BackwardPlan& plan) {
  if (p.is_empty()) return {};
  if (p.is_ragged()) FLASH3_CHECK(check_lengths(p));
  const Space space(p);
  int threads = plan.threads;
  WorkList list = list_blocks(p, plan, space);
  if (p.is_ragged()) threads = std::min(threads, threads_for(list.work(), p.num_threads));
  list.close(threads);
  const UnitRunner runner(p, plan, space, list);
  clear_biases(p, space, threads);

  // A task waits only for those before it in the list, which have been taken before it: they cannot
  // block each other. Heads and sequences alternate, so that it seldom waits at all.
  std::atomic<int64_t> next_sequence{0}, next_task{0};
  Interrupt interrupt;
  run_workers(threads, [&](int worker) {
    for (int64_t b; (b = next_sequence.fetch_add(1)) < p.batch;)
      finish_rest(p, plan, space, sequence_of(p, b));
    void* scratch = space.scratch(plan.scratch_size, worker);
    for (int64_t index; !interrupt.ends(worker) && (index = next_task.fetch_add(1)) < list.tasks();)
      list.for_each_unit(index, [&](int64_t unit) { runner.run(unit, scratch); });
  });
  FLASH3_CHECK(interrupt.status());
  if (p.dsink.data) sum_sink_terms(p, space);
  finish_biases(p, space, threads);
  return {};
}

}  // namespace flash3::cpu
