// ByteBudget: the bytes that requests and their answers may hold together. A request counts from
// the moment its message is here until its answer was sent.
//
// The rule: a connection that holds bytes for one call may take more for another as long as it then
// holds no more than what is left for all others, and as long as n connections that hold something
// then leave one part in n + 1 of the budget. So one connection alone holds half of it at most. Two
// that take all they can leave a third, in whatever order they come. A single call may always take
// all that is free.
//
// Attacker: clients whose large requests, or answers that they do not read, fill the memory. Shown
// by byte_budget_test, tests/server/services/in_flight_test and `unread_answers` of tests/attack.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/transport/connection.h"

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

}  // namespace awqd::transport
