// ByteLanes for AVX-512 VNNI and AVX-VNNI: what column_product.h and quads_body.h are written over.
// One instruction adds four products of bytes to each lane. Everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies/integers/bytes_x86.h"

namespace awqd::cpu {
namespace {

// sums + four products of codes and x in each lane.
inline Wide::V AddProducts(Wide::V sums, Wide::V codes, Wide::V x) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(sums, codes, x);
#else
  return _mm256_dpbusd_avx_epi32(sums, codes, x);
#endif
}

struct ByteLanes {
  using Sums = Wide::V;
  // Tokens that are multiplied by a column while its codes are in registers.
  static constexpr int kTokens = 3;
  static constexpr int kBytes = sizeof(Wide::V), kVectors = kIntegerRows / kBytes;
  static constexpr bool kDigitsOf8Bits = true;

  // 128 codes of a column, as bytes.
  template <int kBits>
  struct Column {
    Wide::V v[kVectors];

    static AWQD_ALWAYS_INLINE Column Load(const uint8_t* block) {
      Column out;
      if constexpr (kBits == 8) {
        Times<kVectors>([&](auto i) AWQD_ALWAYS_INLINE {
          out.v[i] = Wide::FlipSigns(Wide::Load(block + i * kBytes));
        });
      } else {
        Times<kVectors / 2>([&](auto i) AWQD_ALWAYS_INLINE {
          const Wide::V bytes = Wide::Load(block + i * kBytes);
          out.v[i] = Wide::Low(bytes);
          out.v[i + kVectors / 2] = Wide::High(bytes);
        });
      }
      return out;
    }
  };
  template <int kBits>
  using ColumnOfDigits = Column<kBits>;

  // What a code lacks when it is multiplied.
  static constexpr int32_t TakenOff(int) { return 0; }
  static Sums Zero() { return Wide::Zero(); }

  // sums + the products with 128 bytes of x, in the order of codes.
  template <int kBits>
  static AWQD_ALWAYS_INLINE Sums OneDigit(const Column<kBits>& column, const int8_t* x, Sums sums) {
    Times<kVectors>([&](auto i) AWQD_ALWAYS_INLINE {
      sums = AddProducts(sums, column.v[i], Wide::Load(x + i * kBytes));
    });
    return sums;
  }
  // The products with 256 times 128 bytes of x, plus those with the next 128.
  template <int kBits>
  static AWQD_ALWAYS_INLINE Sums BothDigits(const Column<kBits>& column, const int8_t* x) {
    const Sums high = OneDigit(column, x, Zero());
    return OneDigit(column, x + kIntegerRows, Wide::Times256(high));
  }
  static Eight::I Fold(const Sums (&v)[8]) { return FoldLanes(v); }
};

}  // namespace
}  // namespace awqd::cpu
