// cpu/qmatmul_a16: the fused product. cpu/qmatmul_a16_pairs: that of many tokens of FP16 or BF16,
// as integers.
//
// Both compute y = x @ W + bias. Weight layout: k16. Work split: tiles of 8 columns by blocks of
// rows. The first accumulates in FP32 and expands x to FP32 once, or makes FP16 and BF16 INT16, two
// planes of INT8, where the CPU multiplies them (bodies/integers/column_product.h). A row's bits
// depend on the row and the weight only. Limits: those of the layout.
//
// The second has x as INT16 by blocks of 128 rows (bodies/integers/int16_block.h) and W as codes
// less their zeros in packed panels, whose scales multiply the sums of blocks in FP32
// (bodies/integers/panel_product.h; some tokens with AVX-512 VNNI: lane_product.h; AMX:
// amx_product.h). Its bits are those of the first. Limits:
// codes of 4 or 8 bits, groups of whole blocks, floating scales; AVX2. It leaves FP32 activations
// and tokens that INT16 holds badly to the first.
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
// Products of fewer multiplications run on one thread, about 30 us: waking another takes as long
// as it saves, and under load it takes a core from those that serve other requests.
constexpr int64_t kSingle = int64_t{1} << 20, kSingleInt16 = int64_t{3} << 19;
// Tokens of a task whose INT16 stay in the L2 cache.
constexpr int64_t kMaxRowsPerTask = 96;

// One odd cache line more than the row: rows of a power of two would share cache sets.
int64_t Stride(const K16Weight& w) { return w.runs * 16 + 16; }

int64_t FloatBytes(const K16Weight& w, const DeviceInfo& device, int64_t rows) {
  const int64_t scratch = cpu::BodiesFor(device.isa).scratch_floats * device.threads;
  return (rows * Stride(w) + scratch) * static_cast<int64_t>(sizeof(float));
}

bool HasInt16(const K16Weight& w, CpuIsa isa) {
  return cpu::IntegersFor(isa).int16_columns.product != nullptr && cpu::SuitsInt16(w);
}

int64_t Workspace(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  const K16Weight w = cpu::DescribeK16(shape);
  const int64_t rows = std::min(m, kMaxRows);
  int64_t bytes = FloatBytes(w, device, rows);
  if (HasInt16(w, device.isa)) {
    bytes +=
        cpu::IntegerActivations::Bytes(w, cpu::IntegersFor(device.isa).int16_columns, rows,
                                       device.threads, cpu::ColumnScratchBytes(w.groups, rows));
  }
  return bytes;
}

