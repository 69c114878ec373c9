// The status of a request that there is no memory for.
#pragma once

#include <new>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace awqd {

// RESOURCE_EXHAUSTED that says `what`; nothing where there is no memory for that either.
inline absl::Status OutOfMemory(absl::string_view what) noexcept {
  try {
    return absl::ResourceExhaustedError(what);
  } catch (const std::bad_alloc&) {
    return absl::Status(absl::StatusCode::kResourceExhausted, "");
  }
}

}  // namespace awqd
