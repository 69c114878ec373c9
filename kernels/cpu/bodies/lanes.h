// The vector registers of the instruction set that a source is compiled for: their types, which are
// the compiler's vectors, and the instructions that the compiler has no operator for. Loops are
// written over Vec (vec.h) and IntVec (int_vec.h), which have 16 lanes. Everything has internal
// linkage.
//
// Every aarch64 machine has NEON, so the sources of its bodies define AWQD_NEON_BODY
// (kernels/cpu/CMakeLists.txt): the portable body of the same machine must not use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(AWQD_NEON_BODY)
#include <arm_neon.h>
#else
#include "kernels/base/half.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#endif

#include "kernels/cpu/bodies/bodies.h"

// Accumulators stay in registers only where every function between them and the loop is inlined,
// which the compiler's own limits do not promise: behind a call each FMA waits for memory and
// takes three times as long.
#define AWQD_ALWAYS_INLINE __attribute__((always_inline))

namespace awqd::cpu {
namespace {

// --- Loops and branches with numbers that the compiler knows ---

// Arguments of __builtin_prefetch.
constexpr int kRead = 0;
constexpr int kL2Cache = 2;

template <auto kConstant>
struct Constant {
  static constexpr auto kValue = kConstant;
  constexpr operator decltype(kConstant)() const { return kConstant; }
};
template <int kNumber>
using Number = Constant<kNumber>;

// run(Number<count>), for a count from kLeast to kMost.
template <int kLeast, int kMost, typename Run>
AWQD_ALWAYS_INLINE inline void WithCount(int64_t count, Run run) {
  if constexpr (kLeast < kMost) {
    if (count < kMost) return WithCount<kLeast, kMost - 1>(count, run);
  }
  run(Number<kMost>());
}

// act(Number<0>), act(Number<1>), ...: where they index arrays of vectors, these stay in registers.
template <int kCount, int kFrom = 0, typename Act>
AWQD_ALWAYS_INLINE inline void Times(Act act) {
  if constexpr (kFrom < kCount) {
    act(Number<kFrom>());
    Times<kCount, kFrom + 1>(act);
  }
}

// --- Registers ---

#if defined(__AVX512BW__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kLanes = kVectorBytes / 4;
// Registers of 16 lanes of 32 bits.
constexpr int kRegisters = 16 / kLanes;
// The lanes of a register, at most the 8 columns of a tile.
constexpr int kTileLanes = kLanes < 8 ? kLanes : 8;

template <int kCount>
struct VectorsOf {
  typedef float Floats __attribute__((vector_size(4 * kCount)));
  typedef uint32_t Words __attribute__((vector_size(4 * kCount)));
  typedef int32_t Ints __attribute__((vector_size(4 * kCount)));
  typedef uint16_t Halves __attribute__((vector_size(2 * kCount)));
};
using Floats = VectorsOf<kLanes>::Floats;
using Halves = VectorsOf<kLanes>::Halves;
using Lanes32 = VectorsOf<kLanes>::Words;
using Ints = VectorsOf<kLanes>::Ints;
typedef uint16_t Lanes16 __attribute__((vector_size(kVectorBytes)));
typedef uint8_t Lanes8 __attribute__((vector_size(kVectorBytes)));
// The columns of a tile, in one or more of them.
using TileFloats = VectorsOf<kTileLanes>::Floats;
using TileHalves = VectorsOf<kTileLanes>::Halves;
using TileWords = VectorsOf<kTileLanes>::Words;
using TileInts = VectorsOf<kTileLanes>::Ints;

// At any address. With memcpy GCC 12 takes vectors apart into integers.
template <typename V>
struct __attribute__((packed, may_alias)) Unaligned {
  V v;
};
template <typename V>
AWQD_ALWAYS_INLINE inline V LoadAs(const void* p) {
  return static_cast<const Unaligned<V>*>(p)->v;
}
template <typename V>
AWQD_ALWAYS_INLINE inline void StoreAs(void* p, V v) {
  static_cast<Unaligned<V>*>(p)->v = v;
}
AWQD_ALWAYS_INLINE inline Lanes32 LoadVector(const void* p) { return LoadAs<Lanes32>(p); }

// Lane i of the result is lane Index::Source(i) of a, then b.
template <typename Index, typename V, size_t... kLane>
AWQD_ALWAYS_INLINE inline V ShuffleLanes(V a, V b, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(a, b, Index::Source(static_cast<int>(kLane))...);
}
template <typename Index, typename V>
AWQD_ALWAYS_INLINE inline V Shuffle(V a, V b) {
  return ShuffleLanes<Index>(a, b, std::make_index_sequence<sizeof(V) / sizeof(V{}[0])>());
}

// op over the registers of 16 lanes: halves are folded onto each other, whatever their length.
template <typename V, typename Op>
AWQD_ALWAYS_INLINE inline V FoldRegisters(const V (&r)[kRegisters], Op op) {
  if constexpr (kRegisters == 1) {
    return r[0];
  } else if constexpr (kRegisters == 2) {
    return op(r[0], r[1]);
  } else {
    return op(op(r[0], r[2]), op(r[1], r[3]));
  }
}

// The same over the lanes of a register.
template <int kHalf>
struct Rotated {
  static constexpr int Source(int lane) { return (lane + kHalf) % kLanes; }
};
template <int kHalf = kLanes / 2, typename V, typename Op>
AWQD_ALWAYS_INLINE inline auto FoldLanes(V v, Op op) {
  if constexpr (kHalf == 0) {
    return v[0];
  } else {
    return FoldLanes<kHalf / 2>(op(v, Shuffle<Rotated<kHalf>>(v, v)), op);
  }
}

// --- Instructions ---
//
//   WidenHalves          16 bits to 32
//   NarrowWords          the lower 16 bits of each 32
//   UpperHalves          the upper ones
//   FromFp16, ToFp16     conversions, rounded to nearest even
//   RoundToInts          to nearest even; in the portable body, of less than 2^22
//   Fma, Fms             a * b + c and a * b - c with one rounding; in the portable body, with two
//   Smaller, Larger      of two floats; b where one is a NaN
//   AddPairs             sums + both products of each lane's 16-bit integers
//   StreamVector         a store that goes around the caches, to an aligned address

#if defined(__AVX2__)

inline __m128i Load8Bytes(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline __m128i Load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m256i Load32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

inline TileWords WidenHalves(TileHalves v) { return (TileWords)_mm256_cvtepu16_epi32((__m128i)v); }
inline TileHalves NarrowWords(TileWords v) {
#if defined(__AVX512VL__)
  return (TileHalves)_mm256_cvtepi32_epi16((__m256i)v);
#else
  const __m256i low = _mm256_and_si256((__m256i)v, _mm256_set1_epi32(0xffff));
  return (TileHalves)_mm_packus_epi32(_mm256_castsi256_si128(low),
                                      _mm256_extracti128_si256(low, 1));
#endif
}
inline TileHalves UpperHalves(TileWords v) {
  const __m256i high = _mm256_srli_epi32((__m256i)v, 16);
  return (TileHalves)_mm_packus_epi32(_mm256_castsi256_si128(high),
                                      _mm256_extracti128_si256(high, 1));
}
inline TileFloats FromFp16(TileHalves v) { return _mm256_cvtph_ps((__m128i)v); }
inline TileHalves ToFp16(TileFloats v) {
  return (TileHalves)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
}
inline TileFloats Fma(TileFloats a, TileFloats b, TileFloats c) { return _mm256_fmadd_ps(a, b, c); }
inline TileFloats Fms(TileFloats a, TileFloats b, TileFloats c) { return _mm256_fmsub_ps(a, b, c); }
inline TileFloats Smaller(TileFloats a, TileFloats b) { return _mm256_min_ps(a, b); }
inline TileFloats Larger(TileFloats a, TileFloats b) { return _mm256_max_ps(a, b); }
inline void StreamVector(void* p, __m128i v) { _mm_stream_si128(static_cast<__m128i*>(p), v); }
inline void StreamVector(void* p, __m256i v) { _mm256_stream_si256(static_cast<__m256i*>(p), v); }
// Makes streaming stores visible before another thread is told that they are done.
inline void StreamFence() { _mm_sfence(); }

#if defined(__AVX512BW__)
inline Lanes32 RoundToInts(Floats v) { return (Lanes32)_mm512_cvtps_epi32(v); }
inline Lanes32 ShiftEach(Lanes32 v, int bits) {
  return (Lanes32)_mm512_srlv_epi32((__m512i)v, _mm512_set1_epi32(bits));
}
inline Lanes32 ShuffleBytes(Lanes32 v, __m128i indices) {
  return (Lanes32)_mm512_shuffle_epi8((__m512i)v, _mm512_broadcast_i32x4(indices));
}
inline Lanes32 AddPairs(Lanes32 sums, Lanes16 a, Lanes16 b) {
#if defined(__AVX512VNNI__)
  return (Lanes32)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#else
  return sums + (Lanes32)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#endif
}
inline Lanes32 WidenHalves(Halves v) { return (Lanes32)_mm512_cvtepu16_epi32((__m256i)v); }
inline Halves NarrowWords(Lanes32 v) { return (Halves)_mm512_cvtepi32_epi16((__m512i)v); }
inline Halves UpperHalves(Lanes32 v) {
  return (Halves)_mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)v, 16));
}
inline Floats Smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats Larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats FromFp16(Halves v) { return _mm512_cvtph_ps((__m256i)v); }
inline Halves ToFp16(Floats v) { return (Halves)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
inline Floats Fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats Fms(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
inline void StreamVector(void* p, __m512i v) { _mm512_stream_si512(static_cast<__m512i*>(p), v); }
#else
inline Lanes32 RoundToInts(Floats v) { return (Lanes32)_mm256_cvtps_epi32(v); }
inline Lanes32 ShiftEach(Lanes32 v, int bits) {
  return (Lanes32)_mm256_srlv_epi32((__m256i)v, _mm256_set1_epi32(bits));
}
inline Lanes32 ShuffleBytes(Lanes32 v, __m128i indices) {
  return (Lanes32)_mm256_shuffle_epi8((__m256i)v, _mm256_broadcastsi128_si256(indices));
}
inline Lanes32 AddPairs(Lanes32 sums, Lanes16 a, Lanes16 b) {
#if defined(__AVXVNNI__)
  return (Lanes32)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#else
  return sums + (Lanes32)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}
#endif

#else

#if defined(AWQD_NEON_BODY)
inline Lanes32 WidenHalves(Halves v) { return (Lanes32)vmovl_u16((uint16x4_t)v); }
inline Halves NarrowWords(Lanes32 v) { return (Halves)vmovn_u32((uint32x4_t)v); }
inline Halves UpperHalves(Lanes32 v) { return (Halves)vshrn_n_u32((uint32x4_t)v, 16); }
inline Floats FromFp16(Halves v) { return (Floats)vcvt_f32_f16((float16x4_t)v); }
inline Halves ToFp16(Floats v) { return (Halves)vcvt_f16_f32((float32x4_t)v); }
inline Lanes32 RoundToInts(Floats v) { return (Lanes32)vcvtnq_s32_f32((float32x4_t)v); }
inline Floats Fma(Floats a, Floats b, Floats c) {
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
// The sign of c is changed, not that of the result: a difference of equals is +0.
inline Floats Fms(Floats a, Floats b, Floats c) { return Fma(a, b, -c); }
#else
inline Lanes32 WidenHalves(Halves v) { return __builtin_convertvector(v, Lanes32); }
inline Halves NarrowWords(Lanes32 v) { return __builtin_convertvector(v, Halves); }
inline Halves UpperHalves(Lanes32 v) { return NarrowWords(v >> 16); }
inline Floats FromFp16(Halves v) {
  return Floats{HalfToFloat(v[0]), HalfToFloat(v[1]), HalfToFloat(v[2]), HalfToFloat(v[3])};
}
inline Halves ToFp16(Floats v) {
  return Halves{FloatToHalf(v[0]), FloatToHalf(v[1]), FloatToHalf(v[2]), FloatToHalf(v[3])};
}
inline Lanes32 RoundToInts(Floats v) { return (Lanes32)(v + 0x1.8p23f) - 0x4b400000; }
inline Floats Fma(Floats a, Floats b, Floats c) { return a * b + c; }
inline Floats Fms(Floats a, Floats b, Floats c) { return a * b - c; }
inline Lanes32 AddPairs(Lanes32 sums, Lanes16 a, Lanes16 b) {
#if defined(__SSE2__)
  // Every x86-64 machine has it.
  return sums + (Lanes32)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const auto low = [](Lanes16 v) { return (Ints)((Lanes32)v << 16) >> 16; };
  const auto high = [](Lanes16 v) { return (Ints)v >> 16; };
  return sums + (Lanes32)(low(a) * low(b)) + (Lanes32)(high(a) * high(b));
#endif
}
#endif

inline Lanes32 ShiftEach(Lanes32 v, int bits) { return v >> bits; }
inline Floats Smaller(Floats a, Floats b) { return a < b ? a : b; }
inline Floats Larger(Floats a, Floats b) { return a > b ? a : b; }

// There is no such store to ask for: these machines see by themselves that lines are written whole.
template <typename V>
inline void StreamVector(void* p, V v) {
  StoreAs(p, v);
}
inline void StreamFence() {}

#endif

// Lanes shifted to the right. By a variable number of bits, x86-64 shifts each lane by its own in
// one instruction, and all by the same in two.
AWQD_ALWAYS_INLINE inline Lanes32 ShiftRight(Lanes32 v, int bits) {
  return __builtin_constant_p(bits) ? v >> bits : ShiftEach(v, bits);
}

}  // namespace
}  // namespace awqd::cpu
