// SPDX-License-Identifier: Apache-2.0
// Causal ring attention (context parallelism), forward and backward, with NCCL: one sequence over
// the Hopper GPUs of this machine, a thread for each. A rank may as well be a process elsewhere.
//
// The sequence is cut into 2n pieces, and rank r has pieces r and 2n - 1 - r (zigzag): its first
// and second half. Queries stay. Keys and values go to the next rank in each step, while the
// kernels compute with those that came before:
//
//   own keys        both halves are in order: one causal call
//   of a rank < r   the first half is before all queries here, the second half after them all
//   of a rank > r   both halves lie between those here: the second half's queries see all of them
//
// So each step is one call, after the first without a mask, and all ranks have as much work.
// Results of steps are float32; flash3_merge brings them together by their lse, and rounds once at
// the end. A step's backward takes the final out and lse, so that gradients of steps add up. The
// sums for keys and values follow these around the ring, and at last go home. No rank has memory
// for the whole sequence, but for what it is compared with.
//
//   10_ring [ranks]
#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <flash3/flash3.hpp>
#include <source_location>
#include <thread>
#include <vector>

#include "10_ring_reference.hpp"

// sum += part, in 10_ring_add.cu: no reduction of NCCL adds up what one rank has. It reads both and
// writes one, once a step, which is little beside the call that made the part.
cudaError_t add(float* sum, const float* part, int64_t count, cudaStream_t stream);

namespace {

constexpr int64_t kCheckedTokens = 1024, kTimedTokens = 8192;  // of a rank
constexpr int kRuns = 20;
// NCCL copies with so many thread blocks at most, and forward calls leave them as many
// multiprocessors: else they wait for the call's end, and nothing overlaps. Backward calls have no
// such margin; there copies begin as the first blocks of a call end.
constexpr int kCopyBlocks = 8;
// Of a tensor's largest value. The GPU rounds weights and their gradients to bfloat16, of 8 bits,
// before they meet in sums. A step that is left out makes an error of more than 0.5.
constexpr double kTolerance = 0.02;

// Other ranks wait in NCCL for this one: nothing but the end of the process ends them.
[[noreturn]] void fail(const char* whose, const char* what, const std::source_location& where) {
  std::fflush(stdout);
  std::fprintf(stderr, "line %u: %s: %s\n", unsigned(where.line()), whose, what);
  std::_Exit(1);
}
using Where = std::source_location;
void check(cudaError_t error, const Where& where = Where::current()) {
  if (error != cudaSuccess) fail("CUDA", cudaGetErrorString(error), where);
}
void check(ncclResult_t error, const Where& where = Where::current()) {
  if (error != ncclSuccess) fail(ncclGetErrorString(error), ncclGetLastError(nullptr), where);
}
void check(const flash3::Result& result, const Where& where = Where::current()) {
  if (!result) fail("flash3", result.message().c_str(), where);
}

// A rank's place in the ring, and its two streams.
struct Ring {
  Ring(int rank_here, int ranks_in_all, const ncclUniqueId& id)
      : rank(rank_here), ranks(ranks_in_all) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.maxCTAs = kCopyBlocks;
    check(ncclCommInitRankConfig(&comm, ranks, id, rank, &config));
    int least = 0, greatest = 0;  // where both have blocks that wait, copies go first
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    check(cudaStreamCreateWithPriority(&calls, cudaStreamNonBlocking, least));
    check(cudaStreamCreateWithPriority(&copies, cudaStreamNonBlocking, greatest));
    for (cudaEvent_t* event : {&begun, &arrived})
      check(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  }
  ~Ring() {
    check(ncclCommDestroy(comm));
    for (cudaStream_t stream : {calls, copies}) check(cudaStreamDestroy(stream));
    for (cudaEvent_t event : {begun, arrived}) check(cudaEventDestroy(event));
  }

  // Both begin when what was enqueued in `calls` is done; what comes there next waits for both.
  template <class Copies, class Calls>
  void side_by_side(const Copies& enqueue_copies, const Calls& enqueue_calls) const {
    check(cudaEventRecord(begun, calls));
    check(cudaStreamWaitEvent(copies, begun, 0));
    check(ncclGroupStart());
    enqueue_copies();
    check(ncclGroupEnd());
    check(cudaEventRecord(arrived, copies));
    enqueue_calls();
    check(cudaStreamWaitEvent(calls, arrived, 0));
  }
  // Sends to the next rank, and receives as much from the one before.
  template <class T>
  void pass_on(const T* from, T* to, int64_t count) const {
    const ncclDataType_t type = sizeof(T) == 4 ? ncclFloat32 : ncclBfloat16;
    check(ncclSend(from, size_t(count), type, (rank + 1) % ranks, comm, copies));
    check(ncclRecv(to, size_t(count), type, (rank + ranks - 1) % ranks, comm, copies));
  }

