// SPDX-License-Identifier: Apache-2.0
#include "core/alias_checks.hpp"
#include "core/kept.hpp"
#include "core/message.hpp"
#include "core/params.hpp"

namespace flash3 {
namespace {

// Of every field that flash3_mask_make() sets, and of where.
Status find_key(const MaskLists& mask, const Backend& backend, uint64_t* key) {
  const MaskShape& s = mask.shape;
  uint64_t device = 0;
  FLASH3_CHECK(backend.device(&device));
  Hash hash;
  hash.add(s.batch, s.heads, s.seq_q, s.seq_k, s.ranges, s.blocks, s.partial_blocks, s.granularity,
           mask.documents);
  mask.rule.visit([&](auto... parts) { hash.add(parts...); });
  hash.add(mask.lengths, backend.id(), device);
  *key = hash.key();
  return {};
}

Status check_room(const Backend& backend, const MaskLists& mask) {
  return check_scratch(backend, {"mask->data", "mask->size", mask.data, mask.size},
                       mask_bytes(mask.shape, mask.documents), "flash3_mask_size");
}

// What the backend reads, and that it lies nowhere in what it writes.
Status check_sources(const Backend& backend, const flash3_mask_params& p) {
  Status status;
  const auto check = [&](const char* name, const flash3_tensor& t) {
    if (status.ok() && t.data) status = check_access(backend, name, ".data", t.data, kRead);
  };
  visit_sources(p, check);
  visit_lengths(p, check);
  return status;
}

Status check_aliases(const flash3_mask_params& p, const flash3_mask& mask, size_t bytes) {
  CallMemory memory;
  const auto add = [&](const char* name, const flash3_tensor& t) {
    if (t.data) memory.add(name, t, false);
  };
  visit_sources(p, add);
  visit_lengths(p, add);
  const size_t sources = memory.count();
  memory.add("mask->data", mask.data, bytes, true);
  return memory.check(sources);
}

// All of it but its key, as a call has it that is given what becomes of the problem.
MaskLists lists_of(const MaskProblem& p, size_t size) {
  MaskLists lists;
  lists.shape = p.shape, lists.documents = p.documents;
  lists.rule = p.rule, lists.lengths = p.lengths();
  lists.data = p.data, lists.size = size;
  return lists;
}

void fill(const MaskProblem& p, uint64_t key, flash3_mask* mask) {
  const MaskShape& s = p.shape;
  mask->key = key;
  mask->batch = s.batch, mask->heads = s.heads;
  mask->seq_q = s.seq_q, mask->seq_k = s.seq_k;
  mask->window_left = p.rule.window_left, mask->window_right = p.rule.window_right;
  mask->chunk = p.rule.chunk;
  mask->mask_alignment = p.rule.top_left ? FLASH3_ALIGN_TOP_LEFT : FLASH3_ALIGN_BOTTOM_RIGHT;
  mask->ranges = static_cast<int32_t>(s.ranges);
  mask->blocks = s.blocks, mask->partial_blocks = s.partial_blocks;
  mask->granularity = s.granularity;
  mask->lengths = p.lengths();
  mask->documents = p.documents;
}

}  // namespace

Status check_mask(const Problem& problem, const Backend& backend) {
  const MaskLists& lists = problem.mask_lists;
  if (!lists.given) return {};
  uint64_t key = 0;
  FLASH3_CHECK(find_key(lists, backend, &key));
  if (lists.key != key)
    return invalid_argument(message(
        "mask->key = ", lists.key, " but its fields make ", key, " on the ", backend.name(),
        " backend; flash3_mask_make sets them all, for the backend and the device that it ran on"));
  return check_room(backend, lists);
}

Status make_mask(const flash3_mask_params* params, flash3_mask* mask) {
  WholeParams<flash3_mask_params> whole;
  FLASH3_CHECK(whole.read(params));
  MaskProblem problem;
  FLASH3_CHECK(make_mask_problem(params, Pointers::kRequired, &problem));
  const size_t bytes = mask_bytes(problem.shape, problem.documents);
  FLASH3_CHECK(check_aliases(*whole, *mask, bytes));
  problem.data = mask->data;
  return on_backend(problem.backend, "mask", [&](const Backend& backend) -> Status {
    FLASH3_CHECK(backend.available());
    FLASH3_CHECK(check_sources(backend, *whole));
    const MaskLists lists = lists_of(problem, mask->size);
    FLASH3_CHECK(check_room(backend, lists));
    uint64_t key = 0;
    FLASH3_CHECK(find_key(lists, backend, &key));
    FLASH3_CHECK(backend.make_mask(problem));
    fill(problem, key, mask);
    return {};
  });
}

Status describe_mask(const flash3_mask_params* params, flash3_mask* mask) {
  MaskProblem problem;
  FLASH3_CHECK(make_mask_problem(params, Pointers::kOptional, &problem));
  return on_backend(problem.backend, "mask", [&](const Backend& backend) -> Status {
    FLASH3_CHECK(backend.available());
    uint64_t key = 0;
    mask->size = mask_bytes(problem.shape, problem.documents);
    FLASH3_CHECK(find_key(lists_of(problem, mask->size), backend, &key));
    fill(problem, key, mask);
    return {};
  });
}

Status count_mask(const flash3_mask& mask, void* stream, MaskCounts* counts) {
  const MaskLists lists = mask_lists(mask);
  FLASH3_CHECK(check_mask_shape(lists));
  for (const Backend* backend : backends()) {
    uint64_t key = 0;
    if (!find_key(lists, *backend, &key).ok() || key != lists.key) continue;
    FLASH3_CHECK(check_room(*backend, lists));
    return backend->read_mask_counts(lists.shape, lists.data, stream, counts);
  }
  return invalid_argument(message("mask->key = ", lists.key,
                                  " but no backend makes that of its fields; flash3_mask_make "
                                  "sets them all"));
}

}  // namespace flash3
