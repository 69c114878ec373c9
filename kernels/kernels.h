// The public face of kernels/: open a device, prepare a weight, run Dequantize and QuantizedMatmul.
//
// server/ uses this header with types.h, weight.h, device.h, registry.h (to list rows) and
// formats/format.h, and nothing else.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/device.h"
#include "kernels/registry.h"
#include "kernels/types.h"
#include "kernels/weight.h"

namespace awqd {

struct DeviceOptions {
  int cpu_threads = 0;       // 0: as many as the process may use
  int64_t budget_bytes = 0;  // cap on device memory; 0: none
  // A token's result has the same bits whatever the batch: kernels whose sums depend on the number
  // of tokens, and the dense path, do not serve.
  bool batch_invariant = false;
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
absl::StatusOr<std::shared_ptr<const DeviceWeight>> PrepareWeight(const CanonicalWeight& weight,
                                                                  Device& device);

// The same with rows chosen from `rows` only (tests, benches, forcing a kernel).
absl::StatusOr<std::shared_ptr<const DeviceWeight>> PrepareWeight(
    const CanonicalWeight& weight, Device& device, absl::Span<const KernelRow* const> rows);

// Device bytes that PrepareWeight will take, bias included; for checking a budget before anything
// is allocated.
absl::StatusOr<int64_t> PreparedBytes(const CanonicalWeight& weight, const DeviceInfo& device);

// Bytes of workspace that a product of m tokens may need on `path`, the largest over the plan's
// rows up to m.
int64_t WorkspaceBytes(const DeviceWeight& weight, Path path, int64_t m);

// Runs the plan's row for args.x.rows tokens on `path`; falls back to the other path's row when
// this path has none, and reports the row that ran in `ran`. M = 0 runs nothing and succeeds.
// Enqueues on `stream`; errors of the work itself surface at the stream's Synchronize.
absl::Status QuantizedMatmul(const MatmulArgs& args, Path path, StreamView stream,
                             const KernelRow** ran = nullptr);

absl::Status Dequantize(const DequantizeArgs& args, StreamView stream,
                        const KernelRow** ran = nullptr);

}  // namespace awqd
