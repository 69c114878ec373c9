// Codes and zeros of layout "mma16" as bytes, for products of INT8 activations. Device code only.
#pragma once

#include "kernels/cuda/common/integers.h"
#include "kernels/cuda/common/mma16.cuh"

namespace awqd::cuda {

// The codes of one step of a lane as bytes.
template <int kBits>
__device__ __forceinline__ StepBytes BytesOf(const LaneCodes<kBits>& codes, int step) {
  if constexpr (kBits == 8) {
    return {codes.Word(step, 0), codes.Word(step, 1)};
  } else if constexpr (kBits == 4) {
    return Int4Bytes(codes.Word(step));
  } else if constexpr (kBits == 2) {
    return Int2Bytes(codes.Low(step));
  } else if constexpr (kBits == 1) {
    return Int1Bytes(codes.Rotated(step));
  } else {
    return Int3Bytes(codes.low.Low(step), codes.high.Rotated(step));
  }
}

// A lane's two zeros in every byte.
template <int kBits>
__device__ __forceinline__ StepBytes ZeroBytes(uint32_t zeros) {
  if constexpr (kBits == 8) {
    return {Prmt(zeros, 0, 0), Prmt(zeros, 0, 0x1111)};
  } else {
    return {(zeros & 15) * 0x01010101u, (zeros >> 4 & 15) * 0x01010101u};
  }
}

// code - zero of two steps of a lane as signed bytes, the A operand of an instruction that takes 32
// of K. Of 8 bits it is code - 128: what is left, zero - 128, does not fit beside it.
template <int kBits>
__device__ __forceinline__ void DecodeSigned(const LaneCodes<kBits>& codes, int step,
                                             StepBytes below, uint32_t (&a)[4]) {
  const StepBytes first = BytesOf<kBits>(codes, step), second = BytesOf<kBits>(codes, step + 1);
  if constexpr (kBits == 8) {
    a[0] = MinusHalfBytes(first.low), a[1] = MinusHalfBytes(first.high);
    a[2] = MinusHalfBytes(second.low), a[3] = MinusHalfBytes(second.high);
  } else {
    a[0] = MinusZeroBytes(first.low, below.low), a[1] = MinusZeroBytes(first.high, below.high);
    a[2] = MinusZeroBytes(second.low, below.low), a[3] = MinusZeroBytes(second.high, below.high);
  }
}

// What DecodeSigned takes for a lane's two zeros.
template <int kBits>
__device__ __forceinline__ StepBytes BelowZeros(uint32_t zeros) {
  if constexpr (kBits == 8) return {};
  return {BelowZero(zeros & 15), BelowZero(zeros >> 4 & 15)};
}

}  // namespace awqd::cuda
