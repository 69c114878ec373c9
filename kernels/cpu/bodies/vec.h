// Vec: the 16 floats that the bodies are written over. Everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies/elements.h"
#if !defined(__AVX2__) && !defined(AWQD_NEON_BODY)
#include "kernels/base/float8.h"
#endif

namespace awqd::cpu {
namespace {

struct Vec {
  using F = FloatVec;

  // kRows, kColumns    the largest tile of accumulators
  // kRoomySums         a tile of more sums leaves no registers for tables and codes
  // kUsePanel          whether several groups of rows share decoded weights, through memory
  // kUnroll            whether shifts that the compiler knows are worth their code
  // Columns            how many columns a tile has that decodes for itself
#if defined(__AVX512BW__)
  // A shift and a permutation next to four FMAs cost nothing (Zen 4, measured): every group of rows
  // decodes for itself.
  static constexpr int kRows = 6, kColumns = 4, kRoomySums = 16;
  static constexpr bool kUsePanel = false, kUnroll = true;
  static constexpr int Columns(int rows) { return rows <= 3 ? 8 : kColumns; }
#elif defined(__AVX2__)
  // A decoded vector costs ten instructions.
  static constexpr int kRows = 3, kColumns = 2, kRoomySums = 2;
  static constexpr bool kUsePanel = true, kUnroll = true;
  static constexpr int Columns(int) { return kColumns; }
#elif defined(AWQD_NEON_BODY)
  // A decoded vector costs sixteen instructions. In a tile that decodes for itself sums, one
  // decoded vector and one of x, a table and constants have 32 registers.
  static constexpr int kRows = 3, kColumns = 2, kRoomySums = 2;
  static constexpr bool kUsePanel = true, kUnroll = true;
  static constexpr int Columns(int rows) { return rows < 3 ? kColumns : 1; }
#else
  // A decoded vector costs sixteen look-ups.
  static constexpr int kRows = 1, kColumns = 2, kRoomySums = 0;
  static constexpr bool kUsePanel = true, kUnroll = false;
  static constexpr int Columns(int) { return kColumns; }
#endif

  // of(i) for the registers.
  template <typename Of>
  AWQD_ALWAYS_INLINE static F Each(Of of) {
    F out;
    Times<kRegisters>([&](auto i) AWQD_ALWAYS_INLINE { out.r[i] = of(i); });
    return out;
  }
  static F Set(float v) {
    return Each([v](int) { return v - Floats{}; });  // not a sum, which would lose the sign of -0
  }
  static F Zero() { return {}; }
  static F Load(const float* p) {
    return Each([p](int i) { return LoadAs<Floats>(p + i * kLanes); });
  }
  static void Store(float* p, const F& v) {
    Times<kRegisters>([&](auto i) { StoreAs(p + i * kLanes, v.r[i]); });
  }
  static F Add(const F& a, const F& b) {
    return Each([&](int i) { return a.r[i] + b.r[i]; });
  }
  static F Sub(const F& a, const F& b) {
    return Each([&](int i) { return a.r[i] - b.r[i]; });
  }
  static F Mul(const F& a, const F& b) {
    return Each([&](int i) { return a.r[i] * b.r[i]; });
  }
  static F Div(const F& a, const F& b) {
    return Each([&](int i) { return a.r[i] / b.r[i]; });
  }
  // a * b + c.
  static F Fma(const F& a, const F& b, const F& c) {
    return Each([&](int i) { return cpu::Fma(a.r[i], b.r[i], c.r[i]); });
  }
  // a * b - c.
  static F Fms(const F& a, const F& b, const F& c) {
    return Each([&](int i) { return cpu::Fms(a.r[i], b.r[i], c.r[i]); });
  }
  static F Abs(const F& v) {
    return Each([&](int i) { return (Floats)((Lanes32)v.r[i] & 0x7fffffff); });
  }
  // b where one is a NaN.
  static F Min(const F& a, const F& b) {
    return Each([&](int i) { return Smaller(a.r[i], b.r[i]); });
  }
  static F Max(const F& a, const F& b) {
    return Each([&](int i) { return Larger(a.r[i], b.r[i]); });
  }
  static float MinOfAll(const F& v) {
    const auto min = [](Floats a, Floats b) { return Smaller(a, b); };
    return FoldLanes(FoldRegisters(v.r, min), min);
  }
  static float MaxOfAll(const F& v) {
    const auto max = [](Floats a, Floats b) { return Larger(a, b); };
    return FoldLanes(FoldRegisters(v.r, max), max);
  }
  static float SumOfAll(const F& v) {
    const auto add = [](Floats a, Floats b) { return a + b; };
    return FoldLanes(FoldRegisters(v.r, add), add);
  }
  // out[i]: SumOfAll of v[i]. Writes whole registers.
  template <int kCount>
  static void Sums(const F* v, float* out) {
    Times<(kCount + kLanes - 1) / kLanes>([&](auto i) AWQD_ALWAYS_INLINE {
      constexpr int kFirst = i.kValue * kLanes;
      StoreAs(out + kFirst, SumsOfRegister<kCount - kFirst>(v + kFirst));
    });
  }

