// ByteLanes without VNNI, for AVX2 and AVX-512: what column_product.h and quads_body.h are written
// over.
//
// The instruction that multiplies bytes adds two products to 16 bits and saturates there. Codes of
// 4 bits are below 16, so 8 products with bytes are below 2^14: sums of 16 bits hold a block and
// are widened once, by the instruction that multiplies 16-bit integers, which weighs digits as
// well. Codes of 8 bits are multiplied as two of 4, or with 16-bit x as 16-bit integers.
//
// Everything has internal linkage.
#pragma once

#include <type_traits>

#include "kernels/cpu/bodies/integers/bytes_x86.h"

namespace awqd::cpu {
namespace {

struct ByteLanes {
  using Sums = Wide::V;
  // Tokens that are multiplied by a column while its codes are in registers.
  static constexpr int kTokens = sizeof(Wide::V) == 64 ? 2 : 4;
  static constexpr int kBytes = sizeof(Wide::V), kVectors = kIntegerRows / kBytes;

  // 128 codes of up to 4 bits, as bytes.
  struct Codes {
    Wide::V v[kVectors];

    // The products with 128 bytes of x, in 16 bits.
    AWQD_ALWAYS_INLINE Wide::V Times128(const int8_t* x) const {
      Wide::V sums = Wide::MultiplyBytes(v[0], Wide::Load(x));
      Times<kVectors - 1>([&](auto i) AWQD_ALWAYS_INLINE {
        const Wide::V more = Wide::MultiplyBytes(v[i + 1], Wide::Load(x + (i + 1) * kBytes));
        sums = Wide::Add16(sums, more);
      });
      return sums;
    }
  };

  // Of 4 bits, as they are stored.
  template <int kBits>
  struct Column {
    Codes codes;

    static AWQD_ALWAYS_INLINE Column Load(const uint8_t* block) {
      Column out;
      Times<kVectors / 2>([&](auto i) AWQD_ALWAYS_INLINE {
        const Wide::V bytes = Wide::Load(block + i * kBytes);
        out.codes.v[i] = Wide::Low(bytes);
        out.codes.v[i + kVectors / 2] = Wide::High(bytes);
      });
      return out;
    }
    // The products with 128 bytes of x, times a factor.
    AWQD_ALWAYS_INLINE Sums Products(const int8_t* x, int factor) const {
      return Wide::MultiplyPairs(codes.Times128(x), Wide::Set16(factor));
    }
  };

  // Of 8 bits, as 16-bit integers.
  struct Words {
    Wide::V v[2 * kVectors];

    static AWQD_ALWAYS_INLINE Words Load(const uint8_t* block) {
      Words out;
      const Wide::V sign = Wide::Set16(0x80);
      Times<2 * kVectors>([&](auto i) AWQD_ALWAYS_INLINE {
        out.v[i] = Wide::Xor(Wide::LoadWidened(block + i * kBytes / 2), sign);
      });
      return out;
    }
  };

  // How codes are multiplied by both digits of x: of 8 bits by x whole, in 16-bit integers.
  static constexpr bool kDigitsOf8Bits = false;
  template <int kBits>
  using ColumnOfDigits = std::conditional_t<kBits == 8, Words, Column<kBits>>;

  // What a code lacks when it is multiplied.
  static constexpr int32_t TakenOff(int) { return 0; }
  static Sums Zero() { return Wide::Zero(); }

  // sums + the products with 128 bytes of x, in the order of codes.
  template <int kBits>
  static AWQD_ALWAYS_INLINE Sums OneDigit(const Column<kBits>& column, const int8_t* x, Sums sums) {
    return Wide::Add32(sums, column.Products(x, 1));
  }
  // The products with 256 times 128 bytes of x, plus those with the next 128.
  static AWQD_ALWAYS_INLINE Sums BothDigits(const Column<4>& column, const int8_t* x) {
    return Wide::Add32(column.Products(x, 256), column.Products(x + kIntegerRows, 1));
  }
  // The products with 128 integers of 16 bits.
  static AWQD_ALWAYS_INLINE Sums BothDigits(const Words& column, const int8_t* x) {
    Sums sums = Wide::MultiplyPairs(column.v[0], Wide::Load(x));
    Times<2 * kVectors - 1>([&](auto i) AWQD_ALWAYS_INLINE {
      sums =
          Wide::Add32(sums, Wide::MultiplyPairs(column.v[i + 1], Wide::Load(x + (i + 1) * kBytes)));
    });
    return sums;
  }
  static Eight::I Fold(const Sums (&v)[8]) { return FoldLanes(v); }
};

template <>
struct ByteLanes::Column<8> {
  Codes low, high;

  static AWQD_ALWAYS_INLINE Column Load(const uint8_t* block) {
    Column out;
    Times<kVectors>([&](auto i) AWQD_ALWAYS_INLINE {
      const Wide::V bytes = Wide::FlipSigns(Wide::Load(block + i * kBytes));
      out.low.v[i] = Wide::Low(bytes);
      out.high.v[i] = Wide::High(bytes);
    });
    return out;
  }
  AWQD_ALWAYS_INLINE Sums Products(const int8_t* x, int factor) const {
    return Wide::Add32(Wide::MultiplyPairs(high.Times128(x), Wide::Set16(16 * factor)),
                       Wide::MultiplyPairs(low.Times128(x), Wide::Set16(factor)));
  }
};

}  // namespace
}  // namespace awqd::cpu
