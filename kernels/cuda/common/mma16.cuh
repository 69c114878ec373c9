// Reads the layout "mma16" from shared memory into matrix fragments. Device code only.
//
// A record kind is a template parameter: the width of its codes and how many metas it has. Rings,
// consumers and epilogues are written once over it. A lane's codes of a step, 16 of K, are one A
// fragment of m16n8k16: pairs 0 and 2 belong to row lane / 4, pairs 1 and 3 to row lane / 4 + 8.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/common/dequant.cuh"
#include "kernels/cuda/common/integers.h"
#include "kernels/cuda/common/mma.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {

// Records of codes of kBits_ bits with at most kMetas_ metas: 0 (bare), 1, 2, or 4 or 8 for as
// many as a call tells. kReal_: their zeros are real numbers.
template <int kBits_, int kMetas_, CodeKind kCode_ = CodeKind::kUnsigned, bool kReal_ = false>
struct Record {
  static constexpr bool kReal = kReal_;
  static constexpr mma16::MetaKind kMetaKind = mma16::MetaKindOf(kCode_, kReal_);
  static constexpr int kBits = kBits_;
  static constexpr CodeKind kCode = kCode_;
  static constexpr int kMetas = kMetas_;
  static constexpr bool kBare = kMetas == 0;
  // Groups of K shorter than 64: the scales change within a unit.
  static constexpr bool kFine = kMetas > 2;
  static constexpr int kUnitBytes = mma16::UnitBytes(kBits);
  static constexpr int kCodesBytes = mma16::CodesBytes(kBits);
  static constexpr int kMetaBytes = mma16::MetaBytes(kBits, kMetaKind);
};

// ---- codes -------------------------------------------------------------------------------------

// A lane's codes of one unit, four steps. LaneOffset: where they begin in the unit.
template <int kBits>
struct LaneCodes;

template <>
struct LaneCodes<4> {
  uint4 words;

  static __device__ __forceinline__ uint32_t LaneOffset(uint32_t lane) { return lane * 16; }
  __device__ __forceinline__ void Load(uint32_t at) { words = LoadShared16(at); }
  __device__ __forceinline__ void LoadGlobal(const uint8_t* at) { words = LoadStreaming(at); }
  __device__ __forceinline__ uint32_t Word(int step) const {
    return step == 0 ? words.x : step == 1 ? words.y : step == 2 ? words.z : words.w;
  }
};

template <>
struct LaneCodes<8> {
  uint4 words[2];  // of two steps each: row, row + 8, row, row + 8

  static __device__ __forceinline__ uint32_t LaneOffset(uint32_t lane) { return lane * 16; }
  __device__ __forceinline__ void Load(uint32_t at) {
    words[0] = LoadShared16(at), words[1] = LoadShared16(at + 512);
  }
  __device__ __forceinline__ void LoadGlobal(const uint8_t* at) {
    words[0] = LoadStreaming(at), words[1] = LoadStreaming(at + 512);
  }
  __device__ __forceinline__ uint32_t Word(int step, int upper) const {
    const uint4& w = words[step / 2];
    return step % 2 == 0 ? (upper == 0 ? w.x : w.y) : (upper == 0 ? w.z : w.w);
  }
};

template <>
struct LaneCodes<2> {
  uint2 words;  // of two steps each

  static __device__ __forceinline__ uint32_t LaneOffset(uint32_t lane) { return lane * 8; }
  __device__ __forceinline__ void Load(uint32_t at) { words = LoadShared8(at); }
  __device__ __forceinline__ void LoadGlobal(const uint8_t* at) {
    words = __ldg(reinterpret_cast<const uint2*>(at));
  }
  // The step's 8 bits of each half on the right.
  __device__ __forceinline__ uint32_t Low(int step) const {
    const uint32_t word = step < 2 ? words.x : words.y;
    return step % 2 == 0 ? word : word >> 8;
  }
};

template <>
struct LaneCodes<1> {
  uint32_t word;

