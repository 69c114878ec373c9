// Holding calls back and letting go of them.
#include "server/transport/drain.h"

#include <utility>

namespace awqd::transport {

void Drain::TurnAway(std::function<void()> answer) {
  turned_away_.fetch_add(1);
  {
    MutexLock lock(&mu_);
    if (state_.load() == State::kClosed) {
      waiting_.push_back(std::move(answer));
      return;
    }
  }
  answer();
}

grpc::Status Drain::UnavailableStatus() {
  return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is draining; try another one");
}

Drain::Listener::Listener(Drain* gate, std::function<void()> refusing)
    : gate_(gate), id_(gate->Listen(std::move(refusing))) {}

Drain::Listener::~Listener() {
  MutexLock lock(&gate_->mu_);
  gate_->listeners_.erase(id_);
}

int64_t Drain::Listen(std::function<void()> refusing) {
  {
    MutexLock lock(&mu_);
    const int64_t id = next_listener_++;
    if (state_.load() != State::kRefusing) {
      listeners_.emplace(id, std::move(refusing));
      return id;
    }
  }
  refusing();
  return -1;
}

void Drain::Close() { state_.store(State::kClosed); }

void Drain::Refuse() {
  std::vector<std::function<void()>> waiting;
  {
    MutexLock lock(&mu_);
    state_.store(State::kRefusing);
    waiting.swap(waiting_);
    for (auto& [id, listener] : listeners_) waiting.push_back(std::move(listener));
    listeners_.clear();
  }
  for (const std::function<void()>& tell : waiting) tell();
}

}  // namespace awqd::transport
