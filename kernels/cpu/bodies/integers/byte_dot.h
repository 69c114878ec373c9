// Dot products of bytes along K for one instruction set: AVX-512 VNNI, AVX-VNNI, AVX-512, AVX2, or
// NEON with dot products. ByteDot multiplies 128 codes of a column by 128 INT8 activations or by
// 128 INT16 ones; Columns8 is what becomes of the sums of 8 columns. Everything has internal
// linkage.
//
// VNNI and NEON add four products of bytes to each lane of 32 bits in one instruction. maddubs,
// which AVX2 and AVX-512 have, adds two products to 16 bits and saturates there. Codes of 4 bits
// are below 16, so 8 products with bytes are below 2^14: sums of 16 bits hold a block and are
// widened once, by the instruction that multiplies 16-bit integers, which weighs the two planes of
// INT16 as well. Codes of 8 bits are multiplied as two of 4, or with INT16 as 16-bit integers.
#pragma once

#include <type_traits>

#include "kernels/cpu/bodies/vec.h"

namespace awqd::cpu {
namespace {

// --- The columns of a tile, as 8 floats or 8 integers ---

struct Columns8 {
  static constexpr int kParts = 8 / kTileLanes;
  struct F {
    TileFloats r[kParts];
  };
  struct I {
    TileWords r[kParts];
  };
  template <typename To, typename Of>
  AWQD_ALWAYS_INLINE static To Each(Of of) {
    To out;
    Times<kParts>([&](auto i) AWQD_ALWAYS_INLINE { out.r[i] = of(i); });
    return out;
  }

  static F Set(float v) {
    return Each<F>([v](int) { return v - TileFloats{}; });
  }
  static F Load(const float* p) {
    return Each<F>([p](int i) { return LoadAs<TileFloats>(p + i * kTileLanes); });
  }
  static void Store(float* p, const F& v) {
    Times<kParts>([&](auto i) { StoreAs(p + i * kTileLanes, v.r[i]); });
  }
  static F Mul(const F& a, const F& b) {
    return Each<F>([&](int i) { return a.r[i] * b.r[i]; });
  }
  // a * b + c.
  static F Fma(const F& a, const F& b, const F& c) {
    return Each<F>([&](int i) { return cpu::Fma(a.r[i], b.r[i], c.r[i]); });
  }
  static F ToFloat(const I& v) {
    return Each<F>([&](int i) { return __builtin_convertvector((TileInts)v.r[i], TileFloats); });
  }
  static I LoadInts(const int32_t* p) {
    return Each<I>([p](int i) { return LoadAs<TileWords>(p + i * kTileLanes); });
  }
  // sum + a * b.
  static I AddTimes(const I& sum, const I& a, int32_t b) {
    return Each<I>([&](int i) { return sum.r[i] + a.r[i] * static_cast<uint32_t>(b); });
  }
  // The sum of the lanes of each of 8 vectors.
  static I Fold(const Lanes32 (&v)[8]) {
#if defined(AWQD_NEON_BODY)
    const auto of_2 = [&](int i) { return vpaddq_u32((uint32x4_t)v[i], (uint32x4_t)v[i + 1]); };
    return Each<I>([&](int i) { return (TileWords)vpaddq_u32(of_2(4 * i), of_2(4 * i + 2)); });
#else
    const auto half = [&](int i) {
#if defined(__AVX512F__)
      const auto all = (__m512i)v[i];
      return _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
#else
      return (__m256i)v[i];
#endif
    };
    // In each half the sums of four vectors.
    const auto of_4 = [&](int i) {
      return _mm256_hadd_epi32(_mm256_hadd_epi32(half(i), half(i + 1)),
                               _mm256_hadd_epi32(half(i + 2), half(i + 3)));
    };
    const __m256i low = of_4(0), high = of_4(4);
    return {(TileWords)_mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20),
                                        _mm256_permute2x128_si256(low, high, 0x31))};
#endif
  }
};

// --- 128 rows of a column ---

constexpr int kBlockVectors = kBlockRows / kVectorBytes;

