// Guarded: turns exceptions of libraries (bad_alloc above all) into a status, because gRPC would
// answer them with a bare UNIMPLEMENTED and a worker thread would end the process.
#pragma once

#include <exception>
#include <new>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/out_of_memory.h"

namespace awqd::transport {

// `body` returns absl::Status.
template <typename F>
absl::Status Guarded(F&& body) {
  try {
    return std::forward<F>(body)();
  } catch (const std::bad_alloc&) {
    return OutOfMemory("the server has no memory for this request");
  } catch (const std::exception& e) {
    return absl::InternalError(absl::StrCat("exception: ", e.what()));
  }
}

}  // namespace awqd::transport
