// The table of layouts, and the parts that are the same in all of them.
#include <algorithm>
#include <cstring>

#include "kernels/layouts/layout.h"

namespace awqd {
namespace {

bool MovesScales(const Layout& layout, const WeightShape& shape) {
  return layout.moves_scales != nullptr && layout.moves_scales(shape);
}

template <typename T>
void CopyPart(const std::vector<T>& from, Part part, const Sections& sections, uint8_t* out) {
  if (sections.Has(part))
    std::memcpy(out + sections.offset(part), from.data(), sections.bytes(part));
}

}  // namespace

absl::Span<const Layout* const> AllLayouts() {
  static const Layout* const layouts[] = {
      &kPlainLayout,
      &kK16Layout,
      &kMma16Layout,
      &kVectorsLayout,
  };
  return layouts;
}

Sections SectionsOf(const Layout& layout, const WeightShape& shape, const HostWeight* weight) {
  const QuantizationScheme& d = shape.scheme;
  Sections out;
  layout.add_sections(shape, &out);
  out.Add(Part::kTable, d.code == CodeKind::kTable ? 16 * 4 : 0);
  const bool outer = d.outer != OuterKind::kNone || MovesScales(layout, shape);
  out.Add(Part::kOuter, outer ? shape.n * 4 : 0);
  if (weight == nullptr) return out;
  out.Add(Part::kOrder, weight->order.empty() ? 0 : shape.k * 4);
  out.Add(Part::kFactor, weight->factor.empty() ? 0 : shape.k * 4);
  out.Add(Part::kBias, weight->bias.empty() ? 0 : shape.n * 4);
  return out;
}

void PackCommonParts(const Layout& layout, const HostWeight& weight, const Sections& sections,
                     uint8_t* out) {
  CopyPart(weight.table, Part::kTable, sections, out);
  CopyPart(weight.order, Part::kOrder, sections, out);
  CopyPart(weight.factor, Part::kFactor, sections, out);
  CopyPart(weight.bias, Part::kBias, sections, out);
  if (!sections.Has(Part::kOuter)) return;
  float* outer = reinterpret_cast<float*>(out + sections.offset(Part::kOuter));
  if (weight.scheme.outer != OuterKind::kNone) {
    for (int64_t n = 0; n < weight.n; ++n) outer[n] = weight.Outer(n);
  } else {
    layout.moved_scales(weight, outer);
  }
}

HostWeight MakeEmpty(const WeightShape& shape) {
  const QuantizationScheme& d = shape.scheme;
  HostWeight out;
  out.k = shape.k;
  out.n = shape.n;
  out.scheme = d;
  out.codes.resize(out.code_rows() * out.row_bytes());
  out.scales.resize(shape.cells() * d.scale_bytes());
  out.zeros.resize(shape.cells() * d.zero_bytes());
  if (d.outer != OuterKind::kNone) out.outer.resize(d.outer == OuterKind::kOne ? 1 : shape.n);
  return out;
}

HostWeight Unpack(const Layout& layout, const WeightShape& shape, const Sections& sections,
                  const uint8_t* in) {
  HostWeight out = MakeEmpty(shape);
  layout.unpack(shape, in, sections, &out);
  const auto copy = [&](Part part, std::vector<float>* to) {
    std::copy_n(reinterpret_cast<const float*>(in + sections.offset(part)), to->size(),
                to->begin());
  };
  out.table.resize(sections.bytes(Part::kTable) / 4);
  copy(Part::kTable, &out.table);
  copy(Part::kOuter, &out.outer);
  return out;
}

}  // namespace awqd
