// The public face of kernels/: open a device, prepare a weight, run Dequantize and QuantizedMatmul.
//
// server/ uses this header with types.h, scheme.h, weight.h, device.h, registry.h (to list
// rows), steps.h, plan/plan.h and formats/format.h, and nothing else.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/mutex.h"
#include "kernels/device.h"
#include "kernels/plan/plan.h"
#include "kernels/registry.h"
#include "kernels/steps.h"
#include "kernels/types.h"
#include "kernels/weight.h"

namespace awqd {

// Opens a device. `spec`: "cpu", "cpu:N" (one of several that share the cores), "cuda:N", or "auto"
// (cuda:0 when a usable GPU answers, else the CPU; `why` says in one sentence which one and why).
// INVALID_ARGUMENT for any other spelling; FAILED_PRECONDITION when the GPU is missing, its driver
// is too old or its compute capability is not supported.
absl::StatusOr<std::unique_ptr<Device>> OpenDevice(absl::string_view spec,
                                                   const DeviceOptions& options,
                                                   std::string* why = nullptr);

// Where weights are packed on their way to devices that the host does not address. It is kept from
// one weight to the next: to pin host memory and to let it go takes as long as to pack. Thread-safe;
// weights of one device do not share it at the same time.
class PackMemory {
 public:
  // Staging memory, or, where the device has none, other host memory. Valid until the next call for
  // that device.
  uint8_t* Get(Device& device, int64_t bytes);

 private:
  Mutex mu_;
  std::map<const Device*, Buffer> kept_ ABSL_GUARDED_BY(mu_);
};

// Packs a weight into the layout that Select chooses and puts it on the device. Blocks.
// INVALID_ARGUMENT for a bad weight, UNIMPLEMENTED (with reasons) without a kernel,
// RESOURCE_EXHAUSTED without room; after an error nothing stays allocated. Chooses rows from `rows`
// only, so that tests and benches can force a kernel. `memory`: null for memory of its own.
absl::StatusOr<std::shared_ptr<const DeviceWeight>> PrepareWeight(
    const HostWeight& weight, Device& device,
    absl::Span<const KernelRow* const> rows = AllKernels(), PackMemory* memory = nullptr);

// Device bytes that PrepareWeight will allocate, for checking a budget first. The weight may lack
// its codes. It may also lack its scales: the layout can depend on them, and the size with any
// scales lies between the two.
struct PreparedSize {
  int64_t least = 0;
  int64_t most = 0;
};
absl::StatusOr<PreparedSize> PreparedBytes(const HostWeight& weight, const DeviceInfo& device);

// Host memory that can still be allocated; the largest number if it is unknown.
int64_t HostFreeBytes();

// The operation of a product: kIntegerMatmul for INT8 x without scales, kQuantizedActivations for
// INT8 x with scales and for x that is to be quantised to INT8, kFloat8Activations for x that is to
// be rounded to E4M3, else kMatmul.
Op ProductOf(const MatmulArgs& args);

// Bytes of workspace that a product of m tokens may need on `path`: the largest over the plan's
// rows up to m, including prologue and epilogue. `op`: from ProductOf.
int64_t WorkspaceBytes(const DeviceWeight& weight, Path path, int64_t m,
                       ActivationFunction activation = ActivationFunction::kNone,
                       Op op = Op::kMatmul);

// Runs the plan's row for args.x.rows tokens on `path`. Uses the other path's row when this path
// has none, and reports the row that ran in `ran`. M = 0 runs nothing and succeeds. INT8
// activations use WeightPlan::integer on either path; INVALID_ARGUMENT when the weight has no
// integer products (WhyNoIntegers), or has a bias, a factor or a transform. Quantised activations
// use WeightPlan::quantized; INVALID_ARGUMENT when the codes are not integers, or when INT8 x meets
// a factor or a transform; UNIMPLEMENTED when the layout has no kernel for them. Activations that
// are rounded to E4M3 use WeightPlan::float8 on the fused path, and where it has no row they are
// multiplied as floating ones. Enqueues on `stream`; the stream's Synchronize returns errors of the
// work itself.
absl::Status QuantizedMatmul(const MatmulArgs& args, Path path, StreamView stream,
                             const KernelRow** ran = nullptr);

// Bytes of workspace for decoding blocks of `cols` columns to `out`; 0 for a weight without an
// order.
int64_t DequantizeWorkspaceBytes(const DeviceWeight& weight, int64_t cols, DType out);

// `workspace` has DequantizeWorkspaceBytes, and is null if these are 0.
absl::Status Dequantize(const DequantizeArgs& args, void* workspace, StreamView stream,
                        const KernelRow** ran = nullptr);

// --- The products of a stack of experts by one kernel ---
// Every argument but `table` and `workspace` is set when these functions are called.

// The row of the plan that computes these products. Null: each expert's product is a
// QuantizedMatmul of its own. Activations that are rounded to E4M3 use WeightPlan::grouped_float8,
// and where it has no row WeightPlan::grouped.
const KernelRow* GroupedRow(const GroupedArgs& args);
int64_t GroupedWorkspaceBytes(const GroupedArgs& args, const KernelRow& row);
// With GroupedArgs::device_experts. Whether one kernel can multiply by both, and GroupedTableBytes:
// enough whatever the row.
bool IsGroupable(const DeviceWeight& weight, const DeviceWeight& first);
int64_t GroupedTableBytes(const GroupedArgs& args);
absl::Status MakeGroupedTable(const GroupedTableArgs& args, Device& device, StreamView stream);
// Enqueues the products. There is at least one row. E4M3 x has a quantisation and scales as in
// MatmulArgs. INVALID_ARGUMENT for a quantisation of INT8 x, and for scales that are missing or not
// wanted.
absl::Status GroupedMatmul(const GroupedArgs& args, const KernelRow& row, StreamView stream);

// --- The steps between the products of experts and of a gated MLP ---
// kernels/steps.h has the arguments. Each step enqueues one kernel; without work it succeeds.

absl::Status SortChoices(const SortArgs& args, Device& device, StreamView stream);
absl::Status GatherRows(const GatherArgs& args, Device& device, StreamView stream);
absl::Status MultiplyByUp(const GateArgs& args, Device& device, StreamView stream);
absl::Status GateTokens(const TokenGateArgs& args, Device& device, StreamView stream);
absl::Status CombineRows(const CombineArgs& args, Device& device, StreamView stream);

}  // namespace awqd
