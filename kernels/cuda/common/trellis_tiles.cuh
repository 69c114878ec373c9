// Decodes tiles of a trellis (kernels/base/trellis.h) to FP16, and transforms 128 columns. Device
// code only.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/base/trellis.h"
#include "kernels/cuda/common/packed.cuh"

namespace awqd::cuda {

// The sums of the halves of a and of b: one instruction each, which picks the halves by itself.
__device__ __forceinline__ uint32_t SumsOfHalves(uint32_t a, uint32_t b) {
  uint32_t sums;
  asm("{.reg .f16 a0, a1, b0, b1;\n"
      "mov.b32 {a0, a1}, %1;\n"
      "mov.b32 {b0, b1}, %2;\n"
      "add.rn.f16 a0, a0, a1;\n"
      "add.rn.f16 b0, b0, b1;\n"
      "mov.b32 %0, {a0, b0};}"
      : "=r"(sums)
      : "r"(a), "r"(b));
  return sums;
}

// The entries of two states as FP16, the first in the lower half: the arithmetic of trellis.h in the
// instructions that it is made for.
template <TrellisCode kCode>
__device__ __forceinline__ uint32_t Entries(uint32_t first, uint32_t second) {
  if constexpr (kCode == TrellisCode::kMul1) {
    const auto bytes = [](uint32_t state) {
      return __dp4a(state * kMul1Multiplier, 0x01010101u, 0x6400u);
    };
    // 1024 + sum of the bytes, times 1774 / 2^18, less 1329 / 2^7.
    return Fma2Fp16(bytes(first) | bytes(second) << 16, 0x1eee1eeeu, 0xc931c931u);
  } else {
    const auto halves = [](uint32_t state) {
      const uint32_t x =
          kCode == TrellisCode::kMcg ? state * kMcgMultiplier : state * 89226354u + 64248484u;
      return Lop3<0x6a>(x, 0x8fff8fffu, 0x3b603b60u);  // (x & mask) ^ halves
    };
    return SumsOfHalves(halves(first), halves(second));
  }
}

// Where a lane reads its eight codes of a tile: four words of the ring, and the bit of the first at
// which the first state begins.
struct LaneWindow {
  int words[4];
  int bit, bits;

  __device__ __forceinline__ explicit LaneWindow(int bits) : bits(bits) {
    const int count = 8 * bits, lane = threadIdx.x % 32;
    // The first state ends with the lane's first code; the last one is at most 31 + 16 + 7 * 8 bits
    // from the first word's begin.
    const int first = (8 * lane + 1) * bits - 16 + 32 * count;
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = (first / 32 + i) % count;
    bit = first % 32;
  }

  // Pairs of elements: rows 2 (lane % 4) and the next of column lane / 4, the same 8 rows below,
  // then both of the column 8 further.
  template <TrellisCode kCode>
  __device__ __forceinline__ void Decode(const uint32_t* tile, uint32_t (&out)[4]) const {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = tile[words[i]];
#pragma unroll
    for (int i = 0; i < 3; ++i) w[i] = __funnelshift_l(w[i + 1], w[i], bit);
    DecodeFour<kCode>(w[0], w[1], out);
    DecodeFour<kCode>(__funnelshift_lc(w[1], w[0], 4 * bits),
                      __funnelshift_lc(w[2], w[1], 4 * bits), out + 2);
  }

 private:
  // Four codes, of which the first one's state begins with the highest bit of `high`.
  template <TrellisCode kCode>
  __device__ __forceinline__ void DecodeFour(uint32_t high, uint32_t low, uint32_t* out) const {
    out[0] = Entries<kCode>(high >> 16, __funnelshift_l(low, high, bits) >> 16);
    out[1] = Entries<kCode>(__funnelshift_l(low, high, 2 * bits) >> 16,
                            __funnelshift_l(low, high, 3 * bits) >> 16);
  }
};

template <class Fn>
absl::Status ForTrellisCode(TrellisCode code, Fn fn) {
  if (code == TrellisCode::kMcg) return fn.template operator()<TrellisCode::kMcg>();
  if (code == TrellisCode::kMul1) return fn.template operator()<TrellisCode::kMul1>();
  return fn.template operator()<TrellisCode::k3Inst>();
}

// Butterflies of distance 1, 2, 4, ..., 64 over v[i] of lane l as element 4 l + i, and the scale: the
// operations of TransformBlock (exact.h).
__device__ __forceinline__ void TransformWarp(float (&v)[4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int apart = 1; apart < 4; apart *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & apart) != 0) continue;
      const float a = v[i], b = v[i + apart];
      v[i] = __fadd_rn(a, b);
      v[i + apart] = __fsub_rn(a, b);
    }
  }
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
#pragma unroll
    for (float& own : v) {
      const float other = __shfl_xor_sync(0xffffffffu, own, apart);
      own = (lane & apart) != 0 ? __fsub_rn(other, own) : __fadd_rn(own, other);
    }
  }
#pragma unroll
  for (float& own : v) own = __fmul_rn(own, kTrellisScale);
}

}  // namespace awqd::cuda