// 128 codes of a column, as bytes.
struct ByteCodes {
  Lanes8 v[kBlockVectors];

  // Codes of 4 bits, as they are stored.
  static AWQD_ALWAYS_INLINE ByteCodes LoadNibbles(const uint8_t* block) {
    ByteCodes out;
    Times<kBlockVectors / 2>([&](auto i) AWQD_ALWAYS_INLINE {
      const auto bytes = (Lanes8)LoadVector(block + i * kVectorBytes);
      out.v[i] = Low(bytes);
      out.v[i + kBlockVectors / 2] = High(bytes);
    });
    return out;
  }
  static AWQD_ALWAYS_INLINE Lanes8 Low(Lanes8 bytes) { return bytes & 15; }
  static AWQD_ALWAYS_INLINE Lanes8 High(Lanes8 bytes) {
#if defined(AWQD_NEON_BODY)
    return bytes >> 4;
#else
    return Low((Lanes8)((Lanes16)bytes >> 4));
#endif
  }
};

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(AWQD_NEON_BODY)

// sums + four products of codes and x in each lane.
AWQD_ALWAYS_INLINE inline Lanes32 DotBytes(Lanes32 sums, Lanes8 codes, Lanes32 x) {
#if defined(__AVX512VNNI__)
  return (Lanes32)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)x);
#elif defined(__AVXVNNI__)
  return (Lanes32)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, (__m256i)x);
#else
  return (Lanes32)vdotq_s32((int32x4_t)sums, (int8x16_t)codes, (int8x16_t)x);
#endif
}

struct ByteDot {
#if defined(AWQD_NEON_BODY)
  // Tokens whose sums of 8 columns stay in registers, beside the codes of a column.
  static constexpr int kTokens = 2;
  // Codes of 8 bits are multiplied as they are stored, with a sign: 128 less.
  static constexpr int32_t Bias(int bits) { return bits == 8 ? 128 : 0; }
#else
  // Tokens that are multiplied by a column while its codes are in registers.
  static constexpr int kTokens = 3;
  // Codes are multiplied whole.
  static constexpr int32_t Bias(int) { return 0; }
#endif
  // Whether INT16 has two planes, else it is whole.
  static constexpr bool HasPlanes(int) { return true; }

  template <int kBits>
  struct Column : ByteCodes {
    static AWQD_ALWAYS_INLINE Column Load(const uint8_t* block) {
      if constexpr (kBits == 4) return {LoadNibbles(block)};
      Column out;
      Times<kBlockVectors>([&](auto i) AWQD_ALWAYS_INLINE {
        const auto bytes = (Lanes8)LoadVector(block + i * kVectorBytes);
        out.v[i] = Bias(8) == 0 ? bytes ^ 0x80 : bytes;
      });
      return out;
    }
    // sums + the products with 128 bytes of x, in the order of codes.
    AWQD_ALWAYS_INLINE Lanes32 AddPlane(const int8_t* x, Lanes32 sums) const {
      Times<kBlockVectors>([&](auto i) AWQD_ALWAYS_INLINE {
        sums = DotBytes(sums, this->v[i], LoadVector(x + i * kVectorBytes));
      });
      return sums;
    }
    // The products with both planes of INT16, the upper one first.
    AWQD_ALWAYS_INLINE Lanes32 MultiplyInt16(const int8_t* x) const {
      return AddPlane(x + kBlockRows, AddPlane(x, Lanes32{}) << 8);
    }
  };
  template <int kBits>
  using Int16Column = Column<kBits>;
};

#else

// The products of both 16-bit integers of each lane, added.
AWQD_ALWAYS_INLINE inline Lanes32 MultiplyPairs(Lanes16 a, Lanes16 b) {
  return AddPairs(Lanes32{}, a, b);
}

