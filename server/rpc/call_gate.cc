// Holding calls back and letting go of them.
#include "server/rpc/call_gate.h"

#include <utility>

namespace awqd {

grpc::Status CallGate::Draining() {
  return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is draining; try another one");
}

void CallGate::Close() { state_.store(State::kClosed); }

void CallGate::Refuse() {
  std::vector<std::function<void()>> waiting;
  {
    MutexLock lock(&mu_);
    state_.store(State::kRefusing);
    waiting.swap(waiting_);
  }
  for (const std::function<void()>& finish : waiting) finish();
}

void CallGate::Answer(std::function<void()> finish) {
  {
    MutexLock lock(&mu_);
    if (state_.load() == State::kClosed) {
      waiting_.push_back(std::move(finish));
      return;
    }
  }
  finish();
}

}  // namespace awqd
