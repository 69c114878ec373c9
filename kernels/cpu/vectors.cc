// cpu/vectors_dequantize and cpu/vectors_matmul: vector codes, any block of W as FP16, BF16 or
// FP32, and the fused product.
//
// The product is y = x @ W + bias in FP32: a block of a column is decoded to 256 weights, which are
// multiplied by all tokens of a pass; sums have 32 lanes along K. A row's bits depend on the row
// and the weight only. Weight layout: plain. Work split: 16 columns a task. Limits: none.
#include <algorithm>

#include "kernels/cpu/rows.h"

namespace awqd {
namespace {

constexpr int64_t kColumns = 16;
// Tokens of a pass, whose x of 256 rows of K stays in the L2 cache.
constexpr int64_t kTokens = 64;
// Products of fewer multiplications run on one thread: waking another takes as long as it saves.
constexpr int64_t kSingle = int64_t{1} << 19;

// Decodes blocks of one weight.
class Blocks {
 public:
  explicit Blocks(const DeviceWeight& weight)
      : decode_(InfoOf(weight.shape.scheme.vector).decode),
        bytes_(VectorBlockBytes(weight.shape.scheme.vector)),
        codes_(weight.codes()),
        n_(weight.shape.n) {}

  void Decode(int64_t block, int64_t col, DecodedBlock* out) const {
    decode_(codes_ + (block * n_ + col) * bytes_, out);
  }

 private:
  void (*const decode_)(const uint8_t*, DecodedBlock*);
  const int64_t bytes_;
  const uint8_t* const codes_;
  const int64_t n_;
};

// Runs task(first column, columns) for all of [begin, begin + count).
template <typename Task>
void ForColumns(ThreadPool& pool, int64_t begin, int64_t count, bool single, Task task) {
  const auto run = [&](int64_t index, int /*thread*/) {
    const int64_t at = index * kColumns;
    task(begin + at, std::min(kColumns, count - at));
  };
  const int64_t tasks = CeilDiv(count, kColumns);
  if (!single) return pool.ParallelFor(tasks, run);
  for (int64_t index = 0; index < tasks; ++index) run(index, 0);
}

// --- Dequantize ---

// Rows [begin, end) of one block and some columns; `out` is element (begin, col).
void DequantizeColumns(const DeviceWeight& weight, const cpu::Bodies& bodies, int64_t begin,
                       int64_t end, int64_t col, int64_t cols, const MatrixView& out, char* to) {
  const Blocks blocks(weight);
  DecodedBlock decoded[kColumns];
  for (int64_t c = 0; c < cols; ++c) blocks.Decode(begin / kVectorBlock, col + c, &decoded[c]);
  const float* const outer = weight.outer();
  for (int64_t row = begin; row < end; ++row, to += out.cols * SizeOf(out.dtype)) {
    float values[kColumns];
    for (int64_t c = 0; c < cols; ++c) {
      values[c] = decoded[c].Element(row % kVectorBlock);
      if (outer != nullptr) values[c] *= outer[col + c];
    }
    bodies.from_float(values, nullptr, cols, cpu::ElementOf(out.dtype), to);
  }
}

absl::Status Dequantize(const DequantizeArgs& args, StreamView) {
  CpuDevice& device = CpuDevice::Of(args.weight->device);
  const cpu::Bodies& bodies = cpu::BodiesFor(device.info().isa);
  const MatrixView& out = args.out;
  const int64_t row_end = args.row_begin + out.rows;
  const bool single = out.rows * out.cols < kSingle;
  ForColumns(device.pool(), args.col_begin, out.cols, single, [&](int64_t col, int64_t cols) {
    for (int64_t begin = args.row_begin; begin < row_end;) {
      const int64_t end = std::min(row_end, (begin / kVectorBlock + 1) * kVectorBlock);
      const int64_t at = (begin - args.row_begin) * out.cols + col - args.col_begin;
      DequantizeColumns(*args.weight, bodies, begin, end, col, cols, out,
                        static_cast<char*>(out.data) + at * SizeOf(out.dtype));
      begin = end;
    }
  });
  return absl::OkStatus();
}

// --- Product ---

int64_t Workspace(const WeightShape& shape, const DeviceInfo&, int64_t m) {
  return std::min(m, kTokens) * shape.k * static_cast<int64_t>(sizeof(float));
}

// Tokens of a pass: x [count, K] in FP32, and the factor of each one's sums.
struct Pass {
  const float* x = nullptr;
  const float* factors = nullptr;
  int64_t first = 0, count = 0;
};

void MultiplyColumns(const MatmulArgs& args, const cpu::Bodies& bodies, const Pass& pass,
                     int64_t col, int64_t cols) {
  const int64_t k = args.x.cols;
  const Blocks blocks(*args.weight);
  const float* const outer = args.weight->outer();
  float sums[kTokens][kColumns];
  alignas(64) float lanes[kTokens * cpu::kVectorLanes];
  DecodedBlock decoded;
  for (int64_t c = 0; c < cols; ++c) {
    std::fill_n(lanes, pass.count * cpu::kVectorLanes, 0.0f);
    for (int64_t block = 0; block < k / kVectorBlock; ++block) {
      blocks.Decode(block, col + c, &decoded);
      bodies.vector_block(decoded.codes, decoded.scales, pass.x + block * kVectorBlock, k,
                          pass.count, lanes);
    }
    for (int64_t m = 0; m < pass.count; ++m) {
      float sum = 0;
      for (int64_t i = 0; i < cpu::kVectorLanes; ++i) sum += lanes[m * cpu::kVectorLanes + i];
      sums[m][c] = sum * pass.factors[m] * (outer != nullptr ? outer[col + c] : 1);
    }
  }
  char* const y = static_cast<char*>(args.y.data);
  for (int64_t m = 0; m < pass.count; ++m) {
    bodies.from_float(sums[m], args.bias != nullptr ? args.bias + col : nullptr, cols,
                      cpu::ElementOf(args.y.dtype),
                      y + ((pass.first + m) * args.y.cols + col) * SizeOf(args.y.dtype));
  }
}

absl::Status Matmul(const MatmulArgs& args, StreamView) {
  CpuDevice& device = CpuDevice::Of(args.weight->device);
  const cpu::Bodies& bodies = cpu::BodiesFor(device.info().isa);
  const int64_t k = args.x.cols;
  float* const x = static_cast<float*>(args.workspace);
  for (int64_t first = 0; first < args.x.rows; first += kTokens) {
    const int64_t count = std::min(kTokens, args.x.rows - first);
    float factors[kTokens];
    cpu::ExpandRows(args.x, first, count, {}, /*padded=*/false, k, x, factors, device);
    const Pass pass = {x, factors, first, count};
    const bool single = count * k * args.y.cols < kSingle;
    ForColumns(device.pool(), 0, args.y.cols, single,
               [&](int64_t col, int64_t cols) { MultiplyColumns(args, bodies, pass, col, cols); });
  }
  return absl::OkStatus();
}

}  // namespace

const KernelRow kCpuVectorsDequantize = {.name = "cpu/vectors_dequantize",
                                         .op = Op::kDequantize,
                                         .claims = kVectorCodes,
                                         .layout = &kPlainLayout,
                                         .priority = 10,
                                         .dequantize = Dequantize};

const KernelRow kCpuVectorsMatmul = {.name = "cpu/vectors_matmul",
                                     .op = Op::kMatmul,
                                     .claims = kVectorCodes,
                                     .layout = &kPlainLayout,
                                     .batch_invariant = true,
                                     .priority = 10,
                                     .workspace_bytes = Workspace,
                                     .matmul = Matmul};

}  // namespace awqd
