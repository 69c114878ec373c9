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

// Columns [begin, end) of a weight: multiples of kStep, or N.
struct ColumnRange {
  static constexpr int64_t kStep = 64;
  int64_t begin = 0;
  int64_t end = 0;
};

struct Layout {
  // "plain", ...; the string that the registry, the API and the logs show.
  absl::string_view name;

  // Empty when the layout can hold weights of this shape, else the reason why not.
  std::string (*refuses)(const WeightShape& shape);

  // Bytes of each section. Only for shapes that are not refused.
  LayoutExtent (*extent)(const WeightShape& shape);

  // Writes what some columns are packed to, at their place in `out`: extent.total() bytes of host
  // memory, which the ranges [0, N) together fill but for the gaps between sections. Threads may
  // pack disjoint ranges at the same time.
  void (*pack)(const CanonicalWeight& weight, ColumnRange columns, uint8_t* out);

  // Inverse of pack: fills codes, zeros and scales of `out`, whose k, n and scheme are set and
  // whose vectors have their final sizes.
  void (*unpack)(const uint8_t* in, CanonicalWeight* out);
};

// Every layout, in a fixed order. Round-trip tests walk this.
absl::Span<const Layout* const> AllLayouts();

// The layout of that name, or null.
const Layout* FindLayout(absl::string_view name);

}  // namespace awqd
