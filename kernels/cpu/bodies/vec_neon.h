// 16 floats in four NEON registers: the vector that the bodies are written over, for aarch64. Of
// the architecture's first version only: no flags, so every machine has it.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "kernels/cpu/bodies/lanes_neon.h"

namespace awqd::cpu {
namespace {

struct Vec {
  struct F {
    float32x4_t q[4];
  };
  static constexpr int kRows = 3;
  // Tiles of more sums than this leave no registers for tables and codes.
  static constexpr int kRoomySums = 2;
  static constexpr int kColumns = 2;
  // A decoded vector costs sixteen instructions: several groups of rows share it through memory.
  static constexpr bool kUsePanel = true;
  static constexpr bool kUnroll = true;
  // In a tile that decodes for itself sums, one decoded vector and one of x, a table and constants
  // have 32 registers.
  static constexpr int Columns(int rows) { return rows < 3 ? kColumns : 1; }

  // of(i) for the four registers.
  template <typename Of>
  __attribute__((always_inline)) static F Each(Of of) {
    return {{of(0), of(1), of(2), of(3)}};
  }
  static F Zero() { return Set(0); }
  static F Load(const float* p) {
    return Each([p](int i) { return vld1q_f32(p + 4 * i); });
  }
  static void Store(float* p, const F& v) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, v.q[i]);
  }
  static F Fma(const F& a, const F& b, const F& c) {
    return Each([&](int i) { return vfmaq_f32(c.q[i], a.q[i], b.q[i]); });
  }
  // The sign of c is changed, not that of the result: a difference of equals is +0.
  static F Fms(const F& a, const F& b, const F& c) {
    return Each([&](int i) { return vfmaq_f32(vnegq_f32(c.q[i]), a.q[i], b.q[i]); });
  }
  static F Sub(const F& a, const F& b) {
    return Each([&](int i) { return vsubq_f32(a.q[i], b.q[i]); });
  }
  static F Mul(const F& a, const F& b) {
    return Each([&](int i) { return vmulq_f32(a.q[i], b.q[i]); });
  }
  static F Set(float v) {
    return Each([v](int) { return vdupq_n_f32(v); });
  }
  static F Load16Of(const void* in, Element type, int64_t index) {
    return Each([&](int i) { return Load4(in, type, index + 4 * i); });
  }
  static F Add(const F& a, const F& b) {
    return Each([&](int i) { return vaddq_f32(a.q[i], b.q[i]); });
  }
  static F Abs(const F& v) {
    return Each([&](int i) { return vabsq_f32(v.q[i]); });
  }
  static F Max(const F& a, const F& b) {
    return Each([&](int i) { return vmaxq_f32(a.q[i], b.q[i]); });
  }
  static float MaxOfAll(const F& v) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(v.q[0], v.q[1]), vmaxq_f32(v.q[2], v.q[3])));
  }
  // Halves folded onto each other, as AVX-512 does it.
  static float SumOfAll(const F& v) {
    const float32x4_t of_4 = vaddq_f32(vaddq_f32(v.q[0], v.q[2]), vaddq_f32(v.q[1], v.q[3]));
    const float32x2_t of_2 = vadd_f32(vget_low_f32(of_4), vget_high_f32(of_4));
    return vget_lane_f32(of_2, 0) + vget_lane_f32(of_2, 1);
  }
  static F RoundToHalf(const F& v) {
    return Each([&](int i) { return vcvt_f32_f16(vcvt_f16_f32(v.q[i])); });
  }
  using Part = float32x4_t;
  static constexpr int kParts = 4;
  template <int kPart>
  static Part LoadPart(const float* p) {
    return vld1q_f32(p + kPart * 4);
  }
  template <int kPart>
  static void FmaPart(Part a, Part b, F* c) {
    c->q[kPart] = vfmaq_f32(c->q[kPart], a, b);
  }

  // out[i]: the lanes of v[i], halves folded onto each other four times. Writes whole registers.
  template <int kCount>
  static void Sums(const F* v, float* out) {
    const auto at = [&](int i) {
      const F& f = v[i < kCount ? i : 0];
      return vaddq_f32(vaddq_f32(f.q[0], f.q[2]), vaddq_f32(f.q[1], f.q[3]));
    };
#pragma GCC unroll 8
    for (int i = 0; i < kCount; i += 4) {
      vst1q_f32(out + i, vpaddq_f32(FoldPairs(at(i), at(i + 1)), FoldPairs(at(i + 2), at(i + 3))));
    }
  }
  // [a | b], 2 lanes each.
  static float32x4_t FoldPairs(float32x4_t a, float32x4_t b) {
    const float64x2_t x = vreinterpretq_f64_f32(a), y = vreinterpretq_f64_f32(b);
    return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(x, y)),
                     vreinterpretq_f32_f64(vzip2q_f64(x, y)));
  }

  // Codes are below 16. The look-up takes bytes: those of entry i are 4 i to 4 i + 3.
  static float32x4_t LookupQuad(const uint8x16x4_t& table, uint32x4_t codes) {
    const uint32x4_t bytes = vmlaq_u32(vdupq_n_u32(0x03020100), codes, vdupq_n_u32(0x04040404));
    return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(bytes)));
  }
  static uint8x16x4_t BytesOf(const F& table) {
    return {{vreinterpretq_u8_f32(table.q[0]), vreinterpretq_u8_f32(table.q[1]),
             vreinterpretq_u8_f32(table.q[2]), vreinterpretq_u8_f32(table.q[3])}};
  }
  // table[words[i] >> shift], whose low 4 bits are the index.
  static F Lookup(const F& table, const uint32_t* words, int shift) {
    const uint8x16x4_t bytes = BytesOf(table);
    const int32x4_t right = vdupq_n_s32(-shift);
    return Each([&](int i) {
      const uint32x4_t codes = vshlq_u32(vld1q_u32(words + 4 * i), right);
      return LookupQuad(bytes, vandq_u32(codes, vdupq_n_u32(15)));
    });
  }
  template <int kShift>
  static uint32x4_t CodesAt(uint32x4_t words) {
    if constexpr (kShift == 28) return vshrq_n_u32(words, 28);
    if constexpr (kShift > 0) words = vshrq_n_u32(words, kShift);
    return vandq_u32(words, vdupq_n_u32(15));
  }
  template <int kShift>
  static F LookupAt(const F& table, const uint32_t* words) {
    const uint8x16x4_t bytes = BytesOf(table);
    return Each(
        [&](int i) { return LookupQuad(bytes, CodesAt<kShift>(vld1q_u32(words + 4 * i))); });
  }
  // 2^23 + (words[i] >> shift & mask).
  static F Magic(const uint32_t* words, int shift, int mask) {
    const int32x4_t right = vdupq_n_s32(-shift);
    const uint32x4_t m = vdupq_n_u32(static_cast<uint32_t>(mask));
    return Each([&](int i) {
      const uint32x4_t codes = vandq_u32(vshlq_u32(vld1q_u32(words + 4 * i), right), m);
      return vreinterpretq_f32_u32(vorrq_u32(codes, vdupq_n_u32(0x4b000000)));
    });
  }
  static F Signed(const uint8_t* bytes) {
    const int8x16_t all = vreinterpretq_s8_u8(vld1q_u8(bytes));
    const int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_high_s8(all);
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
  }
  // The bytes have their upper bit flipped.
  static F Flipped(const uint8_t* bytes) {
    const uint8x16_t all = FlipSigns(vld1q_u8(bytes));
    const uint16x8_t low = vmovl_u8(vget_low_u8(all)), high = vmovl_high_u8(all);
    return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_high_u16(low)),
             vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_high_u16(high))}};
  }
  // 2^-8 of each.
  static F E4m3(const uint8_t* bytes) {
    const int8x16_t all = vreinterpretq_s8_u8(vld1q_u8(bytes));
    const float16x8_t low = HalvesOfE4m3(vmovl_s8(vget_low_s8(all)));
    const float16x8_t high = HalvesOfE4m3(vmovl_high_s8(all));
    return {{vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low),
             vcvt_f32_f16(vget_low_f16(high)), vcvt_high_f32_f16(high)}};
  }
  static void WidenLanes(const uint8_t* block, int bits, uint32_t* words) {
    for (int i = 0; i < 16; i += 8) {
      const uint16x8_t low =
          bits == 1 ? vmovl_u8(vld1_u8(block + i)) : vreinterpretq_u16_u8(vld1q_u8(block + 2 * i));
      const uint16x8_t high = bits == 3 ? vmovl_u8(vld1_u8(block + 32 + i)) : vdupq_n_u16(0);
      vst1q_u16(reinterpret_cast<uint16_t*>(words + i), vzip1q_u16(low, high));
      vst1q_u16(reinterpret_cast<uint16_t*>(words + i + 4), vzip2q_u16(low, high));
    }
  }

  // There is no streaming store to ask for; the machine sees by itself that lines are written
  // whole.
  static void Stream32(const F& a, const F& b, Element type, void* out) {
    Store8(out, type, 0, a.q[0], a.q[1]);
    Store8(out, type, 8, a.q[2], a.q[3]);
    Store8(out, type, 16, b.q[0], b.q[1]);
    Store8(out, type, 24, b.q[2], b.q[3]);
  }
};

}  // namespace
}  // namespace awqd::cpu
