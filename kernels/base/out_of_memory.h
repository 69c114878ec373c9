// Exceptions become statuses: no memory for a request, and what libraries throw.
#pragma once

#include <exception>
#include <new>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace awqd {

// RESOURCE_EXHAUSTED that says `what`, or nothing where there is no memory for that either.
inline absl::Status OutOfMemory(absl::string_view what) noexcept {
  try {
    return absl::ResourceExhaustedError(what);
  } catch (const std::bad_alloc&) {
    return absl::Status(absl::StatusCode::kResourceExhausted, "");
  }
}

// Runs `body`, which returns absl::Status, and returns its status. An exception, bad_alloc above
// all, becomes an error: gRPC would answer it with a bare UNIMPLEMENTED, and a thread of ours would
// end the process.
template <typename F>
absl::Status CatchExceptions(F&& body) {
  try {
    return std::forward<F>(body)();
  } catch (const std::bad_alloc&) {
    return OutOfMemory("the server has no memory for this request");
  } catch (const std::exception& e) {
    return absl::InternalError(absl::StrCat("exception: ", e.what()));
  }
}

}  // namespace awqd
