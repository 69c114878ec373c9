// Multiplies the rows of a batch once; decodes a block into the buffer that the result is fetched
// from.
#include "server/engine/matmul_work.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/exact.h"
#include "kernels/kernels.h"
#include "server/engine/lane.h"
#include "server/engine/reassembly.h"
#include "server/engine/threshold_table.h"

namespace awqd::engine {

// Multiplications. Decoding the weight first costs as much as some tokens more.
int64_t MatmulWork::cost() const {
  constexpr int64_t kDecode = 32;
  const WeightShape& shape = here().shape;
  const int64_t all = rows + (path == Path::kDequantize ? kDecode : 0);
  return CostOfMultiplications(static_cast<double>(all) * static_cast<double>(shape.k * shape.n));
}

batching::BatchKey MatmulWork::merge_key() const {
  if (!bias.empty()) return {};
  const uint32_t asked = path.has_value() ? 1 + static_cast<uint32_t>(*path) : 0;
  return {&here(), static_cast<uint32_t>(quantization) << 28 |
                       static_cast<uint32_t>(activation) << 24 | asked << 16 |
                       static_cast<uint32_t>(x_dtype) << 8 | static_cast<uint32_t>(out_dtype)};
}

absl::StatusOr<WorkPartition> MatmulWork::Partition(StagingPool& staging) const {
  if (weight->partitioned_at_rows()) return PartitionAtRows(staging);
  const ColumnResult result = {*weight, {0, weight->shape.n}, rows, SizeOf(out_dtype)};
  return PartitionColumns(result, [this](size_t, model::ColumnSpan columns) {
    auto out = std::make_unique<MatmulWork>(*this);
    if (!bias.empty()) {
      out->bias = {bias.begin() + columns.begin, bias.begin() + columns.end};
    }
    return out;
  });
}

std::vector<float> ComputeTokenScales(const Activations& activations, float most) {
  const int64_t count = activations.rows;
  const int64_t k = count == 0 ? 0 : activations.x.size() / SizeOf(activations.dtype) / count;
  std::vector<float> out;
  for (int64_t row = 0; row < count; ++row) {
    float largest = 0;
    bool finite = true;
    for (int64_t i = row * k; i < (row + 1) * k; ++i) {
      const float magnitude = std::abs(LoadElement(activations.x.data(), activations.dtype, i));
      finite = finite && std::isfinite(magnitude);
      largest = std::max(largest, magnitude);
    }
    out.push_back(!finite       ? std::numeric_limits<float>::quiet_NaN()
                  : largest > 0 ? largest / most
                                : 1);
  }
  return out;
}

// Each part multiplies its columns of x, without the steps after the sum. All of a token is
// quantised by one scale, as on one device; parts begin with a block of 128 (SplitMlp).
absl::StatusOr<WorkPartition> MatmulWork::PartitionAtRows(StagingPool& staging) const {
  const bool integers = out_dtype == DType::kInt32;
  const Activations all = {x, x_dtype, rows};
  MatmulWork like = *this;
  if (!integers) like.out_dtype = DType::kFp32;
  like.activation = ActivationFunction::kNone;
  const bool int8 = quantization == ActivationQuantization::kPerToken;
  if (int8 || quantization == ActivationQuantization::kFloat8PerToken) {
    like.quantization =
        int8 ? ActivationQuantization::kStatic : ActivationQuantization::kFloat8Static;
    like.scales = rows == 0 ? std::vector<float>{1} : ComputeTokenScales(all, int8 ? 127 : 448);
  }
  const Reduction reduction = {
      .count = rows, .cols = weight->shape.n, .activation = activation, .y_dtype = out_dtype};
  const auto make = [&](size_t i) -> absl::StatusOr<std::unique_ptr<Work>> {
    auto part = std::make_unique<MatmulWork>(like);
    AWQD_ASSIGN_OR_RETURN(part->x, CopyColumns(all, weight->parts[i], staging));
    if (has_block_scales()) {
      part->scales = CopyBlockScales(scales, rows, *weight, weight->parts[i]);
    }
    if (i > 0) part->bias.clear();  // the weight's own is with the first part too
    return part;
  };
  return PartitionPartialSums(reduction, weight->parts.size(), make);
}

bool MatmulWork::has_row_scales() const {
  return HasGivenScales(quantization) || x_dtype == DType::kE4m3 ||
         (x_dtype == DType::kInt8 && out_dtype != DType::kInt32);
}

bool MatmulWork::has_block_scales() const {
  return x_dtype == DType::kE4m3 && quantization == ActivationQuantization::kFloat8PerBlock;
}

std::vector<float> CopyBlockScales(absl::Span<const float> scales, int64_t rows,
                                   const model::PlacedWeight& weight, const model::WeightPart& of) {
  const int64_t all = CeilDiv(weight.shape.k, kScaledBlock);
  std::vector<float> out;
  for (int64_t row = 0; row < rows; ++row) {
    const auto begin = scales.begin() + row * all;
    out.insert(out.end(), begin + of.row_begin / kScaledBlock,
               begin + CeilDiv(of.row_end(), kScaledBlock));
  }
  if (out.empty()) out = {1};  // no tokens
  return out;
}

void MatmulWork::AppendScales(std::vector<float>* out) const {
  if (scales.size() == 1 && !has_block_scales()) {
    out->insert(out->end(), rows, scales[0]);
  } else {
    out->insert(out->end(), scales.begin(), scales.end());
  }
}

absl::Status MatmulWork::Run(Lane& lane, const batching::Batch& batch, char* result,
                             ExecutionReport* report) const {
  const Path taken = path.value_or(ChoosePath(lane, here(), batch.tokens, quantization));
  absl::InlinedVector<RowPiece, 8> pieces;
  pieces.reserve(batch.tasks.size());
  std::vector<float> all_scales;
  for (const std::unique_ptr<batching::Task>& task : batch.tasks) {
    const auto& work = static_cast<const MatmulWork&>(*task);
    pieces.push_back({work.x.data(), work.rows, work.x.device()});
    work.AppendScales(&all_scales);
  }
  // Without tokens too the kernel is chosen by whether there are scales.
  if (has_row_scales() && all_scales.empty()) all_scales = {1};
  if (pieces.size() > 1 || rows <= lane.max_rows()) {
    return Multiply(lane, pieces, all_scales, taken, result, report);
  }
  // One work larger than a batch may be: in steps, so that the lane's buffers stay bounded.
  const int64_t x_row = here().shape.k * SizeOf(x_dtype);
  const int64_t y_row = here().shape.n * SizeOf(out_dtype);
  return RunInSteps(rows, lane.max_rows(), [&](int64_t row, int64_t count) {
    const RowPiece piece{x.data() + row * x_row, count, x.device()};
    const auto scales = absl::MakeConstSpan(all_scales);
    const int64_t each = scales.empty() ? 0 : static_cast<int64_t>(scales.size()) / rows;
    const auto own = scales.subspan(row * each, count * each);
    return Multiply(lane, {&piece, 1}, own, taken, result + row * y_row, report);
  });
}

absl::Status MatmulWork::Multiply(Lane& lane, absl::Span<const RowPiece> pieces,
                                  absl::Span<const float> token_scales, Path taken, char* y,
                                  ExecutionReport* report) const {
  const int64_t k = here().shape.k, n = here().shape.n;
  const int64_t m = CountRows(pieces);
  const int64_t y_bytes = m * n * SizeOf(out_dtype);
  MatmulArgs args;
  args.weight = &here();
  args.bias = here().bias();
  args.activation = activation;
  args.quantization = quantization;
  if (!token_scales.empty()) {
    AWQD_ASSIGN_OR_RETURN(args.scales, lane.Upload(token_scales));
  }
  if (!bias.empty()) {
    AWQD_ASSIGN_OR_RETURN(args.bias, lane.Upload(bias));
  }
  AWQD_ASSIGN_OR_RETURN(const void* rows_there, lane.GatherRows(pieces, k * SizeOf(x_dtype)));
  args.x = {rows_there, x_dtype, m, k};
  AWQD_ASSIGN_OR_RETURN(void* target, lane.AllocateResult(y, y_bytes));
  args.y = {target, out_dtype, m, n};
  AWQD_RETURN_IF_ERROR(RunProduct(lane, args, taken, report));
  return lane.Fetch(y, target, y_bytes);
}

absl::StatusOr<WorkPartition> DequantizeWork::Partition(StagingPool& /*staging*/) const {
  const int64_t element_bytes = SizeOf(out_dtype);
  WorkPartition out;
  out.bytes = rows * cols * element_bytes;
  std::vector<ResultBlock> blocks;
  for (size_t i = 0; i < weight->parts.size(); ++i) {
    const model::WeightPart& here = weight->parts[i];
    const int64_t top = std::max(row_begin, here.row_begin);
    const int64_t left = std::max(col_begin, here.col_begin);
    auto work = std::make_unique<DequantizeWork>(*this);
    work->part = i;
    work->row_begin = top - here.row_begin;
    work->rows = std::min(row_begin + rows, here.row_end()) - top;
    work->col_begin = left - here.col_begin;
    work->cols = std::min(col_begin + cols, here.col_end()) - left;
    if (work->rows <= 0 || work->cols <= 0) continue;
    blocks.push_back({.row_begin = top - row_begin,
                      .rows = work->rows,
                      .offset = (left - col_begin) * element_bytes,
                      .row_bytes = work->cols * element_bytes});
    out.parts.push_back(std::move(work));
  }
  if (out.parts.empty()) {  // no elements at all still get an answer
    auto work = std::make_unique<DequantizeWork>(*this);
    work->row_begin = work->rows = work->col_begin = work->cols = 0;
    out.parts.push_back(std::move(work));
  }
  if (out.parts.size() > 1) {
    out.reassembler = ReassembleBlocks(cols * element_bytes, std::move(blocks));
  }
  return out;
}

bool DequantizeWork::accesses_devices() const {
  return !partitioned() && !weight->parts[part].weight->transforms_input();
}

absl::Status DequantizeWork::Run(Lane& lane, const batching::Batch& /*batch*/, char* result,
                                 ExecutionReport* report) const {
  if (weight->parts[part].weight->transforms_input()) return RunTransformed(lane, result, report);
  AWQD_ASSIGN_OR_RETURN(const KernelRow* ran,
                        Decode(lane, out_dtype, {row_begin, rows, col_begin, cols}, result));
  AddKernel(ran, report);
  return absl::OkStatus();
}

absl::StatusOr<const KernelRow*> DequantizeWork::Decode(Lane& lane, DType dtype, const Block& block,
                                                        void* host) const {
  const int64_t bytes = block.rows * block.cols * SizeOf(dtype);
  AWQD_ASSIGN_OR_RETURN(void* target, lane.AllocateResult(host, bytes));
  DequantizeArgs args;
  args.weight = weight->parts[part].weight.get();
  args.out = {target, dtype, block.rows, block.cols};
  args.row_begin = block.row_begin;
  args.col_begin = block.col_begin;
  const int64_t scratch = DequantizeWorkspaceBytes(*args.weight, block.cols, dtype);
  AWQD_ASSIGN_OR_RETURN(void* workspace, lane.AllocateWorkspace(scratch));
  const KernelRow* ran = nullptr;
  AWQD_RETURN_IF_ERROR(awqd::Dequantize(args, workspace, lane.stream(), &ran));
  AWQD_RETURN_IF_ERROR(lane.Fetch(host, target, bytes));
  return ran;
}

// Kernels decode the weight that activations are multiplied by after the factor and the transform.
// Some rows at a time, whole blocks of the transform, so that their FP32 numbers stay small beside
// the result; where blocks are long, some columns too.
absl::Status DequantizeWork::RunTransformed(Lane& lane, char* result,
                                            ExecutionReport* report) const {
  constexpr int64_t kBlockElements = 1 << 20, kFewColumns = 64;
  constexpr auto kFloatBytes = static_cast<int64_t>(sizeof(float));
  const DeviceWeight& one = *weight->parts[part].weight;
  std::vector<float> fetched;
  const float* factor = one.factor();
  if (factor != nullptr && !one.device->host_addressable()) {
    fetched.resize(one.shape.k);
    AWQD_RETURN_IF_ERROR(
        one.device->CopyToHost(fetched.data(), factor, one.shape.k * kFloatBytes, lane.stream()));
    factor = fetched.data();  // there with the first block
  }
  const int64_t unit = std::max<int64_t>(1, one.hadamard.size);
  const int64_t width =
      std::max<int64_t>(1, std::min(cols, std::max(kFewColumns, kBlockElements / unit)));
  const int64_t most = std::max<int64_t>(1, kBlockElements / width / unit) * unit;
  const int64_t first = row_begin / unit * unit, end = RoundUp(row_begin + rows, unit);
  AWQD_ASSIGN_OR_RETURN(const Payload staged,
                        lane.staging().Get(std::min(most, end - first) * width * kFloatBytes));
  auto* const block = reinterpret_cast<float*>(staged.data());
  for (int64_t row = first; row < end || row == first; row += most) {
    const int64_t count = std::min(most, end - row);
    for (int64_t col = 0; col < cols || col == 0; col += width) {
      const int64_t some = std::min(width, cols - col);
      AWQD_ASSIGN_OR_RETURN(
          const KernelRow* ran,
          Decode(lane, DType::kFp32, {row, count, col_begin + col, some}, staged.data()));
      if (row == first && col == 0) AddKernel(ran, report);
      for (int64_t i = 0; i < count && one.hadamard.size > 0; i += unit) {
        TransformBlock(one.hadamard, block + i * some, some);
      }
      for (int64_t i = std::max(row, row_begin); i < std::min(row + count, row_begin + rows); ++i) {
        const float multiplier = factor == nullptr ? 1 : factor[i];
        for (int64_t c = 0; c < some; ++c) {
          const float product = block[(i - row) * some + c] * multiplier;
          StoreElement(result, out_dtype, (i - row_begin) * cols + col + c, product);
        }
      }
    }
  }
  return absl::OkStatus();
}

Path ChoosePath(const Lane& lane, const DeviceWeight& weight, int64_t tokens,
                ActivationQuantization quantization) {
  return awqd::ChoosePath(weight.plan, tokens, quantization,
                          lane.thresholds().FindThreshold(weight));
}

absl::Status RunProduct(Lane& lane, MatmulArgs args, Path path, ExecutionReport* report) {
  // Either path may run (QuantizedMatmul falls back), so the workspace serves both.
  const auto bytes_on = [&](Path taken) {
    return WorkspaceBytes(*args.weight, taken, args.x.rows, args.activation, ProductOf(args));
  };
  const int64_t bytes = std::max(bytes_on(Path::kFused), bytes_on(path));
  AWQD_ASSIGN_OR_RETURN(args.workspace, lane.AllocateWorkspace(bytes));
  const KernelRow* ran = nullptr;
  AWQD_RETURN_IF_ERROR(QuantizedMatmul(args, path, lane.stream(), &ran));
  AddKernel(ran, report);
  return absl::OkStatus();
}

}  // namespace awqd::engine
