// The consumer of codes that are no integers, and of integers with real zeros: they decode to the
// type of the activations, exactly but for tables, and the sums of the rows of K that share a scale
// are multiplied by it in FP32. Device code only.
#pragma once

#include "kernels/cuda/common/float_codes.cuh"
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/sm80/consumer.cuh"

namespace awqd::cuda {
namespace {

// ---- codes -------------------------------------------------------------------------------------

// Decode gives a lane's fragment of a step, and factor() the factor that its numbers still lack in
// records with scales. In bare records QMatmulParams::unit has that factor.
template <CodeKind kCode, int kBits, bool kBf16>
class FloatCodes;

template <bool kBf16>
class FloatCodes<CodeKind::kE2m1, 4, kBf16> {
 public:
  __device__ __forceinline__ explicit FloatCodes(const float*) {}
  __device__ __forceinline__ float factor() const { return 1; }
  __device__ __forceinline__ Pairs Decode(const LaneCodes<4>& codes, int step) const {
    return kBf16 ? E2m1ToBf16(codes.Word(step)) : E2m1ToFp16(codes.Word(step));
  }
};

template <bool kBf16>
class FloatCodes<CodeKind::kE4m3, 8, kBf16> {
 public:
  __device__ __forceinline__ explicit FloatCodes(const float*) {}
  __device__ __forceinline__ float factor() const { return kBf16 ? 1 : kE4m3UnitFp16; }
  __device__ __forceinline__ Pairs Decode(const LaneCodes<8>& codes, int step) const {
    return E4m3ToPairs<kBf16>(codes.Word(step, 0), codes.Word(step, 1));
  }
};

// Integers as they are, of weights with real zeros.
template <int kBits, bool kBf16>
class FloatCodes<CodeKind::kUnsigned, kBits, kBf16> {
 public:
  __device__ __forceinline__ explicit FloatCodes(const float*) {
    ExpandZeros<kBits, kBf16>(0, none_);
  }
  __device__ __forceinline__ float factor() const { return kBf16 ? kBareUnitBf16 : 1; }
  __device__ __forceinline__ Pairs Decode(const LaneCodes<kBits>& codes, int step) const {
    return MinusZero<kBits, kBf16>(codes, step, none_);
  }

 private:
  uint32_t none_[4];
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
  extern __shared__ __align__(128) uint8_t shared[];
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

template <bool kBf16>
class FloatCodes<CodeKind::kTable, 4, kBf16> {
 public:
  __device__ __forceinline__ explicit FloatCodes(const float* table)
      : factor_(TableFactor(table)), lane_(threadIdx.x % 32 * 4) {}
  __device__ __forceinline__ float factor() const { return factor_; }
  __device__ __forceinline__ Pairs Decode(const LaneCodes<4>& codes, int step) const {
    uint32_t rows[4];
    PairRows(codes.Word(step), rows);
    Pairs out;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      out.v[p] = *reinterpret_cast<const uint32_t*>(PairTable() + (rows[p] | lane_));
    }
    return out;
  }

 private:
  float factor_;
  uint32_t lane_;
};

// ---- sums --------------------------------------------------------------------------------------

template <DType kX, class Record_>
struct FloatMath {
  using X = uint16_t;
  using Record = Record_;
  static constexpr bool kBf16 = kX == DType::kBf16;
};

// The scales, or zeros, of a lane's two rows.
struct LaneScales {
  float low, high;
};

template <DType kX, class Record, class Config>
class Consumer<FloatMath<kX, Record>, Config> {
 public:
  __device__ __forceinline__ Consumer(const QMatmulParams& p, const Slot<Config>& slot,
                                      uint32_t ring)
      : slot_(slot), decoder_(p.table), zero_first_(p.zero_first), at_(slot, ring) {}

  // sums += of the next slot.
  __device__ __forceinline__ void Accumulate(Sums<Config>& sums) {
    Sums<Config> part = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Codes codes[Config::kRowTiles];
#pragma unroll
      for (int r = 0; r < Config::kRowTiles; ++r) {
        codes[r].Load(at_.codes + r * slot_.record_bytes + half * Record::kUnitBytes);
      }
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) AddSteps(half, pair, codes, part, sums);
      if (Record::kMetas == 2) Fold(half * 4, part, sums);
    }
    if (Record::kMetas == 1) Fold(0, part, sums);
    at_.Advance(walk_.Advance(slot_));
  }

 private:
  using Math = FloatMath<kX, Record>;
  using Codes = LaneCodes<Record::kBits>;
  static constexpr bool kWide = mma16::HasFloatScales(Record::kMetaKind);
  static constexpr int kHalfTokenBytes = Config::kTokenBytes / 2;