  int rank, ranks;
  ncclComm_t comm = nullptr;
  cudaStream_t calls = nullptr, copies = nullptr;
  cudaEvent_t begun = nullptr, arrived = nullptr;
};

// Rows of a rank's tensors: the first half, the second or both.
struct Rows {
  int64_t first, count;
};
struct Step {
  Rows q, k;
  bool causal;
};

// Attention of a rank's own tokens.
class Attention {
 public:
  Attention(const Ring& ring, const Sequence& sequence)
      : ring_(ring), tokens_(sequence.tokens / ring.ranks) {
    upload(q_, sequence.q, kHeads), upload(dout_, sequence.dout, kHeads);
    upload(own_keys_, sequence.k, kKvHeads), upload(own_keys_ + k_size_, sequence.v, kKvHeads);
    for (int s = 0; s < ring_.ranks; ++s)
      workspace_size_ = std::max({workspace_size_, flash3::workspace(forward_call(s)),
                                  flash3::workspace(backward_call(s))});
    if (workspace_size_ > 0) workspace_ = allocate<char>(int64_t(workspace_size_));
  }
  ~Attention() {
    for (void* memory : owned_) check(cudaFree(memory));
  }

  void forward() {
    for (int s = 0; s < ring_.ranks; ++s)
      ring_.side_by_side([&] { pass_on_keys(s); }, [&] { attend(s); });
    for (const int side : {0, 1})  // a merge of one part rounds it
      merge(side, sum_at_[side], 1, batch_of(out_, kHeads, rows_of(side)), lse_);
  }

  void backward() {
    for (int s = 0; s < ring_.ranks; ++s) {
      const auto copies = [&] {
        pass_on_keys(s);
        if (s > 0) ring_.pass_on(key_sums(s - 1), key_sums(s), 2 * k_size_);
      };
      ring_.side_by_side(copies, [&] { differentiate(s); });
      if (s == 0) continue;  // the first results are the sums
      add_rows(key_sums(s), key_part_, kKvHeads, step_of(s).k);
      add_rows(key_sums(s) + k_size_, key_part_ + k_size_, kKvHeads, step_of(s).k);
    }
    const int last = ring_.ranks - 1;  // then the sums are at the rank after their own
    ring_.side_by_side([&] { ring_.pass_on(key_sums(last), key_sums(last + 1), 2 * k_size_); },
                       [] {});
  }

  // Prints how far the results are from the CPU's; true if all are near enough.
  bool compare(const Sequence& right) const {
    const float* const dk = key_sums(ring_.ranks);
    const std::array<double, 4> errors = {
        error(out_, right.out, kHeads), error(dq_, right.dq, kHeads), error(dk, right.dk, kKvHeads),
        error(dk + k_size_, right.dv, kKvHeads)};
    std::printf("rank %d: largest error of out %.5f, dq %.5f, dk %.5f, dv %.5f; allowed is %.2f\n",
                ring_.rank, errors[0], errors[1], errors[2], errors[3], kTolerance);
    return *std::ranges::max_element(errors) <= kTolerance;
  }

  // Of the forward's steps that have a copy beside their calls.
  void print_times() {
    const auto microseconds = [&](bool with_calls, bool with_copy) {
      const int steps = ring_.ranks - 1;
      const auto run = [&](int runs) {
        for (int i = 0; i < runs * steps; ++i)
          ring_.side_by_side(
              [&] {
                if (with_copy) pass_on_keys(i % steps);
              },
              [&] {
                if (with_calls) attend(i % steps);
              });
        check(cudaStreamSynchronize(ring_.calls));
      };
      run(1);
      const auto begin = std::chrono::steady_clock::now();
      run(kRuns);
      const std::chrono::duration<double, std::micro> taken =
          std::chrono::steady_clock::now() - begin;
      return taken.count() / (kRuns * steps);
    };
    const double step = microseconds(true, true), calls = microseconds(true, false),
                 copy = microseconds(false, true);
    std::printf(
        "rank %d: a forward step takes %.0f us; its calls alone %.0f, its copy alone %.0f\n",
        ring_.rank, step, calls, copy);
  }

