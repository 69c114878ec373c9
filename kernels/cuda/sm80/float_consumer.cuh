// The consumer of codes that are no integers, and of integers with zeros as real numbers: they
// decode to the type of the activations, exactly but for tables, and the sums of the rows of K that
// share a scale are multiplied by it in FP32. Device code only.
#pragma once

#include "kernels/cuda/common/float_math.cuh"
#include "kernels/cuda/sm80/consumer.cuh"

namespace awqd::cuda {
namespace {

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
      : slot_(slot),
        factor_(Decoder::Factor(p.table)),
        zero_first_(p.zero_first),
        at_(slot, ring) {}

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
  using Decoder = FloatCodes<Record::kCode, Math::kBf16>;
  static constexpr int kHalfTokenBytes = Config::kTokenBytes / 2;
  // Zeros of two steps: one for both in groups of 32 rows and more.
  static constexpr int kZeros = Record::kMetas == 8 ? 2 : 1;

  // The meta that serves step `step` of a record, of eight.
  __device__ __forceinline__ LaneMeta<Record> Meta(int r, int step) const {
    const int offset = r * slot_.record_bytes + step * slot_.metas() / 8 * Record::kMetaBytes;
    return LoadMeta<Record>(at_.scales + offset, at_.zeros + offset, zero_first_, factor_);
  }

  __device__ __forceinline__ LaneScales Scales(int r, int step) const {
    const auto meta = Meta(r, step);
    if constexpr (mma16::HasFloatScales(Record::kMetaKind)) {
      return {meta.scales[0], meta.scales[1]};
    } else {
      return {Fp16ToFloat(meta.scales & 0xffff) * factor_,
              Fp16ToFloat(meta.scales >> 16) * factor_};
    }
  }

  // Two steps: into the sums of bare records, with their own scales into the sums where those
  // change within a unit, for 32 rows at least or for 16, else into `part`.
  __device__ __forceinline__ void AddSteps(int half, int pair,
                                           const Codes (&codes)[Config::kRowTiles],
                                           Sums<Config>& part, Sums<Config>& sums) const {
    Pairs a[Config::kRowTiles][2];
    // Zeros are the factors of a token's sum over those rows, which is then subtracted.
    LaneScales scales[Config::kRowTiles][2], zeros[Config::kRowTiles][2];
#pragma unroll
    for (int r = 0; r < Config::kRowTiles; ++r) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        a[r][s] = Decoder::Decode(codes[r], pair * 2 + s);
        const int step = half * 4 + pair * 2 + s;
        if constexpr (Record::kReal) {
          if (s >= kZeros) continue;
          const auto meta = Meta(r, step);
          scales[r][s] = {meta.scales[0], meta.scales[1]};
          zeros[r][s] = {meta.zeros[0], meta.zeros[1]};
        } else if (s < Record::kMetas / 4) {
          scales[r][s] = Scales(r, step);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < Config::kTokenTiles; ++j) {
      uint32_t b[4];
      LoadMatrices(at_.tokens[pair] + half * kHalfTokenBytes + j * 8 * Config::kTokenBytes, b);
      float below[2][4] = {};  // minus the sums of the tokens themselves
      if constexpr (Record::kReal) {
        constexpr uint32_t kMinusOnes = Math::kBf16 ? 0xbf80bf80 : 0xbc00bc00;
        const Pairs ones = {{kMinusOnes, kMinusOnes, kMinusOnes, kMinusOnes}};
        Mma<Math::kBf16>(below[0], ones, b[0], b[1]);
        Mma<Math::kBf16>(below[kZeros - 1], ones, b[2], b[3]);
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
        if constexpr (Record::kReal) {
#pragma unroll
          for (int z = 0; z < kZeros; ++z) AddScaled(zeros[r][z], below[z], sums[r][j]);
        }
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
  const float factor_;
  const bool zero_first_;
  Walk<Config> walk_;
  SlotAddresses<Config> at_;
};

}  // namespace
}  // namespace awqd::cuda
