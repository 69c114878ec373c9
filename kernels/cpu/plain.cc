// cpu/plain_dequantize and cpu/plain_matmul: any block of any weight as FP16, BF16 or FP32, and its
// product, slowly. They serve what layout k16 does not hold.
//
// The product is y = x @ W + bias with FP32 accumulation, each sum one chain along K. Weight
// layout: plain. Work split: blocks of 64 rows by 256 columns; 64 columns of a product a task, for
// up to 64 tokens, whose x is expanded to FP32 first. Limits: none. Compiled without contraction: a
// fused multiply-add would leave out a rounding (CMakeLists.txt).
#include <algorithm>
#include <vector>

#include "kernels/cpu/device.h"
#include "kernels/cpu/rows.h"
#include "kernels/exact.h"

namespace awqd {
namespace {

// --- Reading a weight row by row ---

// Some columns of a weight, decoded as kernels/exact.h says. `weight` must outlive it.
class PlainColumns {
 public:
  PlainColumns(const DeviceWeight& weight, int64_t col_begin, int64_t cols);

  // The weights of a stored row, valid until the next call. Fast where rows come in their order.
  const float* Row(int64_t row);

 private:
  void LoadGroup(int64_t group);

  const DeviceWeight& weight_;
  const QuantizationScheme& scheme_;
  const int64_t col_begin_;
  float values_[256];  // of codes
  int64_t group_ = -1;
  std::vector<float> scales_, zeros_;  // of the group, by column
  std::vector<float> row_;
};

PlainColumns::PlainColumns(const DeviceWeight& weight, int64_t col_begin, int64_t cols)
    : weight_(weight),
      scheme_(weight.shape.scheme),
      col_begin_(col_begin),
      scales_(cols, 1.0f),
      zeros_(cols, static_cast<float>(scheme_.zero)),
      row_(cols) {
  for (int code = 0; code < 256; ++code) {
    values_[code] = DecodeCode(scheme_.code, weight.table(), code);
  }
}

void PlainColumns::LoadGroup(int64_t group) {
  group_ = group;
  const int64_t step = weight_.shape.block_cols(), blocks = weight_.shape.column_blocks();
  for (size_t c = 0; c < row_.size(); ++c) {
    const int64_t cell = group * blocks + (col_begin_ + static_cast<int64_t>(c)) / step;
    if (scheme_.scale_dtype) {
      scales_[c] = LoadElement(weight_.scales(), *scheme_.scale_dtype, cell);
    }
    if (scheme_.real_zeros()) {
      zeros_[c] = LoadElement(weight_.zeros(), scheme_.zero_dtype, cell);
    } else if (scheme_.zero_kind == ZeroKind::kStored) {
      zeros_[c] = weight_.zeros()[cell];
    }
  }
}

const float* PlainColumns::Row(int64_t row) {
  const int64_t group = row / weight_.shape.group_rows();
  if (group != group_) LoadGroup(group);
  const int bits = CodeBits(scheme_.bits), mask = (1 << bits) - 1;
  const bool after = scheme_.zero_kind == ZeroKind::kRealAfter;
  const uint8_t* codes = weight_.codes() + row * CeilDiv(weight_.shape.n * bits, 8);
  for (size_t c = 0; c < row_.size(); ++c) {
    const int64_t bit = (col_begin_ + static_cast<int64_t>(c)) * bits;
    const float value = values_[codes[bit / 8] >> (bit % 8) & mask];
    row_[c] = after ? value * scales_[c] - zeros_[c] : (value - zeros_[c]) * scales_[c];
  }
  if (const float* outer = weight_.outer(); outer != nullptr) {
    for (size_t c = 0; c < row_.size(); ++c) row_[c] *= outer[col_begin_ + c];
  }
  return row_.data();
}

// --- Dequantize ---

constexpr int64_t kDequantizeRows = 64;
constexpr int64_t kDequantizeColumns = 256;

absl::Status Dequantize(const DequantizeArgs& args, StreamView) {
  const MatrixView& out = args.out;
  const int64_t chunks = CeilDiv(out.cols, kDequantizeColumns);
  CpuDevice::Of(args.weight->device)
      .pool()
      .ParallelFor(CeilDiv(out.rows, kDequantizeRows) * chunks, [&](int64_t task, int) {
        const int64_t begin = task / chunks * kDequantizeRows,
                      col = task % chunks * kDequantizeColumns;
        const int64_t cols = std::min(kDequantizeColumns, out.cols - col);
        PlainColumns weight(*args.weight, args.col_begin + col, cols);
        for (int64_t r = begin; r < std::min(out.rows, begin + kDequantizeRows); ++r) {
          const float* values = weight.Row(args.row_begin + r);
          for (int64_t c = 0; c < cols; ++c) {
            StoreElement(out.data, out.dtype, r * out.cols + col + c, values[c]);
          }
        }
      });
  return absl::OkStatus();
}

// --- Matmul ---

constexpr int64_t kTokens = 64;
constexpr int64_t kColumns = 64;

int64_t Workspace(const WeightShape& shape, const DeviceInfo&, int64_t m) {
  return std::min(m, kTokens) * shape.k * static_cast<int64_t>(sizeof(float));
}

// Tokens [first, first + count), whose x is [count, K] in FP32, by columns [col, col + cols). Sums
// of token m are multiplied by factors[m].
void Multiply(const MatmulArgs& args, const float* x, const float* factors, int64_t first,
              int64_t count, int64_t col, int64_t cols) {
  const int64_t k = args.x.cols;
  PlainColumns weight(*args.weight, col, cols);
  std::vector<float> sums(count * cols);
  for (int64_t i = 0; i < k; ++i) {
    const float* row = weight.Row(i);
    for (int64_t m = 0; m < count; ++m) {
      const float value = x[m * k + i];
      float* sum = sums.data() + m * cols;
      for (int64_t c = 0; c < cols; ++c) sum[c] += value * row[c];
    }
  }
  for (int64_t m = 0; m < count; ++m) {
    for (int64_t c = 0; c < cols; ++c) {
      const float sum = sums[m * cols + c] * factors[m];
      StoreElement(args.y.data, args.y.dtype, (first + m) * args.y.cols + col + c,
                   args.bias != nullptr ? sum + args.bias[col + c] : sum);
    }
  }
}

absl::Status Matmul(const MatmulArgs& args, StreamView) {
  ThreadPool& pool = CpuDevice::Of(args.weight->device).pool();
  const int64_t k = args.x.cols;
  float* const x = static_cast<float*>(args.workspace);
  for (int64_t first = 0; first < args.x.rows; first += kTokens) {
    const int64_t count = std::min(kTokens, args.x.rows - first);
    float factors[kTokens];
    pool.ParallelFor(count, [&](int64_t m, int) {
      for (int64_t i = 0; i < k; ++i) {
        x[m * k + i] = LoadElement(args.x.data, args.x.dtype, (first + m) * k + i);
      }
      factors[m] = cpu::ScaleDownHugeRow(x + m * k, k);
    });
    pool.ParallelFor(CeilDiv(args.y.cols, kColumns), [&](int64_t task, int) {
      const int64_t col = task * kColumns;
      Multiply(args, x, factors, first, count, col, std::min(kColumns, args.y.cols - col));
    });
  }
  return absl::OkStatus();
}

}  // namespace

const KernelRow kCpuPlainDequantize = {.name = "cpu/plain_dequantize",
                                       .op = Op::kDequantize,
                                       .claims = kElementCodes,
                                       .layout = &kPlainLayout,
                                       .priority = 1,
                                       .dequantize = Dequantize};

const KernelRow kCpuPlainMatmul = {.name = "cpu/plain_matmul",
                                   .op = Op::kMatmul,
                                   .claims = kElementCodes,
                                   .layout = &kPlainLayout,
                                   .batch_invariant = true,
                                   .priority = 1,
                                   .workspace_bytes = Workspace,
                                   .matmul = Matmul};

}  // namespace awqd
