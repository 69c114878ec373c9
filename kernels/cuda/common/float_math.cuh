// Fragments of codes that are no integers, and of weights whose scales and zeros are FP32. Device
// code only.
#pragma once

#include "kernels/cuda/common/float_codes.cuh"
#include "kernels/cuda/common/mma16.cuh"
#include "kernels/cuda/common/mma16.h"

namespace awqd::cuda {

// ---- codes -------------------------------------------------------------------------------------

// Decode gives a lane's fragment of a step, and Factor the factor that its numbers still lack.
template <CodeKind kCode, bool kBf16>
struct FloatCodes;

template <bool kBf16>
struct FloatCodes<CodeKind::kE2m1, kBf16> {
  static __device__ __forceinline__ float Factor(const float*) { return 1; }
  static __device__ __forceinline__ Pairs Decode(const LaneCodes<4>& codes, int step) {
    return kBf16 ? E2m1ToBf16(codes.Word(step)) : E2m1ToFp16(codes.Word(step));
  }
};

template <bool kBf16>
struct FloatCodes<CodeKind::kE4m3, kBf16> {
  static __device__ __forceinline__ float Factor(const float*) { return kBf16 ? 1 : kE4m3UnitFp16; }
  static __device__ __forceinline__ Pairs Decode(const LaneCodes<8>& codes, int step) {
    return E4m3ToPairs<kBf16>(codes.Word(step, 0), codes.Word(step, 1));
  }
};

// Integers as they are, of weights with zeros as real numbers.
template <bool kBf16>
struct FloatCodes<CodeKind::kUnsigned, kBf16> {
  static __device__ __forceinline__ float Factor(const float*) { return kBf16 ? kBareUnitBf16 : 1; }
  template <int kBits>
  static __device__ __forceinline__ Pairs Decode(const LaneCodes<kBits>& codes, int step) {
    uint32_t none[4];
    ExpandZeros<kBits, kBf16>(0, none);
    return MinusZero<kBits, kBf16>(codes, step, none);
  }
};

// The table is rounded to 16 bits after a division by this power of two, which brings its largest
// number to [1, 2). To be called by whole warps.
__device__ __forceinline__ float TableFactor(const float* table) {
  const float v = fabsf(__ldg(table + threadIdx.x % 16));
  float most = isfinite(v) ? v : 0;
#pragma unroll
  for (int apart = 8; apart > 0; apart /= 2) {
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, apart));
  }
  // Denormals stay as they are.
  const uint32_t exponent = __float_as_uint(most) & 0x7f800000;
  return exponent == 0 ? 1 : __uint_as_float(exponent);
}

// Where a block has it: at the start of its shared memory. That start is a constant of the compiled
// kernel, which loads take beside a register.
__device__ __forceinline__ uint8_t* PairTable() {
  extern __shared__ __align__(1024) uint8_t shared[];
  return shared;
}

// Fills the table (float_codes.cuh), by all threads of the block.
template <bool kBf16>
__device__ __forceinline__ void FillPairTable(const float* table) {
  const int lane = threadIdx.x % 32;
  const float scaled = __ldg(table + lane % 16) / TableFactor(table);
  const uint32_t mine = kBf16 ? ToBf16x2(scaled, 0) : ToFp16x2(scaled, 0);
  uint8_t* const to = PairTable() + lane * 4;
  for (int row = threadIdx.x / 32; row < 256; row += blockDim.x / 32) {
    const uint32_t first = __shfl_sync(0xffffffffu, mine, row % 16);
    const uint32_t second = __shfl_sync(0xffffffffu, mine, row / 16);
    *reinterpret_cast<uint32_t*>(to + row * kPairTableRow) = first | second << 16;
  }
  __syncthreads();
}

// `kBf16`: what the table was filled with.
template <bool kBf16>
struct FloatCodes<CodeKind::kTable, kBf16> {
  static __device__ __forceinline__ float Factor(const float* table) { return TableFactor(table); }
  static __device__ __forceinline__ Pairs Decode(const LaneCodes<4>& codes, int step) {
    const uint32_t lane = threadIdx.x % 32 * 4;
    uint32_t rows[4];
    PairRows(codes.Word(step), rows);
    Pairs out;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      out.v[p] = *reinterpret_cast<const uint32_t*>(PairTable() + (rows[p] | lane));
    }
    return out;
  }
};

// ---- arithmetic, as Fp16Math and Bf16Math have it ----------------------------------------------

// A magnitude has two significant bits. A scale, of E4M3 or E8M0, has at most four: records hold it
// as FP16 (layouts/mma16.cc), it fits BF16, and so do all products of the two.
template <class Record, bool kBf16_>
struct E2m1Math {
  using X = uint16_t;
  static constexpr bool kBf16 = kBf16_;

  struct Meta {
    uint32_t scales[2];  // of a lane's two rows, twice each
  };

  static __device__ __forceinline__ Meta Expand(LaneMetaBits bits) {
    if constexpr (kBf16) {
      const float low = Fp16ToFloat(bits.scales & 0xffff), high = Fp16ToFloat(bits.scales >> 16);
      return {{ToBf16x2(low, low), ToBf16x2(high, high)}};
    } else {
      return {{Prmt(bits.scales, 0, 0x1010), Prmt(bits.scales, 0, 0x3232)}};
    }
  }
  static __device__ __forceinline__ Pairs Decode(const LaneCodes<4>& codes, int step,
                                                 const Meta& meta) {
    Pairs out = FloatCodes<CodeKind::kE2m1, kBf16>::Decode(codes, step);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t scale = meta.scales[i % 2];
      out.v[i] = kBf16 ? Mul2Bf16(out.v[i], scale) : Mul2Fp16(out.v[i], scale);
    }
    return out;
  }
};

