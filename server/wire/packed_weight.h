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

// The bytes that a weight takes beside the message. Shapes of few rows and small groups are padded,
// so it may be a hundred times as large as its message.
struct PackedSize {
  int64_t decoded = 0;   // until it is on its device
  int64_t prepared = 0;  // until its request was answered
  int64_t plans = 0;     // likewise: which kernels it has, and why not others

  PackedSize& operator+=(const PackedSize& other) {
    decoded += other.decoded;
    prepared += other.prepared;
    plans += other.plans;
    return *this;
  }
};

// For a weight that passed CheckPacked, without decoding its codes. Fails as DecodePacked and
// model::MeasureMost do.
absl::StatusOr<PackedSize> MeasurePacked(const v1::PackedWeight& packed, const DeviceInfo& device);

// RESOURCE_EXHAUSTED where all weights of a request, prepared, are more than twice as large as they
// may be when they are sent.
absl::Status CheckPrepared(const PackedSize& size, int64_t max_bytes);

// Decodes as a checkpoint of the format is decoded. For a weight that passed CheckPacked;
// takes as long as copying it a few times.
absl::StatusOr<HostWeight> DecodePacked(const v1::PackedWeight& packed);

}  // namespace awqd::wire