  static __device__ __forceinline__ uint32_t LaneOffset(uint32_t lane) { return lane * 4; }
  __device__ __forceinline__ void Load(uint32_t at) { word = LoadShared4(at); }
  __device__ __forceinline__ void LoadGlobal(const uint8_t* at) {
    word = __ldg(reinterpret_cast<const uint32_t*>(at));
  }
  // The step's bits where 3-bit codes have their upper one.
  __device__ __forceinline__ uint32_t Rotated(int step) const {
    const int by = step / 2 * 8 + step % 2;
    return by == 0 ? word : __funnelshift_r(word, word, by);
  }
};

template <>
struct LaneCodes<3> {
  LaneCodes<2> low;
  LaneCodes<1> high;

  // In the lower plane. Lanes of the upper plane are half as far apart.
  static __device__ __forceinline__ uint32_t LaneOffset(uint32_t lane) { return lane * 8; }
  __device__ __forceinline__ void Load(uint32_t at) {
    low.Load(at);
    high.Load(at + mma16::UnitBytes(2) - threadIdx.x % 32 * 4);
  }
  __device__ __forceinline__ void LoadGlobal(const uint8_t* at) {
    low.LoadGlobal(at);
    high.LoadGlobal(at + mma16::UnitBytes(2) - threadIdx.x % 32 * 4);
  }
};

// 5 to 7 bits: the planes, and from them the words that LaneCodes<8> has.
template <int kBits>
requires(kBits > 4 && kBits < 8) struct LaneCodes<kBits> {
  static constexpr int kUpper = mma16::PlaneBits(kBits, 1), kTop = mma16::PlaneBits(kBits, 2);
  static constexpr int kUpperAt = mma16::UnitBytes(4), kTopAt = kUpperAt + mma16::UnitBytes(kUpper);
  uint4 low;
  uint2 upper;  // x alone where kUpper is 1
  uint32_t top;

  // In the lowest plane. Lanes of the others are closer together.
  static __device__ __forceinline__ uint32_t LaneOffset(uint32_t lane) { return lane * 16; }
  __device__ __forceinline__ void Load(uint32_t at) {
    const uint32_t unit = at - LaneOffset(threadIdx.x % 32), lane = threadIdx.x % 32;
    low = LoadShared16(at);
    if constexpr (kUpper == 2) upper = LoadShared8(unit + kUpperAt + lane * 8);
    if constexpr (kUpper == 1) upper.x = LoadShared4(unit + kUpperAt + lane * 4);
    if constexpr (kTop == 1) top = LoadShared4(unit + kTopAt + lane * 4);
  }
  __device__ __forceinline__ void LoadGlobal(const uint8_t* at) {
    const uint32_t lane = threadIdx.x % 32;
    const uint8_t* const unit = at - LaneOffset(lane);
    const auto word = [&](int from) { return *reinterpret_cast<const uint32_t*>(unit + from); };
    low = LoadStreaming(at);
    if constexpr (kUpper == 2) upper = *reinterpret_cast<const uint2*>(unit + kUpperAt + lane * 8);
    if constexpr (kUpper == 1) upper.x = word(kUpperAt + lane * 4);
    if constexpr (kTop == 1) top = word(kTopAt + lane * 4);
  }
  __device__ __forceinline__ uint32_t Word(int step, int row) const {
    const uint32_t both = step == 0 ? low.x : step == 1 ? low.y : step == 2 ? low.z : low.w;
    const int place = 2 * step + row;
    const uint32_t plane = place * kUpper < 8 ? upper.x : upper.y;
    uint32_t word = (row == 0 ? both : both >> 4) & 0x0f0f0f0fu;
    word = WithUpperBits<kUpper, 4>(word, plane, place);
    if constexpr (kTop == 1) word = WithUpperBits<kTop, 6>(word, top, place);
    return word;
  }
};

// ---- metas -------------------------------------------------------------------------------------

// A lane's two scales (row, row + 8) and its two zeros, of 4 bits in a byte or of 8 in two.
struct LaneMetaBits {
  uint32_t scales;
  uint32_t zeros;
};

// The same in FP32. Zeros, of records that have real ones, come after the scale.
struct LaneMetaFloats {
  float scales[2];
  float zeros[2];
};