  __device__ __forceinline__ uint32_t ScalesAt(int r, int step) const {
    return at_.scales + r * slot_.record_bytes + step * slot_.metas() / 8 * Record::kMetaBytes;
  }

  // Those that serve step `step` of a record, of eight.
  __device__ __forceinline__ LaneScales Scales(int r, int step) const {
    const uint32_t at = ScalesAt(r, step);
    const float factor = decoder_.factor();
    if constexpr (kWide) {
      const uint2 bits = LoadShared8(at);
      return {__uint_as_float(bits.x) * factor, __uint_as_float(bits.y) * factor};
    } else {
      const uint32_t bits = LoadShared4(at);
      return {Fp16ToFloat(bits & 0xffff) * factor, Fp16ToFloat(bits >> 16) * factor};
    }
  }

  // Factors of a token's sum over those rows, which is then subtracted: real zeros, times the scale
  // where they come before it.
  __device__ __forceinline__ LaneScales Zeros(int r, int step) const {
    const uint32_t at = ScalesAt(r, step);
    const uint2 bits = LoadShared8(at + 2 * mma16::kMetaScalesBytes);
    const LaneScales zeros = {__uint_as_float(bits.x), __uint_as_float(bits.y)};
    if (!zero_first_) return zeros;
    const uint2 scales = LoadShared8(at);
    return {zeros.low * __uint_as_float(scales.x), zeros.high * __uint_as_float(scales.y)};
  }

  // Two steps: into the sums of bare records, with their own scales into the sums where those
  // change within a unit, for 32 rows at least or for 16, else into `part`.
  __device__ __forceinline__ void AddSteps(int half, int pair,
                                           const Codes (&codes)[Config::kRowTiles],
                                           Sums<Config>& part, Sums<Config>& sums) const {
    Pairs a[Config::kRowTiles][2];
    LaneScales scales[Config::kRowTiles][2], zeros[Config::kRowTiles];
#pragma unroll
    for (int r = 0; r < Config::kRowTiles; ++r) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        a[r][s] = decoder_.Decode(codes[r], pair * 2 + s);
        if (s < Record::kMetas / 4) scales[r][s] = Scales(r, half * 4 + pair * 2 + s);
      }
      if constexpr (Record::kReal) zeros[r] = Zeros(r, half * 4 + pair * 2);
    }
#pragma unroll
    for (int j = 0; j < Config::kTokenTiles; ++j) {
      uint32_t b[4];
      LoadMatrices(at_.tokens[pair] + half * kHalfTokenBytes + j * 8 * Config::kTokenBytes, b);
      float below[4] = {};  // minus the sums of the tokens themselves
      if constexpr (Record::kReal) {
        constexpr uint32_t kMinusOnes = Math::kBf16 ? 0xbf80bf80 : 0xbc00bc00;
        const Pairs a = {{kMinusOnes, kMinusOnes, kMinusOnes, kMinusOnes}};
        Mma<Math::kBf16>(below, a, b[0], b[1]);
        Mma<Math::kBf16>(below, a, b[2], b[3]);
      }
#pragma unroll
      for (int r = 0; r < Config::kRowTiles; ++r) {
        float own[4] = {};
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          float(&to)[4] = Record::kFine ? own : Record::kBare ? sums[r][j] : part[r][j];
          Mma<Math::kBf16>(to, a[r][s], b[2 * s], b[2 * s + 1]);
          if (Record::kMetas == 8) {
            AddScaled(scales[r][s], own, sums[r][j]);
            own[0] = own[1] = own[2] = own[3] = 0;
          }
        }
        if (Record::kMetas == 4) AddScaled(scales[r][0], own, sums[r][j]);
        if (Record::kReal) AddScaled(zeros[r], below, sums[r][j]);
      }
    }
  }

  // sums += scales of step `step` * part; part = 0.
  __device__ __forceinline__ void Fold(int step, Sums<Config>& part, Sums<Config>& sums) const {
#pragma unroll
    for (int r = 0; r < Config::kRowTiles; ++r) {
      const LaneScales scales = Scales(r, step);
#pragma unroll
      for (int j = 0; j < Config::kTokenTiles; ++j) {
        AddScaled(scales, part[r][j], sums[r][j]);
#pragma unroll
        for (int i = 0; i < 4; ++i) part[r][j][i] = 0;
      }
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
  const FloatCodes<Record::kCode, Record::kBits, Math::kBf16> decoder_;
  const bool zero_first_;
  Walk<Config> walk_;
  SlotAddresses<Config> at_;
};

}  // namespace
}  // namespace awqd::cuda
