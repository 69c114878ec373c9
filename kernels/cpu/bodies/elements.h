// Elements of FP16, BF16 and FP32 in memory, one register, 8 or one at a time; transposes of a
// tile's codes. Everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies/int_vec.h"

namespace awqd::cpu {
namespace {

// --- Elements ---

constexpr int64_t ElementBytes(Element type) { return type == Element::kFp32 ? 4 : 2; }

// BF16 is the upper half of FP32. Rounded to nearest even; NaNs become quiet.
template <typename H>
AWQD_ALWAYS_INLINE inline auto FromBf16(H v) {
  return (typename VectorsOf<sizeof(H) / 2>::Floats)(WidenHalves(v) << 16);
}
template <typename F>
AWQD_ALWAYS_INLINE inline auto ToBf16(F v) {
  using Words = typename VectorsOf<sizeof(F) / 4>::Words;
  const auto bits = (Words)v;
  const Words rounded = bits + (bits >> 16 & 1) + 0x7fff, quiet = bits | 0x400000;
  return UpperHalves(v == v ? rounded : quiet);
}

// To 16 bits.
template <typename F>
AWQD_ALWAYS_INLINE inline auto RoundTo(Element type, F v) {
  return type == Element::kFp16 ? ToFp16(v) : ToBf16(v);
}

// Elements from `index` on, as many as F has lanes.
template <typename F>
AWQD_ALWAYS_INLINE inline F LoadElements(const void* in, Element type, int64_t index) {
  if (type == Element::kFp32) return LoadAs<F>(static_cast<const float*>(in) + index);
  const auto bits =
      LoadAs<typename VectorsOf<sizeof(F) / 4>::Halves>(static_cast<const uint16_t*>(in) + index);
  return type == Element::kFp16 ? FromFp16(bits) : FromBf16(bits);
}
template <typename F>
AWQD_ALWAYS_INLINE inline void StoreElements(void* out, Element type, int64_t index, F v) {
  if (type == Element::kFp32) return StoreAs(static_cast<float*>(out) + index, v);
  StoreAs(static_cast<uint16_t*>(out) + index, RoundTo(type, v));
}

// One element, through the vector conversions so that every element rounds alike.
inline float Load1(const void* in, Element type, int64_t index) {
  if (type == Element::kFp32) return static_cast<const float*>(in)[index];
  const TileHalves bits = {static_cast<const uint16_t*>(in)[index]};
  return (type == Element::kFp16 ? FromFp16(bits) : FromBf16(bits))[0];
}
inline void Store1(void* out, Element type, int64_t index, float value) {
  if (type == Element::kFp32) {
    static_cast<float*>(out)[index] = value;
  } else {
    static_cast<uint16_t*>(out)[index] = RoundTo(type, TileFloats{value})[0];
  }
}

// 8 elements to floats.
inline void Load8To(const void* in, Element type, int64_t index, float* out) {
  for (int i = 0; i < 8; i += kTileLanes) {
    StoreAs(out + i, LoadElements<TileFloats>(in, type, index + i));
  }
}
// 8 bytes to floats.
inline void Zeros8(const uint8_t* in, float* out) {
#if defined(__AVX2__)
  _mm256_storeu_ps(out, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(Load8Bytes(in))));
#else
  const FloatVec all = IntVec::WidenBytes(in, in).ToFloat();
  for (int i = 0; i < 2; ++i) StoreAs(out + 4 * i, all.r[i]);
#endif
}

// 8 floats from memory, added and stored with one rounding.
inline void Store8Plus(void* out, Element type, int64_t index, const float* v, const float* bias) {
  for (int i = 0; i < 8; i += kTileLanes) {
#if defined(__AVX2__)
    // As they were written: a load of what two stores left waits for both.
    TileFloats sum = _mm256_set_m128(_mm_loadu_ps(v + 4), _mm_loadu_ps(v));
#else
    TileFloats sum = LoadAs<TileFloats>(v + i);
#endif
    if (bias != nullptr) sum = sum + LoadAs<TileFloats>(bias + i);
    StoreElements(out, type, index + i, sum);
  }
}

// Whether 8 scales are such that products with integers below 256 are normal halves.
inline bool Ordinary(const float* scales) {
#if defined(__AVX2__)
  const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_loadu_ps(scales));
  const __m256 fits = _mm256_and_ps(_mm256_cmp_ps(size, _mm256_set1_ps(0x1p-14f), _CMP_GE_OQ),
                                    _mm256_cmp_ps(size, _mm256_set1_ps(128), _CMP_LE_OQ));
  return _mm256_movemask_ps(fits) == 0xff;
#else
  TileInts fits = ~TileInts{};
  for (int i = 0; i < 8; i += kTileLanes) {
    const auto size = (TileFloats)(LoadAs<TileWords>(scales + i) & 0x7fffffff);
    fits &= (size >= 0x1p-14f) & (size <= 128.0f);
  }
  return FoldLanes(fits, [](TileInts a, TileInts b) { return a & b; }) != 0;
#endif
}

