// 4 and 8 lanes of NEON: conversions, loads and stores of elements,
// transposes. Everything has internal linkage.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "kernels/cpu/bodies/bodies.h"

namespace awqd::cpu {
namespace {

inline uint8x16_t FlipSigns(uint8x16_t bytes) { return veorq_u8(bytes, vdupq_n_u8(0x80)); }

// 8 codes of E4M3, as signed numbers, as FP16 values of 2^-8 of theirs: the exponent's bias differs
// by 8. A subnormal code becomes a subnormal half, exactly.
inline float16x8_t HalvesOfE4m3(int16x8_t codes) {
  // The sign at bits 15 and up, exponent and mantissa at bits 7 to 13.
  const uint16x8_t wide = vreinterpretq_u16_s16(vshlq_n_s16(codes, 7));
  const uint16x8_t halves = vandq_u16(wide, vdupq_n_u16(0xbf80));
  // NaN, all ones, alone carries into bit 14, which makes it a NaN again.
  const uint16x8_t carry = vaddq_u16(halves, vdupq_n_u16(0x80));
  return vreinterpretq_f16_u16(vorrq_u16(halves, vandq_u16(carry, vdupq_n_u16(0x4000))));
}

// Whether 8 scales are such that products with integers below 256 are normal halves.
inline bool Ordinary(const float* scales) {
  uint32x4_t fits = vdupq_n_u32(~0u);
  for (int i = 0; i < 8; i += 4) {
    const float32x4_t size = vabsq_f32(vld1q_f32(scales + i));
    fits = vandq_u32(fits, vcgeq_f32(size, vdupq_n_f32(0x1p-14f)));
    fits = vandq_u32(fits, vcleq_f32(size, vdupq_n_f32(128)));
  }
  return vminvq_u32(fits) != 0;
}

inline uint16x4_t ToFp16(float32x4_t v) { return vreinterpret_u16_f16(vcvt_f16_f32(v)); }

// Round to nearest even; NaNs become quiet.
inline uint16x4_t ToBf16(float32x4_t v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), 16);
}

inline uint16x4_t Round4(float32x4_t v, Element type) {
  return type == Element::kFp16 ? ToFp16(v) : ToBf16(v);
}

inline float32x4_t Load4(const void* in, Element type, int64_t index) {
  if (type == Element::kFp32) return vld1q_f32(static_cast<const float*>(in) + index);
  const uint16x4_t bits = vld1_u16(static_cast<const uint16_t*>(in) + index);
  if (type == Element::kFp16) return vcvt_f32_f16(vreinterpret_f16_u16(bits));
  return vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
}

inline void Store8(void* out, Element type, int64_t index, float32x4_t low, float32x4_t high) {
  if (type == Element::kFp32) {
    vst1q_f32(static_cast<float*>(out) + index, low);
    vst1q_f32(static_cast<float*>(out) + index + 4, high);
    return;
  }
  vst1q_u16(static_cast<uint16_t*>(out) + index,
            vcombine_u16(Round4(low, type), Round4(high, type)));
}

// One element, through the vector conversions so that every element rounds alike.
inline float Load1(const void* in, Element type, int64_t index) {
  if (type == Element::kFp32) return static_cast<const float*>(in)[index];
  const uint16x4_t bits = vdup_n_u16(static_cast<const uint16_t*>(in)[index]);
  if (type == Element::kFp16) return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(bits)), 0);
  return vgetq_lane_f32(vreinterpretq_f32_u32(vshll_n_u16(bits, 16)), 0);
}

inline void Store1(void* out, Element type, int64_t index, float value) {
  if (type == Element::kFp32) {
    static_cast<float*>(out)[index] = value;
  } else {
    static_cast<uint16_t*>(out)[index] = vget_lane_u16(Round4(vdupq_n_f32(value), type), 0);
  }
}

inline void Load8To(const void* in, Element type, int64_t index, float* out) {
  vst1q_f32(out, Load4(in, type, index));
  vst1q_f32(out + 4, Load4(in, type, index + 4));
}

