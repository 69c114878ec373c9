// The formula of a weight in FP32. Compiled without contraction, because a fused multiply-add would
// omit a rounding (CMakeLists.txt).
#include "kernels/exact.h"

namespace awqd {

float WeightValue(const HostWeight& weight, int64_t row, int64_t col) {
  if (weight.scheme.code == CodeKind::kVector) {
    DecodedBlock block;
    InfoOf(weight.scheme.vector).decode(weight.Block(row, col), &block);
    return block.Element(row % kVectorBlock) * weight.Outer(col);
  }
  const QuantizationScheme& d = weight.scheme;
  const int64_t group = row / weight.group_rows();
  const float code = DecodeCode(d.code, weight.table.data(), weight.Code(row, col));
  const float scale = weight.Scale(group, col);
  const float zero =
      d.real_zeros() ? weight.RealZero(group, col) : static_cast<float>(weight.Zero(group, col));
  const float value =
      d.zero_kind == ZeroKind::kRealAfter ? code * scale - zero : (code - zero) * scale;
  return weight.outer.empty() ? value : value * weight.Outer(col);
}

}  // namespace awqd
