// The kernel registry: one row per kernel, and the pure function that plans which rows serve a
// weight.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/device.h"
#include "kernels/layouts/layout.h"
#include "kernels/types.h"
#include "kernels/weight.h"

namespace awqd {

// y = x @ W (+ bias), FP32 accumulation, one rounding to y's dtype. All pointers in the weight's
// device memory.
struct MatmulArgs {
  const DeviceWeight* weight = nullptr;
  ConstMatrixView x;            // [M, K], FP16, BF16 or FP32
  MatrixView y;                 // [M, N], FP16, BF16 or FP32
  const float* bias = nullptr;  // FP32 [N], or null for none
  // At least the row's workspace_bytes, 256-byte aligned; contents are free to be overwritten.
  void* workspace = nullptr;
};

// out = W[row_begin : row_begin + out.rows, col_begin : col_begin + out.cols].
// FP16: one rounding of (q - z) * s. BF16, FP32: one rounding of the exact product.
struct DequantizeArgs {
  const DeviceWeight* weight = nullptr;
  MatrixView out;
  int64_t row_begin = 0;
  int64_t col_begin = 0;
};

enum class Op : uint8_t { kDequantize, kMatmul };

struct KernelRow {
  // Path of its source beneath kernels/ without extension: also test filter and metric label.
  absl::string_view name;
  Op op;
  Path path = Path::kFused;  // matmul only
  DeviceKind device = DeviceKind::kCpu;
  Activation activation = Activation::kA16;
  uint32_t bits_mask = 0;  // bit b set: takes b-bit codes
  int64_t group_multiple =
      1;  // group sizes are a multiple of this (a single group of K always passes)
  bool integer_zeros = true;
  bool symmetric = true;
  DTypeMask scales = MaskOf(DType::kFp16) | MaskOf(DType::kBf16);
  DTypeMask inputs = kFloatingMask;   // dtypes of x
  DTypeMask outputs = kFloatingMask;  // dtypes of y
  // The layout it reads; null: any, through Layout::unpack (the reference).
  const Layout* layout = nullptr;
  int min_arch = 0;    // CUDA: lowest compute capability x 10
  int max_arch = 0;    // CUDA: highest, 0 for no bound
  int64_t min_m = 0;   // tokens it serves
  int64_t max_m = -1;  // inclusive; -1: no bound
  // A fused matmul that was measured against decoding the weight first, at every count of tokens
  // that it serves and every shape of a model's layers, and is faster or within 5 %.
  bool replaces_dense = false;
  // A matmul whose bits for a token depend on that token and the weight alone: not on M, nor on the
  // tokens beside it. Rows of one layout and device that say so agree, because a plan may go from
  // one to another as M grows.
  bool batch_invariant = false;
  int priority =
      0;  // larger wins among rows that support a weight; negative: only when forced by name
  // Further conditions: empty, or the reason why not. May be null.
  std::string (*refuses)(const WeightShape&, const DeviceInfo&) = nullptr;
  // How it cuts the product of m tokens into tiles, for a person. Null: always alike.
  std::string (*tile)(const WeightShape&, const DeviceInfo&, int64_t m) = nullptr;
  // Bytes of scratch for m tokens; null means none.
  int64_t (*workspace_bytes)(const WeightShape&, const DeviceInfo&, int64_t m) = nullptr;
  absl::Status (*matmul)(const MatmulArgs&, StreamView) = nullptr;
  absl::Status (*dequantize)(const DequantizeArgs&, StreamView) = nullptr;
};

// Rows of every backend that this binary holds, in a fixed order.
absl::Span<const KernelRow* const> AllKernels();

// The row of that name, or null.
const KernelRow* FindKernel(absl::string_view name);

// Empty when `row` can serve the weight on the device, else the reason why not. Pure.
std::string WhyNot(const KernelRow& row, const WeightShape& shape, const DeviceInfo& device);

struct Plan {
  const Layout* layout = nullptr;
  WeightPlan rows;
};

// Chooses the layout and, for each path and token count, the row of highest priority that reads it.
// Pure. UNIMPLEMENTED, with every refused row and its reason, when no row serves a matmul or a
// dequantize.
absl::StatusOr<Plan> Select(const WeightShape& shape, const DeviceInfo& device,
                            absl::Span<const KernelRow* const> rows);

// How the entry's row cuts the product at the first count of its range and at powers of two up to
// 4096, counts that are cut alike together: "17-32: 32x192 on 132 blocks, 64: ...". Empty where the
// row has no choice. Pure.
std::string DescribeTiles(const PlanEntry& entry, const WeightShape& shape,
                          const DeviceInfo& device);

// One line for the log: layout, the row of each token range with its tiles, every refused row with
// its reason.
std::string Explain(const Plan& plan, const WeightShape& shape, const DeviceInfo& device);

}  // namespace awqd
