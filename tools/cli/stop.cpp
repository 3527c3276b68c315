// SPDX-License-Identifier: Apache-2.0
#include "cli/stop.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <csignal>

#include "cli/format.hpp"

namespace flash3::cli {
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
