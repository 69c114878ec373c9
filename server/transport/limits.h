// ByteBudget: the bytes that requests and their answers may hold together. ClientLimiter: limits of
// each client: concurrency, bytes in flight, and a rate (token bucket).
//
// A request counts in the budget from the moment its message is here until its answer was sent.
//
// The rule: a connection that holds bytes for one call may take more for another as long as it then
// holds no more than what is left for all others, and as long as n connections that hold something
// then leave one part in n + 1 of the budget. So one connection alone holds half of it at most. Two
// that take all they can leave a third, in whatever order they come. A single call may always take
// all that is free.
//
// Attacker: clients whose large requests, or answers that they do not read, fill the memory. Shown
// by byte_budget_test, tests/server/services/in_flight_test and `unread_answers` of tests/attack.
// And a client that takes everything that is there for all: rate_limits_test,
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
#include "server/transport/connection.h"
#include "server/transport/options.h"

namespace awqd::transport {

class ByteBudget;
class Client;

// Nobody knows when something in flight will end.
inline constexpr absl::Duration kRetrySoon = absl::Milliseconds(100);

// The connection and the client that are charged for bytes. By default neither: only the budget's
// own limit binds.
struct Charge {
  std::shared_ptr<Connection> connection = nullptr;
  std::shared_ptr<Client> client = nullptr;
  // The bytes are those of a request that is not counted yet: a message of a stream. The request
  // counts as one of the client's until the lease is given back.
  bool new_request = false;
};

// Bytes of a budget, and of the client's that was charged; given back by the destructor. Move-only,
// not thread-safe.
class ByteLease {
 public:
  ByteLease() = default;
  ByteLease(ByteLease&& other) noexcept { *this = std::move(other); }
  ByteLease& operator=(ByteLease&& other) noexcept {
    Release();
    budget_ = std::exchange(other.budget_, nullptr);
    charge_ = std::exchange(other.charge_, {});
    bytes_ = std::exchange(other.bytes_, 0);
    return *this;
  }
  ~ByteLease() { Release(); }

  // Takes more for the same call; on RESOURCE_EXHAUSTED the lease stays as it was. `what` begins
  // the message.
  absl::Status Grow(int64_t bytes, absl::string_view what);
  // Takes more as long as half of the budget stays free. False: nothing was taken.
  bool GrowFromSpare(int64_t bytes);
  // Gives back all but `bytes`. Never takes more.
  void ShrinkTo(int64_t bytes);
  // Grows or shrinks to `bytes`; on RESOURCE_EXHAUSTED the lease stays as it was.
  absl::Status Resize(int64_t bytes, absl::string_view what) {
    if (bytes > bytes_) return Grow(bytes - bytes_, what);
    ShrinkTo(bytes);
    return absl::OkStatus();
  }

  int64_t bytes() const { return bytes_; }

 private:
  friend class ByteBudget;
  ByteLease(ByteBudget* budget, Charge charge) : budget_(budget), charge_(std::move(charge)) {}
  void Release();

  ByteBudget* budget_ = nullptr;
  Charge charge_;
  int64_t bytes_ = 0;
};

// Thread-safe. Outlives its leases.
class ByteBudget {
 public:
  // `limit` 0: no limit, bytes are only counted. `flag`: the option that sets it.
  explicit ByteBudget(int64_t limit, const char* flag = "max_in_flight_bytes")
      : limit_(limit), flag_(flag) {}
  ByteBudget(const ByteBudget&) = delete;
  ByteBudget& operator=(const ByteBudget&) = delete;

  // RESOURCE_EXHAUSTED, naming `what`, the bytes and the limit, when they would pass the limit, the
  // connection's part of it, or the client's own limits.
  absl::StatusOr<ByteLease> AcquireBytes(Charge charge, int64_t bytes, absl::string_view what);

  int64_t in_flight() const { return in_flight_.load(std::memory_order_relaxed); }
  int64_t limit() const { return limit_; }
  // How often it refused bytes.
  int64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  friend class ByteLease;
  // For a call of `connection` that has `of_call` bytes already.
  absl::Status Reserve(Connection* connection, int64_t of_call, int64_t bytes,
                       absl::string_view what);
  // Whether that would leave less than the rule asks for.
  bool TakesTooMuch(int64_t held, int64_t own, int64_t of_call, int64_t bytes) const;
  // How many bytes a connection that holds some leaves to the others.
  int64_t PartOfOthers() const;
  void GiveBack(Connection* connection, int64_t bytes);

  const int64_t limit_;
  const char* const flag_;
  std::atomic<int64_t> in_flight_{0};
  std::atomic<int64_t> holders_{0};  // connections that hold any of it
  std::atomic<int64_t> refused_{0};
};

// The limits of one client, an identity or a host, and what it has in flight. Thread-safe.
class Client {
 public:
  using Clock = std::chrono::steady_clock;

  Client(std::string name, const ClientQuota& quota, Clock::time_point now);

  // Counts a request that begins now. RESOURCE_EXHAUSTED, with a retry delay, over a limit.
  absl::Status BeginRequest(Clock::time_point now);
  void EndRequest() { requests_.fetch_sub(1, std::memory_order_relaxed); }
  // Bytes of its requests and their answers.
  ByteBudget* bytes() { return &bytes_; }

  // Whether forgetting it would change nothing: it may begin as many requests as ever.
  bool IsRested(Clock::time_point now);

 private:
  double TokensAt(Clock::time_point now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::string name_;
  const ClientQuota quota_;
  const double burst_;  // the most tokens of its bucket, which is full at first
  ByteBudget bytes_;
  std::atomic<int64_t> requests_{0};
  Mutex mu_;
  double tokens_ ABSL_GUARDED_BY(mu_);
  Clock::time_point refilled_ ABSL_GUARDED_BY(mu_);
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
  const ClientQuota quota_;
  mutable Mutex mu_;
  std::map<std::string, std::shared_ptr<Client>, std::less<>> clients_ ABSL_GUARDED_BY(mu_);
  size_t sweep_at_ ABSL_GUARDED_BY(mu_) = 64;
};

}  // namespace awqd::transport