// Where in the meta at `meta` they lie; `row_tile` 0..3.
template <class Record>
__device__ __forceinline__ uint32_t ScalesAddress(uint32_t meta, uint32_t row_tile, uint32_t lane) {
  constexpr int kBytes = mma16::HasFloatScales(Record::kMetaKind) ? 8 : 4;  // of a lane
  return meta + (row_tile * 8 + lane / 4) * kBytes;
}
template <int kBits>
__device__ __forceinline__ uint32_t ZerosAddress(uint32_t meta, uint32_t row_tile, uint32_t lane) {
  constexpr int kBytes = mma16::ZeroBits(kBits) / 4;
  return meta + mma16::kMetaScalesBytes + (row_tile * 8 + lane / 4) * kBytes;
}
template <int kBits>
__device__ __forceinline__ uint32_t LoadZeros(uint32_t address) {
  return kBits > 4 ? LoadShared2(address) : LoadShared1(address);
}

template <class Record>
using LaneMeta =
    std::conditional_t<mma16::HasFloatScales(Record::kMetaKind), LaneMetaFloats, LaneMetaBits>;

// A lane's meta, of the addresses above. `zero_first`: real zeros are taken off before the scale.
// `factor`: multiplies FP32 scales.
template <class Record>
__device__ __forceinline__ LaneMeta<Record> LoadMeta(uint32_t scales, uint32_t zeros,
                                                     bool zero_first, float factor) {
  if constexpr (mma16::HasFloatScales(Record::kMetaKind)) {
    const uint2 s = LoadShared8(scales);
    LaneMeta<Record> out = {{__uint_as_float(s.x), __uint_as_float(s.y)}, {0, 0}};
    if constexpr (Record::kReal) {
      const uint2 z = LoadShared8(scales + 2 * mma16::kMetaScalesBytes);
      out.zeros[0] = __uint_as_float(z.x) * (zero_first ? out.scales[0] : 1);
      out.zeros[1] = __uint_as_float(z.y) * (zero_first ? out.scales[1] : 1);
    }
    out.scales[0] *= factor, out.scales[1] *= factor;
    return out;
  } else {
    constexpr bool kZeros = Record::kCode == CodeKind::kUnsigned;
    return {LoadShared4(scales), kZeros ? LoadZeros<Record::kBits>(zeros) : 0};
  }
}

// ---- arithmetic --------------------------------------------------------------------------------

// q - z of a lane's fragment, exactly: in fp16, or in bf16 as (q - z) / 64.
template <int kBits, bool kBf16>
__device__ __forceinline__ Pairs MinusZero(const LaneCodes<kBits>& codes, int step,
                                           const uint32_t (&zeros)[4]) {
  if constexpr (kBits == 4) {
    const uint32_t word = codes.Word(step);
    return kBf16 ? Int4MinusZeroBf16(word, zeros) : Int4MinusZeroFp16(word, zeros);
  } else if constexpr (kBits > 4) {
    Pairs out;
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const uint32_t word = codes.Word(step, upper), zero = zeros[upper];
      uint32_t pairs[2];
      kBf16 ? Int8MinusZeroBf16(word, zero, pairs) : Int8MinusZeroFp16(word, zero, pairs);
      out.v[upper] = pairs[0], out.v[2 + upper] = pairs[1];
    }
    return out;
  } else if constexpr (kBits == 2) {
    const uint32_t low = codes.Low(step);
    return kBf16 ? Int2MinusZeroBf16(low, zeros) : MinusZeroFp16<0>(Int2PlusBias(low), zeros);
  } else if constexpr (kBits == 1) {
    const uint32_t bits = codes.Rotated(step);
    return kBf16 ? Int1MinusZeroBf16(bits, zeros) : MinusZeroFp16<1>(Int1PlusBias(bits), zeros);
  } else {
    const uint32_t low = codes.low.Low(step), high = codes.high.Rotated(step);
    return kBf16 ? Int3MinusZeroBf16(low, high, zeros)
                 : MinusZeroFp16<0>(Int3PlusBias(low, high), zeros);
  }
}

