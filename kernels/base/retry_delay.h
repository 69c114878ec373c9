// A status that says when to try again. wire/status.h sends it as a google.rpc.RetryInfo.
#pragma once

#include <optional>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace awqd {

inline constexpr absl::string_view kRetryDelayPayload = "awqd.retry_delay_ns";

inline absl::Status WithRetryDelay(absl::Status status, absl::Duration delay) {
  status.SetPayload(kRetryDelayPayload, absl::Cord(absl::StrCat(absl::ToInt64Nanoseconds(delay))));
  return status;
}

// Returns nullopt if the status has no delay.
inline std::optional<absl::Duration> RetryDelayOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kRetryDelayPayload);
  int64_t nanoseconds = 0;
  if (!payload || !absl::SimpleAtoi(std::string(*payload), &nanoseconds)) return std::nullopt;
  return absl::Nanoseconds(nanoseconds);
}

}  // namespace awqd
