// ByteBudget: what requests and their answers may hold together, from the moment a message is here
// until its answer was sent, and how much of it one connection may hold.
//
// The rule: a connection that holds bytes for one call may take more for another as long as it then
// holds no more than what is left for all others, and as long as n connections that hold something
// then leave one part in n + 1 of the budget. So one connection alone holds half of it at most, two
// that take all they can leave a third, in whatever order they come. A single call may always take
// what is free.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/transport/connection.h"

namespace awqd::transport {

class ByteBudget;
class Client;

// A share of a budget, and of the client's whose call took it (PaidBy); given back by the
// destructor. Move-only, not thread-safe.
class ByteLease {
 public:
  ByteLease() = default;
  ByteLease(ByteLease&& other) noexcept { *this = std::move(other); }
  ByteLease& operator=(ByteLease&& other) noexcept {
    Release();
    budget_ = std::exchange(other.budget_, nullptr);
    connection_ = std::move(other.connection_);
    bytes_ = std::exchange(other.bytes_, 0);
    client_ = std::move(other.client_);
    is_request_ = std::exchange(other.is_request_, false);
    return *this;
  }
  ~ByteLease() { Release(); }

  // Takes more for the same call; on RESOURCE_EXHAUSTED the lease stays as it was. `what` begins
  // the message.
  absl::Status Grow(int64_t bytes, absl::string_view what);
  // Takes more where nobody is likely to miss it: half of the budget stays free. False: nothing was
  // taken.
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
  ByteLease(ByteBudget* budget, std::shared_ptr<Connection> connection)
      : budget_(budget), connection_(std::move(connection)) {}
  // Takes nothing yet; counts a request of the client if that is who pays.
  absl::Status Open();
  void Release();

  ByteBudget* budget_ = nullptr;
  std::shared_ptr<Connection> connection_;
  int64_t bytes_ = 0;
  std::shared_ptr<Client> client_;  // null: nobody pays
  bool is_request_ = false;         // one of the client's, until the lease is given back
};

// Thread-safe. Outlives its leases.
class ByteBudget {
 public:
  // `limit` 0: no limit, bytes are only counted. `flag`: the option that sets it.
  explicit ByteBudget(int64_t limit, const char* flag = "max_in_flight_bytes")
      : limit_(limit), flag_(flag) {}
  ByteBudget(const ByteBudget&) = delete;
  ByteBudget& operator=(const ByteBudget&) = delete;

  // For a call of `connection`. RESOURCE_EXHAUSTED, naming `what`, the bytes and the limit, when
  // they would pass it, or the connection's part of it, or when the client who pays has no more.
  // Null: nobody's call, which only the limit binds.
  absl::StatusOr<ByteLease> Take(std::shared_ptr<Connection> connection, int64_t bytes,
                                 absl::string_view what);

  int64_t in_flight() const { return in_flight_.load(std::memory_order_relaxed); }
  int64_t limit() const { return limit_; }
  // How often it said no.
  int64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  friend class ByteLease;
  // For a call of `connection` that has `of_call` bytes already.
  absl::Status Reserve(Connection* connection, int64_t of_call, int64_t bytes,
                       absl::string_view what);
  // Whether that would leave less than the rule asks for.
  bool TakesTooMuch(int64_t held, int64_t own, int64_t of_call, int64_t bytes) const;
  // What a connection that holds something leaves to the others.
  int64_t PartOfOthers() const;
  void GiveBack(Connection* connection, int64_t bytes);

  const int64_t limit_;
  const char* const flag_;
  std::atomic<int64_t> in_flight_{0};
  std::atomic<int64_t> holders_{0};  // connections that hold any of it
  std::atomic<int64_t> refused_{0};
};

}  // namespace awqd::transport
