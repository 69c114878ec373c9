// PrepareWeight, and the dispatch of Dequantize and QuantizedMatmul to the rows of a weight's plan.
#include "kernels/kernels.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kernels/base/huge_pages.h"
#include "kernels/base/status.h"

namespace awqd {
namespace {

int64_t BiasBytes(const CanonicalWeight& weight) {
  return static_cast<int64_t>(weight.bias.size() * sizeof(float));
}

// Bytes that one more thread packs in about as long as it takes to start.
constexpr int64_t kBytesPerThread = int64_t{1} << 20;
constexpr int64_t kMaxThreads = 8;  // packing soon waits for memory

// Packs all columns into `out`, uninitialised host memory, on a few threads of its own: loading
// comes before serving, and has no claim on the threads that serve.
void PackAll(const CanonicalWeight& weight, const DeviceWeight& like, uint8_t* out) {
  const LayoutExtent& extent = like.extent;
  const auto clear = [&](int64_t begin, int64_t end) { std::memset(out + begin, 0, end - begin); };
  clear(extent.codes_bytes, extent.scales_offset());
  clear(extent.scales_offset() + extent.scales_bytes, extent.zeros_offset());
  clear(extent.zeros_offset() + extent.zeros_bytes, extent.total());
  const int64_t steps = CeilDiv(weight.n, ColumnRange::kStep);
  const int64_t cores = std::thread::hardware_concurrency();
  const int64_t parts = std::clamp<int64_t>(
      std::min({extent.total() / kBytesPerThread, steps, cores}), 1, kMaxThreads);
  const auto pack = [&](int64_t part) {
    const int64_t begin = steps * part / parts * ColumnRange::kStep;
    const int64_t end = steps * (part + 1) / parts * ColumnRange::kStep;
    like.layout->pack(weight, {begin, std::min(end, weight.n)}, out);
  };
  std::vector<std::thread> threads;
  threads.reserve(parts);
  for (int64_t part = 1; part < parts; ++part) {
    try {
      threads.emplace_back(pack, part);
    } catch (const std::exception&) {  // the process may start no more
      pack(part);
    }
  }
  pack(0);
  for (std::thread& thread : threads) thread.join();
}

// Straight into the device's memory where the host can reach it.
absl::Status Pack(const CanonicalWeight& weight, Device& device, DeviceWeight* out) {
  const int64_t bytes = out->extent.total();
  if (device.host_addressable()) {
    PackAll(weight, *out, static_cast<uint8_t*>(out->storage.data()));
    if (out->bias) std::memcpy(out->bias.data(), weight.bias.data(), out->bias.size());
    return absl::OkStatus();
  }
  const std::unique_ptr<uint8_t[]> host(new uint8_t[bytes]);
  AdviseHugePages(host.get(), bytes);
  PackAll(weight, *out, host.get());
  AWQD_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device.CreateCopyStream());
  AWQD_RETURN_IF_ERROR(device.CopyToDevice(out->storage.data(), host.get(), bytes, stream->view()));
  if (out->bias) {
    AWQD_RETURN_IF_ERROR(device.CopyToDevice(out->bias.data(), weight.bias.data(), out->bias.size(),
                                             stream->view()));
  }
  return stream->Synchronize();
}

absl::Status CheckMatmul(const MatmulArgs& args) {
  const WeightShape& shape = args.weight->shape;
  if (args.x.cols != shape.k || args.y.cols != shape.n || args.x.rows != args.y.rows) {
    return absl::InvalidArgumentError(
        absl::StrCat("matmul: got x [", args.x.rows, ", ", args.x.cols, "] and y [", args.y.rows,
                     ", ", args.y.cols, "], expected [M, ", shape.k, "] and [M, ", shape.n, "]"));
  }
  return absl::OkStatus();
}

absl::Status CheckDtypes(const KernelRow& row, DType in, DType out) {
  if ((row.inputs & MaskOf(in)) == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("activations dtype: ", row.name, " does not take ", Name(in)));
  }
  if ((row.outputs & MaskOf(out)) == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("output dtype: ", row.name, " does not write ", Name(out)));
  }
  return absl::OkStatus();
}

Path Other(Path path) { return path == Path::kFused ? Path::kDequantize : Path::kFused; }

}  // namespace

