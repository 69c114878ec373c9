// Inline weights of stateless calls: v1.PackedWeight -> HostWeight.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "awqd/v1/tensor.pb.h"
#include "kernels/weight.h"

namespace awqd::wire {

// Cheap enough for a thread of the loop: that the format is known and knows every tensor and
// setting, that every tensor agrees with itself, and that together they stay within `max_bytes`
// (RESOURCE_EXHAUSTED otherwise). FieldErrors beneath "packed". `before`: the bytes of other
// weights of the request, which share the limit; this one's are added.
absl::Status CheckPacked(const v1::PackedWeight& packed, int64_t max_bytes,
                         int64_t* before = nullptr);

// Decodes as a checkpoint of the format is decoded. For a weight that passed CheckPacked;
// takes as long as copying it a few times.
absl::StatusOr<HostWeight> DecodePacked(const v1::PackedWeight& packed);

}  // namespace awqd::wire
