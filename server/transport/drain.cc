// Holds new calls, then rejects them.
#include "server/transport/drain.h"

#include <utility>

namespace awqd::transport {

void Drain::Reject(std::function<void()> answer) {
  rejected_.fetch_add(1);
  {
    MutexLock lock(&mu_);
    if (state_.load() == State::kHolding) {
      waiting_.push_back(std::move(answer));
      return;
    }
  }
  answer();
}

grpc::Status Drain::UnavailableStatus() {
  return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is draining; try another one");
}

Drain::Listener::Listener(Drain* drain, std::function<void()> rejecting)
    : drain_(drain), id_(drain->AddListener(std::move(rejecting))) {}

Drain::Listener::~Listener() {
  MutexLock lock(&drain_->mu_);
  drain_->listeners_.erase(id_);
}

int64_t Drain::AddListener(std::function<void()> rejecting) {
  {
    MutexLock lock(&mu_);
    const int64_t id = next_listener_++;
    if (state_.load() != State::kRejecting) {
      listeners_.emplace(id, std::move(rejecting));
      return id;
    }
  }
  rejecting();
  return -1;
}

void Drain::HoldNewCalls() { state_.store(State::kHolding); }

void Drain::RejectNewCalls() {
  std::vector<std::function<void()>> waiting;
  {
    MutexLock lock(&mu_);
    state_.store(State::kRejecting);
    waiting.swap(waiting_);
    for (auto& [id, listener] : listeners_) waiting.push_back(std::move(listener));
    listeners_.clear();
  }
  for (const std::function<void()>& run : waiting) run();
}

}  // namespace awqd::transport