// --- Transposes ---

template <typename V, bool kHigh>
struct Zipped {
  static constexpr int kCount = sizeof(V) / sizeof(V{}[0]);
  static constexpr int Source(int lane) {
    return lane / 2 + lane % 2 * kCount + (kHigh ? kCount / 2 : 0);
  }
};
// The lower or upper lanes of a and b, in turn.
template <typename V>
AWQD_ALWAYS_INLINE inline V ZipLow(V a, V b) {
  return Shuffle<Zipped<V, false>>(a, b);
}
template <typename V>
AWQD_ALWAYS_INLINE inline V ZipHigh(V a, V b) {
  return Shuffle<Zipped<V, true>>(a, b);
}
typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint16_t Halves8 __attribute__((vector_size(16)));
typedef uint32_t Words4 __attribute__((vector_size(16)));
typedef uint64_t Pairs2 __attribute__((vector_size(16)));

// out[i * stride + c] = in[c * 16 + i] for 8 columns of 16 words.
#if defined(__AVX2__)
inline void TransposeTile(const uint32_t* in, uint32_t* out, int64_t stride) {
  for (int half = 0; half < 16; half += 8) {
    const auto* const from = reinterpret_cast<const float*>(in) + half;
    auto* const to = reinterpret_cast<float*>(out) + half * stride;
    __m256 r[8], s[8];
    for (int c = 0; c < 8; ++c) r[c] = _mm256_loadu_ps(from + c * 16);
    for (int c = 0; c < 8; c += 2) {
      s[c] = _mm256_unpacklo_ps(r[c], r[c + 1]);
      s[c + 1] = _mm256_unpackhi_ps(r[c], r[c + 1]);
    }
    for (int c = 0; c < 8; c += 4) {
      r[c] = _mm256_shuffle_ps(s[c], s[c + 2], 0x44);
      r[c + 1] = _mm256_shuffle_ps(s[c], s[c + 2], 0xee);
      r[c + 2] = _mm256_shuffle_ps(s[c + 1], s[c + 3], 0x44);
      r[c + 3] = _mm256_shuffle_ps(s[c + 1], s[c + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      _mm256_storeu_ps(to + i * stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
      _mm256_storeu_ps(to + (i + 4) * stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
  }
}
#else
inline void TransposeTile(const uint32_t* in, uint32_t* out, int64_t stride) {
  for (int c = 0; c < 8; c += 4) {
    for (int i = 0; i < 16; i += 4) {
      const auto column = [&](int next) { return LoadAs<Words4>(in + (c + next) * 16 + i); };
      const Words4 even[2] = {ZipLow(column(0), column(2)), ZipHigh(column(0), column(2))};
      const Words4 odd[2] = {ZipLow(column(1), column(3)), ZipHigh(column(1), column(3))};
      for (int half = 0; half < 2; ++half) {
        uint32_t* const to = out + (i + 2 * half) * stride + c;
        StoreAs(to, ZipLow(even[half], odd[half]));
        StoreAs(to + stride, ZipHigh(even[half], odd[half]));
      }
    }
  }
}
#endif

// out[i * stride + c] = in[c * in_stride + i] for 8 columns of 16 bytes.
inline void TransposeTileOfBytes(const uint8_t* in, int64_t in_stride, uint8_t* out,
                                 int64_t stride) {
  const auto column = [&](int c) { return LoadAs<Bytes16>(in + c * in_stride); };
  for (int half = 0; half < 2; ++half) {
    // Rows 8 half .. 8 half + 7 of two columns.
    const auto pair = [&](int c) {
      return (Halves8)(half == 0 ? ZipLow(column(c), column(c + 1))
                                 : ZipHigh(column(c), column(c + 1)));
    };
    const Halves8 a = pair(0), b = pair(2), c = pair(4), d = pair(6);
    const Words4 low[2] = {(Words4)ZipLow(a, b), (Words4)ZipHigh(a, b)};
    const Words4 high[2] = {(Words4)ZipLow(c, d), (Words4)ZipHigh(c, d)};
    for (int quarter = 0; quarter < 2; ++quarter) {
      uint8_t* const to = out + (half * 8 + quarter * 4) * stride;
      const Pairs2 rows[2] = {(Pairs2)ZipLow(low[quarter], high[quarter]),
                              (Pairs2)ZipHigh(low[quarter], high[quarter])};
      for (int i = 0; i < 4; ++i) StoreAs(to + i * stride, rows[i / 2][i % 2]);
    }
  }
}

}  // namespace
}  // namespace awqd::cpu
