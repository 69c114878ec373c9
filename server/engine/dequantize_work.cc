// DequantizeWork: decode to where the result is fetched from.
#include "server/engine/dequantize_work.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "server/engine/lane.h"

namespace awqd::engine {

WorkCut DequantizeWork::CutAtRows() const {
  const int64_t row_bytes = cols * SizeOf(out_dtype);
  WorkCut out = {.bytes = rows * row_bytes};
  std::vector<BlocksJoin::Block> blocks;
  const auto add = [&](size_t part, int64_t begin, int64_t end) {
    auto work = std::make_unique<DequantizeWork>(*this);
    work->part = part;
    work->row_begin = begin - weight->parts[part].row_begin;
    work->rows = end - begin;
    blocks.push_back({.row_begin = begin - row_begin, .rows = end - begin, .row_bytes = row_bytes});
    out.parts.push_back(std::move(work));
  };
  for (size_t i = 0; i < weight->parts.size(); ++i) {
    const model::WeightPart& part = weight->parts[i];
    const int64_t begin = std::max(row_begin, part.row_begin);
    const int64_t end = std::min(row_begin + rows, part.row_end());
    if (begin < end) add(i, begin, end);
  }
  // No rows at all still get an answer.
  if (out.parts.empty()) add(0, 0, 0);
  if (out.parts.size() > 1) out.join = std::make_unique<BlocksJoin>(row_bytes, std::move(blocks));
  return out;
}

absl::StatusOr<WorkCut> DequantizeWork::Cut(StagingPool& /*staging*/) const {
  if (weight->cut_at_rows()) return CutAtRows();
  const ColumnResult result = {*weight, {col_begin, col_begin + cols}, rows, SizeOf(out_dtype)};
  return CutAtColumns(result, [this](size_t part, model::ColumnSpan columns) {
    auto out = std::make_unique<DequantizeWork>(*this);
    out->col_begin = columns.begin - weight->parts[part].col_begin;
    out->cols = columns.end - columns.begin;
    return out;
  });
}

absl::Status DequantizeWork::Run(Lane& lane, const batching::Batch& /*batch*/, char* result,
                                 ExecutionReport* report) const {
  AWQD_ASSIGN_OR_RETURN(void* target, lane.Target(result, result_bytes()));
  DequantizeArgs args;
  args.weight = weight->parts[part].weight.get();
  args.out = {target, out_dtype, rows, cols};
  args.row_begin = row_begin;
  args.col_begin = col_begin;
  const int64_t scratch = DequantizeWorkspaceBytes(*args.weight, cols, out_dtype);
  AWQD_ASSIGN_OR_RETURN(void* workspace, lane.Workspace(scratch));
  const KernelRow* ran = nullptr;
  AWQD_RETURN_IF_ERROR(awqd::Dequantize(args, workspace, lane.stream(), &ran));
  AddKernel(ran, report);
  return lane.Fetch(result, target, result_bytes());
}

}  // namespace awqd::engine
