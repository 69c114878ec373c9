// What all works share: keys that keep classes apart, the refusal to be cut, the report.
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