absl::StatusOr<int64_t> PreparedBytes(const CanonicalWeight& weight, const DeviceInfo& device) {
  const WeightShape shape{weight.k, weight.n, weight.scheme};
  AWQD_ASSIGN_OR_RETURN(Plan plan, Select(shape, device, AllKernels()));
  return plan.layout->extent(shape).total() + BiasBytes(weight);
}

absl::StatusOr<std::shared_ptr<const DeviceWeight>> PrepareWeight(const CanonicalWeight& weight,
                                                                  Device& device) {
  return PrepareWeight(weight, device, AllKernels());
}

absl::StatusOr<std::shared_ptr<const DeviceWeight>> PrepareWeight(
    const CanonicalWeight& weight, Device& device, absl::Span<const KernelRow* const> rows) {
  AWQD_RETURN_IF_ERROR(Validate(weight));
  auto out = std::make_shared<DeviceWeight>();
  out->shape = {weight.k, weight.n, weight.scheme};
  out->format = weight.format;
  out->device = &device;
  AWQD_ASSIGN_OR_RETURN(Plan plan, Select(out->shape, device.info(), rows));
  out->layout = plan.layout;
  out->plan = std::move(plan.rows);
  out->extent = out->layout->extent(out->shape);
  AWQD_ASSIGN_OR_RETURN(out->storage, device.Allocate(MemoryKind::kWeights, out->extent.total()));
  if (!weight.bias.empty()) {
    AWQD_ASSIGN_OR_RETURN(out->bias, device.Allocate(MemoryKind::kWeights, BiasBytes(weight)));
  }
  AWQD_RETURN_IF_ERROR(Pack(weight, device, out.get()));
  return std::shared_ptr<const DeviceWeight>(std::move(out));
}

int64_t WorkspaceBytes(const DeviceWeight& weight, Path path, int64_t m) {
  int64_t bytes = 0;
  for (const PlanEntry& entry : weight.plan.matmul) {
    if (entry.path != path || entry.min_m > m || entry.row->workspace_bytes == nullptr) continue;
    const int64_t at = entry.max_m < 0 ? m : std::min(m, entry.max_m);
    bytes = std::max(bytes, entry.row->workspace_bytes(weight.shape, weight.device->info(), at));
  }
  return bytes;
}

absl::Status QuantizedMatmul(const MatmulArgs& args, Path path, StreamView stream,
                             const KernelRow** ran) {
  AWQD_RETURN_IF_ERROR(CheckMatmul(args));
  const int64_t m = std::max<int64_t>(args.x.rows, 1);
  const KernelRow* row = args.weight->plan.Matmul(path, m);
  if (row == nullptr) row = args.weight->plan.Matmul(Other(path), m);
  if (row == nullptr) {
    return absl::UnimplementedError(absl::StrCat("no kernel in the plan for M = ", m));
  }
  AWQD_RETURN_IF_ERROR(CheckDtypes(*row, args.x.dtype, args.y.dtype));
  if (ran != nullptr) *ran = row;
  return args.x.rows == 0 ? absl::OkStatus() : row->matmul(args, stream);
}

absl::Status Dequantize(const DequantizeArgs& args, StreamView stream, const KernelRow** ran) {
  const WeightShape& shape = args.weight->shape;
  if (args.row_begin < 0 || args.col_begin < 0 || args.out.rows < 0 || args.out.cols < 0 ||
      args.row_begin > shape.k - args.out.rows || args.col_begin > shape.n - args.out.cols) {
    return absl::InvalidArgumentError(absl::StrCat("dequantize: got rows ", args.row_begin, " + ",
                                                   args.out.rows, " and columns ", args.col_begin,
                                                   " + ", args.out.cols, ", expected a block of [",
                                                   shape.k, ", ", shape.n, "]"));
  }
  const KernelRow* row = args.weight->plan.dequantize;
  AWQD_RETURN_IF_ERROR(CheckDtypes(*row, DType::kFp16, args.out.dtype));
  if (ran != nullptr) *ran = row;
  if (args.out.rows == 0 || args.out.cols == 0) return absl::OkStatus();
  return row->dequantize(args, stream);
}

}  // namespace awqd
