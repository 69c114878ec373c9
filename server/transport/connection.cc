// Finding the connection of a call.
#include "server/transport/connection.h"

namespace awqd::transport {

std::shared_ptr<Connection> Connections::Of(grpc_call* call) {
  Connection::Id id(grpc_call_auth_context(call));
  const grpc_auth_context* const key = id.get();
  {
    MutexLock lock(&mu_);
    const auto it = connections_.find(key);
    if (it != connections_.end()) {
      if (std::shared_ptr<Connection> known = it->second.lock()) return known;
    }
  }
  // Without the lock, which the end of a connection takes: of one that there is not enough memory
  // for, and of one that another call was quicker to make.
  std::shared_ptr<Connection> fresh(new Connection(shared_from_this(), std::move(id)));
  MutexLock lock(&mu_);
  std::weak_ptr<Connection>& entry = connections_[key];
  if (std::shared_ptr<Connection> known = entry.lock()) return known;
  entry = fresh;
  return fresh;
}

int64_t Connections::size() const {
  MutexLock lock(&mu_);
  return static_cast<int64_t>(connections_.size());
}

void Connections::Forget(const grpc_auth_context* id) {
  MutexLock lock(&mu_);
  // Another call may have made a new entry for the same connection meanwhile.
  const auto it = connections_.find(id);
  if (it != connections_.end() && it->second.expired()) connections_.erase(it);
}

Connection::~Connection() {
  if (all_ != nullptr) all_->Forget(id_.get());
}

}  // namespace awqd::transport
