// What all works share: keys that keep classes apart, cutting and its refusal, the report.
#include "server/engine/work.h"

#include <algorithm>
#include <cstring>
#include <typeinfo>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status.h"
#include "kernels/registry.h"

namespace awqd::engine {

batching::BatchKey Work::key() const {
  batching::BatchKey key = merge_key();
  key.kind = &typeid(*this);
  return key;
}

bool Work::cut() const {
  return absl::c_any_of(weights(), [](const auto& weight) { return weight->cut(); });
}

absl::StatusOr<WorkCut> Work::Cut(StagingPool& /*staging*/) const {
  return absl::UnimplementedError(absl::StrCat(
      name(), ": got a weight whose columns are cut among ", weights().front()->devices(),
      ", expected whole weights: serve with --shard=replicas or --shard=models"));
}

WorkCut CutAtColumns(
    const ColumnResult& result,
    absl::FunctionRef<std::unique_ptr<Work>(size_t part, model::ColumnSpan columns)> make) {
  const model::PlacedWeight& weight = result.weight;
  const model::ColumnSpan wanted = result.wanted;
  const int64_t rows = result.rows, element_bytes = result.element_bytes;
  const int64_t row_bytes = (wanted.end - wanted.begin) * element_bytes;
  WorkCut out = {.bytes = rows * row_bytes};
  std::vector<BlocksJoin::Block> blocks;
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
  if (out.parts.size() > 1) out.join = std::make_unique<BlocksJoin>(row_bytes, std::move(blocks));
  return out;
}

absl::StatusOr<Payload> ColumnsOf(const Activations& activations, const model::WeightPart& part,
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

void AddName(absl::string_view name, std::string* list) {
  if (name.empty() || name == *list) return;
  const std::vector<absl::string_view> known = absl::StrSplit(*list, ',');
  if (std::find(known.begin(), known.end(), name) != known.end()) return;
  absl::StrAppend(list, list->empty() ? "" : ",", name);
}

void AddKernel(const KernelRow* row, ExecutionReport* report) {
  if (row == nullptr) return;
  AddName(row->name, &report->kernel);
  if (row->op == Op::kDequantize || row->path == Path::kDequantize) {
    report->path = Path::kDequantize;
  }
}

}  // namespace awqd::engine
