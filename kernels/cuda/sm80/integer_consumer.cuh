// The consumer of INT8 activations: products of bytes are summed in INT32. Either over the part of
// a record that has one scale, and then scaled and added up in FP32; or, where the sums themselves
// are asked for, along all of K, modulo 2^32. Device code only.
#pragma once

#include "kernels/cuda/sm80/consumer.cuh"

namespace awqd::cuda {
namespace {

// The zeros and scales that decode a lane's two rows. `rest`: for codes of 8 bits, zero - 128 in
// every byte.
struct LaneMetaInt8 {
  StepBytes below;
  StepBytes rest;
  float scale_low, scale_high;
  float zero_low, zero_high;  // real zeros, times the scale where they come before it
};

// Sum: float or int.
template <class Record_, class Sum_>
struct Int8Math {
  using X = int8_t;
  using Sum = Sum_;
  using Record = Record_;
  using Meta = LaneMetaInt8;
  static constexpr int kBits = Record::kBits;

  static __device__ __forceinline__ Meta Expand(LaneMetaBits bits) {
    Meta out;
    out.below = BelowZeros<kBits>(bits.zeros);
    const StepBytes zeros = ZeroBytes<kBits>(bits.zeros);
    out.rest = {MinusHalfBytes(zeros.low), MinusHalfBytes(zeros.high)};
    out.scale_low = Record::kBare ? 1 : Fp16ToFloat(bits.scales & 0xffff);
    out.scale_high = Record::kBare ? 1 : Fp16ToFloat(bits.scales >> 16);
    return out;
  }
};

// The difference may fit 32 bits where `a` and `b` did not.
__device__ __forceinline__ int MinusModulo(int a, int b) {
  return static_cast<int>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
}

template <class Record, class Sum, class Config>
class Consumer<Int8Math<Record, Sum>, Config> {
 public:
  __device__ __forceinline__ Consumer(const QMatmulParams& p, const Slot<Config>& slot,
                                      uint32_t ring)
      : slot_(slot), zero_(p.zero), zero_first_(p.zero_first), at_(slot, ring) {}

  // sums += of the next slot.
  __device__ __forceinline__ void Accumulate(Sums<Config>& sums) {
#pragma unroll
    for (int r = 0; r < Config::kRowTiles; ++r) {
      if constexpr (Record::kFine && !kIntegers) {
        AddFine(r, sums[r]);
      } else if constexpr (Record::kFine) {
        AddFineIntegers(r, sums[r]);
      } else {
        AddRecord(r, sums[r]);
      }
    }
    at_.Advance(walk_.Advance(slot_));
  }

 private:
  using Math = Int8Math<Record, Sum>;
  using Codes = LaneCodes<Record::kBits>;
  using RowSums = Sum[Config::kTokenTiles][4];
  using RowIntegers = int[Config::kTokenTiles][4];
  static constexpr int kBits = Record::kBits;
  static constexpr bool kIntegers = std::is_same_v<Sum, int>;

  __device__ __forceinline__ typename Math::Meta Meta(int r, int which) const {
    if constexpr (Record::kBare) return Math::Expand(BareMeta(zero_));
    const int offset = r * slot_.record_bytes + which * Record::kMetaBytes;
    const auto bits =
        LoadMeta<Record>(at_.scales + offset, at_.zeros + offset, zero_first_, /*factor=*/1);
    if constexpr (Record::kReal) {
      typename Math::Meta out = Math::Expand({0, 0});
      out.scale_low = bits.scales[0], out.scale_high = bits.scales[1];
      out.zero_low = bits.zeros[0], out.zero_high = bits.zeros[1];
      return out;
    } else {
      return Math::Expand(bits);
    }
  }

  __device__ __forceinline__ Codes LoadCodes(int r, int half) const {
    Codes out;
    out.Load(at_.codes + r * slot_.record_bytes + half * Record::kUnitBytes);
    return out;
  }

  // Tokens of a token tile: what its four steps of 16 of K, half a record, are to a lane.
  __device__ __forceinline__ void LoadTokens(int half, int j, uint32_t (&b)[4]) const {
    LoadMatrices(at_.tokens[half] + j * 8 * Config::kTokenBytes, b);
  }

  // Groups of 64 and more.
  __device__ __forceinline__ void AddRecord(int r, RowSums& sums) const {
    RowIntegers fresh = {};
    RowIntegers& integers = IntegersOf(sums, fresh);
    typename Math::Meta meta = Meta(r, 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (Record::kMetas == 2 && half == 1) meta = Meta(r, 1);
      const Codes codes = LoadCodes(r, half);
      uint32_t a[2][4];
      DecodeSigned<kBits>(codes, 0, meta.below, a[0]);
      DecodeSigned<kBits>(codes, 2, meta.below, a[1]);
#pragma unroll
      for (int j = 0; j < Config::kTokenTiles; ++j) {
        uint32_t b[4];
        LoadTokens(half, j, b);
        MmaS8(integers[j], a[0], b[0], b[1]);
        MmaS8(integers[j], a[1], b[2], b[3]);
      }
      if constexpr (kBits == 8) TakeOffRest(half, meta, integers);
      if (Record::kMetas == 2 && half == 0) Fold(meta, integers, sums);
    }
    Fold(meta, integers, sums);
  }

