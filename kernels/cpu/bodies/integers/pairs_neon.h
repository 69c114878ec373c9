// Pairs of the NEON body. Included by int_vec.h; everything has internal linkage.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace awqd::cpu {
namespace {

// Sums of products of pairs. NEON multiplies 16-bit integers and adds each product to a lane of its
// own, so a pair has two lanes until the end.
struct PairSums {
  int32x4_t v[8] = {};

  template <typename P>
  void AddProducts(const P& a, const P& b) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int16x8_t x = vreinterpretq_s16_u32(a.v[i]), w = vreinterpretq_s16_u32(b.v[i]);
      v[2 * i] = vmlal_s16(v[2 * i], vget_low_s16(x), vget_low_s16(w));
      v[2 * i + 1] = vmlal_high_s16(v[2 * i + 1], x, w);
    }
  }
  int32x4_t Quad(int i) const { return vpaddq_s32(v[2 * i], v[2 * i + 1]); }
  Vec::F ToFloat() const {
    return Vec::Each([this](int i) { return vcvtq_f32_s32(Quad(i)); });
  }
  void Store(int32_t* p) const {
    for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, Quad(i));
  }
};

struct Pairs {
  // Three tokens' sums take 24 registers of 32.
  static constexpr int kVectors = 1, kTokens = 3;
  using Sums = PairSums;
  uint32x4_t v[4] = {};

  static Pairs Load(const void* p) {
    return Each([p](int i) { return vld1q_u32(static_cast<const uint32_t*>(p) + 4 * i); });
  }
  static Pairs LoadWritten(const void* p) { return Load(p); }
  void Store(void* p) const {
    for (int i = 0; i < 4; ++i) vst1q_u32(static_cast<uint32_t*>(p) + 4 * i, v[i]);
  }
  static Pairs Set(uint32_t lane) {
    return Each([lane](int) { return vdupq_n_u32(lane); });
  }
  static Pairs Bytes(const uint8_t* low, const uint8_t* high) {
    const uint16x8_t a = vmovl_u8(vld1_u8(low)), b = vmovl_u8(vld1_u8(high));
    return {{vmovl_u16(vget_low_u16(a)), vmovl_high_u16(a), vmovl_u16(vget_low_u16(b)),
             vmovl_high_u16(b)}};
  }
  Pairs operator&(const Pairs& o) const {
    return Each([&](int i) { return vandq_u32(v[i], o.v[i]); });
  }
  Pairs operator|(const Pairs& o) const {
    return Each([&](int i) { return vorrq_u32(v[i], o.v[i]); });
  }
  Pairs operator^(const Pairs& o) const {
    return Each([&](int i) { return veorq_u32(v[i], o.v[i]); });
  }
  Pairs operator>>(int bits) const {
    return Each([&](int i) { return vshlq_u32(v[i], vdupq_n_s32(-bits)); });
  }
  Pairs operator<<(int bits) const {
    return Each([&](int i) { return vshlq_u32(v[i], vdupq_n_s32(bits)); });
  }
  // The lower and the upper two bytes of each lane, each to 16 bits.
  Pairs LowBytes() const { return HalfBytes(0); }
  Pairs HighBytes() const { return HalfBytes(16); }
  // Of 16-bit integers, modulo 2^16.
  Pairs Minus(const Pairs& o) const {
    return Each([&](int i) {
      return vreinterpretq_u32_u16(
          vsubq_u16(vreinterpretq_u16_u32(v[i]), vreinterpretq_u16_u32(o.v[i])));
    });
  }
  Pairs Times(const Pairs& o) const {
    return Each([&](int i) {
      return vreinterpretq_u32_u16(
          vmulq_u16(vreinterpretq_u16_u32(v[i]), vreinterpretq_u16_u32(o.v[i])));
    });
  }

  // Of one integer in each lane: rounded to the nearest, ties to even; of 16 signed bytes.
  static Pairs Rounded(const Vec::F& f) {
    return Each([&](int i) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(f.q[i])); });
  }
  static Pairs Signed(const int8_t* p) {
    const int8x16_t all = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_high_s8(all);
    return {{vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(low))),
             vreinterpretq_u32_s32(vmovl_high_s16(low)),
             vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(high))),
             vreinterpretq_u32_s32(vmovl_high_s16(high))}};
  }
  Pairs Plus(const Pairs& o) const {
    return Each([&](int i) { return vaddq_u32(v[i], o.v[i]); });
  }
  int32_t SumOfAll() const {
    return vaddvq_s32(
        vreinterpretq_s32_u32(vaddq_u32(vaddq_u32(v[0], v[1]), vaddq_u32(v[2], v[3]))));
  }
  // The lower 8 or 16 bits of each lane.
  void StoreBytes(void* p) const {
    vst1q_u8(static_cast<uint8_t*>(p),
             vcombine_u8(vmovn_u16(Halves(v[0], v[1])), vmovn_u16(Halves(v[2], v[3]))));
  }
  void StoreHalves(void* p) const {
    vst1q_u16(static_cast<uint16_t*>(p), Halves(v[0], v[1]));
    vst1q_u16(static_cast<uint16_t*>(p) + 8, Halves(v[2], v[3]));
  }
  static uint16x8_t Halves(uint32x4_t a, uint32x4_t b) {
    return vcombine_u16(vmovn_u32(a), vmovn_u32(b));
  }

  Pairs HalfBytes(int shift) const {
    return Each([&](int i) {
      const uint32x4_t two = vshlq_u32(v[i], vdupq_n_s32(-shift));
      return vorrq_u32(vandq_u32(two, vdupq_n_u32(0xff)),
                       vandq_u32(vshlq_n_u32(two, 8), vdupq_n_u32(0xff0000)));
    });
  }
  template <typename Of>
  __attribute__((always_inline)) static Pairs Each(Of of) {
    return {{of(0), of(1), of(2), of(3)}};
  }
};

}  // namespace
}  // namespace awqd::cpu
