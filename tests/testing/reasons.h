// The reasons that settings and checkpoints give for what is not read.
#pragma once

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/checkpoint/checkpoint.h"
#include "kernels/formats/format.h"

namespace awqd::testing {

// The error of settings that are refused, else the reason of the first rule that is not read. OK
// where all are.
inline absl::Status FirstReason(const absl::StatusOr<FoundFormat>& found) {
  if (!found.ok()) return found.status();
  const auto unread = absl::c_find_if(found->config.rules,
                                      [](const LinearRule& rule) { return !rule.unread.ok(); });
  return unread == found->config.rules.end() ? absl::OkStatus() : unread->unread;
}

// The error of a checkpoint that is refused, else the reason of the first linear that cannot be
// read. OK where all can be.
inline absl::Status FirstReason(const absl::StatusOr<model::Checkpoint>& checkpoint) {
  if (!checkpoint.ok()) return checkpoint.status();
  return checkpoint->unserved().empty() ? absl::OkStatus() : checkpoint->unserved().begin()->second;
}

}  // namespace awqd::testing
