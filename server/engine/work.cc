// Shared by all works: keys that keep classes apart, partitions, the report.
#include "server/engine/work.h"

#include <algorithm>
#include <cstring>
#include <typeinfo>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status.h"
#include "kernels/registry.h"
#include "server/engine/reassembly.h"

namespace awqd::engine {

batching::BatchKey Work::key() const {
  batching::BatchKey key = merge_key();
  key.kind = &typeid(*this);
  return key;
}

batching::RunKey Work::run_key() const {
  batching::RunKey key = {.operation = &typeid(*this)};
  if (weights().empty()) return key;
  const DeviceWeight& weight = *weights().front()->parts[part].weight;
  key.shape = absl::HashOf(weight.shape.k, weight.shape.n, weight.shape.scheme.bits, weight.layout);
  return key;
}

bool Work::partitioned() const {
  return absl::c_any_of(weights(), [](const auto& weight) { return weight->partitioned(); });
}

absl::StatusOr<WorkPartition> Work::Partition(StagingPool& /*staging*/) const {
  return absl::UnimplementedError(absl::StrCat(
      name(), ": got a weight whose columns are cut among ", weights().front()->devices(),
      ", expected whole weights: serve with --shard=replicas or --shard=models"));
}

WorkPartition PartitionColumns(
    const ColumnResult& result,
    absl::FunctionRef<std::unique_ptr<Work>(size_t part, model::ColumnSpan columns)> make) {
  const model::PlacedWeight& weight = result.weight;
  const model::ColumnSpan wanted = result.wanted;
  const int64_t rows = result.rows, element_bytes = result.element_bytes;
  const int64_t row_bytes = (wanted.end - wanted.begin) * element_bytes;
  WorkPartition out;
  out.bytes = rows * row_bytes;
  std::vector<ResultBlock> blocks;
  const auto add = [&](size_t part, model::ColumnSpan columns) {
    out.parts.push_back(make(part, columns));
    out.parts.back()->part = part;
    blocks.push_back({.rows = rows,
                      .offset = (columns.begin - wanted.begin) * element_bytes,
                      .row_bytes = (columns.end - columns.begin) * element_bytes});
  };
  for (size_t i = 0; i < weight.parts.size(); ++i) {
    const model::WeightPart& part = weight.parts[i];
    const model::ColumnSpan columns = {std::max(wanted.begin, part.col_begin),
                                       std::min(wanted.end, part.col_end())};
    if (columns.begin < columns.end) add(i, columns);
  }
  // No columns at all still get an answer.
  if (out.parts.empty()) add(0, {0, 0});
  if (out.parts.size() > 1) {
    out.reassembler = ReassembleBlocks(row_bytes, std::move(blocks));
  }
  return out;
}

absl::StatusOr<WorkPartition> PartitionPartialSums(
    const Reduction& reduction, size_t parts,
    absl::FunctionRef<absl::StatusOr<std::unique_ptr<Work>>(size_t part)> make) {
  WorkPartition out;
  out.bytes = reduction.count * reduction.cols * SizeOf(reduction.y_dtype);
  for (size_t i = 0; i < parts; ++i) {
    AWQD_ASSIGN_OR_RETURN(std::unique_ptr<Work> part, make(i));
    part->part = i;
    out.parts.push_back(std::move(part));
  }
  out.reassembler = ReassemblePartialSums(reduction, parts);
  return out;
}

absl::StatusOr<Payload> CopyColumns(const Activations& activations, const model::WeightPart& part,
                                    StagingPool& staging) {
  const auto& [x, dtype, rows] = activations;
  const int64_t begin = part.row_begin * SizeOf(dtype);
  const int64_t width = part.weight->shape.k * SizeOf(dtype);
  AWQD_ASSIGN_OR_RETURN(Payload out, staging.Get(rows * width));
  const int64_t row_bytes = rows == 0 ? 0 : x.size() / rows;
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(out.data() + row * width, x.data() + row * row_bytes + begin, width);
  }
  staging.CountCopy(out.size());
  return out;
}

int64_t CostOfMultiplications(double multiplications) {
  return multiplications < 1e18 ? static_cast<int64_t>(multiplications)
                                : batching::Task::kUnknownCost;
}

void AddName(absl::string_view name, std::string* list) {
  if (name.empty() || name == *list) return;
  if (absl::c_linear_search(absl::StrSplit(*list, ','), name)) return;
  absl::StrAppend(list, list->empty() ? "" : ",", name);
}

void AddStage(const ExecutionReport& later, ExecutionReport* report) {
  if (later.path == Path::kDequantize) report->path = Path::kDequantize;
  for (absl::string_view name : absl::StrSplit(later.kernel, ',')) AddName(name, &report->kernel);
  for (absl::string_view name : absl::StrSplit(later.device, ',')) AddName(name, &report->device);
  report->queue_us += later.queue_us;
  report->compute_us += later.compute_us;
  report->input_ns += later.input_ns;
}

void AddKernel(const KernelRow* row, ExecutionReport* report) {
  if (row == nullptr) return;
  AddName(row->name, &report->kernel);
  if (row->op == Op::kDequantize || row->path == Path::kDequantize) {
    report->path = Path::kDequantize;
  }
}

}  // namespace awqd::engine
