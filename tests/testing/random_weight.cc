// Random values by SplitMix64, because standard distributions give different numbers on different
// systems.
#include "tests/testing/random_weight.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/base/float8.h"
#include "kernels/base/half.h"
#include "kernels/layouts/layout.h"

namespace awqd::testing {
namespace {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 0x1234567ull) {}

  uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  uint32_t Below(uint32_t bound) { return static_cast<uint32_t>((Next() >> 32) * bound >> 32); }
  // In [0, 1).
  float Unit() { return static_cast<float>(Next() >> 40) * 0x1p-24f; }
  // Nearly a standard normal: the sum of four uniforms.
  float Normal() { return (Unit() + Unit() + Unit() + Unit() - 2.0f) * 1.7320508f; }

 private:
  uint64_t state_;
};

uint32_t ToBits(float value, DType dtype) {
  if (dtype == DType::kFp16) return FloatToHalf(value);
  if (dtype == DType::kE4m3) return FloatToE4m3(value);
  return dtype == DType::kBf16 ? FloatToBf16(value) : std::bit_cast<uint32_t>(value);
}

// Bits of scales that are finite and unusual: 0, -0, least and largest denormal, least normal,
// largest finite, negative ones.
std::vector<uint32_t> ExtremeBits(DType dtype) {
  if (dtype == DType::kBf16) return {0, 0x8000, 1, 0x7f, 0x80, 0x7f7f, 0xff7f, 0x8001};
  return {0, 0x80000000u, 1, 0x7fffff, 0x800000, 0x7f7fffff, 0xff7fffff, 0x80000001u};
}

// The same for FP16, in a column of small scales or of large ones.
std::vector<uint32_t> ExtremeHalfBits(bool large) {
  if (large) return {0, 0x8000, 0x7bff, 0xfbff};
  return {0, 0x8000, 1, 0x3ff, 0x400, 0x8001};
}

uint32_t RandomScale(Random* random, DType dtype, Scales kind, int64_t column) {
  const bool large = kind == Scales::kExtreme && dtype == DType::kFp16 && column % 2 == 1;
  if (kind == Scales::kExtreme && random->Below(2) == 0) {
    const std::vector<uint32_t> extreme =
        dtype == DType::kFp16 ? ExtremeHalfBits(large) : ExtremeBits(dtype);
    return extreme[random->Below(static_cast<uint32_t>(extreme.size()))];
  }
  float magnitude = 0.001f + 0.029f * random->Unit();
  if (large) magnitude *= 1000;
  if (kind == Scales::kLarge) magnitude = 1024 + 64480 * random->Unit();
  return ToBits(random->Below(2) == 0 ? magnitude : -magnitude, dtype);
}

// Blocks of any bits, but with an ordinary or a very small d.
void FillBlocks(Random* random, Scales kind, HostWeight* w) {
  const int64_t bytes = VectorBlockBytes(w->scheme.vector);
  const auto end = static_cast<int64_t>(w->codes.size());
  for (uint8_t& byte : w->codes) byte = static_cast<uint8_t>(random->Next());
  // The sign and the upper bits of the exponent of d are the same bits of another byte in iq1_m.
  const int64_t at = w->scheme.vector == VectorCode::kIq1M ? bytes - 1 : 1;
  for (int64_t i = at; i < end; i += bytes) {
    w->codes[i] = kind == Scales::kExtreme ? w->codes[i] & 0xbf : (w->codes[i] & 0x8f) | 0x10;
  }
}

void FillCodes(Random* random, HostWeight* w) {
  const int code_bits = w->code_bits();
  const uint8_t mask = static_cast<uint8_t>((1 << w->scheme.bits) - 1);
  for (uint8_t& byte : w->codes) {
    const uint64_t bits = random->Next();
    byte = 0;
    for (int at = 0; at < 8; at += code_bits) {
      byte |= static_cast<uint8_t>((bits >> at * 4 & mask) << at);
    }
    // These codes are NaN.
    if (w->scheme.code == CodeKind::kE4m3 && (byte & 0x7f) == 0x7f) byte ^= 1;
  }
  // The bits beyond N are 0.
  const int64_t row = w->row_bytes(), spare = row * 8 - w->n * code_bits;
  for (int64_t i = 1; spare > 0 && i <= w->k; ++i) w->codes[i * row - 1] &= 0xff >> spare;
}

