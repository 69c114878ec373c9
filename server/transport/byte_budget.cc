// One counter, raised only when the sum stays within the limit.
#include "server/transport/byte_budget.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"

namespace awqd::transport {

absl::Status ByteBudget::Reserve(int64_t bytes, absl::string_view what) {
  int64_t held = in_flight_.load(std::memory_order_relaxed);
  do {
    if (limit_ != 0 && bytes > limit_ - held) {
      refused_.fetch_add(1, std::memory_order_relaxed);
      return absl::ResourceExhaustedError(absl::StrCat(
          what, ": got ", bytes, " bytes, expected at most ", limit_ - held, ": requests and ",
          "answers in flight hold ", held, " bytes of the server's max_in_flight_bytes, ", limit_,
          "; try again later"));
    }
  } while (!in_flight_.compare_exchange_weak(held, held + bytes, std::memory_order_relaxed));
  return absl::OkStatus();
}

absl::StatusOr<ByteLease> ByteBudget::Take(int64_t bytes, absl::string_view what) {
  AWQD_RETURN_IF_ERROR(Reserve(bytes, what));
  return ByteLease(this, bytes);
}

absl::Status ByteLease::Grow(int64_t bytes, absl::string_view what) {
  if (budget_ == nullptr) return absl::OkStatus();
  AWQD_RETURN_IF_ERROR(budget_->Reserve(bytes, what));
  bytes_ += bytes;
  return absl::OkStatus();
}

void ByteLease::ShrinkTo(int64_t bytes) {
  if (budget_ == nullptr || bytes >= bytes_) return;
  budget_->in_flight_.fetch_sub(bytes_ - bytes, std::memory_order_relaxed);
  bytes_ = bytes;
}

}  // namespace awqd::transport