// A lane's two zeros as the pairs of MinusZero take them.
template <int kBits, bool kBf16>
__device__ __forceinline__ void ExpandZeros(uint32_t bits, uint32_t (&zeros)[4]) {
  if constexpr (kBits > 4) {
    const auto zero = [](uint32_t both) { return kBf16 ? ByteZeroBf16(both) : ByteZeroFp16(both); };
    zeros[0] = zeros[2] = zero(Prmt(bits, 0, 0x4040));
    zeros[1] = zeros[3] = zero(Prmt(bits, 0, 0x4141));
  } else if constexpr (kBf16 || kBits == 4) {
    const uint32_t both = Both(bits);
    zeros[0] = zeros[2] = kBf16 ? LowZeroBf16(both) : LowZeroFp16(both);
    zeros[1] = zeros[3] = kBf16 ? HighZeroBf16(both) : HighZeroFp16(both);
  } else {
    kBits == 1 ? BitZerosFp16(Both(bits), zeros) : PairZerosFp16(Both(bits), zeros);
  }
}

template <bool kBf16>
__device__ __forceinline__ void Mma(float (&d)[4], const Pairs& a, uint32_t b0, uint32_t b1) {
  kBf16 ? MmaBf16(d, a.v, b0, b1) : MmaFp16(d, a.v, b0, b1);
}

// Zeros and scales that decode a lane's two rows, as the pairs of a fragment expect them.
struct LaneMetaFp16 {
  uint32_t zeros[4];
  uint32_t scales[4];
};

struct LaneMetaBf16 {
  uint32_t zeros[4];
  uint32_t high[4];
  uint32_t low[4];
};

// How fragments are decoded for one type of activations and one kind of records. The sums of bare
// records still lack the scale, and with bf16 a factor of 64 (mma16.h).
template <class Record>
struct Fp16Math {
  using X = uint16_t;
  static constexpr bool kBf16 = false;
  static constexpr int kBits = Record::kBits;
  using Meta = LaneMetaFp16;

  static __device__ __forceinline__ Meta Expand(LaneMetaBits bits) {
    Meta out;
    ExpandZeros<kBits, kBf16>(bits.zeros, out.zeros);
    if constexpr (!Record::kBare) {
      out.scales[0] = out.scales[2] = Prmt(bits.scales, 0, 0x1010);
      out.scales[1] = out.scales[3] = Prmt(bits.scales, 0, 0x3232);
    }
    return out;
  }
  static __device__ __forceinline__ Pairs Decode(const LaneCodes<kBits>& codes, int step,
                                                 const Meta& meta) {
    const Pairs out = MinusZero<kBits, kBf16>(codes, step, meta.zeros);
    return Record::kBare ? out : ScaleFp16(out, meta.scales);
  }
};

template <class Record>
struct Bf16Math {
  using X = uint16_t;
  static constexpr bool kBf16 = true;
  static constexpr int kBits = Record::kBits;
  using Meta = LaneMetaBf16;

  static __device__ __forceinline__ Meta Expand(LaneMetaBits bits) {
    Meta out;
    ExpandZeros<kBits, kBf16>(bits.zeros, out.zeros);
    if constexpr (!Record::kBare) {
      const SplitScale s0 = SplitToBf16(bits.scales & 0xffff), s1 = SplitToBf16(bits.scales >> 16);
      out.high[0] = out.high[2] = s0.high, out.high[1] = out.high[3] = s1.high;
      out.low[0] = out.low[2] = s0.low, out.low[1] = out.low[3] = s1.low;
    }
    return out;
  }
  static __device__ __forceinline__ Pairs Decode(const LaneCodes<kBits>& codes, int step,
                                                 const Meta& meta) {
    const Pairs out = MinusZero<kBits, kBf16>(codes, step, meta.zeros);
    return Record::kBare ? out : ScaleBf16(out, meta.high, meta.low);
  }
};

// A lane's zeros, and the scales that sums of its two rows are multiplied by.
struct LaneMetaOfSums {
  uint32_t zeros[4];
  float scales[2];  // of rows lane / 4 and lane / 4 + 8
};

