// The public face of kernels/: open a device, prepare a weight, run Dequantize and QuantizedMatmul.
//
// server/ uses this header with types.h, description.h, weight.h, device.h, registry.h (to list
// rows), steps.h, plan/plan.h and formats/format.h, and nothing else.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/device.h"
#include "kernels/plan/plan.h"
#include "kernels/registry.h"
#include "kernels/steps.h"
#include "kernels/types.h"
#include "kernels/weight.h"

namespace awqd {

struct DeviceOptions {
  int cpu_threads = 0;       // 0: as many as the process may use
  int64_t budget_bytes = 0;  // cap on device memory; 0: none
  // A token's result has the same bits whatever the batch: kernels whose sums depend on the number
  // of tokens, and the dense path, do not serve.
  bool batch_invariant = false;
  // Behind the device's id: of one that is opened several times, "#2".
  std::string id_suffix;
  // Of the CPU; see CpuPlacement.
  bool cpu_pin_threads = false;
  bool cpu_interleave = false;
};

// `spec`: "cpu", "cpu:N" (one of several that share the cores), "cuda:N", or "auto" (cuda:0 when a
// usable GPU answers, else the CPU; `why` says which and why, in one sentence). INVALID_ARGUMENT
// for another spelling; FAILED_PRECONDITION when the GPU asked for is missing, its driver too old
// or its compute capability unsupported.
absl::StatusOr<std::unique_ptr<Device>> OpenDevice(absl::string_view spec,
                                                   const DeviceOptions& options,
                                                   std::string* why = nullptr);

// Packs a weight into the layout that Select chooses and puts it on the device. Blocks.
// INVALID_ARGUMENT bad weight, UNIMPLEMENTED no kernel (with reasons), RESOURCE_EXHAUSTED no room;
// on an error nothing stays allocated.
// Rows are chosen from `rows` only (tests, benches, forcing a kernel).
absl::StatusOr<std::shared_ptr<const DeviceWeight>> PrepareWeight(
    const HostWeight& weight, Device& device,
    absl::Span<const KernelRow* const> rows = AllKernels());

// Device bytes that PrepareWeight will take; for checking a budget before anything is allocated.
// The weight may lack its codes. Without scales, too, the layout may depend on them: what any
// scales make of it lies between the two.
struct PreparedSize {
  int64_t least = 0;
  int64_t most = 0;
};
absl::StatusOr<PreparedSize> PreparedBytes(const HostWeight& weight, const DeviceInfo& device);

// What host memory can still be allocated; the largest number where that cannot be told.
int64_t HostFreeBytes();

// Which operation a product is: kIntegerMatmul of INT8 x without scales, kQuantizedActivations of
// INT8 x with scales and of x that is to be quantised, else kMatmul.
Op ProductOf(const MatmulArgs& args);

// Bytes of workspace that a product of m tokens may need on `path`, the largest over the plan's
// rows up to m, with stage and finish. `op`: of ProductOf.
int64_t WorkspaceBytes(const DeviceWeight& weight, Path path, int64_t m,
                       ActivationFunction activation = ActivationFunction::kNone,
                       Op op = Op::kMatmul);

// Runs the plan's row for args.x.rows tokens on `path`; falls back to the other path's row when
// this path has none, and reports the row that ran in `ran`. M = 0 runs nothing and succeeds. INT8
// activations go to WeightPlan::integer whatever the path; INVALID_ARGUMENT when the weight gives
// no integers (WhyNoIntegers), or has a bias or a factor. Quantised ones go to
// WeightPlan::quantized; INVALID_ARGUMENT when the codes are no integers, or when INT8 x meets a
// factor, UNIMPLEMENTED when the layout has no kernel for them. Enqueues on `stream`; errors of the
// work itself surface at the stream's Synchronize.
absl::Status QuantizedMatmul(const MatmulArgs& args, Path path, StreamView stream,
                             const KernelRow** ran = nullptr);

// Bytes of workspace for decoding blocks of `cols` columns to `out`: 0 for a weight without an
// order.
int64_t DequantizeWorkspaceBytes(const DeviceWeight& weight, int64_t cols, DType out);

// `workspace`: of DequantizeWorkspaceBytes, or null for 0 of them.
absl::Status Dequantize(const DequantizeArgs& args, void* workspace, StreamView stream,
                        const KernelRow** ran = nullptr);

// --- The products of a stack of experts by one kernel ---
// Every argument but `table` and `workspace` is set when they are asked for.

// The row of the plan that takes these products, or null: then each expert's is a QuantizedMatmul.
const KernelRow* GroupedRow(const GroupedArgs& args);
// What is to be copied to the device for GroupedArgs::table.
std::string GroupedTable(const GroupedArgs& args, const KernelRow& row);
int64_t GroupedWorkspaceBytes(const GroupedArgs& args, const KernelRow& row);
// Enqueues them. At least one row.
absl::Status GroupedMatmul(const GroupedArgs& args, const KernelRow& row, StreamView stream);

// --- Between the products of experts and of a gated MLP ---
// Arguments: kernels/steps.h. They enqueue one kernel each; nothing to do succeeds.

absl::Status GatherRows(const GatherArgs& args, Device& device, StreamView stream);
absl::Status MultiplyByUp(const GateArgs& args, Device& device, StreamView stream);
absl::Status CombineRows(const CombineArgs& args, Device& device, StreamView stream);

}  // namespace awqd
