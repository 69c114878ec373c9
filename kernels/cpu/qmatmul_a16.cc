// cpu/qmatmul_a16: the fused product.
//
// Computes y = x @ W + bias with FP32 accumulation. Weight layout: k16. Work split: tiles of 8
// columns by blocks of rows; x is expanded to FP32 once, or FP16 and BF16 are made digits, which
// AVX-512 VNNI multiplies as integers (bodies/column_product.h). A row's bits depend on the row and
// the weight only (bodies/product_body.h). Limits: those of the layout.
#include <algorithm>
#include <optional>

#include "kernels/cpu/integer_product.h"
#include "kernels/cpu/rows.h"

namespace awqd {
namespace {

using cpu::Bodies;
using cpu::K16Weight;

// Rows expanded at a time: bounds the workspace.
constexpr int64_t kMaxRows = 192;
// 64 columns: enough that a task of one row takes microseconds, few enough that threads end
// together.
constexpr int64_t kMaxTilesPerTask = 8;
constexpr int64_t kMinRowsPerTask = 12;
// Products of fewer multiplications run on one thread, about 30 us: waking another takes as long
// as it saves, and under load it takes a core from those that serve other requests.
constexpr int64_t kAlone = int64_t{1} << 20;

// One odd cache line more than the row: rows of a power of two would share cache sets.
int64_t Stride(const K16Weight& w) { return w.runs * 16 + 16; }

int64_t Workspace(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  const K16Weight w = cpu::DescribeK16(shape);
  const int64_t rows = std::min(m, kMaxRows);
  const int64_t scratch = cpu::BodiesFor(device.isa).scratch_floats * device.threads;
  const int64_t floats = (rows * Stride(w) + scratch) * static_cast<int64_t>(sizeof(float));
  const bool digits = cpu::DigitBodiesFor(device.isa) != nullptr && cpu::SuitDigits(w);
  return floats + (digits ? cpu::Digits::Bytes(w, device.threads, rows) : 0);
}

// How the tiles and rows of one pass are cut into tasks.
struct Cut {
  int64_t tiles_per_task = 1;
  int64_t tile_tasks = 1;
  int64_t row_tasks = 1;
};

Cut ChooseCut(const K16Weight& w, int64_t rows, int64_t threads) {
  const int64_t tiles = w.tiles;
  Cut cut;
  if (rows * w.k <= kAlone / std::max<int64_t>(1, w.n)) {
    return {.tiles_per_task = tiles, .tile_tasks = 1, .row_tasks = 1};
  }
  cut.tiles_per_task = std::clamp<int64_t>(tiles / (threads * 8), 1, kMaxTilesPerTask);
  cut.tile_tasks = CeilDiv(tiles, cut.tiles_per_task);
  cut.row_tasks =
      std::clamp<int64_t>(CeilDiv(threads * 4, cut.tile_tasks), 1, CeilDiv(rows, kMinRowsPerTask));
  return cut;
}

void RunPass(const K16Weight& w, const cpu::ProductTask& pass, float* scratch, CpuDevice& device) {
  const Bodies& bodies = cpu::BodiesFor(device.info().isa);
  const int64_t tiles = w.tiles;
  const Cut cut = ChooseCut(w, pass.rows, device.info().threads);
  const int64_t size = pass.y_type == cpu::Element::kFp32 ? 4 : 2;
  device.pool().ParallelFor(cut.tile_tasks * cut.row_tasks, [&](int64_t index, int thread) {
    const int64_t part = index % cut.row_tasks;
    const int64_t first = pass.rows * part / cut.row_tasks;
    cpu::ProductTask task = pass;
    task.rows = pass.rows * (part + 1) / cut.row_tasks - first;
    task.x = pass.x + first * pass.x_stride;
    if (pass.row_factors != nullptr) task.row_factors = pass.row_factors + first;
    task.y = static_cast<char*>(pass.y) + first * pass.y_stride * size;
    task.tile_begin = index / cut.row_tasks * cut.tiles_per_task;
    task.tile_end = std::min(task.tile_begin + cut.tiles_per_task, tiles);
    task.scratch = scratch + thread * bodies.scratch_floats;
    bodies.product(w, task);
  });
}

// Rows [begin, begin + count) of y, at most kMaxRows.
class Rows {
 public:
  Rows(const MatmulArgs& args, const K16Weight& w, CpuDevice& device)
      : args_(args), w_(w), device_(device), most_(std::min(args.x.rows, kMaxRows)) {}

  void InFloats(int64_t begin, int64_t count) {
    float* const expanded = static_cast<float*>(args_.workspace);
    cpu::ProductTask pass;
    pass.x = expanded;
    pass.x_stride = Stride(w_);
    pass.rows = count;
    pass.bias = args_.bias;
    pass.y = Y(begin).data;
    pass.y_stride = args_.y.cols;
    pass.y_type = cpu::ElementOf(args_.y.dtype);
    float factors[kMaxRows];
    if (cpu::ExpandRows(args_.x, begin, count, w_, /*padded=*/true, pass.x_stride, expanded,
                        factors, device_)) {
      pass.row_factors = factors;
    }
    RunPass(w_, pass, expanded + most_ * pass.x_stride, device_);
  }

  // Neighbours that digits hold are multiplied together, and so are the others.
  void ByDigits(int64_t begin, int64_t count, cpu::Digits& digits) {
    digits.Make(args_.x, begin, count)
        .ForNeighbours(count, [&](int64_t first, int64_t some, bool made) {
          if (made) {
            digits.Multiply(first, some, args_.bias, Y(begin + first));
          } else {
            InFloats(begin + first, some);
          }
        });
  }

  int64_t most() const { return most_; }
  // Behind what InFloats needs.
  void* rest() const {
    const int64_t scratch =
        cpu::BodiesFor(device_.info().isa).scratch_floats * device_.info().threads;
    return static_cast<float*>(args_.workspace) + most_ * Stride(w_) + scratch;
  }

 private:
  MatrixView Y(int64_t begin) const {
    MatrixView y = args_.y;
    y.data = static_cast<char*>(y.data) + begin * y.cols * SizeOf(y.dtype);
    return y;
  }

  const MatmulArgs& args_;
  const K16Weight& w_;
  CpuDevice& device_;
  const int64_t most_;
};

absl::Status Matmul(const MatmulArgs& args, StreamView) {
  CpuDevice& device = CpuDevice::Of(args.weight->device);
  const K16Weight w = cpu::AccessK16(*args.weight);
  Rows rows(args, w, device);
  std::optional<cpu::Digits> digits;
  if (args.x.dtype != DType::kFp32 && cpu::DigitBodiesFor(device.info().isa) != nullptr &&
      cpu::SuitDigits(w)) {
    digits.emplace(w, device, rows.rest(), rows.most());
  }
  for (int64_t m = 0; m < args.x.rows; m += rows.most()) {
    const int64_t count = std::min(rows.most(), args.x.rows - m);
    if (digits) {
      rows.ByDigits(m, count, *digits);
    } else {
      rows.InFloats(m, count);
    }
  }
  return absl::OkStatus();
}

}  // namespace

const KernelRow kCpuQmatmulA16 = {.name = "cpu/qmatmul_a16",
                                  .op = Op::kMatmul,
                                  .claims = kEverything,
                                  .layout = &kK16Layout,
                                  .batch_invariant = true,
                                  .priority = 10,
                                  .workspace_bytes = Workspace,
                                  .matmul = Matmul};

}  // namespace awqd
