// The consumer of codes that are no integers: they decode to the type of the activations, exactly
// but for tables, and the sums of the rows of K that share a scale are multiplied by it in FP32.
// Device code only.
#pragma once

#include "kernels/cuda/common/float_codes.cuh"
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/sm80/consumer.cuh"

namespace awqd::cuda {
namespace {

// ---- codes -------------------------------------------------------------------------------------

// Decode gives a lane's fragment of a step; factor() is what its numbers are still to be multiplied
// by, of records with scales (of bare ones QMatmulParams::unit has it).
template <CodeKind kCode, bool kBf16>
class FloatCodes;

template <bool kBf16>
class FloatCodes<CodeKind::kE2m1, kBf16> {
 public:
  __device__ __forceinline__ explicit FloatCodes(const float*) {}
  __device__ __forceinline__ float factor() const { return 1; }
  __device__ __forceinline__ Pairs Decode(const LaneCodes<4>& codes, int step) const {
    return kBf16 ? E2m1ToBf16(codes.Word(step)) : E2m1ToFp16(codes.Word(step));
  }
};

template <bool kBf16>
class FloatCodes<CodeKind::kE4m3, kBf16> {
 public:
  __device__ __forceinline__ explicit FloatCodes(const float*) {}
  __device__ __forceinline__ float factor() const { return kBf16 ? 1 : kE4m3UnitFp16; }
  __device__ __forceinline__ Pairs Decode(const LaneCodes<8>& codes, int step) const {
    Pairs out;
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const uint32_t word = codes.Word(step, upper);
      out.v[upper] = Pair(LowerBytes(word)), out.v[2 + upper] = Pair(UpperBytes(word));
    }
    return out;
  }

 private:
  static __device__ __forceinline__ uint32_t Pair(uint32_t pair) {
    return kBf16 ? E4m3PairToBf16(pair) : E4m3PairToFp16(pair);
  }
};

// The table is rounded to 16 bits, over a power of two that brings its largest number to [1, 2).
template <bool kBf16>
class FloatCodes<CodeKind::kTable, kBf16> {
 public:
  __device__ __forceinline__ explicit FloatCodes(const float* table) {
    float v[16], most = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      v[i] = __ldg(table + i);
      if (isfinite(v[i])) most = fmaxf(most, fabsf(v[i]));
    }
    // Denormals stay as they are.
    const uint32_t exponent = __float_as_uint(most) & 0x7f800000;
    factor_ = exponent == 0 ? 1 : __uint_as_float(exponent);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float scaled = v[i] / factor_;
      SetEntry(&tables_, i, kBf16 ? ToBf16x2(scaled, 0) : ToFp16x2(scaled, 0));
    }
  }
  __device__ __forceinline__ float factor() const { return factor_; }
  __device__ __forceinline__ Pairs Decode(const LaneCodes<4>& codes, int step) const {
    return LookUp(tables_, codes.Word(step));
  }

 private:
  ByteTables tables_ = {};
  float factor_;
};

// ---- sums --------------------------------------------------------------------------------------

template <DType kX, class Record_>
struct FloatMath {
  using X = uint16_t;
  using Record = Record_;
  static constexpr bool kBf16 = kX == DType::kBf16;

  static __device__ __forceinline__ void Mma(float (&d)[4], const Pairs& a, uint32_t b0,
                                             uint32_t b1) {
    if constexpr (kBf16) {
      MmaBf16(d, a.v, b0, b1);
    } else {
      MmaFp16(d, a.v, b0, b1);
    }
  }
};

// Of a lane's two rows.
struct LaneScales {
  float low, high;
};

