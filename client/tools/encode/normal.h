// Normalised: a weight as most formats can hold it, with the same elements.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/weight.h"

namespace awqd::tools {

// What a format can hold.
struct Limits {
  std::vector<int> widths;    // of integer codes
  std::vector<DType> scales;  // the first that holds all of them is taken
  bool real_zeros = false;
  bool order = false;
  bool short_group = false;  // the last one
};

// A weight with integer codes, a scale for each group of a column, no outer scale, and zeros that
// are one integer for all (where they happen to be), stored integers, or real ones before the
// scale. Every element has the bits it had. INVALID_ARGUMENT naming the part that does not fit,
// what it has and what the format expects.
absl::StatusOr<HostWeight> Normalised(HostWeight weight, const Limits& limits);

// Integer codes of a width that is not among `widths` become codes of the least one above it that
// is stored in as many bits, where there is one. No element changes.
void Widen(absl::Span<const int> widths, HostWeight* weight);

}  // namespace awqd::tools
