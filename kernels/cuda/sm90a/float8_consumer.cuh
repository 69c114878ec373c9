// The consumer of E4M3 activations. E4M3 codes are the tensor cores' operand as they are stored;
// E2M1 codes become E4M3 times the power of two that their group has for a scale
// (float_codes.cuh). The tensor cores keep about 14 bits of a sum, so the products of a step, 128 of
// K, are summed there and then added up in FP32, times the scales of the group and of the tokens.
// Device code only.
#pragma once

#include "kernels/cuda/sm90a/consumer.cuh"

namespace awqd::cuda {
namespace {

template <class Config>
class Consumer<Config, DType::kE4m3> {
 public:
  // `record`: which of the block's records this consumer decodes.
  __device__ __forceinline__ Consumer(const PersistentParams& p, const Ring<Config>& ring,
                                      int record, int slice = 0)
      : record_bytes_(Config::kRecords * ring.record_bytes),
        last_(ring.Full(Config::kSlots - Config::kSlices + slice)),
        at_(ring, record, slice) {
    if constexpr (kTokenScales) token_scales_ = ring.TokenScales(slice) + threadIdx.x % 4 * 8;
  }

  // Call it before the first step of a tile of an expert, which begins at token `first`: where its
  // scales begin in the ring.
  __device__ __forceinline__ void BeginAt(int first) { shift_ = first % 4 * 4; }

  // Waits for the next step to be in the ring, reads and decodes it. Call it before Run.
  __device__ __forceinline__ void Enter() {
    Read();
    Decode();
  }

  // Over steps [begin, end) of a work unit, at least one: sums = W^T x, or with `add` sums += W^T
  // x. The ring holds the work unit's steps up to work_end; if more follow, the next one is
  // entered.
  __device__ __forceinline__ void Run(int begin, int end, int work_end, int add,
                                      Sums<Config>& sums) {
    if (add == 0) Clear<Config>(sums);
    PartSums products;
    for (int left = end - begin;;) {
#pragma unroll
      for (int part = 0; part < kParts - 1; ++part) {
        Multiply(part, products);
        WgmmaWait<0>();
        Fold(part, scales_, token_scales_ + shift_, products, sums);
      }
      Multiply(kParts - 1, products);
      const uint32_t full = at_.full, token_scales = token_scales_ + shift_;
      const RowScales scales = scales_;
      Advance();
      const bool last = --left == 0;
      if (!last && kDecodes) Read();
      WgmmaWait<0>();
      // Not before this: the tensor cores read the operand's registers. Codes that need no decoding
      // arrive there while the sums are added up.
      if (!last && !kDecodes) Read();
      if (!last) Decode();
      if constexpr (!kTokenScales) ReleaseSlot<Config>(full, Config::kCluster);
      Fold(kParts - 1, scales, token_scales, products, sums);
      if constexpr (kTokenScales) ReleaseSlot<Config>(full, Config::kCluster);
      if (last) break;
    }
    if (end < work_end) Enter();
  }

 private:
  using Record = typename Config::Record;
  static constexpr bool kDecodes = Record::kCode == CodeKind::kE2m1;
  static constexpr bool kRowScales = !kDecodes && !Record::kBare;
  static_assert(kDecodes || (Record::kCode == CodeKind::kE4m3 && Record::kMetas <= 1),
                "one scale serves a record's 128 of K");
  static constexpr bool kTokenScales = Config::kTokenScales;
  // Registers hold the sums of a step beside those of all steps: of all tokens, or of half of them
  // at a time.
  static constexpr int kParts = Config::kTokens > 128 ? 2 : 1;
  static constexpr int kPartTokens = Config::kTokens / kParts;
  static_assert(kPartTokens % 8 == 0, "the second part begins with a swizzled row of eight");
  using PartSums = float[kPartTokens / 2];

