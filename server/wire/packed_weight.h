// Inline weights of stateless calls: v1.PackedWeight -> CanonicalWeight.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "awqd/v1/tensor.pb.h"
#include "kernels/weight.h"

namespace awqd::wire {

// Cheap enough for a thread of the loop: that every tensor agrees with itself, and that together
// they stay within `max_bytes` (RESOURCE_EXHAUSTED otherwise). FieldErrors beneath "packed".
absl::Status CheckPacked(const v1::PackedWeight& packed, int64_t max_bytes);

// Decodes through the checkpoint format of the same layout. For a weight that passed CheckPacked;
// takes as long as copying it a few times.
absl::StatusOr<CanonicalWeight> DecodePacked(const v1::PackedWeight& packed);

}  // namespace awqd::wire
