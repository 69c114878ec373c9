// The products of a stack of experts by one kernel, between stage and finish.
#include <algorithm>

#include "kernels/backends.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/kernels.h"

namespace awqd {
namespace {

constexpr int64_t kAlign = 256;

// Whether one kernel can compute both with the same parameters.
bool IsLike(const DeviceWeight& a, const DeviceWeight& b) {
  return a.shape.k == b.shape.k && a.shape.n == b.shape.n && a.shape.scheme == b.shape.scheme &&
         a.layout == b.layout;
}

// Calls fn(expert) for each expert that has rows, until it returns false. Returns whether it never
// did.
template <typename Fn>
bool EveryActive(const GroupedArgs& args, Fn fn) {
  int64_t begin = 0;
  for (size_t i = 0; i < args.experts.size(); ++i) {
    const size_t e = i % args.ends.size();
    if (e == 0) begin = 0;
    if (args.ends[e] > begin && !fn(*args.experts[i])) return false;
    begin = args.ends[e];
  }
  return true;
}

// The parts of the workspace, one after the other.
struct Workspace {
  int64_t row = 0;     // bytes that the row needs
  int64_t staged = 0;  // x in the form that the row reads
  int64_t sums = 0;    // FP32 [rows, N] for finish, unless y is FP32 itself

  int64_t total() const { return row + staged + sums; }
};

Workspace PlanWorkspace(const GroupedArgs& args, const KernelRow& row) {
  const DeviceWeight& weight = *args.experts.front();
  Workspace out;
  if (row.workspace_bytes != nullptr) {
    out.row =
        RoundUp(row.workspace_bytes(weight.shape, weight.device->info(), args.rows()), kAlign);
  }
  if (row.staged != Staged::kAny) {
    const Steps& steps = StepsOf(*weight.device);
    out.staged = RoundUp(steps.staged_bytes(row.staged, args.x.rows, args.x.cols), kAlign);
  }
  if (args.activation != ActivationFunction::kNone && args.y.dtype != DType::kFp32) {
    out.sums = args.y.rows * args.y.cols * 4;
  }
  return out;
}

absl::Status Stage(const GroupedArgs& args, const KernelRow& row, void* out, GroupedArgs* staged,
                   StreamView stream) {
  Device& device = *args.experts.front()->device;
  const Steps& steps = StepsOf(device);
  if (steps.ready(row.staged, args.x)) return absl::OkStatus();
  PrologueResult tokens;
  AWQD_RETURN_IF_ERROR(
      steps.stage({.x = args.x, .want = row.staged, .out = out}, &tokens, device, stream));
  staged->x = tokens.x;
  staged->x_stride = tokens.stride;
  if (tokens.scale != nullptr) staged->x_scale = tokens.scale;
  return absl::OkStatus();
}

}  // namespace

const KernelRow* GroupedRow(const GroupedArgs& args) {
  if (args.rows() == 0) return nullptr;
  const int64_t mean = CeilDiv(args.rows(), args.active());
  const KernelRow* row = nullptr;
  const bool alike = EveryActive(args, [&](const DeviceWeight& weight) {
    const KernelRow* const own = weight.plan.Grouped(mean);
    if (row == nullptr) row = own;
    return own != nullptr && own == row && IsLike(weight, *args.experts.front()) &&
           !weight.sections.Has(Part::kOrder) && !weight.sections.Has(Part::kFactor);
  });
  return alike && (row->inputs & MaskOf(args.x.dtype)) != 0 ? row : nullptr;
}

std::string GroupedTable(const GroupedArgs& args, const KernelRow& row) {
  return row.grouped_table(args);
}

int64_t GroupedWorkspaceBytes(const GroupedArgs& args, const KernelRow& row) {
  return PlanWorkspace(args, row).total();
}

absl::Status GroupedMatmul(const GroupedArgs& args, const KernelRow& row, StreamView stream) {
  const Workspace at = PlanWorkspace(args, row);
  char* const workspace = static_cast<char*>(args.workspace);
  GroupedArgs product = args;
  AWQD_RETURN_IF_ERROR(Stage(args, row, workspace + at.row, &product, stream));
  if (args.activation == ActivationFunction::kNone) return row.grouped(product, stream);
  void* const sums = at.sums > 0 ? workspace + at.row + at.staged : args.y.data;
  product.activation = ActivationFunction::kNone;
  product.y = {sums, DType::kFp32, args.y.rows, args.y.cols};
  AWQD_RETURN_IF_ERROR(row.grouped(product, stream));
  Device& device = *args.experts.front()->device;
  return StepsOf(device).finish({.sums = static_cast<const float*>(sums),
                                 .ld_sums = args.y.cols,
                                 .activation = args.activation,
                                 .y = args.y.data,
                                 .ld_y = args.y.cols,
                                 .y_dtype = args.y.dtype,
                                 .rows = args.y.rows,
                                 .cols = args.y.cols},
                                device, stream);
}

}  // namespace awqd