void FillZeros(Random* random, HostWeight* w) {
  const QuantizationScheme& d = w->scheme;
  if (d.zero_kind == ZeroKind::kStored) {
    for (uint8_t& zero : w->zeros) zero = static_cast<uint8_t>(random->Below(1u << d.bits));
    return;
  }
  // Before the scale a zero has the size of codes, after it the size of weights.
  const float size = d.zero_kind == ZeroKind::kRealBefore ? (1 << d.bits) : 0.1f;
  for (size_t i = 0; i < w->zeros.size() / SizeOf(d.zero_dtype); ++i) {
    SetElement(&w->zeros, d.zero_dtype, static_cast<int64_t>(i), size * random->Unit());
  }
}

void FillScales(Random* random, Scales kind, HostWeight* w) {
  if (!w->scheme.scale_dtype) return;
  const DType dtype = *w->scheme.scale_dtype;
  const int64_t size = SizeOf(dtype), cells = static_cast<int64_t>(w->scales.size()) / size;
  for (int64_t i = 0; i < cells; ++i) {
    uint32_t bits = 0;
    if (IsFloating(dtype)) {
      bits = RandomScale(random, dtype, kind, i % w->shape().column_blocks());
    } else if (dtype == DType::kE8m0) {
      bits = 118 + random->Below(8);
    } else if (dtype == DType::kE4m3) {
      bits = random->Below(0x7f);
    } else {
      bits = 1 + random->Below(17);
    }
    std::memcpy(w->scales.data() + i * size, &bits, size);
  }
}

void FillOrder(Random* random, HostWeight* w) {
  w->order.resize(w->k);
  for (int64_t i = 0; i < w->k; ++i) w->order[i] = static_cast<int32_t>(i);
  for (int64_t i = w->k - 1; i > 0; --i) {
    std::swap(w->order[i], w->order[random->Below(static_cast<uint32_t>(i + 1))]);
  }
}

}  // namespace

HostWeight RandomWeight(const WeightSpec& spec) {
  WeightShape shape = {spec.k, spec.n, spec.scheme};
  if (shape.scheme.block_rows >= spec.k && shape.scheme.rows_of_code() == 1) {
    shape.scheme.block_rows = 0;
  }
  HostWeight out = MakeEmpty(shape);
  out.format = "random";
  Random random(spec.seed);
  if (spec.scheme.code == CodeKind::kVector) {
    FillBlocks(&random, spec.scales, &out);
  } else if (spec.scheme.code == CodeKind::kTrellis) {
    for (uint8_t& byte : out.codes) byte = static_cast<uint8_t>(random.Next());
  } else {
    FillCodes(&random, &out);
  }
  FillZeros(&random, &out);
  FillScales(&random, spec.scales, &out);
  if (spec.scheme.code == CodeKind::kTable) {
    for (int i = 0; i < 16; ++i) out.table.push_back(random.Normal());
  }
  for (float& outer : out.outer) outer = 0.5f + random.Unit();
  if (spec.bias) {
    out.bias.resize(out.n);
    for (float& b : out.bias) b = HalfToFloat(FloatToHalf(random.Normal()));
  }
  if (spec.order) FillOrder(&random, &out);
  if (spec.hadamard > 0) {
    out.hadamard = {spec.hadamard, 1 / std::sqrt(static_cast<float>(spec.hadamard))};
  }
  if (spec.factor) {
    for (int64_t i = 0; i < out.k; ++i) out.factor.push_back(0.5f + random.Unit());
  }
  return out;
}

std::vector<uint8_t> RandomMatrix(int64_t rows, int64_t cols, DType dtype, uint64_t seed) {
  std::vector<uint8_t> out(rows * cols * SizeOf(dtype));
  Random random(seed ^ 0x5bd1e995u);
  if (dtype == DType::kInt8) {
    for (uint8_t& value : out) value = static_cast<uint8_t>(random.Next());
    return out;
  }
  for (int64_t i = 0; i < rows * cols; ++i) SetElement(&out, dtype, i, random.Normal());
  return out;
}

void SetElement(std::vector<uint8_t>* matrix, DType dtype, int64_t index, float value) {
  const uint32_t bits = ToBits(value, dtype);
  std::memcpy(matrix->data() + index * SizeOf(dtype), &bits, SizeOf(dtype));
}

float GetElement(const std::vector<uint8_t>& matrix, DType dtype, int64_t index) {
  uint32_t bits = 0;
  std::memcpy(&bits, matrix.data() + index * SizeOf(dtype), SizeOf(dtype));
  if (dtype == DType::kFp16) return HalfToFloat(static_cast<uint16_t>(bits));
  if (dtype == DType::kBf16) return Bf16ToFloat(static_cast<uint16_t>(bits));
  if (dtype == DType::kE4m3) return E4m3ToFloat(static_cast<uint8_t>(bits));
  return std::bit_cast<float>(bits);
}

}  // namespace awqd::testing
