// Conversions between float and the bits of fp16 and bf16, rounding to nearest even.
//
// The client carries its own so that it needs nothing but the protos; NaNs stay NaNs (quiet),
// values past the largest finite one round to infinity, subnormals are kept.
#pragma once

#include <bit>
#include <cstdint>

namespace awqd::client {

constexpr float HalfToFloat(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    const uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | quiet | ((magnitude & 0x3ffu) << 13));
  }
  // Read as a float, the shifted bits are too small by 2^112, subnormals included; the product is
  // exact.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(scaled));
}

constexpr uint16_t FloatToHalf(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65536 and above
  // Bits that fall away: 13 of the mantissa, and one more for every step below 2^-14.
  const uint32_t exponent = magnitude >> 23;
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  if (exponent < 102) return static_cast<uint16_t>(sign);  // below 2^-25: nearer to 0
  const uint32_t drop = exponent >= 113 ? 13 : 13 + (113 - exponent);
  const uint32_t kept = mantissa >> drop;
  const uint32_t rest = mantissa & ((1u << drop) - 1);
  const uint32_t half_unit = 1u << (drop - 1);
  const uint32_t up = rest > half_unit || (rest == half_unit && (kept & 1u)) ? 1 : 0;
  // The hidden bit of `kept` adds one to the exponent field; a carry out of the mantissa does too.
  const uint32_t base = exponent >= 113 ? (exponent - 113) << 10 : 0;
  return static_cast<uint16_t>(sign | (base + kept + up));
}

constexpr float Bf16ToFloat(uint16_t bf16) {
  return std::bit_cast<float>(static_cast<uint32_t>(bf16) << 16);
}

constexpr uint16_t FloatToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace awqd::client
