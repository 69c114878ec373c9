// Early-return macros for absl::Status and absl::StatusOr, and the form of most error messages.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace awqd {

// INVALID_ARGUMENT "name: got ..., expected ...".
inline absl::Status BadValue(absl::string_view name, const absl::AlphaNum& got,
                             const absl::AlphaNum& expected) {
  return absl::InvalidArgumentError(absl::StrCat(name, ": got ", got, ", expected ", expected));
}

// INVALID_ARGUMENT, its message put together as by absl::StrCat.
template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// The status with "<prefix>: " before its message.
inline absl::Status Prefixed(absl::string_view prefix, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(prefix, ": ", status.message()));
}

}  // namespace awqd

#define AWQD_CONCAT_INNER(a, b) a##b
#define AWQD_CONCAT(a, b) AWQD_CONCAT_INNER(a, b)

#define AWQD_RETURN_IF_ERROR(expr)                                                \
  do {                                                                            \
    if (absl::Status awqd_status = (expr); !awqd_status.ok()) return awqd_status; \
  } while (false)

#define AWQD_ASSIGN_OR_RETURN(lhs, expr) \
  AWQD_ASSIGN_OR_RETURN_INNER(AWQD_CONCAT(awqd_or_, __LINE__), lhs, expr)
#define AWQD_ASSIGN_OR_RETURN_INNER(tmp, lhs, expr) \
  auto tmp = (expr);                                \
  if (!tmp.ok()) return std::move(tmp).status();    \
  lhs = std::move(tmp).value()
