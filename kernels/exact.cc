// The formula of a weight in FP32. Compiled without contraction, because a fused multiply-add would
// omit a rounding (CMakeLists.txt).
#include "kernels/exact.h"

namespace awqd {
namespace {

// The entry of one element of a tile.
float TrellisElement(const QuantizationScheme& scheme, const uint8_t* tile, int row, int column) {
  const int lane = column % 8 * 4 + row % 8 / 2;
  const int code = lane * 8 + column / 8 * 4 + row / 8 * 2 + row % 2;
  const int ring = 256 * scheme.bits;
  uint32_t state = 0;
  for (int i = (code + 1) * scheme.bits - 16; i < (code + 1) * scheme.bits; ++i) {
    const int at = (i + ring) % ring, bit = 31 - at % 32;
    state = state << 1 | (tile[at / 32 * 4 + bit / 8] >> (bit % 8) & 1);
  }
  return TrellisEntries(scheme.trellis)[state];
}

float TrellisValue(const HostWeight& weight, int64_t row, int64_t col) {
  const int64_t first = col / kTrellisColumns * kTrellisColumns;
  float block[kTrellisColumns];
  for (int i = 0; i < kTrellisColumns; ++i) {
    const int tile = i / kTrellisTile * kTrellisTile;
    block[i] = TrellisElement(weight.scheme, weight.Block(row, first + tile),
                              static_cast<int>(row % kTrellisTile), i - tile);
  }
  TransformBlock(kTrellisTransform, block);
  return block[col - first];
}

}  // namespace

void DecodeTrellis(const QuantizationScheme& scheme, const uint8_t* tiles, float* out) {
  const int64_t tile_bytes = int64_t{kTrellisTile} * CodeBits(scheme) / 8;
  for (int64_t tile = 0; tile < kTrellisColumns / kTrellisTile; ++tile) {
    DecodeTile(scheme.trellis, scheme.bits, tiles + tile * tile_bytes, 1, kTrellisTile,
               out + tile * kTrellisTile * kTrellisTile);
  }
  TransformBlock(kTrellisTransform, out, kTrellisTile);
}

float WeightValue(const HostWeight& weight, int64_t row, int64_t col) {
  if (weight.scheme.code == CodeKind::kVector) {
    DecodedBlock block;
    InfoOf(weight.scheme.vector).decode(weight.Block(row, col), &block);
    return block.Element(row % kVectorBlock) * weight.Outer(col);
  }
  if (weight.scheme.code == CodeKind::kTrellis) {
    return TrellisValue(weight, row, col) * weight.Outer(col);
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
