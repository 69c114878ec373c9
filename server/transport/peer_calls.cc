// Counters of connections, of their peers and of all; nothing is locked but the table of peers.
#include "server/transport/peer_calls.h"

#include <algorithm>

namespace awqd::transport {
namespace {

// So many calls in so short a time may be the beginning of more. To look for these costs little
// where there are none.
constexpr int64_t kCrowd = 128;
constexpr std::chrono::milliseconds kMoment(25);

}  // namespace

class PeerCalls::Peer {
 public:
  Peer(std::string name, std::shared_ptr<std::atomic<int64_t>> total)
      : name(std::move(name)), total(std::move(total)) {}

  const std::string name;
  const std::shared_ptr<std::atomic<int64_t>> total;  // of all peers
  std::atomic<int64_t> calls{0}, refused{0};
  std::atomic<int64_t> moment{0}, came{0};  // a stretch of time, and the calls that came in it
};

void PeerCalls::Share::Release(Place place) {
  if (place == Place::kTaken) {
    calls_.fetch_sub(1, std::memory_order_relaxed);
    peer_->calls.fetch_sub(1, std::memory_order_relaxed);
    peer_->total->fetch_sub(1, std::memory_order_relaxed);
  } else if (place == Place::kRefused) {
    peer_->refused.fetch_sub(1, std::memory_order_relaxed);
  }
}

PeerCalls::Place PeerCalls::Take(Share* share, bool asks_to_begin,
                                 absl::FunctionRef<std::string()> name) {
  Peer* const peer = Join(share, name);
  if (asks_to_begin) {
    const int64_t own = share->calls_.fetch_add(1, std::memory_order_relaxed) + 1;
    const int64_t calls = peer->calls.fetch_add(1, std::memory_order_relaxed) + 1;
    const int64_t total = total_->fetch_add(1, std::memory_order_relaxed) + 1;
    if (own <= limits_.per_peer - calls && calls <= limits_.total - total) return Place::kTaken;
    share->Release(Place::kTaken);
  }
  if (peer->refused.fetch_add(1, std::memory_order_relaxed) < limits_.per_peer) {
    return Place::kRefused;
  }
  share->Release(Place::kRefused);
  return Place::kDropped;
}

void PeerCalls::Count(Share* share, absl::FunctionRef<std::string()> name,
                      std::chrono::steady_clock::time_point now) {
  if (share->came_.fetch_add(1, std::memory_order_relaxed) < limits_.few) return;
  if (limits_.crowded == nullptr) return;
  Peer* const peer = Join(share, name);
  const int64_t moment = now.time_since_epoch() / kMoment;
  if (peer->moment.load(std::memory_order_relaxed) != moment) {
    peer->moment.store(moment, std::memory_order_relaxed);
    peer->came.store(0, std::memory_order_relaxed);
  }
  const int64_t came = peer->came.fetch_add(1, std::memory_order_relaxed) + 1;
  if (came == kCrowd) limits_.crowded(peer->name);
}

PeerCalls::Peer* PeerCalls::Join(Share* share, absl::FunctionRef<std::string()> name) {
  if (Peer* const joined = share->joined_.load(std::memory_order_acquire)) return joined;
  std::string key = name();
  MutexLock lock(&mu_);
  if (Peer* const joined = share->joined_.load(std::memory_order_relaxed)) return joined;
  if (peers_.size() >= sweep_at_) {
    std::erase_if(peers_, [](const auto& entry) { return entry.second.expired(); });
    sweep_at_ = std::max<size_t>(64, 2 * peers_.size());
  }
  std::weak_ptr<Peer>& entry = peers_[key];
  share->peer_ = entry.lock();
  if (share->peer_ == nullptr) {
    share->peer_ = std::make_shared<Peer>(std::move(key), total_);
    entry = share->peer_;
  }
  share->joined_.store(share->peer_.get(), std::memory_order_release);
  return share->peer_.get();
}

int64_t PeerCalls::size() const {
  MutexLock lock(&mu_);
  return static_cast<int64_t>(peers_.size());
}

}  // namespace awqd::transport
