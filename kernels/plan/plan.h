// Planning: which layout a weight gets, which row serves which token count, and why the others do
// not. Pure functions over the registry's rows.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/registry.h"

namespace awqd {

// Empty when `row` can serve the weight on the device, else the reason why not. Pure.
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

// Whether the fused row that serves m tokens and more makes decoding first pointless
// (KernelRow::replaces_dense): the border between the paths is then nowhere.
bool FusedReplacesDense(const WeightPlan& plan, int64_t m);

// How the entry's row cuts the product at the first count of its range and at powers of two up to
// 4096, counts that are cut alike together: "17-32: 32x192 on 132 blocks, 64: ...". Empty where the
// row has no choice. Pure.
std::string DescribeTiles(const PlanEntry& entry, const WeightShape& shape,
                          const DeviceInfo& device);

// One line for the log: layout, the row of each token range with its tiles, every refused row with
// its reason.
std::string Explain(const Plan& plan, const WeightShape& shape, const DeviceInfo& device);

}  // namespace awqd