// The products with 128 bytes of x, in 16 bits.
AWQD_ALWAYS_INLINE inline Lanes16 MultiplyBytes(const ByteCodes& codes, const int8_t* x) {
  const auto multiply = [&](int i) AWQD_ALWAYS_INLINE {
    const Lanes32 bytes = LoadVector(x + i * kVectorBytes);
#if defined(__AVX512BW__)
    return (Lanes16)_mm512_maddubs_epi16((__m512i)codes.v[i], (__m512i)bytes);
#else
    return (Lanes16)_mm256_maddubs_epi16((__m256i)codes.v[i], (__m256i)bytes);
#endif
  };
  Lanes16 sums = multiply(0);
  Times<kBlockVectors - 1>([&](auto i) AWQD_ALWAYS_INLINE { sums += multiply(i + 1); });
  return sums;
}

struct ByteDot {
  // Tokens that are multiplied by a column while its codes are in registers.
  static constexpr int kTokens = kVectorBytes == 64 ? 2 : 4;
  static constexpr int32_t Bias(int) { return 0; }
  static constexpr bool HasPlanes(int bits) { return bits == 4; }

  // Codes of 8 bits are two of 4.
  template <int kBits>
  struct Column {
    ByteCodes low, high;

    static AWQD_ALWAYS_INLINE Column Load(const uint8_t* block) {
      Column out;
      if constexpr (kBits == 4) {
        out.low = ByteCodes::LoadNibbles(block);
        return out;
      }
      Times<kBlockVectors>([&](auto i) AWQD_ALWAYS_INLINE {
        const Lanes8 bytes = (Lanes8)LoadVector(block + i * kVectorBytes) ^ 0x80;
        out.low.v[i] = ByteCodes::Low(bytes);
        out.high.v[i] = ByteCodes::High(bytes);
      });
      return out;
    }
    // The products with 128 bytes of x, times a factor.
    AWQD_ALWAYS_INLINE Lanes32 Multiply(const int8_t* x, uint16_t factor) const {
      const Lanes32 products = MultiplyPairs(MultiplyBytes(low, x), Lanes16{} + factor);
      if constexpr (kBits == 4) return products;
      const auto factor_of_high = static_cast<uint16_t>(16 * factor);
      return MultiplyPairs(MultiplyBytes(high, x), Lanes16{} + factor_of_high) + products;
    }
    // sums + the products with 128 bytes of x, in the order of codes.
    AWQD_ALWAYS_INLINE Lanes32 AddPlane(const int8_t* x, Lanes32 sums) const {
      return sums + Multiply(x, 1);
    }
    // The products with both planes of INT16, the upper one first.
    AWQD_ALWAYS_INLINE Lanes32 MultiplyInt16(const int8_t* x) const {
      return Multiply(x, 256) + Multiply(x + kBlockRows, 1);
    }
  };

  // Codes of 8 bits as 16-bit integers.
  struct WideColumn {
    Lanes16 v[2 * kBlockVectors];

    static AWQD_ALWAYS_INLINE WideColumn Load(const uint8_t* block) {
      WideColumn out;
      Times<2 * kBlockVectors>([&](auto i) AWQD_ALWAYS_INLINE {
        const uint8_t* const half = block + i * kVectorBytes / 2;
#if defined(__AVX512BW__)
        out.v[i] = (Lanes16)_mm512_cvtepu8_epi16(Load32(half)) ^ 0x80;
#else
        out.v[i] = (Lanes16)_mm256_cvtepu8_epi16(Load16(half)) ^ 0x80;
#endif
      });
      return out;
    }
    AWQD_ALWAYS_INLINE Lanes32 MultiplyInt16(const int8_t* x) const {
      const auto multiply = [&](int i) AWQD_ALWAYS_INLINE {
        return MultiplyPairs(v[i], (Lanes16)LoadVector(x + i * kVectorBytes));
      };
      Lanes32 sums = multiply(0);
      Times<2 * kBlockVectors - 1>([&](auto i) AWQD_ALWAYS_INLINE { sums += multiply(i + 1); });
      return sums;
    }
  };
  template <int kBits>
  using Int16Column = std::conditional_t<kBits == 8, WideColumn, Column<4>>;
};

#endif

}  // namespace
}  // namespace awqd::cpu