  // The argument of StreamVector.
#if defined(__AVX512BW__)
  using StreamedFloats = __m512i;
  using StreamedHalves = __m256i;
#elif defined(__AVX2__)
  using StreamedFloats = __m256i;
  using StreamedHalves = __m128i;
#else
  using StreamedFloats = Floats;
  using StreamedHalves = Halves;
#endif

  // Elements of memory.
  static F Load16Of(const void* in, Element type, int64_t index) {
    return Each([&](int i) { return LoadElements<Floats>(in, type, index + i * kLanes); });
  }
  static void Store16To(void* out, Element type, int64_t index, const F& v) {
    Times<kRegisters>([&](auto i) { StoreElements(out, type, index + i * kLanes, v.r[i]); });
  }
  // The same around the caches, to an address that is a multiple of 64.
  static void Stream16To(void* out, Element type, int64_t index, const F& v) {
    Times<kRegisters>([&](auto i) {
      const int64_t at = index + i * kLanes;
      if (type == Element::kFp32) {
        StreamVector(static_cast<float*>(out) + at, (StreamedFloats)v.r[i]);
      } else {
        StreamVector(static_cast<uint16_t*>(out) + at, (StreamedHalves)RoundTo(type, v.r[i]));
      }
    });
  }
  static F RoundToHalf(const F& v) {
    return Each([&](int i) { return FromFp16(ToFp16(v.r[i])); });
  }

  // A register of a vector.
  using Part = Floats;
  static constexpr int kParts = kRegisters;
  template <int kPart>
  static Part LoadPart(const float* p) {
    Part out = LoadAs<Floats>(p + kPart * kLanes);
#if defined(__AVX2__)
    // Otherwise the compiler loads it once for each of its uses, and loads are what is short.
    asm("" : "+x"(out));
#endif
    return out;
  }
  template <int kPart>
  static void FmaPart(Part a, Part b, F* c) {
    c->r[kPart] = cpu::Fma(a, b, c->r[kPart]);
  }

  // table[words[i] >> shift] of a register, whose low 4 bits are the index.
  AWQD_ALWAYS_INLINE static Floats LookupLanes(const F& table, Lanes32 words, int shift) {
    const Lanes32 codes = ShiftRight(words, shift);
#if defined(__AVX512BW__)
    // vpermps reads the low 4 bits of an index and ignores the rest.
    return _mm512_permutexvar_ps((__m512i)codes, table.r[0]);
#elif defined(__AVX2__)
    // Entries 0..7 and 8..15 of a table: vpermps reads 3 index bits, a blend reads the fourth.
    const Lanes32 sign = __builtin_constant_p(shift) ? words << (28 - shift) : codes << 28;
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.r[0], (__m256i)codes),
                            _mm256_permutevar8x32_ps(table.r[1], (__m256i)codes), (__m256)sign);
#elif defined(AWQD_NEON_BODY)
    // The look-up takes bytes: those of entry i are 4 i to 4 i + 3.
    const uint8x16x4_t entries = {{(uint8x16_t)table.r[0], (uint8x16_t)table.r[1],
                                   (uint8x16_t)table.r[2], (uint8x16_t)table.r[3]}};
    const Lanes32 bytes = (codes & 15) * 0x04040404 + 0x03020100;
    return (Floats)vqtbl4q_u8(entries, (uint8x16_t)bytes);
#else
    const auto* const entries = reinterpret_cast<const float*>(&table);
    const Lanes32 index = codes & 15;
    return Floats{entries[index[0]], entries[index[1]], entries[index[2]], entries[index[3]]};
#endif
  }

