// Finds the connection of a call, and counts the calls of connections, of their peers and of all.
#include "server/transport/connection.h"

#include <algorithm>

namespace awqd::transport {
namespace {

// So many calls in so short a time may be the beginning of more. Looking for more costs little
// where there are none.
constexpr int64_t kCrowd = 128;
constexpr std::chrono::milliseconds kCrowdPeriod(25);

}  // namespace

class PeerCalls::Peer {
 public:
  Peer(std::string name, std::shared_ptr<std::atomic<int64_t>> total)
      : name(std::move(name)), total(std::move(total)) {}

  const std::string name;
  const std::shared_ptr<std::atomic<int64_t>> total;  // of all peers
  std::atomic<int64_t> calls{0}, rejected{0};
  std::atomic<int64_t> period{0}, came{0};  // number of kCrowdPeriod, and the calls that came in it
};

void PeerCalls::Release(Connection* connection, Place place) {
  if (place == Place::kAdmitted) {
    connection->calls_of_peer_.fetch_sub(1, std::memory_order_relaxed);
    connection->peer_->calls.fetch_sub(1, std::memory_order_relaxed);
    connection->peer_->total->fetch_sub(1, std::memory_order_relaxed);
  } else if (place == Place::kRejected) {
    connection->peer_->rejected.fetch_sub(1, std::memory_order_relaxed);
  }
}

PeerCalls::Place PeerCalls::Admit(Connection* connection, bool asks_to_begin,
                                  absl::FunctionRef<std::string()> name) {
  Peer* const peer = FindPeer(connection, name);
  if (asks_to_begin) {
    const int64_t own = connection->calls_of_peer_.fetch_add(1, std::memory_order_relaxed) + 1;
    const int64_t calls = peer->calls.fetch_add(1, std::memory_order_relaxed) + 1;
    const int64_t total = total_->fetch_add(1, std::memory_order_relaxed) + 1;
    if (own <= limits_.per_peer - calls && calls <= limits_.total - total) return Place::kAdmitted;
    Release(connection, Place::kAdmitted);
  }
  if (peer->rejected.fetch_add(1, std::memory_order_relaxed) < limits_.per_peer) {
    return Place::kRejected;
  }
  Release(connection, Place::kRejected);
  return Place::kDropped;
}

void PeerCalls::CountArrival(Connection* connection, absl::FunctionRef<std::string()> name,
                             std::chrono::steady_clock::time_point now) {
  if (connection->came_.fetch_add(1, std::memory_order_relaxed) < limits_.few) return;
  if (limits_.crowded == nullptr) return;
  Peer* const peer = FindPeer(connection, name);
  const int64_t period = now.time_since_epoch() / kCrowdPeriod;
  if (peer->period.load(std::memory_order_relaxed) != period) {
    peer->period.store(period, std::memory_order_relaxed);
    peer->came.store(0, std::memory_order_relaxed);
  }
  const int64_t came = peer->came.fetch_add(1, std::memory_order_relaxed) + 1;
  if (came == kCrowd) limits_.crowded(peer->name);
}

PeerCalls::Peer* PeerCalls::FindPeer(Connection* connection,
                                     absl::FunctionRef<std::string()> name) {
  if (Peer* const joined = connection->joined_.load(std::memory_order_acquire)) return joined;
  std::string key = name();
  MutexLock lock(&mu_);
  if (Peer* const joined = connection->joined_.load(std::memory_order_relaxed)) return joined;
  if (peers_.size() >= sweep_at_) {
    std::erase_if(peers_, [](const auto& entry) { return entry.second.expired(); });
    sweep_at_ = std::max<size_t>(64, 2 * peers_.size());
  }
  std::weak_ptr<Peer>& entry = peers_[key];
  connection->peer_ = entry.lock();
  if (connection->peer_ == nullptr) {
    connection->peer_ = std::make_shared<Peer>(std::move(key), total_);
    entry = connection->peer_;
  }
  connection->joined_.store(connection->peer_.get(), std::memory_order_release);
  return connection->peer_.get();
}

int64_t PeerCalls::size() const {
  MutexLock lock(&mu_);
  return static_cast<int64_t>(peers_.size());
}

std::shared_ptr<Connection> Connections::Find(grpc_call* call) {
  Connection::Id id(grpc_call_auth_context(call));
  const grpc_auth_context* const key = id.get();
  {
    MutexLock lock(&mu_);
    const auto it = connections_.find(key);
    if (it != connections_.end()) {
      if (std::shared_ptr<Connection> known = it->second.lock()) return known;
    }
  }
  // Without the lock, because the end of a connection takes it. This one ends here when there is no
  // memory to remember it, or when another call was quicker.
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