void RunPass(const K16Weight& w, const cpu::ProductTask& pass, float* scratch, CpuDevice& device) {
  const Bodies& bodies = cpu::BodiesFor(device.info().isa);
  const cpu::TaskSplit split =
      cpu::SplitColumns(w, pass.rows, device.info().threads, kSingle, pass.rows);
  const int64_t size = pass.y_type == cpu::Element::kFp32 ? 4 : 2;
  device.pool().ParallelFor(split.tile_tasks * split.row_tasks, [&](int64_t index, int thread) {
    const int64_t part = index % split.row_tasks, first = pass.rows * part / split.row_tasks;
    cpu::ProductTask task = pass;
    task.rows = pass.rows * (part + 1) / split.row_tasks - first;
    task.x = pass.x + first * pass.x_stride;
    if (pass.row_factors != nullptr) task.row_factors = pass.row_factors + first;
    task.y = static_cast<char*>(pass.y) + first * pass.y_stride * size;
    task.tile_begin = index / split.row_tasks * split.tiles_per_task;
    task.tile_end = std::min(task.tile_begin + split.tiles_per_task, w.tiles);
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

  // Neighbours that INT16 holds well are multiplied together, and so are the others.
  void AsInt16(int64_t begin, int64_t count, cpu::IntegerActivations& tokens) {
    const auto function = cpu::IntegersFor(device_.info().isa).int16_columns.product;
    tokens.Convert(args_.x, begin, count);
    tokens.ForNeighbours(count, [&](int64_t first, int64_t some, bool held) {
      if (!held) return InFloats(begin + first, some);
      cpu::IntegerTask task = tokens.Task(first, some, Y(begin + first));
      task.bias = args_.bias;
      tokens.Run(
          function, task,
          cpu::SplitColumns(w_, some, device_.info().threads, kSingleInt16, kMaxRowsPerTask));
    });
  }

  int64_t most() const { return most_; }
  // Behind what InFloats needs.
  void* rest() const {
    return static_cast<char*>(args_.workspace) + FloatBytes(w_, device_.info(), most_);
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
  std::optional<cpu::IntegerActivations> tokens;
  if (args.x.dtype != DType::kFp32 && HasInt16(w, device.info().isa)) {
    tokens.emplace(w, cpu::IntegersFor(device.info().isa).int16_columns, rows.most(),
                   cpu::ColumnScratchBytes(w.groups, rows.most()), rows.rest(), device);
  }
  for (int64_t m = 0; m < args.x.rows; m += rows.most()) {
    const int64_t count = std::min(rows.most(), args.x.rows - m);
    if (tokens) {
      rows.AsInt16(m, count, *tokens);
    } else {
      rows.InFloats(m, count);
    }
  }
  return absl::OkStatus();
}

// --- Many tokens, from packed panels ---

// Fewer tokens repay the decoding of a panel nowhere. From how many on they do is said by the body;
// below that the product is that of cpu/qmatmul_a16.
constexpr int64_t kMinTokens = 6;

std::string Refuses(const WeightShape& shape, const DeviceInfo& device) {
  if (cpu::IntegersFor(device.isa).int16_panels.product == nullptr) return "needs AVX2";
  if (cpu::SuitsInt16(cpu::DescribeK16(shape))) return "";
  return "needs codes of 4 or 8 bits, groups of a multiple of 128 rows, or one";
}

// The product for so many tokens, null where they are too few.
const cpu::IntegerProduct* Choose(const K16Weight& w, CpuIsa isa, int64_t rows) {
  const cpu::IntegerProducts& integers = cpu::IntegersFor(isa);
  for (const cpu::IntegerProduct* product : {&integers.int16_lanes, &integers.int16_panels}) {
    const int64_t least = w.bits == 8 ? product->min_tokens_8bit : product->min_tokens;
    const int64_t most = w.bits == 8 ? product->max_tokens_8bit : product->max_tokens;
    if (product->product != nullptr && least <= rows && rows <= most) return product;
  }
  return nullptr;
}

// Enough for fewer tokens too.
int64_t PanelBytes(const K16Weight& w, const DeviceInfo& device, int64_t rows) {
  const cpu::IntegerProducts& integers = cpu::IntegersFor(device.isa);
  const auto bytes = [&](const cpu::IntegerProduct& product) {
    return cpu::IntegerActivations::Bytes(
        w, product, std::min(rows, std::max(product.max_tokens, product.max_tokens_8bit)),
        device.threads, integers.panel_scratch_bytes);
  };
  return std::max(bytes(integers.int16_lanes), bytes(integers.int16_panels));
}

int64_t PairsWorkspace(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  const int64_t rows = std::min(m, cpu::kMaxIntegerRows);
  // The second is for the tokens that are left to it.
  return PanelBytes(cpu::DescribeK16(shape), device, rows) +
         kCpuQmatmulA16.workspace_bytes(shape, device, rows);
}

MatmulArgs RowsOf(const MatmulArgs& args, int64_t first, int64_t count) {
  MatmulArgs rows = args;
  const int64_t x = first * args.x.cols * SizeOf(args.x.dtype);
  const int64_t y = first * args.y.cols * SizeOf(args.y.dtype);
  rows.x = {static_cast<const char*>(args.x.data) + x, args.x.dtype, count, args.x.cols};
  rows.y = {static_cast<char*>(args.y.data) + y, args.y.dtype, count, args.y.cols};
  return rows;
}

absl::Status PairsMatmul(const MatmulArgs& args, StreamView stream) {
  CpuDevice& device = CpuDevice::Of(args.weight->device);
  const cpu::IntegerProducts& integers = cpu::IntegersFor(device.info().isa);
  const K16Weight w = cpu::AccessK16(*args.weight);
  const cpu::IntegerProduct* const chosen = Choose(w, device.info().isa, args.x.rows);
  if (args.x.dtype == DType::kFp32 || chosen == nullptr) {
    return kCpuQmatmulA16.matmul(args, stream);
  }
  const cpu::IntegerProduct& product = *chosen;
  const int64_t most = std::min(args.x.rows, cpu::kMaxIntegerRows);
  cpu::IntegerActivations tokens(w, product, most, integers.panel_scratch_bytes, args.workspace,
                                 device);
  absl::Status status;
  for (int64_t begin = 0; begin < args.x.rows; begin += most) {
    const int64_t count = std::min(most, args.x.rows - begin);
    tokens.Convert(args.x, begin, count);
    tokens.ForNeighbours(count, [&](int64_t first, int64_t some, bool held) {
      MatmulArgs rows = RowsOf(args, begin + first, some);
      if (held) {
        cpu::IntegerTask task = tokens.Task(first, some, rows.y);
        task.bias = args.bias;
        return tokens.Run(product.product, task,
                          cpu::SplitPanels(w, some, device.info().threads, /*single=*/0));
      }
      rows.workspace = static_cast<char*>(args.workspace) + PanelBytes(w, device.info(), most);
      status.Update(kCpuQmatmulA16.matmul(rows, stream));
    });
  }
  return status;
}

}  // namespace

const KernelRow kCpuQmatmulA16 = {.name = "cpu/qmatmul_a16",
                                  .op = Op::kMatmul,
                                  .claims = kElementCodes,
                                  .layout = &kK16Layout,
                                  .batch_invariant = true,
                                  .priority = 10,
                                  .workspace_bytes = Workspace,
                                  .matmul = Matmul};

const KernelRow kCpuQmatmulA16Pairs = {.name = "cpu/qmatmul_a16_pairs",
                                       .op = Op::kMatmul,
                                       .claims = {.bits = 0b111110000,
                                                  .zeros = kEverything.zeros,
                                                  .scales = kFloatingMask,
                                                  .group_multiple = 128},
                                       .layout = &kK16Layout,
                                       .min_m = kMinTokens,
                                       // From 128 to 2048 tokens of 4096 x 4096 and 14336 x 4096 it
                                       // takes half of the dense path's time.
                                       .dense_from = NeverDense,
                                       .batch_invariant = true,
                                       .priority = 20,
                                       .refuses = Refuses,
                                       .workspace_bytes = PairsWorkspace,
                                       .matmul = PairsMatmul};

}  // namespace awqd
