// Finding the connection of a call.
#include "server/transport/connection.h"

namespace awqd::transport {

std::shared_ptr<Connection> Connections::Of(grpc_call* call) {
  Connection::Id id(grpc_call_auth_context(call));
  MutexLock lock(&mu_);
  std::weak_ptr<Connection>& entry = connections_[id.get()];
  std::shared_ptr<Connection> connection = entry.lock();
  if (connection == nullptr) {
    connection = std::shared_ptr<Connection>(new Connection(shared_from_this(), std::move(id)));
    entry = connection;
  }
  return connection;
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
