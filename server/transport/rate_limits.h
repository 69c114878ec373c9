// ClientLimiter: limits of each client: concurrency, bytes in flight, and a rate (token bucket).
//
// Attacker: a client that takes everything that is there for all. Shown by rate_limits_test and
// tests/server/services/client_limits_test.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "server/transport/byte_budget.h"
#include "server/transport/options.h"

namespace awqd::transport {

// `rate` tokens a second, up to `burst` of them. Not thread-safe.
class TokenBucket {
 public:
  using Clock = std::chrono::steady_clock;

  // Full at first. A rate of 0: Acquire always succeeds.
  TokenBucket(double rate, Clock::time_point now);

  // Acquires a token: zero. Without one: how long until there is one.
  absl::Duration Acquire(Clock::time_point now);
  bool IsFull(Clock::time_point now) const { return rate_ <= 0 || TokensAt(now) >= burst_; }

 private:
  double TokensAt(Clock::time_point now) const;

  const double rate_, burst_;
  double tokens_;
  Clock::time_point refilled_;
};

// What is known of one client: an identity, or a host. Thread-safe.
class Client {
 public:
  using Clock = TokenBucket::Clock;

  Client(std::string name, const ClientQuota& quota, Clock::time_point now);

  // Counts a request that begins now. RESOURCE_EXHAUSTED, with a retry delay, over a limit.
  absl::Status BeginRequest(Clock::time_point now);
  void EndRequest() { requests_.fetch_sub(1, std::memory_order_relaxed); }
  // Bytes of its requests and their answers.
  ByteBudget* bytes() { return &bytes_; }

  // Whether forgetting it would change nothing: it may begin as many requests as ever.
  bool IsRested(Clock::time_point now);

 private:
  const std::string name_;
  const ClientQuota quota_;
  ByteBudget bytes_;
  std::atomic<int64_t> requests_{0};
  Mutex mu_;
  TokenBucket bucket_ ABSL_GUARDED_BY(mu_);
};

// The in-flight guard of a client's request. Empty where clients have no limits. Move-only.
class ClientRequest {
 public:
  ClientRequest() = default;
  // The request has begun.
  explicit ClientRequest(std::shared_ptr<Client> client) : client_(std::move(client)) {}
  ClientRequest(ClientRequest&&) = default;
  ClientRequest& operator=(ClientRequest&& other) noexcept {
    std::swap(client_, other.client_);
    return *this;
  }
  ~ClientRequest() {
    if (client_ != nullptr) client_->EndRequest();
  }
  const std::shared_ptr<Client>& client() const { return client_; }

 private:
  std::shared_ptr<Client> client_;
};

// Thread-safe. Its memory is bounded by the clients of the last second and those with something in
// flight.
class ClientLimiter {
 public:
  explicit ClientLimiter(const ClientQuota& quota) : quota_(quota) {}

  // Whether there is any limit. Without one BeginRequest does nothing.
  bool any() const { return quota_.any(); }
  // A request of the client of this name. RESOURCE_EXHAUSTED as Client::BeginRequest.
  absl::StatusOr<ClientRequest> BeginRequest(absl::string_view name, Client::Clock::time_point now);
  // How many clients are remembered.
  int64_t clients() const;

 private:
  static constexpr size_t kShards = 16;
  struct Shard {
    mutable Mutex mu;
    std::map<std::string, std::shared_ptr<Client>, std::less<>> clients ABSL_GUARDED_BY(mu);
    size_t sweep_at ABSL_GUARDED_BY(mu) = 64;
  };
  static void Sweep(Shard& shard, Client::Clock::time_point now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(shard.mu);

  const ClientQuota quota_;
  Shard shards_[kShards];
};

}  // namespace awqd::transport