 private:
  template <class T>
  T* allocate(int64_t count) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, size_t(count) * sizeof(T)));
    owned_.push_back(memory);
    return static_cast<T*>(memory);
  }

  Rows rows_of(int side) const { return {side * tokens_ / 2, tokens_ / 2}; }
  int64_t piece(int side) const {
    return side == 0 ? ring_.rank : 2 * ring_.ranks - 1 - ring_.rank;
  }
  void upload(uint16_t* to, const std::vector<uint16_t>& sequence, int64_t heads) const {
    const int64_t size = tokens_ / 2 * heads * kDim;
    for (const int side : {0, 1})
      check(cudaMemcpyAsync(to + side * size, sequence.data() + piece(side) * size,
                            size_t(size) * sizeof(uint16_t), cudaMemcpyHostToDevice, ring_.calls));
  }
  template <class T>
  float error(const T* result, const std::vector<T>& right, int64_t heads) const {
    const size_t size = size_t(tokens_ / 2 * heads * kDim);
    std::vector<T> got(2 * size);
    check(cudaMemcpy(got.data(), result, got.size() * sizeof(T), cudaMemcpyDeviceToHost));
    const auto of_side = [&](int side) {
      return largest_error(got.data() + side * size, right.data() + piece(side) * size, size);
    };
    return std::max(of_side(0), of_side(1));
  }

  // The table at the top. In step s the keys are those of the rank s places before.
  Step step_of(int s) const {
    const Rows all = {0, tokens_};
    const int source = (ring_.rank - s + ring_.ranks) % ring_.ranks;
    if (source == ring_.rank) return {.q = all, .k = all, .causal = true};
    if (source < ring_.rank) return {.q = all, .k = rows_of(0), .causal = false};
    return {.q = rows_of(1), .k = all, .causal = false};
  }

  // K and after it V of step s. A step reads and sends one buffer, and receives into the other.
  uint16_t* keys(int s) const { return s == 0 ? own_keys_ : come_keys_ + s % 2 * 2 * k_size_; }
  // The sums of their gradients, likewise. They come a step after the keys.
  float* key_sums(int s) const { return key_sums_ + s % 2 * 2 * k_size_; }
  void pass_on_keys(int s) const {
    if (s + 1 < ring_.ranks) ring_.pass_on(keys(s), keys(s + 1), 2 * k_size_);
  }

  template <class T>
  flash3::Tensor batch_of(T* data, int64_t heads, Rows rows) const {
    return ::batch_of(data + rows.first * heads * kDim, rows.count, heads);
  }
  flash3::Tensor lse_of(float* data, Rows rows) const {
    flash3::Tensor lse = flash3::lse_tensor(data + rows.first, 1, kHeads, tokens_);
    lse.shape[2] = rows.count;
    return lse;
  }
  template <class Call>
  Call on_gpu(Call call) const {
    call.stream = ring_.calls;
    call.workspace = workspace_, call.workspace_size = workspace_size_;
    return call;
  }

  // The first step's result is the first sum, in slot 0; the others are parts, in slot 1.
  flash3::Forward forward_call(int s) const {
    const auto [rows_q, rows_k, causal] = step_of(s);
    const int64_t slot = s == 0 ? 0 : 1;
    flash3::Forward call{.q = batch_of(q_, kHeads, rows_q), .causal = causal};
    call.k = batch_of(keys(s), kKvHeads, rows_k);
    call.v = batch_of(keys(s) + k_size_, kKvHeads, rows_k);
    call.out = batch_of(parts_ + slot * q_size_, kHeads, rows_q);
    call.lse = lse_of(lse_parts_ + slot * kHeads * tokens_, rows_q);
    call.sm_margin = kCopyBlocks;
    return on_gpu(call);
  }
  void attend(int s) {
    check(flash3::try_forward(forward_call(s)));
    if (s == 0) sum_at_ = {0, 0};
    // A merge must not write what it reads: the sum goes from slot 0 to 2 and back, and the part in
    // the middle is a neighbour of both.
    for (int side = step_of(s).q.first == 0 ? 0 : 1; s > 0 && side < 2; ++side) {
      const int from = sum_at_[side], to = 2 - from;
      merge(side, std::min(from, 1), 2, batch_of(parts_ + to * q_size_, kHeads, rows_of(side)),
            lse_parts_ + to * kHeads * tokens_);
      sum_at_[side] = to;
    }
  }
  // A half's rows in some slots, from `slot` on, become one.
  void merge(int side, int slot, int slots, const flash3::Tensor& out, float* lse) const {
    const Rows rows = rows_of(side);
    flash3::Merge call{.out_parts = batch_of(parts_ + slot * q_size_, kHeads, rows)};
    call.out_parts.shape[0] = slots, call.out_parts.stride[0] = q_size_;
    call.lse_parts = lse_of(lse_parts_ + slot * kHeads * tokens_, rows);
    call.lse_parts.shape[0] = slots;
    call.out = flash3::packed_tensor(out.data, out.dtype, {rows.count, kHeads, kDim});
    call.lse = flash3::packed_lse_tensor(lse + rows.first, kHeads, tokens_);
    call.lse.shape[1] = rows.count;
    check(flash3::try_merge(on_gpu(call)));
  }

  flash3::Backward backward_call(int s) const {
    const auto [rows_q, rows_k, causal] = step_of(s);
    float *const dq = s == 0 ? dq_ : dq_part_, *const dk = s == 0 ? key_sums(0) : key_part_;
    flash3::Backward call{.dout = batch_of(dout_, kHeads, rows_q), .causal = causal};
    call.q = batch_of(q_, kHeads, rows_q);
    call.k = batch_of(keys(s), kKvHeads, rows_k);
    call.v = batch_of(keys(s) + k_size_, kKvHeads, rows_k);
    call.out = batch_of(out_, kHeads, rows_q), call.lse = lse_of(lse_, rows_q);
    call.dq = batch_of(dq, kHeads, rows_q);
    call.dk = batch_of(dk, kKvHeads, rows_k);
    call.dv = batch_of(dk + k_size_, kKvHeads, rows_k);
    return on_gpu(call);
  }
  void differentiate(int s) const {
    check(flash3::try_backward(backward_call(s)));
    if (s > 0) add_rows(dq_, dq_part_, kHeads, step_of(s).q);
  }
  void add_rows(float* sum, const float* part, int64_t heads, Rows rows) const {
    const int64_t first = rows.first * heads * kDim;
    check(add(sum + first, part + first, rows.count * heads * kDim, ring_.calls));
  }

  const Ring& ring_;
  int64_t tokens_, q_size_ = tokens_ * kHeads * kDim, k_size_ = tokens_ * kKvHeads * kDim;
  std::vector<void*> owned_;
  uint16_t *q_ = allocate<uint16_t>(q_size_), *dout_ = allocate<uint16_t>(q_size_),
           *out_ = allocate<uint16_t>(q_size_), *own_keys_ = allocate<uint16_t>(2 * k_size_),
           *come_keys_ = allocate<uint16_t>(4 * k_size_);
  float *parts_ = allocate<float>(3 * q_size_), *dq_ = allocate<float>(q_size_),
        *dq_part_ = allocate<float>(q_size_), *key_part_ = allocate<float>(2 * k_size_),
        *key_sums_ = allocate<float>(4 * k_size_), *lse_ = allocate<float>(kHeads * tokens_),
        *lse_parts_ = allocate<float>(3 * kHeads * tokens_);
  std::array<int, 2> sum_at_ = {0, 0};  // the slot of a half's sum
  void* workspace_ = nullptr;
  size_t workspace_size_ = 0;
};