  // The same of 16 words.
  AWQD_ALWAYS_INLINE static F Lookup(const F& table, const uint32_t* words, int shift) {
    return Each([&](int i) AWQD_ALWAYS_INLINE {
      return LookupLanes(table, LoadVector(words + i * kLanes), shift);
    });
  }
  // 2^23 + (words[i] >> shift & mask).
  static F Magic(const uint32_t* words, int shift, int mask) {
    const IntVec codes = IntVec::Load(words) >> shift & IntVec::Set(static_cast<uint32_t>(mask));
    return (codes | IntVec::Set(0x4b000000)).AsFloats();
  }
  static F Signed(const uint8_t* bytes) { return IntVec::WidenSigned(bytes).ToFloat(); }
  // The bytes have their upper bit flipped.
  static F Flipped(const uint8_t* bytes) {
    return (IntVec::WidenBytes(bytes, bytes + 8) ^ IntVec::Set(0x80)).ToFloat();
  }
  // 2^-8 of each.
  static F E4m3(const uint8_t* bytes) {
#if defined(__AVX512BW__)
    return {FromFp16(E4m3ToFp16((Halves)_mm256_cvtepi8_epi16(Load16(bytes))))};
#elif defined(__AVX2__)
    const auto all = (__m256i)E4m3ToFp16((Lanes16)_mm256_cvtepi8_epi16(Load16(bytes)));
    return {FromFp16((Halves)_mm256_castsi256_si128(all)),
            FromFp16((Halves)_mm256_extracti128_si256(all, 1))};
#elif defined(AWQD_NEON_BODY)
    const int8x16_t all = vld1q_s8(reinterpret_cast<const int8_t*>(bytes));
    const auto low = (float16x8_t)E4m3ToFp16((Lanes16)vmovl_s8(vget_low_s8(all)));
    const auto high = (float16x8_t)E4m3ToFp16((Lanes16)vmovl_high_s8(all));
    return {(Floats)vcvt_f32_f16(vget_low_f16(low)), (Floats)vcvt_high_f32_f16(low),
            (Floats)vcvt_f32_f16(vget_low_f16(high)), (Floats)vcvt_high_f32_f16(high)};
#else
    float out[16];
    for (int i = 0; i < 16; ++i) out[i] = E4m3ToFloat(bytes[i]) * 0x1p-8f;
    return Load(out);
#endif
  }
  // Lanes of `bits`, 1 to 3, times 8 bits, to 32.
  static void WidenLanes(const uint8_t* block, int bits, uint32_t* words) {
    IntVec lanes = bits == 1 ? IntVec::WidenBytes(block, block + 8) : IntVec::LoadHalves(block);
    if (bits == 3) lanes = lanes | IntVec::WidenBytes(block + 32, block + 40) << 16;
    lanes.Store(words);
  }

 private:
  // FP16 numbers of 2^-8 of codes of E4M3, which are sign-extended: the exponent's bias differs by
  // 8. A subnormal code becomes a subnormal half, exactly.
  template <typename H>
  AWQD_ALWAYS_INLINE static H E4m3ToFp16(H codes) {
    // The sign at bits 15 and up, exponent and mantissa at bits 7 to 13.
    const H halves = codes << 7 & 0xbf80;
    // NaN, all ones, alone carries into bit 14, which makes it a NaN again.
    return halves | ((halves + 0x80) & 0x4000);
  }

  // Sums<kLanes>, where the first kCount are wanted. A fold serves two registers, or the parts of
  // what more have become.
  template <int kCount>
  AWQD_ALWAYS_INLINE static Floats SumsOfRegister(const F* v) {
    const Floats a = FoldPairs(Quads<kCount, 4, 0>(v), Quads<kCount, 4, 1>(v));
    const Floats b = FoldPairs(Quads<kCount, 4, 2>(v), Quads<kCount, 4, 3>(v));
    return Shuffle<InQuads<0, 2>>(a, b) + Shuffle<InQuads<1, 2>>(a, b);
  }
  // Lanes in groups of kGroup, each the folded lanes of one of v[kFirst], v[kFirst + 4], ...
  template <int kCount, int kGroup, int kFirst>
  AWQD_ALWAYS_INLINE static Floats Quads(const F* v) {
    if constexpr (kGroup == kLanes) {
      return FoldRegisters(v[kFirst < kCount ? kFirst : 0].r,
                           [](Floats a, Floats b) { return a + b; });
    } else {
      constexpr int kNext = kFirst + 4 * kLanes / (2 * kGroup);
      const Floats a = Quads<kCount, 2 * kGroup, kFirst>(v);
      const Floats b = Quads<kCount, 2 * kGroup, kNext>(v);
      return Shuffle<Halved<kGroup, 0>>(a, b) + Shuffle<Halved<kGroup, kGroup>>(a, b);
    }
  }
  // In every quarter [a | b], 2 lanes each.
  AWQD_ALWAYS_INLINE static Floats FoldPairs(Floats a, Floats b) {
    return Shuffle<InQuads<0, 1>>(a, b) + Shuffle<InQuads<2, 1>>(a, b);
  }
  // kGroup lanes from kFrom on, of every 2 kGroup.
  template <int kGroup, int kFrom>
  struct Halved {
    static constexpr int Source(int lane) {
      return lane / kGroup * 2 * kGroup + kFrom + lane % kGroup;
    }
  };
  // Lanes kFrom and kFrom + kStep of every 4 of a, then of b.
  template <int kFrom, int kStep>
  struct InQuads {
    static constexpr int Source(int lane) {
      return lane / 4 * 4 + lane % 2 * kStep + kFrom + lane % 4 / 2 * kLanes;
    }
  };
};

}  // namespace
}  // namespace awqd::cpu
