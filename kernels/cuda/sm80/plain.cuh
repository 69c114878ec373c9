// What the rows sm80/plain_dequantize and sm80/plain_matmul share: a weight in the layout "plain"
// as kernels see it, and one element of it.
//
// The two serve what the tensor-core layout refuses: codes that are no integers, group sizes that
// are no multiple of 16, real zeros. Limits: none. Speed was not a goal.
#pragma once

#include "kernels/base/float8.h"
#include "kernels/base/half.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/sm80/rows.h"
#include "kernels/layouts/layout.h"

namespace awqd::cuda {

inline constexpr int kPlainThreads = 128;

struct PlainWeight {
  const uint8_t* codes;
  const uint8_t* scales;  // null: 1
  const uint8_t* zeros;   // null: every zero is `zero`
  const float* table;
  const float* outer;  // null: 1
  CodeKind code;
  ZeroKind zero_kind;
  DType zero_dtype;
  DType scale_dtype;
  int code_bits;
  int zero;
  int64_t n;
  int64_t row_bytes;
  int64_t group_rows;
  int64_t block_cols;
  int64_t column_blocks;
};

__device__ inline float LoadPlain(const void* data, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::kFp32:
      return static_cast<const float*>(data)[at];
    case DType::kFp16:
      return HalfToFloat(static_cast<const uint16_t*>(data)[at]);
    case DType::kBf16:
      return Bf16ToFloat(static_cast<const uint16_t*>(data)[at]);
    case DType::kE4m3:
      return E4m3ToFloat(static_cast<const uint8_t*>(data)[at]);
    case DType::kE8m0:
      return E8m0ToFloat(static_cast<const uint8_t*>(data)[at]);
    default:
      return static_cast<const int8_t*>(data)[at];
  }
}

__device__ inline void StorePlain(void* data, DType dtype, int64_t at, float value) {
  if (dtype == DType::kFp32) {
    static_cast<float*>(data)[at] = value;
  } else {
    static_cast<uint16_t*>(data)[at] =
        dtype == DType::kFp16 ? FloatToHalf(value) : FloatToBf16(value);
  }
}

__device__ inline float PlainCode(const PlainWeight& w, int64_t k, int64_t n) {
  const int64_t bit = n * w.code_bits;
  const int code = w.codes[k * w.row_bytes + bit / 8] >> (bit % 8) & ((1 << w.code_bits) - 1);
  switch (w.code) {
    case CodeKind::kE2m1:
      return E2m1ToFloat(static_cast<uint8_t>(code));
    case CodeKind::kE4m3:
      return E4m3ToFloat(static_cast<uint8_t>(code));
    case CodeKind::kTable:
      return w.table[code];
    default:
      return code;
  }
}

struct PlainScale {
  float scale, zero;
};
__device__ inline PlainScale PlainScaleOf(const PlainWeight& w, int64_t group, int64_t n) {
  const int64_t at = group * w.column_blocks + n / w.block_cols;
  return {w.scales == nullptr ? 1 : LoadPlain(w.scales, w.scale_dtype, at),
          w.zeros == nullptr                 ? w.zero
          : w.zero_kind == ZeroKind::kStored ? w.zeros[at]
                                             : LoadPlain(w.zeros, w.zero_dtype, at)};
}

// The formula of kernels/exact.h, rounded at every step: no operation is fused with another.
__device__ inline float PlainElement(const PlainWeight& w, int64_t k, int64_t n) {
  const float code = PlainCode(w, k, n);
  const auto [scale, zero] = PlainScaleOf(w, k / w.group_rows, n);
  const float value = w.zero_kind == ZeroKind::kRealAfter ? __fsub_rn(__fmul_rn(code, scale), zero)
                                                          : __fmul_rn(__fsub_rn(code, zero), scale);
  return w.outer == nullptr ? value : __fmul_rn(value, w.outer[n]);
}

inline PlainWeight ViewPlain(const DeviceWeight& weight) {
  const WeightShape& shape = weight.shape;
  const QuantizationScheme& d = shape.scheme;
  return {.codes = weight.codes(),
          .scales = weight.scales(),
          .zeros = weight.zeros(),
          .table = weight.table(),
          .outer = weight.outer(),
          .code = d.code,
          .zero_kind = d.zero_kind,
          .zero_dtype = d.zero_dtype,
          .scale_dtype = d.scale_dtype.value_or(DType::kFp16),
          .code_bits = CodeBits(d.bits),
          .zero = d.zero,
          .n = shape.n,
          .row_bytes = CeilDiv(shape.n * CodeBits(d.bits), 8),
          .group_rows = shape.group_rows(),
          .block_cols = shape.block_cols(),
          .column_blocks = shape.column_blocks()};
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
  row.claims = kEverything;
  row.layout = &kPlainLayout;
  row.min_arch = 75;
  return row;
}

}  // namespace awqd::cuda
