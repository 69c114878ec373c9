// Layout "plain": the canonical order itself. Codes [K, N] row-major, packed least significant
// first along N; scales [K/g, N] as stored; zeros [K/g, N] one byte each (none for symmetric
// schemes).
//
// Any legal shape. Read by the reference and by the simple CUDA rows; README.md has a worked
// example.
#include "kernels/layouts/plain.h"

#include <cstring>

namespace awqd {
namespace {

std::string Refuses(const WeightShape&) { return ""; }

LayoutExtent Extent(const WeightShape& shape) {
  LayoutExtent out;
  out.codes_bytes = shape.k * CeilDiv(shape.n * CodeBits(shape.scheme.bits), 8);
  out.scales_bytes = shape.groups() * shape.n * SizeOf(shape.scheme.scale_dtype);
  out.zeros_bytes = shape.scheme.zero_kind == ZeroKind::kInteger ? shape.groups() * shape.n : 0;
  return out;
}

void CopyColumns(const std::vector<uint8_t>& in, int64_t rows, int64_t begin, int64_t end,
                 uint8_t* out) {
  const int64_t stride = static_cast<int64_t>(in.size()) / rows;
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(out + row * stride + begin, in.data() + row * stride + begin, end - begin);
  }
}

void Pack(const CanonicalWeight& w, ColumnRange columns, uint8_t* out) {
  const LayoutExtent extent = Extent({w.k, w.n, w.scheme});
  const auto [begin, end] = columns;
  const int64_t scale = SizeOf(w.scheme.scale_dtype);
  CopyColumns(w.codes, w.k, begin * w.code_bits() / 8, CeilDiv(end * w.code_bits(), 8), out);
  CopyColumns(w.scales, w.groups(), begin * scale, end * scale, out + extent.scales_offset());
  if (!w.zeros.empty()) {
    CopyColumns(w.zeros, w.groups(), begin, end, out + extent.zeros_offset());
  }
}

void Unpack(const uint8_t* in, CanonicalWeight* w) {
  const LayoutExtent extent = Extent({w->k, w->n, w->scheme});
  std::memcpy(w->codes.data(), in, w->codes.size());
  std::memcpy(w->scales.data(), in + extent.scales_offset(), w->scales.size());
  if (!w->zeros.empty()) {
    std::memcpy(w->zeros.data(), in + extent.zeros_offset(), w->zeros.size());
  }
}

}  // namespace

const Layout kPlainLayout = {"plain", Refuses, Extent, Pack, Unpack};

}  // namespace awqd
