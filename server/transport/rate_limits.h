// ClientLimiter: what one client may have in flight, and how often it may call, so that one does not
// take what is there for all.
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

// Nobody knows when something in flight will end.
inline constexpr absl::Duration kRetrySoon = absl::Milliseconds(100);

// What is known of one client: an identity, or a machine. Thread-safe.
class Client {
 public:
  using Clock = std::chrono::steady_clock;

  Client(std::string name, const ClientQuota& bounds, Clock::time_point now);

  // Counts a request that begins now. RESOURCE_EXHAUSTED, with a retry delay, over a bound.
  absl::Status Begin(Clock::time_point now);
  void End() { requests_.fetch_sub(1, std::memory_order_relaxed); }
  // Bytes of its requests and their answers.
  ByteBudget* bytes() { return &bytes_; }

  // Whether forgetting it would change nothing: it may begin as many requests as ever.
  bool Rested(Clock::time_point now);

 private:
  absl::Status TakeFromRate(Clock::time_point now);
  double Refilled(Clock::time_point now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::string name_;
  const ClientQuota bounds_;
  const double burst_;  // requests that may come at once
  ByteBudget bytes_;
  std::atomic<int64_t> requests_{0};
  Mutex mu_;
  double left_ ABSL_GUARDED_BY(mu_);  // of the burst
  Clock::time_point refilled_ ABSL_GUARDED_BY(mu_);
};

// A request of a client, from Begin to End. Empty where clients have no bounds. Move-only.
class ClientRequest {
 public:
  ClientRequest() = default;
  // Begun already.
  explicit ClientRequest(std::shared_ptr<Client> client) : client_(std::move(client)) {}
  ClientRequest(ClientRequest&&) = default;
  ClientRequest& operator=(ClientRequest&& other) noexcept {
    std::swap(client_, other.client_);
    return *this;
  }
  ~ClientRequest() {
    if (client_ != nullptr) client_->End();
  }
  const std::shared_ptr<Client>& client() const { return client_; }

 private:
  std::shared_ptr<Client> client_;
};

// While it exists, what this thread takes from a ByteBudget is taken from the client's too. Made
// where a call is handed to its handler, so that no handler has to know.
class PaidBy {
 public:
  // `client`: of the request, if any. `begins_requests`: what is taken belongs to a request that is
  // not counted yet, a message of a stream.
  PaidBy(const ClientRequest& request, bool begins_requests)
      : client_(request.client()), begins_requests_(begins_requests), before_(now_) {
    now_ = client_ == nullptr ? nullptr : this;
  }
  ~PaidBy() { now_ = before_; }
  PaidBy(const PaidBy&) = delete;
  PaidBy& operator=(const PaidBy&) = delete;

  // Null: nobody.
  static const PaidBy* Now() { return now_; }
  const std::shared_ptr<Client>& client() const { return client_; }
  bool begins_requests() const { return begins_requests_; }

 private:
  static constinit thread_local const PaidBy* now_;
  // A copy: the call may end, and take its request along, while its handler runs.
  const std::shared_ptr<Client> client_;
  const bool begins_requests_;
  const PaidBy* const before_;
};

// Thread-safe. Its memory is bounded by the clients of the last second and those with something in
// flight.
class ClientLimiter {
 public:
  explicit ClientLimiter(const ClientQuota& bounds) : bounds_(bounds) {}

  // Whether there is any bound; otherwise Begin does nothing.
  bool any() const { return bounds_.any(); }
  // A request of the client of this name. RESOURCE_EXHAUSTED as Client::Begin.
  absl::StatusOr<ClientRequest> Begin(absl::string_view name, Client::Clock::time_point now);
  // Clients that are remembered.
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

  const ClientQuota bounds_;
  Shard shards_[kShards];
};

}  // namespace awqd::transport
