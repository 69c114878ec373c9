// Random values by SplitMix64: no standard distribution gives the same numbers everywhere.
#include "tests/testing/random_weight.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/base/half.h"

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
  // Near enough to a standard normal: the sum of four uniforms.
  float Normal() { return (Unit() + Unit() + Unit() + Unit() - 2.0f) * 1.7320508f; }

 private:
  uint64_t state_;
};

uint32_t ToBits(float value, DType dtype) {
  if (dtype == DType::kFp16) return FloatToHalf(value);
  return dtype == DType::kBf16 ? FloatToBf16(value) : std::bit_cast<uint32_t>(value);
}

// Bits of scales that are finite and awkward: 0, -0, least and largest denormal, least normal,
// largest finite, negative ones.
std::vector<uint32_t> ExtremeBits(DType dtype) {
  if (dtype == DType::kFp16) return {0, 0x8000, 1, 0x3ff, 0x400, 0x7bff, 0xfbff, 0x8001};
  if (dtype == DType::kBf16) return {0, 0x8000, 1, 0x7f, 0x80, 0x7f7f, 0xff7f, 0x8001};
  return {0, 0x80000000u, 1, 0x7fffff, 0x800000, 0x7f7fffff, 0xff7fffff, 0x80000001u};
}

uint32_t RandomScale(Random* random, DType dtype, Scales kind) {
  if (kind == Scales::kExtreme && random->Below(2) == 0) {
    const std::vector<uint32_t> extreme = ExtremeBits(dtype);
    return extreme[random->Below(static_cast<uint32_t>(extreme.size()))];
  }
  const float magnitude = 0.001f + 0.029f * random->Unit();
  return ToBits(random->Below(2) == 0 ? magnitude : -magnitude, dtype);
}

}  // namespace

CanonicalWeight RandomWeight(const WeightSpec& spec) {
  CanonicalWeight out;
  out.k = spec.k;
  out.n = spec.n;
  out.scheme = spec.scheme;
  out.format = "random";
  if (out.scheme.group_size == 0) out.scheme.group_size = std::min<int64_t>(128, spec.k);
  Random random(spec.seed);
  const int code_bits = out.code_bits();
  const uint8_t mask = static_cast<uint8_t>((1 << out.scheme.bits) - 1);
  out.codes.resize(out.k * out.row_bytes());
  for (uint8_t& byte : out.codes) {
    const uint64_t bits = random.Next();
    byte = 0;
    for (int at = 0; at < 8; at += code_bits) {
      byte |= static_cast<uint8_t>((bits >> at * 4 & mask) << at);
    }
  }
  const int64_t cells = out.groups() * out.n;
  if (out.scheme.zero_kind == ZeroKind::kInteger) {
    out.zeros.resize(cells);
    for (uint8_t& zero : out.zeros) {
      zero = static_cast<uint8_t>(random.Below(1u << out.scheme.bits));
    }
  }
  const int64_t size = SizeOf(out.scheme.scale_dtype);
  out.scales.resize(cells * size);
  for (int64_t i = 0; i < cells; ++i) {
    const uint32_t bits = RandomScale(&random, out.scheme.scale_dtype, spec.scales);
    std::memcpy(out.scales.data() + i * size, &bits, size);
  }
  if (spec.bias) {
    out.bias.resize(out.n);
    for (float& b : out.bias) b = HalfToFloat(FloatToHalf(random.Normal()));
  }
  return out;
}

std::vector<uint8_t> RandomMatrix(int64_t rows, int64_t cols, DType dtype, uint64_t seed) {
  std::vector<uint8_t> out(rows * cols * SizeOf(dtype));
  Random random(seed ^ 0x5bd1e995u);
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
  return std::bit_cast<float>(bits);
}

}  // namespace awqd::testing
