// Planning: chooses the layout of a weight and the row for each token count, and explains why other
// rows were refused. Pure functions over the registry's rows.
#pragma once

#include <cstdint>
#include <optional>
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

// The number of tokens from which decoding first takes less time than the fused row that serves `m`
// tokens and more (KernelRow::dense_from). None: there is no such row, or it was not measured.
std::optional<int64_t> DenseFrom(const WeightPlan& plan, int64_t m, const WeightShape& shape,
                                 const DeviceInfo& device);

// The number of tokens from which a weight is decoded first where nothing was measured of it: vLLM's
// (AWQLinearMethod.apply, vllm PR #2566).
inline constexpr int64_t kDefaultDenseFrom = 256;
// DenseFrom for that many tokens, and that number without it.
int64_t DenseThreshold(const WeightPlan& plan, const WeightShape& shape, const DeviceInfo& device);
// The path of a product of `m` tokens whose caller leaves it open: kDequantize from `threshold` tokens
// on, but kFused where a row of the plan multiplies activations rounded so.
Path ChoosePath(const WeightPlan& plan, int64_t m, ActivationQuantization quantization,
                int64_t threshold);

// The tiles of the entry's row at the first count of its range and at powers of two up to 4096,
// with equal tiles merged: "17-32: 32x192 on 132 blocks, 64: ...". Empty if the row has no choice.
// Pure.
std::string DescribeTiles(const PlanEntry& entry, const WeightShape& shape,
                          const DeviceInfo& device);

// One line for the log: layout, the row of each token range with its tiles, every refused row with
// its reason.
std::string Explain(const Plan& plan, const WeightShape& shape, const DeviceInfo& device);

}  // namespace awqd