// The same with the scale of a group outside the sum over its rows. Fragments are the exact results
// of MinusZero, and the consumer multiplies the FP32 sums of a group by Meta::scales. Decoding
// eight weights of 4 bits takes 9 instructions instead of 13 (FP16) and 17 (BF16). Each sum takes
// one more for each group, and no weight is rounded.
template <class Record, bool kBf16_>
struct ScaledSumsMath {
  using X = uint16_t;
  static constexpr bool kBf16 = kBf16_;
  static constexpr bool kScalesSums = true;
  static constexpr int kBits = Record::kBits;
  using Meta = LaneMetaOfSums;

  static __device__ __forceinline__ Meta Expand(LaneMetaBits bits) {
    constexpr float kUnit = kBf16 ? 64 : 1;
    Meta out;
    ExpandZeros<kBits, kBf16>(bits.zeros, out.zeros);
    out.scales[0] = Fp16ToFloat(static_cast<uint16_t>(bits.scales)) * kUnit;
    out.scales[1] = Fp16ToFloat(static_cast<uint16_t>(bits.scales >> 16)) * kUnit;
    return out;
  }
  static __device__ __forceinline__ Pairs Decode(const LaneCodes<kBits>& codes, int step,
                                                 const Meta& meta) {
    return MinusZero<kBits, kBf16>(codes, step, meta.zeros);
  }
};

// The zeros of bare records, all alike, as a meta has them.
__device__ __forceinline__ LaneMetaBits BareMeta(int zero) {
  return {0, static_cast<uint32_t>(zero) * 0x0101u};
}

// ---- bytes, for products of INT8 activations ---------------------------------------------------

// The codes of one step of a lane as bytes.
template <int kBits>
__device__ __forceinline__ StepBytes BytesOf(const LaneCodes<kBits>& codes, int step) {
  if constexpr (kBits > 4) {
    return {codes.Word(step, 0), codes.Word(step, 1)};
  } else if constexpr (kBits == 4) {
    return Int4Bytes(codes.Word(step));
  } else if constexpr (kBits == 2) {
    return Int2Bytes(codes.Low(step));
  } else if constexpr (kBits == 1) {
    return Int1Bytes(codes.Rotated(step));
  } else {
    return Int3Bytes(codes.low.Low(step), codes.high.Rotated(step));
  }
}

// A lane's two zeros in every byte.
template <int kBits>
__device__ __forceinline__ StepBytes ZeroBytes(uint32_t zeros) {
  if constexpr (kBits > 4) {
    return {Prmt(zeros, 0, 0), Prmt(zeros, 0, 0x1111)};
  } else {
    return {(zeros & 15) * 0x01010101u, (zeros >> 4 & 15) * 0x01010101u};
  }
}

// code - zero of two steps of a lane as signed bytes, the A operand of an instruction that takes 32
// of K. For 8 bits it is code - 128: the rest, zero - 128, does not fit beside it.
template <int kBits>
__device__ __forceinline__ void DecodeSigned(const LaneCodes<kBits>& codes, int step,
                                             StepBytes below, uint32_t (&a)[4]) {
  const StepBytes first = BytesOf<kBits>(codes, step), second = BytesOf<kBits>(codes, step + 1);
  if constexpr (kBits == 8) {
    a[0] = MinusHalfBytes(first.low), a[1] = MinusHalfBytes(first.high);
    a[2] = MinusHalfBytes(second.low), a[3] = MinusHalfBytes(second.high);
  } else {
    a[0] = MinusZeroBytes(first.low, below.low), a[1] = MinusZeroBytes(first.high, below.high);
    a[2] = MinusZeroBytes(second.low, below.low), a[3] = MinusZeroBytes(second.high, below.high);
  }
}

// A lane's two zeros as DecodeSigned takes them.
template <int kBits>
__device__ __forceinline__ StepBytes BelowZeros(uint32_t zeros) {
  if constexpr (kBits == 8) return {};
  if constexpr (kBits > 4) return {BelowZero(zeros & 0xff), BelowZero(zeros >> 8)};
  return {BelowZero(zeros & 15), BelowZero(zeros >> 4 & 15)};
}

}  // namespace awqd::cuda