std::vector<int> hopper_gpus() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return {};  // no driver
  std::vector<int> found;
  for (int gpu = 0; gpu < count; ++gpu) {
    int major = 0, minor = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu));
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu));
    if (major == 9 && minor == 0) found.push_back(gpu);
  }
  return found;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<int> gpus = hopper_gpus();
  const int there = int(gpus.size()),
            ranks = argc > 1 ? int(std::strtol(argv[1], nullptr, 10)) : there;
  if (there < 2) {
    std::printf("skipped: needs two Hopper GPUs, there are %d\n", there);
    return 0;
  }
  if (ranks < 2 || ranks > there) {
    std::fprintf(stderr, "ranks must be from 2 to %d, the Hopper GPUs here\n", there);
    return 2;
  }
  Sequence checked(ranks * kCheckedTokens);
  const Sequence timed(ranks * kTimedTokens);
  checked.solve();

  ncclUniqueId id;
  check(ncclGetUniqueId(&id));
  std::vector<char> right(size_t(ranks), 0);
  std::vector<std::thread> threads;
  threads.reserve(size_t(ranks));
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      check(cudaSetDevice(gpus[rank]));
      const Ring ring(rank, ranks, id);
      Attention attention(ring, checked);
      attention.forward();
      attention.backward();
      check(cudaStreamSynchronize(ring.calls));
      right[rank] = attention.compare(checked);
      Attention(ring, timed).print_times();
    });
  for (std::thread& thread : threads) thread.join();
  return std::ranges::count(right, 1) == ranks ? 0 : 1;
}