// 8 floats from memory, added and stored with one rounding.
inline void Store8Plus(void* out, Element type, int64_t index, const float* v, const float* bias) {
  float32x4_t low = vld1q_f32(v), high = vld1q_f32(v + 4);
  if (bias != nullptr) {
    low = vaddq_f32(low, vld1q_f32(bias));
    high = vaddq_f32(high, vld1q_f32(bias + 4));
  }
  Store8(out, type, index, low, high);
}

inline void Zeros8(const uint8_t* in, float* out) {
  const uint16x8_t wide = vmovl_u8(vld1_u8(in));
  vst1q_f32(out, vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))));
  vst1q_f32(out + 4, vcvtq_f32_u32(vmovl_high_u16(wide)));
}

inline void StreamFence() {}

inline uint32x4_t ZipLow(uint32x4_t a, uint32x4_t b) {
  return vreinterpretq_u32_u64(vzip1q_u64(vreinterpretq_u64_u32(a), vreinterpretq_u64_u32(b)));
}
inline uint32x4_t ZipHigh(uint32x4_t a, uint32x4_t b) {
  return vreinterpretq_u32_u64(vzip2q_u64(vreinterpretq_u64_u32(a), vreinterpretq_u64_u32(b)));
}

// out[i * stride + c] = in[c * 16 + i] for 4 columns of 4 words.
inline void Transpose4x4(const uint32_t* in, uint32_t* out, int64_t stride) {
  const uint32x4_t a = vld1q_u32(in), b = vld1q_u32(in + 16), c = vld1q_u32(in + 32),
                   d = vld1q_u32(in + 48);
  const uint32x4_t ab[2] = {vtrn1q_u32(a, b), vtrn2q_u32(a, b)};
  const uint32x4_t cd[2] = {vtrn1q_u32(c, d), vtrn2q_u32(c, d)};
  for (int i = 0; i < 2; ++i) {
    vst1q_u32(out + i * stride, ZipLow(ab[i], cd[i]));
    vst1q_u32(out + (i + 2) * stride, ZipHigh(ab[i], cd[i]));
  }
}

// The same for 8 columns of 16 words.
inline void TransposeTile(const uint32_t* in, uint32_t* out, int64_t stride) {
  for (int i = 0; i < 16; i += 4) {
    Transpose4x4(in + i, out + i * stride, stride);
    Transpose4x4(in + 4 * 16 + i, out + i * stride + 4, stride);
  }
}

// out[i * stride + c] = in[c * in_stride + i] for 8 columns of 16 bytes.
inline void TransposeTileOfBytes(const uint8_t* in, int64_t in_stride, uint8_t* out,
                                 int64_t stride) {
  for (int half = 0; half < 16; half += 8) {
    // Rows half .. half + 7 of two columns.
    const auto pair = [&](int c) {
      const uint8_t* at = in + c * in_stride + half;
      return vreinterpretq_u16_u8(vcombine_u8(vzip1_u8(vld1_u8(at), vld1_u8(at + in_stride)),
                                              vzip2_u8(vld1_u8(at), vld1_u8(at + in_stride))));
    };
    const uint16x8_t a = pair(0), b = pair(2), c = pair(4), d = pair(6);
    const uint32x4_t low[2] = {vreinterpretq_u32_u16(vzip1q_u16(a, b)),
                               vreinterpretq_u32_u16(vzip2q_u16(a, b))};
    const uint32x4_t high[2] = {vreinterpretq_u32_u16(vzip1q_u16(c, d)),
                                vreinterpretq_u32_u16(vzip2q_u16(c, d))};
    for (int quarter = 0; quarter < 2; ++quarter) {
      uint8_t* to = out + (half + quarter * 4) * stride;
      const uint8x16_t rows[2] = {vreinterpretq_u8_u32(vzip1q_u32(low[quarter], high[quarter])),
                                  vreinterpretq_u8_u32(vzip2q_u32(low[quarter], high[quarter]))};
      for (int i = 0; i < 2; ++i) {
        vst1_u8(to + 2 * i * stride, vget_low_u8(rows[i]));
        vst1_u8(to + (2 * i + 1) * stride, vget_high_u8(rows[i]));
      }
    }
  }
}

}  // namespace
}  // namespace awqd::cpu
