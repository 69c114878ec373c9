// Early-return macros for absl::Status and absl::StatusOr.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"

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
