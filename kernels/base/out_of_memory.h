// The status of a request for which there is no memory.
#pragma once

#include <new>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace awqd {

// RESOURCE_EXHAUSTED with the message `what`, or with no message if there is no memory for one.
inline absl::Status OutOfMemory(absl::string_view what) noexcept {
  try {
    return absl::ResourceExhaustedError(what);
  } catch (const std::bad_alloc&) {
    return absl::Status(absl::StatusCode::kResourceExhausted, "");
  }
}

}  // namespace awqd
