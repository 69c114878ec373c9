// Prints a plan for people.
#include <algorithm>

#include "absl/numeric/bits.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/plan/plan.h"

namespace awqd {

std::string DescribeTiles(const PlanEntry& entry, const WeightShape& shape,
                          const DeviceInfo& device) {
  constexpr int64_t kLast = 4096;
  if (entry.row->tile == nullptr) return "";
  struct Run {
    int64_t first, last;
    std::string tile;
  };
  std::vector<Run> runs;
  for (int64_t m = std::max<int64_t>(entry.min_m, 1);
       m <= kLast && (entry.max_m < 0 || m <= entry.max_m);
       m = static_cast<int64_t>(absl::bit_ceil(static_cast<uint64_t>(m) + 1))) {
    std::string tile = entry.row->tile(shape, device, m);
    if (runs.empty() || runs.back().tile != tile) runs.push_back({m, m, std::move(tile)});
    runs.back().last = m;
  }
  return absl::StrJoin(runs, ", ", [](std::string* out, const Run& run) {
    absl::StrAppend(out, run.first);
    if (run.last > run.first) absl::StrAppend(out, "-", run.last);
    absl::StrAppend(out, ": ", run.tile);
  });
}

std::string Explain(const Plan& plan, const WeightShape& shape, const DeviceInfo& device) {
  std::string out = absl::StrCat("layout ", plan.layout->name);
  for (const PlanEntry& entry : plan.rows.matmul) {
    absl::StrAppend(&out, "; ", Name(entry.path), " M >= ", entry.min_m, ": ", entry.row->name);
    const std::string tiles = DescribeTiles(entry, shape, device);
    if (!tiles.empty()) absl::StrAppend(&out, " (", tiles, ")");
  }
  absl::StrAppend(&out, "; dequantize: ", plan.rows.dequantize->name);
  if (plan.rows.integer != nullptr) absl::StrAppend(&out, "; INT8: ", plan.rows.integer->name);
  for (const PlanEntry& entry : plan.rows.quantized) {
    absl::StrAppend(&out, "; quantised activations M >= ", entry.min_m, ": ", entry.row->name);
  }
  for (const PlanEntry& entry : plan.rows.grouped) {
    absl::StrAppend(&out, "; experts M >= ", entry.min_m, ": ", entry.row->name);
  }
  for (const RefusedRow& row : plan.rows.refused) {
    absl::StrAppend(&out, "; refused ", row.name, ": ", row.reason);
  }
  return out;
}

}  // namespace awqd
