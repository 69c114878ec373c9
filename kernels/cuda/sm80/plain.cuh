// What the rows sm80/plain_dequantize and sm80/plain_matmul share: a weight in the layout "plain"
// as kernels see it, and one element of it.
//
// The two serve what the tensor-core layout refuses: other code widths, group sizes that are no
// multiple of 16, BF16 and FP32 scales. Limits: none. Speed was not a goal.
#pragma once

#include "kernels/base/half.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/sm80/rows.h"
#include "kernels/layouts/plain.h"

namespace awqd::cuda {

inline constexpr int kPlainThreads = 128;

struct PlainWeight {
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* zeros;  // null: every zero point is `symmetric_zero`
  DType scale_dtype;
  int code_bits;
  int symmetric_zero;
  int64_t n;
  int64_t row_bytes;
  int64_t group_size;
};

__device__ inline float LoadPlain(const void* data, DType dtype, int64_t at) {
  if (dtype == DType::kFp32) return static_cast<const float*>(data)[at];
  const uint16_t bits = static_cast<const uint16_t*>(data)[at];
  return dtype == DType::kFp16 ? HalfToFloat(bits) : Bf16ToFloat(bits);
}

__device__ inline void StorePlain(void* data, DType dtype, int64_t at, float value) {
  if (dtype == DType::kFp32) {
    static_cast<float*>(data)[at] = value;
  } else {
    static_cast<uint16_t*>(data)[at] =
        dtype == DType::kFp16 ? FloatToHalf(value) : FloatToBf16(value);
  }
}

// (q - z) * s. Exact in fp32 unless the scale is FP32.
__device__ inline float PlainElement(const PlainWeight& w, int64_t k, int64_t n) {
  const int64_t bit = n * w.code_bits;
  const int code = w.codes[k * w.row_bytes + bit / 8] >> (bit % 8) & ((1 << w.code_bits) - 1);
  const int64_t at = k / w.group_size * w.n + n;
  const int zero = w.zeros == nullptr ? w.symmetric_zero : w.zeros[at];
  return (code - zero) * LoadPlain(w.scales, w.scale_dtype, at);
}

inline PlainWeight ViewPlain(const DeviceWeight& weight) {
  const QuantScheme& s = weight.shape.scheme;
  return {.codes = weight.codes(),
          .scales = weight.scales(),
          .zeros = s.zero_kind == ZeroKind::kInteger ? weight.zeros() : nullptr,
          .scale_dtype = s.scale_dtype,
          .code_bits = CodeBits(s.bits),
          .symmetric_zero = 1 << (s.bits - 1),
          .n = weight.shape.n,
          .row_bytes = CeilDiv(weight.shape.n * CodeBits(s.bits), 8),
          .group_size = s.group_size};
}

// One thread per column and row; rows past the grid are the kernels' to loop over.
inline dim3 PlainGrid(int64_t cols, int64_t rows) {
  constexpr int64_t kMaxY = 65535;
  return {static_cast<unsigned>(CeilDiv(cols, kPlainThreads)),
          static_cast<unsigned>(rows < kMaxY ? rows : kMaxY)};
}

inline KernelRow PlainRow(absl::string_view name, Op op) {
  KernelRow row;
  row.name = name;
  row.op = op;
  row.device = DeviceKind::kCuda;
  row.bits_mask = 0x1fe;
  row.scales = kFloatingMask;
  row.layout = &kPlainLayout;
  row.min_arch = 80;
  return row;
}

}  // namespace awqd::cuda
