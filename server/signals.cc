// A handler that may run on any thread: it counts, and writes one byte into a pipe.
#include "server/signals.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <csignal>

namespace awqd {
namespace {

int g_pipe[2] = {-1, -1};
std::atomic<int> g_signal{0};
static_assert(std::atomic<int>::is_always_lock_free);

void OnSignal(int signal) {
  int none = 0;
  if (!g_signal.compare_exchange_strong(none, signal)) _exit(128 + signal);
  const char byte = 1;
  // A full pipe is readable already; nothing else can be done in a handler.
  if (write(g_pipe[1], &byte, 1) < 0) return;
}

}  // namespace

void InstallSignalHandlers() {
  if (pipe2(g_pipe, O_CLOEXEC | O_NONBLOCK) != 0) return;  // signals then end the process, as usual
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // a limit on file sizes: writes fail instead
}

int SignalFd() { return g_pipe[0]; }

int SignalReceived() { return g_signal.load(); }

}  // namespace awqd
