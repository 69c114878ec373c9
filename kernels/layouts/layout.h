// Layout: a byte order that kernels read, and the host code that packs and unpacks it.
//
// A weight in memory has one layout. A layout is host code only, so that it is tested without a
// GPU; unpack must invert pack exactly. A layout orders codes, zeros and scales; the other parts of
// a weight are the same in every layout (PrepareWeight).
#pragma once

#include <cstdint>
#include <string>

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
  // The name that the registry, the API and the logs show, such as "plain".
  absl::string_view name;

  // Returns "" when the layout can hold weights of this shape, else the reason against it.
  std::string (*refuses)(const WeightShape& shape);

  // Adds the sections of Part::kCodes, kScales and kZeros that the layout needs. Only for shapes
  // that are not refused.
  void (*add_sections)(const WeightShape& shape, Sections* sections);

  // Packs some columns into their place in `out`, which is sections.total() bytes of host memory.
  // The ranges of [0, N) together fill the sections that add_sections added. Threads may pack
  // disjoint ranges at the same time.
  void (*pack)(const HostWeight& weight, ColumnRange columns, const Sections& sections,
               uint8_t* out);

  // Inverse of pack: fills codes, zeros and scales of `out`, which MakeEmpty made. `in` has every
  // section.
  void (*unpack)(const WeightShape& shape, const uint8_t* in, const Sections& sections,
                 HostWeight* out);

  // Whether a weight of this shape needs Part::kOuter although its scheme has no outer:
  // because the layout stores only a part of each scale beside the codes, or because its rows
  // always multiply by Part::kOuter. Null: never.
  bool (*moves_scales)(const WeightShape& shape) = nullptr;
  // Writes the part of the scales that is not beside the codes, one FP32 for each of columns [0, N)
  // and 1 without scales. Rows multiply weights and sums by it.
  void (*moved_scales)(const HostWeight& weight, float* out) = nullptr;
};

extern const Layout kPlainLayout;    // plain.cc
extern const Layout kK16Layout;      // k16.cc, with its numbers in k16.h
extern const Layout kMma16Layout;    // mma16.cc, with its numbers in mma16.h
extern const Layout kVectorsLayout;  // vectors.cc, with its numbers in vectors.h

// Every layout, in a fixed order. Round-trip tests walk this.
absl::Span<const Layout* const> AllLayouts();

// Sections of a weight of this shape in `layout`, including the outer. Order, factor and bias have
// sections only if `weight` is given and has them.
Sections SectionsOf(const Layout& layout, const WeightShape& shape,
                    const HostWeight* weight = nullptr);

// Writes the sections that are the same in every layout.
void PackCommonParts(const Layout& layout, const HostWeight& weight, const Sections& sections,
                     uint8_t* out);

// A weight of this shape whose parts have their full sizes and hold zeros; without order, factor,
// bias and table.
HostWeight MakeEmpty(const WeightShape& shape);

// The weight that was packed to `in`, without order, factor and bias.
HostWeight Unpack(const Layout& layout, const WeightShape& shape, const Sections& sections,
                  const uint8_t* in);

}  // namespace awqd
