// ByteBudget: what requests and their answers may hold together, from the moment a message is here
// until its answer was sent.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace awqd::transport {

class ByteBudget;

// A share of a budget; given back by the destructor. Move-only, not thread-safe.
class ByteLease {
 public:
  ByteLease() = default;
  ByteLease(ByteLease&& other) noexcept { *this = std::move(other); }
  ByteLease& operator=(ByteLease&& other) noexcept {
    Release();
    budget_ = std::exchange(other.budget_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    return *this;
  }
  ~ByteLease() { Release(); }

  // Takes more; on RESOURCE_EXHAUSTED the lease stays as it was. `what` begins the message.
  absl::Status Grow(int64_t bytes, absl::string_view what);
  // Gives back all but `bytes`. Never takes more.
  void ShrinkTo(int64_t bytes);

  int64_t bytes() const { return bytes_; }

 private:
  friend class ByteBudget;
  ByteLease(ByteBudget* budget, int64_t bytes) : budget_(budget), bytes_(bytes) {}
  void Release() {
    ShrinkTo(0);
    budget_ = nullptr;
  }

  ByteBudget* budget_ = nullptr;
  int64_t bytes_ = 0;
};

// Thread-safe. Outlives its leases.
class ByteBudget {
 public:
  // `limit` 0: no limit, bytes are only counted.
  explicit ByteBudget(int64_t limit) : limit_(limit) {}
  ByteBudget(const ByteBudget&) = delete;
  ByteBudget& operator=(const ByteBudget&) = delete;

  // RESOURCE_EXHAUSTED, naming `what`, the bytes and the limit, when they would pass it.
  absl::StatusOr<ByteLease> Take(int64_t bytes, absl::string_view what);

  int64_t in_flight() const { return in_flight_.load(std::memory_order_relaxed); }
  int64_t limit() const { return limit_; }
  // How often it said no.
  int64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  friend class ByteLease;
  absl::Status Reserve(int64_t bytes, absl::string_view what);

  const int64_t limit_;
  std::atomic<int64_t> in_flight_{0};
  std::atomic<int64_t> refused_{0};
};

}  // namespace awqd::transport
