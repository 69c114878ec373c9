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

void Pack(const CanonicalWeight& w, uint8_t* out) {
  const LayoutExtent extent = Extent({w.k, w.n, w.scheme});
  std::memcpy(out, w.codes.data(), w.codes.size());
  std::memcpy(out + extent.scales_offset(), w.scales.data(), w.scales.size());
  if (!w.zeros.empty()) std::memcpy(out + extent.zeros_offset(), w.zeros.data(), w.zeros.size());
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
