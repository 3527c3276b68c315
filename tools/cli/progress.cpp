// SPDX-License-Identifier: Apache-2.0
#include "cli/progress.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <utility>

#include "cases/text.hpp"
#include "cli/format.hpp"

namespace flash3::cli {

using Clock = std::chrono::steady_clock;

Progress::Progress(std::string label, size_t total)
    : label_(std::move(label)),
      total_(total),
      terminal_(isatty(STDERR_FILENO) != 0),
      start_(Clock::now()),
      drawn_(start_) {}

Progress::~Progress() { clear(); }

void Progress::step() {
  ++done_;
  if (Clock::now() - drawn_ > std::chrono::milliseconds(100)) draw();
}

void Progress::announce(const std::string& what) {
  what_ = cases::printable(what);
  draw();
}

void Progress::print(const std::string& line) {
  clear();
  cli::print("{}\n", line);
  flush_output();  // a run that is cut short keeps its lines
}

void Progress::draw() {
  drawn_ = Clock::now();
  if (!terminal_ || total_ == 0) return;
  constexpr size_t kWidth = 32;
  const size_t filled = done_ * kWidth / total_;
  const double seconds = std::chrono::duration<double>(drawn_ - start_).count();
  std::string bar(filled, '#');
  bar.append(kWidth - filled, '.');
  std::fprintf(stderr, "\r\033[K%s [%s] %zu/%zu  %.0f s  %s", label_.c_str(), bar.c_str(), done_,
               total_, seconds, what_.c_str());
  std::fflush(stderr);
  visible_ = true;
}

void Progress::clear() {
  if (!visible_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
  visible_ = false;
}

namespace {

std::atomic<int> received{0};
static_assert(std::atomic<int>::is_always_lock_free);

void note(int signal) { received = signal; }
void ignore(int) {}

void handle(int signal, void (*handler)(int), int flags) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = flags;
  sigaction(signal, &action, nullptr);
}

}  // namespace

void prepare_to_stop() {
  // The wrong way round, so that nothing can be read from them or written to them.
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (fcntl(descriptor, F_GETFD) < 0)
      if (open("/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY) < 0) break;
  for (const int signal : {SIGINT, SIGTERM}) {
    struct sigaction old {};
    sigaction(signal, nullptr, &old);
    if (old.sa_handler != SIG_IGN) handle(signal, note, SA_RESTART | SA_RESETHAND);
  }
  // Handlers and not SIG_IGN, which programs that this one starts would inherit.
  for (const int signal : {SIGPIPE, SIGXFSZ}) handle(signal, ignore, SA_RESTART);
}

bool stop_requested() { return received != 0 || output_error() != 0; }

void throw_if_stopped() {
  if (stop_requested()) throw Stopped();
}

int stop_signal() { return received; }

}  // namespace flash3::cli
