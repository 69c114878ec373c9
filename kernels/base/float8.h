// Portable conversions of the floating-point types of 4 and 8 bits to float, where every value is
// exact, and of float to E4M3.
//
// Source: OCP 8-bit Floating Point Specification 1.0 (E4M3) and OCP Microscaling Formats 1.0 (E2M1,
// E8M0).
#pragma once

#include <bit>
#include <cstdint>

namespace awqd {

// 1 sign, 4 exponent (bias 7), 3 mantissa bits. No infinity; 0x7f and 0xff are NaN.
constexpr float E4m3ToFloat(uint8_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x80u) << 24;
  const uint32_t exponent = bits >> 3 & 15u, mantissa = bits & 7u;
  if ((bits & 0x7fu) == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (exponent == 0) {  // mantissa * 2^-9
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | (exponent + 120) << 23 | mantissa << 20);
}

inline constexpr float kLargestE4m3 = 448;

// The nearest number, of two the one with an even mantissa; beyond the largest the largest. NaN is
// NaN.
constexpr uint8_t FloatToE4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu;
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  if (magnitude > 0x7f800000u) return sign | 0x7fu;
  if (magnitude >= std::bit_cast<uint32_t>(kLargestE4m3)) return sign | 0x7eu;
  if (magnitude < std::bit_cast<uint32_t>(0x1p-6f)) {  // a multiple of 2^-9
    constexpr float kRound = 0x1.8p14f;                // its last bit is 2^-9
    const float sum = std::bit_cast<float>(magnitude) + kRound;
    return sign | static_cast<uint8_t>(std::bit_cast<uint32_t>(sum) & 0xffu);
  }
  const uint32_t odd = magnitude >> 20 & 1u;
  return sign | static_cast<uint8_t>(((magnitude + 0x7ffffu + odd) >> 20) - (120u << 3));
}

// 1 sign, 2 exponent (bias 1), 1 mantissa bit: 0 0.5 1 1.5 2 3 4 6. Reads the low 4 bits.
constexpr float E2m1ToFloat(uint8_t bits) {
  constexpr float kMagnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const uint32_t sign = static_cast<uint32_t>(bits & 8u) << 28;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(kMagnitudes[bits & 7]));
}

// 2^(bits - 127); 0xff is NaN.
constexpr float E8m0ToFloat(uint8_t bits) {
  if (bits == 0xff) return std::bit_cast<float>(0x7fc00000u);
  if (bits == 0) return 0x1p-127f;
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 23);
}

}  // namespace awqd
