// A thread that waits for signals, and tells of the first through a pipe.
#include "server/signals.h"

#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <thread>

namespace awqd {
namespace {

int g_pipe[2] = {-1, -1};

sigset_t Stopping() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

void Wait() {
  const sigset_t stopping = Stopping();
  int number = 0;
  sigwait(&stopping, &number);
  const char byte = 1;
  // It ends in the orderly way only if that is known; otherwise as the signal does by itself.
  if (write(g_pipe[1], &byte, 1) == 1) sigwait(&stopping, &number);
  _exit(128 + number);
}

}  // namespace

void BlockSignals() {
  const sigset_t stopping = Stopping();
  pthread_sigmask(SIG_BLOCK, &stopping, nullptr);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);
}

void AwaitSignals() {
  if (pipe2(g_pipe, O_CLOEXEC | O_NONBLOCK) != 0) g_pipe[0] = g_pipe[1] = -1;
  std::thread(Wait).detach();
}

int SignalFd() { return g_pipe[0]; }

}  // namespace awqd
