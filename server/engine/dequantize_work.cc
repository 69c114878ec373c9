// DequantizeWork: decode to where the result is fetched from.
#include "server/engine/dequantize_work.h"

#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "server/engine/lane.h"

namespace awqd::engine {

absl::StatusOr<WorkCut> DequantizeWork::Cut() const {
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
