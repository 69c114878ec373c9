// Reads the layout "mma16" from shared memory into matrix fragments. Device code only.
//
// A lane's word is one A fragment of m16n8k16: pairs 0 and 2 belong to row lane / 4, pairs 1 and 3
// to row lane / 4 + 8. So each row needs one zero form only: the low one for the first, the high
// one for the second.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/dequant.cuh"
#include "kernels/cuda/common/ptx.cuh"

namespace awqd::cuda {

// What decodes a lane's two rows: zeros and scales as the pairs of dequant.cuh expect them.
struct LaneMetaFp16 {
  uint32_t zeros[4];
  uint32_t scales[4];
};

struct LaneMetaBf16 {
  uint32_t zeros[4];
  uint32_t high[4];
  uint32_t low[4];
};

// A lane's two scales (row, row + 8) and its byte of two zero points.
struct LaneMetaBits {
  uint32_t scales;
  uint32_t zeros;
};

// Where in the meta at `meta` they lie; `row_tile` 0..3.
__device__ __forceinline__ uint32_t ScalesAddress(uint32_t meta, uint32_t row_tile, uint32_t lane) {
  return meta + row_tile * 32 + lane / 4 * 4;
}
__device__ __forceinline__ uint32_t ZerosAddress(uint32_t meta, uint32_t row_tile, uint32_t lane) {
  return meta + 128 + row_tile * 8 + lane / 4;
}

__device__ __forceinline__ LaneMetaFp16 ExpandFp16(LaneMetaBits bits) {
  const uint32_t zeros = Both(bits.zeros);
  const uint32_t low = LowZeroFp16(zeros), high = HighZeroFp16(zeros);
  const uint32_t first = Prmt(bits.scales, 0, 0x1010), second = Prmt(bits.scales, 0, 0x3232);
  return {{low, high, low, high}, {first, second, first, second}};
}

__device__ __forceinline__ LaneMetaBf16 ExpandBf16(LaneMetaBits bits) {
  const uint32_t zeros = Both(bits.zeros);
  const uint32_t z0 = LowZeroBf16(zeros), z1 = HighZeroBf16(zeros);
  const SplitScale s0 = SplitToBf16(bits.scales & 0xffff), s1 = SplitToBf16(bits.scales >> 16);
  return {{z0, z1, z0, z1}, {s0.high, s1.high, s0.high, s1.high}, {s0.low, s1.low, s0.low, s1.low}};
}

// The arithmetic of one activation type: how fragments are decoded and multiplied.
struct Fp16Math {
  static constexpr bool kBf16 = false;
  using Meta = LaneMetaFp16;
  static __device__ __forceinline__ Meta Expand(LaneMetaBits bits) { return ExpandFp16(bits); }
  static __device__ __forceinline__ Pairs Decode(uint32_t word, const Meta& meta) {
    return Int4ToFp16(word, meta.zeros, meta.scales);
  }
  static __device__ __forceinline__ void Mma(float (&d)[4], const Pairs& a, uint32_t b0,
                                             uint32_t b1) {
    MmaFp16(d, a.v, b0, b1);
  }
};

struct Bf16Math {
  static constexpr bool kBf16 = true;
  using Meta = LaneMetaBf16;
  static __device__ __forceinline__ Meta Expand(LaneMetaBits bits) { return ExpandBf16(bits); }
  static __device__ __forceinline__ Pairs Decode(uint32_t word, const Meta& meta) {
    return Int4ToBf16(word, meta.zeros, meta.high, meta.low);
  }
  static __device__ __forceinline__ void Mma(float (&d)[4], const Pairs& a, uint32_t b0,
                                             uint32_t b1) {
    MmaBf16(d, a.v, b0, b1);
  }
};

}  // namespace awqd::cuda
