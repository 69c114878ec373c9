// ByteLanes for NEON with dot products: what column_product.h and quads_body.h are written over. One
// instruction adds four products of signed bytes to each of four lanes. Everything has internal
// linkage.
#pragma once

#include <arm_neon.h>

#include "kernels/cpu/bodies/integers/eights.h"
#include "kernels/cpu/bodies/integers/times.h"

namespace awqd::cpu {
namespace {

struct ByteLanes {
  using Sums = int32x4_t;
  // Tokens whose sums of 8 columns stay in registers, beside the codes of a column.
  static constexpr int kTokens = 2;
  static constexpr bool kDigitsOf8Bits = true;
  // Codes of 8 bits are taken as they are stored, signed: 128 less.
  static constexpr int32_t TakenOff(int bits) { return bits == 8 ? 128 : 0; }

  // 128 codes of a column, as bytes.
  template <int kBits>
  struct Column {
    int8x16_t v[8];

    static AWQD_ALWAYS_INLINE Column Load(const uint8_t* block) {
      Column out;
      if constexpr (kBits == 8) {
        Times<8>([&](auto i) AWQD_ALWAYS_INLINE {
          out.v[i] = vreinterpretq_s8_u8(vld1q_u8(block + 16 * i));
        });
      } else {
        Times<4>([&](auto i) AWQD_ALWAYS_INLINE {
          const uint8x16_t bytes = vld1q_u8(block + 16 * i);
          out.v[i] = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
          out.v[4 + i] = vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4));
        });
      }
      return out;
    }
  };
  template <int kBits>
  using ColumnOfDigits = Column<kBits>;

  static Sums Zero() { return vdupq_n_s32(0); }

  // sums + the products with 128 bytes of x, in the order of codes.
  template <int kBits>
  static AWQD_ALWAYS_INLINE Sums OneDigit(const Column<kBits>& column, const int8_t* x, Sums sums) {
    Times<8>([&](auto i)
                 AWQD_ALWAYS_INLINE { sums = vdotq_s32(sums, column.v[i], vld1q_s8(x + 16 * i)); });
    return sums;
  }
  // The products with 256 times 128 bytes of x, plus those with the next 128.
  template <int kBits>
  static AWQD_ALWAYS_INLINE Sums BothDigits(const Column<kBits>& column, const int8_t* x) {
    const Sums high = OneDigit(column, x, Zero());
    return OneDigit(column, x + kIntegerRows, vshlq_n_s32(high, 8));
  }
  // The sum of the lanes of each of 8 vectors.
  static Eight::I Fold(const Sums (&v)[8]) {
    return {vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3])),
            vpaddq_s32(vpaddq_s32(v[4], v[5]), vpaddq_s32(v[6], v[7]))};
  }
};

}  // namespace
}  // namespace awqd::cpu
