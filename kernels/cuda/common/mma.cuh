// Products of small matrices by a warp: one instruction each from sm_80 on; on sm_75 the same
// fragments through what it has. Device code only.
//
// A lane of a fragment of 16-bit elements: a[0] holds row lane / 4, columns 2 (lane % 4) and the
// next, a[1] the same 8 rows below, a[2] and a[3] 8 columns further; b0 and b1 are rows
// 2 (lane % 4) and the next, and 8 below, of column lane / 4; d is rows lane / 4 and 8 below of
// columns 2 (lane % 4) and the next. Of bytes each word holds four in place of two.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace awqd::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// d[16 x 8] += a[16 x 16] b[16 x 8], fp32 accumulation.
__device__ __forceinline__ void MmaFp16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void MmaBf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d[16 x 8] += a[16 x 32] b[32 x 8] of signed bytes, modulo 2^32.
__device__ __forceinline__ void MmaS8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                      uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of 16 of K.
__device__ __forceinline__ void MmaS8OfSixteen(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

#else

// d[16 x 8] += a[16 x 8] b[8 x 8].
__device__ __forceinline__ void MmaFp16OfEight(float (&d)[4], uint32_t a0, uint32_t a1,
                                               uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

__device__ __forceinline__ void MmaFp16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  MmaFp16OfEight(d, a[0], a[1], b0);
  MmaFp16OfEight(d, a[2], a[3], b1);
}

// d += two elements of a row times two of a column.
__device__ __forceinline__ void AddBf16Pair(float& d, uint32_t a, uint32_t b) {
  d = fmaf(__uint_as_float(a << 16), __uint_as_float(b << 16), d);
  d = fmaf(__uint_as_float(a & 0xffff0000u), __uint_as_float(b & 0xffff0000u), d);
}

// sm_75 has no matrix instruction for bf16. Each lane fetches its rows and columns from the lanes
// that hold them, and adds their products in FP32 in the order of K: 32 shuffles and 64 fma.
__device__ __forceinline__ void MmaBf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  constexpr uint32_t kAll = 0xffffffffu;
  const int lane = threadIdx.x % 32, row = lane & ~3, column = lane % 4 * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t b = half == 0 ? b0 : b1;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint32_t upper = __shfl_sync(kAll, a[2 * half], row + t);
      const uint32_t lower = __shfl_sync(kAll, a[2 * half + 1], row + t);
      const uint32_t left = __shfl_sync(kAll, b, column + t);
      const uint32_t right = __shfl_sync(kAll, b, column + 4 + t);
      AddBf16Pair(d[0], upper, left), AddBf16Pair(d[1], upper, right);
      AddBf16Pair(d[2], lower, left), AddBf16Pair(d[3], lower, right);
    }
  }
}

// d[8 x 8] += a[8 x 16] b[16 x 8] of signed bytes, modulo 2^32.
__device__ __forceinline__ void MmaS8OfEightRows(int& d0, int& d1, uint32_t a, uint32_t b) {
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+r"(d0), "+r"(d1)
               : "r"(a), "r"(b));
}

__device__ __forceinline__ void MmaS8OfSixteen(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  MmaS8OfEightRows(d[0], d[1], a0, b);
  MmaS8OfEightRows(d[2], d[3], a1, b);
}

__device__ __forceinline__ void MmaS8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                      uint32_t b1) {
  MmaS8OfSixteen(d, a[0], a[1], b0);
  MmaS8OfSixteen(d, a[2], a[3], b1);
}

#endif

}  // namespace awqd::cuda