  // integers -= (zero - 128) times the tokens, where a zero of the warp is not 128.
  __device__ __forceinline__ void TakeOffRest(int half, const typename Math::Meta& meta,
                                              RowIntegers& integers) const {
    if (!__any_sync(0xffffffffu, (meta.rest.low | meta.rest.high) != 0)) return;
    const uint32_t a[4] = {meta.rest.low, meta.rest.high, meta.rest.low, meta.rest.high};
#pragma unroll
    for (int j = 0; j < Config::kTokenTiles; ++j) {
      uint32_t b[4];
      LoadTokens(half, j, b);
      int rest[4] = {};
      MmaS8(rest, a, b[0], b[1]);
      MmaS8(rest, a, b[2], b[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) integers[j][i] = MinusModulo(integers[j][i], rest[i]);
    }
  }

  // Where a record's integers are added up: the sums themselves, or `fresh`.
  static __device__ __forceinline__ RowIntegers& IntegersOf(RowIntegers& sums, RowIntegers&) {
    return sums;
  }
  static __device__ __forceinline__ RowIntegers& IntegersOf(float (&)[Config::kTokenTiles][4],
                                                            RowIntegers& fresh) {
    return fresh;
  }

  // sums += scale * integers; integers = 0. Nothing where they are the sums.
  __device__ __forceinline__ void Fold(const typename Math::Meta& meta, RowIntegers& integers,
                                       RowSums& sums) const {
    if constexpr (!kIntegers) {
#pragma unroll
      for (int j = 0; j < Config::kTokenTiles; ++j) AddScaled(meta, integers[j], sums[j]);
    }
  }
  static __device__ __forceinline__ void AddScaled(const typename Math::Meta& meta,
                                                   int (&integers)[4], float (&sums)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] =
          fmaf(__int2float_rn(integers[i]), i < 2 ? meta.scale_low : meta.scale_high, sums[i]);
      integers[i] = 0;
    }
  }

  // Groups of 16 to 64 that have zeros only: two steps at a time, with zeros of their own.
  __device__ __forceinline__ void AddFineIntegers(int r, RowIntegers& sums) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Codes codes = LoadCodes(r, half);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t a[4], rest[4];
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const int step = pair * 2 + s;
          const typename Math::Meta meta = Meta(r, (half * 4 + step) * slot_.metas() / 8);
          uint32_t both[4];
          DecodeSigned<kBits>(codes, step, meta.below, both);
          a[2 * s] = both[0], a[2 * s + 1] = both[1];
          rest[2 * s] = meta.rest.low, rest[2 * s + 1] = meta.rest.high;
        }
#pragma unroll
        for (int j = 0; j < Config::kTokenTiles; ++j) {
          uint32_t b[4];
          LoadTokens(half, j, b);
          MmaS8(sums[j], a, b[pair * 2], b[pair * 2 + 1]);
          if constexpr (kBits == 8) SubtractProduct(rest, b[pair * 2], b[pair * 2 + 1], sums[j]);
        }
      }
    }
  }
  static __device__ __forceinline__ void SubtractProduct(const uint32_t (&a)[4], uint32_t b0,
                                                         uint32_t b1, int (&sums)[4]) {
    int product[4] = {};
    MmaS8(product, a, b0, b1);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = MinusModulo(sums[i], product[i]);
  }

  // Groups of 16 and 32: a scale for each step.
  __device__ __forceinline__ void AddFine(int r, RowSums& sums) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Codes codes = LoadCodes(r, half);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t a[2][2];
        typename Math::Meta meta[2];
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const int step = pair * 2 + s;
          meta[s] = Meta(r, (half * 4 + step) * slot_.metas() / 8);
          uint32_t both[4];
          DecodeSigned<kBits>(codes, step, meta[s].below, both);
          a[s][0] = both[0], a[s][1] = both[1];
        }
#pragma unroll
        for (int j = 0; j < Config::kTokenTiles; ++j) {
          uint32_t b[4];
          LoadTokens(half, j, b);
#pragma unroll
          for (int s = 0; s < 2; ++s) AddStep(meta[s], a[s], b[pair * 2 + s], sums[j]);
        }
      }
    }
  }
  static __device__ __forceinline__ void AddStep(const typename Math::Meta& meta,
                                                 const uint32_t (&a)[2], uint32_t b,
                                                 float (&sums)[4]) {
    int integers[4] = {};
    MmaS8OfSixteen(integers, a[0], a[1], b);
    if constexpr (kBits == 8) {
      int rest[4] = {};
      MmaS8OfSixteen(rest, meta.rest.low, meta.rest.high, b);
#pragma unroll
      for (int i = 0; i < 4; ++i) integers[i] -= rest[i];
    }
    AddScaled(meta, integers, sums);
    if constexpr (Record::kReal) {
      constexpr uint32_t kOnes = 0x01010101;
      int tokens[4] = {};
      MmaS8OfSixteen(tokens, kOnes, kOnes, b);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[i] = fmaf(__int2float_rn(-tokens[i]), i < 2 ? meta.zero_low : meta.zero_high, sums[i]);
      }
    }
  }

  const Slot<Config> slot_;
  Walk<Config> walk_;
  const int zero_;
  const bool zero_first_;
  SlotAddresses<Config> at_;
};

}  // namespace
}  // namespace awqd::cuda
