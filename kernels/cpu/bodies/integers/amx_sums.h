// What the sums that AMX made add to y. With groups of 128 rows that takes vectors about as long as
// AMX takes for the sums. So factors stay in registers, a column for all tokens, and zeros are
// taken off where that costs least: of codes of 4 bits, once in a panel.
//
// Included by amx_product.h; everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies/integers/byte_panel_product.h"

namespace awqd::cpu {
namespace {

constexpr int kAmxTokens = 16;
constexpr int64_t kRunsOfDigits = kIntegerRows / kRowsOfRun;

// Whether zeros can be taken off codes: what is left is a signed byte. A constant may be too large.
inline bool TakesZerosOff(const K16Weight& w) {
  return w.bits == 4 && HasIntegerZeros(w) && w.zero <= 128;
}

// Off the codes of a panel.
void TakeZerosOff(const QuadPiece& piece) {
  ForGroups(piece, [&](const QuadGroup& at) AWQD_ALWAYS_INLINE {
    // The lowest byte of each lane, in all four.
    const __m512i all =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
    __m512i zeros[2];
    Times<2>([&](auto v) AWQD_ALWAYS_INLINE {
      zeros[v] = _mm512_shuffle_epi8(_mm512_loadu_si512(piece.zeros + at.cell + 16 * v), all);
    });
    uint32_t* quad = piece.scratch.panel + (at.begin - piece.begin) * kQuadsOfRun * kPanelColumns;
    for (int64_t i = 0; i < (at.end - at.begin) * kQuadsOfRun; ++i, quad += kPanelColumns) {
      Times<2>([&](auto v) AWQD_ALWAYS_INLINE {
        const __m512i codes = _mm512_loadu_si512(quad + 16 * v);
        _mm512_storeu_si512(quad + 16 * v, _mm512_sub_epi8(codes, zeros[v]));
      });
    }
  });
}

// How a sum of q gets rid of zeros.
enum class ZerosOfSums : uint8_t {
  kNone,      // it has none
  kIntegers,  // in integers
  kBefore,    // in floats, before it is scaled
  kAfter,     // in floats, after
};

// `exact_floats`: floats hold the sums and what is taken off.
inline ZerosOfSums ZerosOf(const K16Weight& w, bool exact_floats) {
  if (TakesZerosOff(w)) return ZerosOfSums::kNone;
  if (HasIntegerZeros(w)) return exact_floats ? ZerosOfSums::kBefore : ZerosOfSums::kIntegers;
  return w.zero_after ? ZerosOfSums::kAfter : ZerosOfSums::kBefore;
}

// Sums of a group, or of a block of digits, of at most 2 * kAmxTokens tokens.
struct AmxTokens {
  // [tokens][kPanelColumns]; of digits the upper ones', then, kAmxTokens rows on, the lower ones'.
  const int32_t* sums = nullptr;
  int64_t tokens = 0;
  int64_t stride = 0;               // elements of the next two
  const int32_t* x_sums = nullptr;  // [tokens]
  const float* steps = nullptr;     // [tokens], of digits
  int64_t cell = 0;                 // where the piece has the factors
  float* y = nullptr;               // [tokens][kPanelColumns]
};

template <bool kDigits, ZerosOfSums kZeros>
__attribute__((noinline)) void AddAmxSumsOf(const QuadPiece& piece, const AmxTokens& of) {
  for (int v = 0; v < kPanelColumns; v += 16) {
    const Vec::F scale = Vec::Load(piece.scratch.scales + of.cell + v);
    const Vec::F offset = Vec::Load(piece.scratch.offsets + of.cell + v);
    const __m512i zero = _mm512_loadu_si512(piece.zeros + of.cell + v);
    for (int64_t t = 0; t < of.tokens; ++t) {
      const int32_t* const sums = of.sums + t * kPanelColumns + v;
      float* const y = of.y + t * kPanelColumns + v;
      __m512i sum = _mm512_load_si512(sums);
      if constexpr (kDigits) {
        const __m512i low = _mm512_load_si512(sums + kAmxTokens * kPanelColumns);
        sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), low);
      }
      const __m512i x_sum = _mm512_set1_epi32(of.x_sums[t * of.stride]);
      if constexpr (kZeros == ZerosOfSums::kIntegers) {
        sum = _mm512_sub_epi32(sum, _mm512_mullo_epi32(zero, x_sum));
      }
      Vec::F value = _mm512_cvtepi32_ps(sum), of_zeros = _mm512_cvtepi32_ps(x_sum);
      if constexpr (kDigits) {
        const Vec::F step = Vec::Set(of.steps[t * of.stride]);
        value = Vec::Mul(value, step);
        of_zeros = Vec::Mul(step, of_zeros);
      }
      if constexpr (kZeros == ZerosOfSums::kBefore) value = Vec::Fma(offset, of_zeros, value);
      Vec::F result = Vec::Fma(value, scale, Vec::Load(y));
      if constexpr (kZeros == ZerosOfSums::kAfter) result = Vec::Fma(offset, of_zeros, result);
      Vec::Store(y, result);
    }
  }
}

template <bool kDigits>
void AddAmxSums(const QuadPiece& piece, ZerosOfSums zeros, const AmxTokens& of) {
  WithCount<0, 3>(static_cast<int64_t>(zeros), [&](auto kind) AWQD_ALWAYS_INLINE {
    AddAmxSumsOf<kDigits, static_cast<ZerosOfSums>(kind.kValue)>(piece, of);
  });
}

}  // namespace
}  // namespace awqd::cpu