  // Codes of E4M3 go to the operand's registers at once.
  __device__ __forceinline__ void Read() {
    BarrierWait(at_.full, at_.parity);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t from = at_.codes + half * Record::kUnitBytes;
      if constexpr (kDecodes) {
        codes_[half].Load(from);
      } else {
        LaneCodes<8> codes;
        codes.Load(from);
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          uint32_t* const to = &operand_[half * 2 + s / 2][s % 2 * 2];
          to[0] = codes.Word(s, 0), to[1] = codes.Word(s, 1);
        }
      }
    }
    if constexpr (kDecodes) {
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        group_scales_[g] = LoadShared4(at_.scales + g * Record::kMetaBytes);
      }
    }
    if constexpr (kRowScales) {
      const uint2 scales = LoadShared8(at_.scales);
      scales_ = {__uint_as_float(scales.x), __uint_as_float(scales.y)};
    }
  }

  // Each operand is of 32 of K, one group.
  __device__ __forceinline__ void Decode() {
    if constexpr (kDecodes) {
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const E4m3Table low = E2m1TableOf(group_scales_[s] & 0xffff);
        const E4m3Table high = E2m1TableOf(group_scales_[s] >> 16);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          E2m1ToE4m3(codes_[s / 2].Word(s % 2 * 2 + half), low, high, &operand_[s][half * 2]);
        }
      }
    }
  }

  __device__ __forceinline__ void Advance() {
    if constexpr (kTokenScales) {
      token_scales_ += (at_.full == last_ ? Config::kSlices - Config::kSlots : Config::kSlices) *
                       TokenScalesBytes(Config::kTokens);
    }
    at_.Advance(record_bytes_, last_);
  }

  __device__ __forceinline__ void Multiply(int part, PartSums& products) {
    const uint64_t tokens =
        WholeDescriptor(at_.tokens) + part * (kPartTokens * kTokenRowBytes >> 4);
    WgmmaArrive();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      WgmmaE4m3<kPartTokens>(products, operand_[s], tokens + s * kDescriptorStep, s > 0);
    }
    WgmmaCommit();
  }

  // The scales of two tokens. Those of an expert lie on four bytes.
  static __device__ __forceinline__ uint2 LoadPair(uint32_t address) {
    if constexpr (!Config::kGrouped) return LoadShared8(address);
    return {LoadShared4(address), LoadShared4(address + 4)};
  }

  // sums += scales * products. `token_scales`: where those of the thread's first two tokens lie.
  static __device__ __forceinline__ void Fold(int part, const RowScales& scales,
                                              uint32_t token_scales, const PartSums& products,
                                              Sums<Config>& sums) {
#pragma unroll
    for (int i = 0; i < kPartTokens / 2; i += 4) {
      float* const to = &sums[part * (kPartTokens / 2) + i];
      if constexpr (kTokenScales) {
        const uint2 pair = LoadPair(token_scales + part * kPartTokens * 4 + i / 4 * 32);
        const float first = __uint_as_float(pair.x), second = __uint_as_float(pair.y);
        to[0] = fmaf(products[i], first * scales.low, to[0]);
        to[1] = fmaf(products[i + 1], second * scales.low, to[1]);
        to[2] = fmaf(products[i + 2], first * scales.high, to[2]);
        to[3] = fmaf(products[i + 3], second * scales.high, to[3]);
      } else if constexpr (!kRowScales) {
#pragma unroll
        for (int e = 0; e < 4; ++e) to[e] += products[i + e];
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          to[e] = fmaf(products[i + e], e < 2 ? scales.low : scales.high, to[e]);
        }
      }
    }
  }

  const int record_bytes_;  // of all records of a slot
  const uint32_t last_;     // `full` of the slice's last slot
  Place<Config> at_;
  uint32_t token_scales_ = 0;
  uint32_t shift_ = 0;  // bytes from there to the scale of the tile's first token
  RowScales scales_ = {1, 1};
  LaneCodes<4> codes_[2];     // where they are decoded
  uint32_t group_scales_[4];  // likewise
  Operand operand_;
};

}  // namespace
}  // namespace awqd::cuda
