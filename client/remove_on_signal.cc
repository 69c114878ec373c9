// A list that a signal handler may walk at any moment: entries are reused and never freed.
#include "client/remove_on_signal.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <climits>

namespace awqd::client {

struct RemoveOnSignal::Entry {
  std::atomic<bool> taken{true};
  std::atomic<bool> named{false};  // `path` may be read
  char path[PATH_MAX] = {};        // its last byte stays 0
  Entry* next = nullptr;
};

namespace {

std::atomic<RemoveOnSignal::Entry*> first{nullptr};
static_assert(std::atomic<RemoveOnSignal::Entry*>::is_always_lock_free);

RemoveOnSignal::Entry* AcquireEntry() {
  for (RemoveOnSignal::Entry* entry = first; entry != nullptr; entry = entry->next) {
    if (!entry->taken.exchange(true)) return entry;
  }
  auto* const entry = new RemoveOnSignal::Entry;
  entry->next = first;
  while (!first.compare_exchange_weak(entry->next, entry)) {
  }
  return entry;
}

void RemoveAndDie(int signal_number) {
  for (RemoveOnSignal::Entry* entry = first; entry != nullptr; entry = entry->next) {
    if (entry->named) unlink(entry->path);
  }
  // Directories once they are empty.
  for (RemoveOnSignal::Entry* entry = first; entry != nullptr; entry = entry->next) {
    if (entry->named) rmdir(entry->path);
  }
  // SA_RESETHAND has put the default action back.
  raise(signal_number);
}

}  // namespace

RemoveOnSignal::RemoveOnSignal(absl::string_view path) {
  if (path.size() >= PATH_MAX) return;  // no such file can be
  entry_ = AcquireEntry();
  path.copy(entry_->path, path.size());
  entry_->path[path.size()] = '\0';
  entry_->named = true;
}

RemoveOnSignal& RemoveOnSignal::operator=(RemoveOnSignal&& other) noexcept {
  std::swap(entry_, other.entry_);
  return *this;
}

RemoveOnSignal::~RemoveOnSignal() {
  if (entry_ == nullptr) return;
  entry_->named = false;
  entry_->taken = false;
}

void RemoveFilesOnSignals() {
  struct sigaction action = {};
  action.sa_handler = RemoveAndDie;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_NODEFER);
  sigemptyset(&action.sa_mask);
  for (const int signal_number : {SIGHUP, SIGINT, SIGTERM}) {
    struct sigaction before = {};
    sigaction(signal_number, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaction(signal_number, &action, nullptr);
  }
}

}  // namespace awqd::client