template <DType kX, class Record, class Config>
class Consumer<FloatMath<kX, Record>, Config> {
 public:
  __device__ __forceinline__ Consumer(const QMatmulParams& p, const Slot<Config>& slot,
                                      uint32_t ring)
      : slot_(slot), decoder_(p.table) {
    const int lane = threadIdx.x % 32, row_tile = ConsumerThread() / 32;
    codes_ = ring + row_tile * 2 * Record::kUnitBytes + Codes::LaneOffset(lane);
    scales_ = ring + Record::kCodesBytes + (row_tile * 8 + lane / 4) * (kWide ? 8 : 4);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int chunk = (pair * 4 + lane / 8) ^ (lane % 8);
      tokens_[pair] = ring + slot.tokens() + lane % 8 * Config::kTokenBytes + chunk * 16;
    }
  }

  // sums += of the next slot.
  __device__ __forceinline__ void Accumulate(Sums<Config>& sums) {
#pragma unroll
    for (int r = 0; r < Config::kRowTiles; ++r) AddRecord(r, sums[r]);
    const int next = walk_.Advance(slot_);
    codes_ += next, scales_ += next, tokens_[0] += next, tokens_[1] += next;
  }

 private:
  using Math = FloatMath<kX, Record>;
  using Codes = LaneCodes<Record::kBits>;
  using RowSums = float[Config::kTokenTiles][4];
  static constexpr bool kWide = mma16::HasFloatScales(Record::kCode);
  static constexpr int kHalfTokenBytes = Config::kTokenBytes / 2;

  // Those that serve step `step` of a record, of eight.
  __device__ __forceinline__ LaneScales Scales(int r, int step) const {
    const uint32_t at =
        scales_ + r * slot_.record_bytes + step * slot_.metas() / 8 * Record::kMetaBytes;
    const float factor = decoder_.factor();
    if constexpr (kWide) {
      const uint2 bits = LoadShared8(at);
      return {__uint_as_float(bits.x) * factor, __uint_as_float(bits.y) * factor};
    } else {
      const uint32_t bits = LoadShared4(at);
      return {Fp16ToFloat(bits & 0xffff) * factor, Fp16ToFloat(bits >> 16) * factor};
    }
  }

  __device__ __forceinline__ void AddRecord(int r, RowSums& sums) const {
    RowSums part = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Codes codes;
      codes.Load(codes_ + r * slot_.record_bytes + half * Record::kUnitBytes);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) AddSteps(r, half, pair, codes, part, sums);
      if (Record::kMetas == 2) Fold(Scales(r, half * 4), part, sums);
    }
    if (Record::kMetas == 1) Fold(Scales(r, 0), part, sums);
  }

  // Two steps: into the sums of bare records, with their own scales into the sums where those
  // change within a unit, for 32 rows at least or for 16, else into `part`.
  __device__ __forceinline__ void AddSteps(int r, int half, int pair, const Codes& codes,
                                           RowSums& part, RowSums& sums) const {
    const Pairs a[2] = {decoder_.Decode(codes, pair * 2), decoder_.Decode(codes, pair * 2 + 1)};
    LaneScales scales[2];
#pragma unroll
    for (int s = 0; s < Record::kMetas / 4; ++s) {
      scales[s] = Scales(r, half * 4 + pair * 2 + s);
    }
#pragma unroll
    for (int j = 0; j < Config::kTokenTiles; ++j) {
      uint32_t b[4];
      LoadMatrices(tokens_[pair] + half * kHalfTokenBytes + j * 8 * Config::kTokenBytes, b);
      float own[4] = {};
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        float(&to)[4] = Record::kFine ? own : Record::kBare ? sums[j] : part[j];
        Math::Mma(to, a[s], b[2 * s], b[2 * s + 1]);
        if (Record::kMetas == 8) {
          AddScaled(scales[s], own, sums[j]);
          own[0] = own[1] = own[2] = own[3] = 0;
        }
      }
      if (Record::kMetas == 4) AddScaled(scales[0], own, sums[j]);
    }
  }

  // sums += scales * part; part = 0.
  static __device__ __forceinline__ void Fold(LaneScales scales, RowSums& part, RowSums& sums) {
#pragma unroll
    for (int j = 0; j < Config::kTokenTiles; ++j) {
      AddScaled(scales, part[j], sums[j]);
#pragma unroll
      for (int i = 0; i < 4; ++i) part[j][i] = 0;
    }
  }
  static __device__ __forceinline__ void AddScaled(LaneScales scales, const float (&part)[4],
                                                   float (&sums)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] = fmaf(part[i], i < 2 ? scales.low : scales.high, sums[i]);
    }
  }

  const Slot<Config> slot_;
  const FloatCodes<Record::kCode, Math::kBf16> decoder_;
  Walk<Config> walk_;
  uint32_t codes_;
  uint32_t scales_;
  uint32_t tokens_[2];  // of the first and the second 32 of 64 rows of K
};

}  // namespace
}  // namespace awqd::cuda
