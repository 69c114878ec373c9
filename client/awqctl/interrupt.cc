// A handler that notes and puts back.
#include "client/awqctl/interrupt.h"

#include <signal.h>

#include <atomic>

namespace awqd::awqctl {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM};

std::atomic<int> noted{0};
static_assert(std::atomic<int>::is_always_lock_free);
// What the signals did before; written while no handler of ours is set.
struct sigaction before[2];

void PutBack() {
  for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &before[i], nullptr);
}

void Note(int signal_number) {
  noted = signal_number;
  PutBack();
}

}  // namespace

Interrupt::Interrupt() {
  noted = 0;
  struct sigaction action = {};
  action.sa_handler = Note;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < 2; ++i) sigaction(kSignals[i], nullptr, &before[i]);
  for (int i = 0; i < 2; ++i) {
    if (before[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);
  }
}

Interrupt::~Interrupt() { PutBack(); }

int Interrupt::signal_number() const { return noted; }

}  // namespace awqd::awqctl
