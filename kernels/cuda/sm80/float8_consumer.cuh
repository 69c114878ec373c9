// The consumer of E4M3 activations, from sm_89 on. E4M3 codes are the operand as they are stored;
// E2M1 codes become E4M3 times the power of two that their group has for a scale (float_codes.cuh).
// The tensor cores keep about 14 bits of a sum, so the products of a record, 128 of K, are summed
// there and then added up in FP32, times the scales of the group and of the tokens. Device code only.
#pragma once

#include "kernels/cuda/common/float_codes.cuh"
#include "kernels/cuda/sm80/consumer.cuh"

namespace awqd::cuda {
namespace {

// d[16 x 8] += a[16 x 32] b[32 x 8] of E4M3; the fragments are those of MmaS8. Hopper has no such
// instruction outside wgmma: its compiler makes two of FP16.
__device__ __forceinline__ void MmaE4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
#if __CUDA_ARCH__ >= 890
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

template <class Record_>
struct Float8Math {
  using X = E4m3;
  using Record = Record_;
};

template <class Record, class Config>
class Consumer<Float8Math<Record>, Config> {
 public:
  __device__ __forceinline__ Consumer(const QMatmulParams&, const Slot<Config>& slot, uint32_t ring)
      : slot_(slot), at_(slot, ring), token_scales_(ring + slot.scales() + threadIdx.x % 4 * 8) {}

  // sums += of the next slot.
  __device__ __forceinline__ void Accumulate(Sums<Config>& sums) {
#pragma unroll
    for (int r = 0; r < Config::kRowTiles; ++r) AddRecord(r, sums[r]);
    const int next = walk_.Advance(slot_);
    at_.Advance(next);
    token_scales_ += next;
  }

 private:
  using RowSums = float[Config::kTokenTiles][4];
  using Operand = uint32_t[4];  // 32 of K
  static constexpr int kPartTiles =
      Config::kTokenTiles > 4 ? Config::kTokenTiles / 2 : Config::kTokenTiles;
  static constexpr bool kDecodes = Record::kCode == CodeKind::kE2m1;
  static_assert(kDecodes || Record::kMetas <= 1, "one scale serves a record's 128 of K");

  // It takes half the tokens at a time where all products would not fit the registers beside the
  // sums.
  __device__ __forceinline__ void AddRecord(int r, RowSums& sums) const {
    float low = 1, high = 1;
    if constexpr (Record::kMetas == 1) {
      const uint2 scales = LoadShared8(at_.scales + r * slot_.record_bytes);
      low = __uint_as_float(scales.x), high = __uint_as_float(scales.y);
    }
#pragma unroll
    for (int first = 0; first < Config::kTokenTiles; first += kPartTiles) {
      float products[kPartTiles][4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Operand a[2];
        Read(r, half, a);
#pragma unroll
        for (int j = 0; j < kPartTiles; ++j) {
          uint32_t b[4];
          LoadMatrices(at_.tokens[half] + (first + j) * 8 * Config::kTokenBytes, b);
          MmaE4m3(products[j], a[0], b[0], b[1]);
          MmaE4m3(products[j], a[1], b[2], b[3]);
        }
      }
#pragma unroll
      for (int j = 0; j < kPartTiles; ++j) {
        const uint2 scales = LoadShared8(token_scales_ + (first + j) * 32);
        AddScaled(products[j], {__uint_as_float(scales.x), __uint_as_float(scales.y)}, low, high,
                  sums[first + j]);
      }
    }
  }
  static __device__ __forceinline__ void AddScaled(const float (&products)[4], float2 tokens,
                                                   float low, float high, float (&sums)[4]) {
    sums[0] = fmaf(products[0], tokens.x * low, sums[0]);
    sums[1] = fmaf(products[1], tokens.y * low, sums[1]);
    sums[2] = fmaf(products[2], tokens.x * high, sums[2]);
    sums[3] = fmaf(products[3], tokens.y * high, sums[3]);
  }

  // Half a record of row tile `r`.
  __device__ __forceinline__ void Read(int r, int half, Operand (&a)[2]) const {
    LaneCodes<Record::kBits> codes;
    codes.Load(at_.codes + r * slot_.record_bytes + half * Record::kUnitBytes);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if constexpr (kDecodes) {
        const uint32_t scales =
            LoadShared4(at_.scales + r * slot_.record_bytes + (half * 2 + s) * Record::kMetaBytes);
        const E4m3Table low = E2m1TableOf(scales & 0xffff), high = E2m1TableOf(scales >> 16);
        E2m1ToE4m3(codes.Word(s * 2), low, high, &a[s][0]);
        E2m1ToE4m3(codes.Word(s * 2 + 1), low, high, &a[s][2]);
      } else {
        a[s][0] = codes.Word(s * 2, 0), a[s][1] = codes.Word(s * 2, 1);
        a[s][2] = codes.Word(s * 2 + 1, 0), a[s][3] = codes.Word(s * 2 + 1, 1);
      }
    }
  }

  const Slot<Config> slot_;
  Walk<Config> walk_;
  SlotAddresses<Config> at_;
  uint32_t token_scales_;  // of the thread's first two tokens
};

}  // namespace
}  // namespace awqd::cuda
