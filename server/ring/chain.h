// Chains: a prepared call of several steps whose tensors are each other's.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/ring/ring.h"

namespace awqd::ring {

// Makes a chain of prepared calls of `ring`, which may be released then. `steps`: the ChainSteps.
// `entry` counts its calls. INVALID_ARGUMENT says which step cannot be.
absl::StatusOr<PreparedPtr> MakeChain(const Ring& ring, absl::string_view steps,
                                      transport::Admission::Entry* entry);

}  // namespace awqd::ring
