// ByteLanes for AVX-512 VNNI: what digits_body.h and quads_body.h are written over. One instruction
// adds four products of bytes to each lane. Everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies/bytes_fold.h"

namespace awqd::cpu {
namespace {

struct ByteLanes {
  using Sums = __m512i;
  // Tokens whose sums of 8 columns stay in registers.
  static constexpr int kTokens = 3;

  // 128 codes of a column, as bytes.
  template <int kBits>
  struct Column {
    __m512i first, second;

    static AWQD_ALWAYS_INLINE Column Load(const uint8_t* block) {
      const __m512i bytes = _mm512_loadu_si512(block);
      if constexpr (kBits == 8) {
        const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
        return {_mm512_xor_si512(bytes, sign),
                _mm512_xor_si512(_mm512_loadu_si512(block + 64), sign)};
      } else {
        const __m512i mask = _mm512_set1_epi8(15);
        return {_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask)};
      }
    }
  };

  static constexpr bool kDigitsOf8Bits = true;
  template <int kBits>
  using ColumnOfDigits = Column<kBits>;

  static Sums Zero() { return _mm512_setzero_si512(); }

  // sums + the products with 128 bytes of x, in the order of codes.
  template <int kBits>
  static AWQD_ALWAYS_INLINE Sums OneDigit(const Column<kBits>& column, const int8_t* x, Sums sums) {
    sums = _mm512_dpbusd_epi32(sums, column.first, _mm512_loadu_si512(x));
    return _mm512_dpbusd_epi32(sums, column.second, _mm512_loadu_si512(x + 64));
  }
  // The products with 256 times 128 bytes of x, plus those with the next 128.
  template <int kBits>
  static AWQD_ALWAYS_INLINE Sums BothDigits(const Column<kBits>& column, const int8_t* x) {
    const Sums high = OneDigit(column, x, Zero());
    return OneDigit(column, x + kIntegerRows, _mm512_slli_epi32(high, 8));
  }
  static __m256i Fold(const Sums (&v)[8]) { return FoldLanes(v); }
};

}  // namespace
}  // namespace awqd::cpu
