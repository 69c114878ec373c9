// Decodes into the buffer that the result is fetched from.
#include "server/engine/dequantize_work.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "server/engine/lane.h"

namespace awqd::engine {

WorkPartition DequantizeWork::PartitionAtRows() const {
  std::vector<RowsPart> parts;
  const auto add = [&](size_t part, int64_t begin, int64_t end) {
    auto work = std::make_unique<DequantizeWork>(*this);
    work->part = part;
    work->row_begin = begin - weight->parts[part].row_begin;
    work->rows = end - begin;
    parts.push_back({std::move(work), begin - row_begin, end - begin});
  };
  for (size_t i = 0; i < weight->parts.size(); ++i) {
    const model::WeightPart& part = weight->parts[i];
    const int64_t begin = std::max(row_begin, part.row_begin);
    const int64_t end = std::min(row_begin + rows, part.row_end());
    if (begin < end) add(i, begin, end);
  }
  // No rows at all still get an answer.
  if (parts.empty()) add(0, 0, 0);
  return PartitionRows(rows, cols * SizeOf(out_dtype), std::move(parts));
}

absl::StatusOr<WorkPartition> DequantizeWork::Partition(StagingPool& /*staging*/) const {
  if (weight->partitioned_at_rows()) return PartitionAtRows();
  const ColumnResult result = {*weight, {col_begin, col_begin + cols}, rows, SizeOf(out_dtype)};
  return PartitionColumns(result, [this](size_t part, model::ColumnSpan columns) {
    auto out = std::make_unique<DequantizeWork>(*this);
    out->col_begin = columns.begin - weight->parts[part].col_begin;
    out->cols = columns.end - columns.begin;
    return out;
  });
}

absl::Status DequantizeWork::Run(Lane& lane, const batching::Batch& /*batch*/, char* result,
                                 ExecutionReport* report) const {
  AWQD_ASSIGN_OR_RETURN(void* target, lane.AllocateResult(result, result_bytes()));
  DequantizeArgs args;
  args.weight = weight->parts[part].weight.get();
  args.out = {target, out_dtype, rows, cols};
  args.row_begin = row_begin;
  args.col_begin = col_begin;
  const int64_t scratch = DequantizeWorkspaceBytes(*args.weight, cols, out_dtype);
  AWQD_ASSIGN_OR_RETURN(void* workspace, lane.AllocateWorkspace(scratch));
  const KernelRow* ran = nullptr;
  AWQD_RETURN_IF_ERROR(awqd::Dequantize(args, workspace, lane.stream(), &ran));
  AddKernel(ran, report);
  return lane.Fetch(result, target, result_bytes());
}

}  // namespace awqd::engine
