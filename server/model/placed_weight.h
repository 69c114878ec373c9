// PlacedWeight: a weight as it is served: whole on one device or on several, or its columns cut
// among them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/weight.h"

namespace awqd::model {

// How several devices share the work; with one device all three are the same. "replicas",
// "columns", "models".
enum class Sharding : uint8_t {
  kReplicas,  // every weight whole on every device; a request runs on one of them
  kColumns,   // every weight's columns cut among the devices; a request runs on all of them
  kModels     // every model whole on the device that has most room
};

absl::string_view Name(Sharding sharding);

// What one device holds.
struct WeightPart {
  std::shared_ptr<const DeviceWeight> weight;
  int64_t col_begin = 0;  // of the whole weight

  int64_t col_end() const { return col_begin + weight->shape.n; }
};

// Immutable once made; each part is freed with the last owner of it or of the whole.
struct PlacedWeight {
  WeightShape shape;  // of the whole
  std::string format;
  bool has_bias = false;
  // One or more, each on its own device. Either each is the whole weight, or together they are its
  // columns from 0 to N in order.
  std::vector<WeightPart> parts;

  const DeclaredActivations& activations() const { return parts.front().weight->activations; }
  bool cut() const { return parts.front().weight->shape.n != shape.n; }
  int64_t bytes() const;        // on all devices
  std::string devices() const;  // "cuda:0,cuda:1"
};

// A weight that lives on one device.
std::shared_ptr<const PlacedWeight> Whole(std::shared_ptr<const DeviceWeight> weight);

// Columns [begin, end) of a weight.
struct ColumnSpan {
  int64_t begin = 0;
  int64_t end = 0;
};

// Cuts N columns into at most `parts` spans of nearly the same width, the last one ragged. Borders
// are multiples of 128, which kernels like best, or of 64 ... 8 where that would leave a device
// with more than a sixteenth above its share. Fewer spans when N < 8 x parts. `block`: columns that
// share a scale, which no border parts.
std::vector<ColumnSpan> CutColumns(int64_t n, int64_t parts, int64_t block = 1);

// Those columns with their zero points, scales and bias, as a weight of their own. `span` is one
// that CutColumns makes.
HostWeight TakeColumns(const HostWeight& weight, ColumnSpan span);

// What one part of a weight takes.
struct PartBytes {
  Device* device = nullptr;
  int64_t columns = 0;
  int64_t bytes = 0;
};
// Of the parts that PlaceWeight makes of a weight, which may lack its codes. Fails as
// PreparedBytes.
absl::StatusOr<std::vector<PartBytes>> PlacedBytes(const HostWeight& weight,
                                                   absl::Span<Device* const> devices, bool cut);

// Puts the weight on the devices, one or more: whole on each, or cut among them. Blocks.
// RESOURCE_EXHAUSTED naming the device that has no room; other errors as PrepareWeight. On an error
// nothing stays allocated on any of them.
absl::StatusOr<std::shared_ptr<const PlacedWeight>> PlaceWeight(const HostWeight& weight,
                                                                absl::Span<Device* const> devices,
                                                                bool cut);

}  // namespace awqd::model
