// The counters of a stream, by which the blocks of a kernel synchronise.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/device.h"

namespace awqd::cuda {

// INVALID_ARGUMENT for a stream without counters. `name`: of the kernel.
inline absl::Status CheckCounters(StreamView stream, absl::string_view name) {
  if (stream.counters != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, ": got a stream without counters, expected one of Device::CreateStream"));
}

}  // namespace awqd::cuda