// E2M1 in BF16 with scales of up to 11 bits: weights are rounded once, as ScaleBf16 does it.
template <class Record>
struct E2m1LongScalesMath {
  using X = uint16_t;
  static constexpr bool kBf16 = true;

  struct Meta {
    uint32_t high[4];
    uint32_t low[4];
  };

  static __device__ __forceinline__ Meta Expand(LaneMetaBits bits) {
    const SplitScale s0 = SplitToBf16(bits.scales & 0xffff), s1 = SplitToBf16(bits.scales >> 16);
    return {{s0.high, s1.high, s0.high, s1.high}, {s0.low, s1.low, s0.low, s1.low}};
  }
  static __device__ __forceinline__ Pairs Decode(const LaneCodes<4>& codes, int step,
                                                 const Meta& meta) {
    // SplitToBf16 has 64 times the scale.
    return ScaleBf16(E2m1ToBf16<64>(codes.Word(step)), meta.high, meta.low);
  }
};

// E4M3 without metas. Sums lack UnitOfBare.
template <class Record, bool kBf16_>
struct BareE4m3Math {
  using X = uint16_t;
  static constexpr bool kBf16 = kBf16_;

  struct Meta {};

  template <class Bits>
  static __device__ __forceinline__ Meta Expand(const Bits&) {
    return {};
  }
  static __device__ __forceinline__ Pairs Decode(const LaneCodes<8>& codes, int step, Meta) {
    return FloatCodes<CodeKind::kE4m3, kBf16>::Decode(codes, step);
  }
};

// Codes that are no integers; the scale of a group multiplies its FP32 sums.
template <class Record, bool kBf16_>
struct ScaledFloatsMath {
  using X = uint16_t;
  using Codes = FloatCodes<Record::kCode, kBf16_>;
  using Meta = LaneMetaFloats;
  static constexpr bool kBf16 = kBf16_;
  static constexpr bool kScalesSums = true;

  static __device__ __forceinline__ float Factor(const float* table) {
    return Codes::Factor(table);
  }
  static __device__ __forceinline__ Meta Expand(LaneMetaFloats meta) { return meta; }
  static __device__ __forceinline__ Pairs Decode(const LaneCodes<Record::kBits>& codes, int step,
                                                 const Meta&) {
    return Codes::Decode(codes, step);
  }
};

// Weights of any code are computed in FP32 and rounded once to the activations' type: integers with
// zeros as real numbers, and other codes with FP32 scales. They are decoded as FP16, whose
// significands are longer.
template <class Record, bool kBf16_>
struct RoundedMath {
  using X = uint16_t;
  static constexpr bool kBf16 = kBf16_;
  static constexpr int kBits = Record::kBits;

  struct Meta {
    float scales[2];
    float addends[2];  // of integers: minus the zero, and minus what a byte's number has too much
  };

  static __device__ __forceinline__ float Factor(const float* table) {
    if constexpr (Record::kReal)
      return 1;
    else
      return FloatCodes<Record::kCode, false>::Factor(table);
  }

  static __device__ __forceinline__ Meta Expand(const LaneMetaFloats& meta) {
    const float excess = Record::kReal && kBits < 8 ? kByteUnit : 0;
    return {{meta.scales[0], meta.scales[1]},
            {fmaf(-excess, meta.scales[0], -meta.zeros[0]),
             fmaf(-excess, meta.scales[1], -meta.zeros[1])}};
  }

  static __device__ __forceinline__ Pairs Decode(const LaneCodes<kBits>& codes, int step,
                                                 const Meta& meta) {
    Pairs out;
    if constexpr (Record::kReal) {
      const StepBytes bytes = BytesOf<kBits>(codes, step);
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const uint32_t word = p % 2 == 0 ? bytes.low : bytes.high;
        out.v[p] = Round(fmaf(Byte(word, p / 2), meta.scales[p % 2], meta.addends[p % 2]),
                         fmaf(Byte(word, p / 2 + 2), meta.scales[p % 2], meta.addends[p % 2]));
      }
    } else {
      const Pairs exact = FloatCodes<Record::kCode, false>::Decode(codes, step);
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        out.v[p] = Round(Fp16ToFloat(exact.v[p] & 0xffff) * meta.scales[p % 2],
                         Fp16ToFloat(exact.v[p] >> 16) * meta.scales[p % 2]);
      }
    }
    return out;
  }

 private:
  // A byte below 128 as bits 16 to 22 of this float adds its value to it: one instruction. What the
  // product with the scale has too much is off by 2^-17 of the scale at most.
  static constexpr float kByteUnit = 128;

  // Byte `at` of a word, plus kByteUnit for codes of up to 7 bits.
  static __device__ __forceinline__ float Byte(uint32_t word, int at) {
    if constexpr (kBits < 8) return __uint_as_float(Prmt(word, 0x43000000, 0x7044 | at << 8));
    return __uint_as_float(Prmt(word, 0x47000000, 0x7404 | at << 4)) - 0x1p15f;
  }
  static __device__ __forceinline__ uint32_t Round(float low, float high) {
    return kBf16 ? ToBf16x2(low, high) : ToFp16x2(low, high);
  }
};

}  // namespace awqd::cuda
