// Planning: chooses the layout of a weight and the row for each token count, and explains why other
// rows were refused. Pure functions over the registry's rows.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/registry.h"

namespace awqd {

// Returns "" when `row` can serve the weight on the device, else the reason against it. Pure.
std::string WhyNot(const KernelRow& row, const WeightShape& shape, const DeviceInfo& device);

struct Plan {
  const Layout* layout = nullptr;
  WeightPlan rows;
};

// Chooses the layout and, for each path and token count, the row of highest priority that reads it.
// Pure. UNIMPLEMENTED, with every refused row and its reason, when no row serves a matmul or a
// dequantize.
absl::StatusOr<Plan> Select(const WeightShape& shape, const DeviceInfo& device,
                            absl::Span<const KernelRow* const> rows);

// Whether the fused row for m tokens and more makes decoding first pointless
// (KernelRow::replaces_dense); there is then no threshold between the paths.
bool FusedReplacesDense(const WeightPlan& plan, int64_t m);

// The tiles of the entry's row at the first count of its range and at powers of two up to 4096,
// with equal tiles merged: "17-32: 32x192 on 132 blocks, 64: ...". Empty if the row has no choice.
// Pure.
std::string DescribeTiles(const PlanEntry& entry, const WeightShape& shape,
                          const DeviceInfo& device);

// One line for the log: layout, the row of each token range with its tiles, every refused row with
// its reason.
std::string Explain(const Plan& plan, const WeightShape& shape, const DeviceInfo& device);

}  // namespace awqd
