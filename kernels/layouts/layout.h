// Layout: a byte order that kernels read, and the host code that packs and unpacks it.
//
// One weight has one layout in memory. A layout is host code only, so that it is tested without a
// GPU; unpack must invert pack exactly.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/weight.h"

namespace awqd {

struct Layout {
  // "plain", ...; the string that the registry, the API and the logs show.
  absl::string_view name;

  // Empty when the layout can hold weights of this shape, else the reason why not.
  std::string (*refuses)(const WeightShape& shape);

  // Bytes of each section. Only for shapes that are not refused.
  LayoutExtent (*extent)(const WeightShape& shape);

  // Writes extent.total() bytes at `out` (host memory, zero-filled by the caller).
  void (*pack)(const CanonicalWeight& weight, uint8_t* out);

  // Inverse of pack: fills codes, zeros and scales of `out`, whose k, n and scheme are set and
  // whose vectors have their final sizes.
  void (*unpack)(const uint8_t* in, CanonicalWeight* out);
};

// Every layout, in a fixed order. Round-trip tests walk this.
absl::Span<const Layout* const> AllLayouts();

// The layout of that name, or null.
const Layout* FindLayout(absl::string_view name);

}  // namespace awqd
