// What all works share: keys that keep classes apart, cutting and its refusal, the report.
#include "server/engine/work.h"

#include <algorithm>
#include <typeinfo>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/registry.h"

namespace awqd::engine {

batching::BatchKey Work::key() const {
  batching::BatchKey key = merge_key();
  key.kind = &typeid(*this);
  return key;
}

absl::StatusOr<WorkCut> Work::Cut() const {
  return absl::UnimplementedError(absl::StrCat(
      name(), ": got a weight whose columns are cut among ", weights().front()->devices(),
      ", expected whole weights: serve with --shard=replicas or --shard=models"));
}

WorkCut CutAtColumns(
    const ColumnResult& result,
    absl::FunctionRef<std::unique_ptr<Work>(size_t part, model::ColumnSpan columns)> make) {
  const auto& [weight, wanted, rows, element_bytes] = result;
  WorkCut out = {.rows = rows, .row_bytes = (wanted.end - wanted.begin) * element_bytes};
  const auto add = [&](size_t part, model::ColumnSpan columns) {
    std::unique_ptr<Work> work = make(part, columns);
    work->part = part;
    out.parts.push_back({std::move(work), (columns.begin - wanted.begin) * element_bytes,
                         (columns.end - columns.begin) * element_bytes});
  };
  for (size_t i = 0; i < weight.parts.size(); ++i) {
    const model::WeightPart& part = weight.parts[i];
    const model::ColumnSpan columns = {std::max(wanted.begin, part.col_begin),
                                       std::min(wanted.end, part.col_end())};
    if (columns.begin < columns.end) add(i, columns);
  }
  // No columns at all still get an answer.
  if (out.parts.empty()) add(0, {0, 0});
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
