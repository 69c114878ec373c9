// Planning: which layout a weight gets and which row serves which token count.
#include "kernels/registry.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "absl/numeric/bits.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"

namespace awqd {
namespace {

using Rows = std::vector<const KernelRow*>;

std::string Architecture(int arch) { return absl::StrCat("sm_", arch); }

std::string WhyNotDevice(const KernelRow& row, const DeviceInfo& device) {
  if (row.device != device.kind) {
    return row.device == DeviceKind::kCpu ? "runs on the CPU only" : "runs on CUDA devices only";
  }
  if (device.arch < row.min_arch) {
    return absl::StrCat("needs ", Architecture(row.min_arch), ", the device is ",
                        Architecture(device.arch));
  }
  if (row.max_arch != 0 && device.arch > row.max_arch) {
    return absl::StrCat("built for ", Architecture(row.max_arch), " at most, the device is ",
                        Architecture(device.arch));
  }
  if (device.batch_invariant && row.op == Op::kMatmul && !row.batch_invariant) {
    return "its sums depend on the batch";
  }
  return "";
}

// A row that is only for forcing steps aside whenever the list holds any other row for the same
// work.
bool StepsAside(const KernelRow& row, absl::Span<const KernelRow* const> rows) {
  return row.priority < 0 && std::any_of(rows.begin(), rows.end(), [&](const KernelRow* other) {
           return other->priority >= 0 && other->op == row.op && other->path == row.path &&
                  other->device == row.device;
         });
}

// The highest priority row of `rows` for m tokens on `path`; among equals the first.
const KernelRow* Best(const Rows& rows, Op op, Path path, int64_t m) {
  const KernelRow* best = nullptr;
  for (const KernelRow* row : rows) {
    if (row->op != op || (op == Op::kMatmul && row->path != path)) continue;
    if (op == Op::kMatmul && (m < row->min_m || (row->max_m >= 0 && m > row->max_m))) continue;
    if (best == nullptr || row->priority > best->priority) best = row;
  }
  return best;
}

// Token counts at which the answer of Best can change.
std::set<int64_t> Breakpoints(const Rows& rows, Path path) {
  std::set<int64_t> points = {1};
  for (const KernelRow* row : rows) {
    if (row->op != Op::kMatmul || row->path != path) continue;
    points.insert(std::max<int64_t>(row->min_m, 1));
    if (row->max_m >= 0) points.insert(row->max_m + 1);
  }
  return points;
}

void PlanPath(const Rows& rows, Path path, std::vector<PlanEntry>* plan) {
  const std::set<int64_t> points = Breakpoints(rows, path);
  for (auto it = points.begin(); it != points.end(); ++it) {
    const KernelRow* row = Best(rows, Op::kMatmul, path, *it);
    if (row == nullptr) continue;
    const int64_t end = std::next(it) == points.end() ? -1 : *std::next(it) - 1;
    if (!plan->empty() && plan->back().path == path && plan->back().row == row &&
        plan->back().max_m + 1 == *it) {
      plan->back().max_m = end;
    } else {
      plan->push_back({path, *it, end, row});
    }
  }
}

// The plan in one layout, and how good it is: the best priority of its products, then that of its
// dequantize.
struct Candidate {
  const Layout* layout = nullptr;
  WeightPlan plan;
  std::optional<std::pair<int, int>> score;  // none: it cannot serve
};

Candidate PlanInLayout(const Layout* layout, const Rows& rows) {
  Candidate out{layout, {}, std::nullopt};
  Rows readers;
  for (const KernelRow* row : rows) {
    if (row->layout == layout || row->layout == nullptr) readers.push_back(row);
  }
  PlanPath(readers, Path::kFused, &out.plan.matmul);
  PlanPath(readers, Path::kDequantize, &out.plan.matmul);
  out.plan.dequantize = Best(readers, Op::kDequantize, Path::kFused, 1);
  if (out.plan.matmul.empty() || out.plan.dequantize == nullptr) return out;
  int best = out.plan.matmul.front().row->priority;
  for (const PlanEntry& entry : out.plan.matmul) best = std::max(best, entry.row->priority);
  out.score = {best, out.plan.dequantize->priority};
  return out;
}

std::string Join(const std::vector<RefusedRow>& refused) {
  return absl::StrJoin(refused, "; ", [](std::string* out, const RefusedRow& row) {
    absl::StrAppend(out, row.name, ": ", row.reason);
  });
}

}  // namespace

std::string WhyNot(const KernelRow& row, const WeightShape& shape, const DeviceInfo& device) {
  if (std::string why = WhyNotDevice(row, device); !why.empty()) return why;
  const QuantScheme& s = shape.scheme;
  if (row.activation != s.activation) {
    return absl::StrCat("takes ", row.activation == Activation::kA16 ? "16-bit" : "8-bit",
                        " activations");
  }
  if ((row.bits_mask >> s.bits & 1) == 0) return absl::StrCat("has no ", s.bits, "-bit codes");
  if (s.zero_kind == ZeroKind::kInteger && !row.integer_zeros) return "takes no zero points";
  if (s.zero_kind == ZeroKind::kSymmetric && !row.symmetric) return "needs stored zero points";
  if ((row.scales & MaskOf(s.scale_dtype)) == 0) {
    return absl::StrCat("takes no ", Name(s.scale_dtype), " scales");
  }
  if (s.group_size != shape.k && s.group_size % row.group_multiple != 0) {
    return absl::StrCat("group size ", s.group_size, " is not a multiple of ", row.group_multiple);
  }
  if (row.layout != nullptr) {
    if (std::string why = row.layout->refuses(shape); !why.empty()) {
      return absl::StrCat("layout ", row.layout->name, ": ", why);
    }
  }
  return row.refuses != nullptr ? row.refuses(shape, device) : "";
}

absl::StatusOr<Plan> Select(const WeightShape& shape, const DeviceInfo& device,
                            absl::Span<const KernelRow* const> rows) {
  AWQD_RETURN_IF_ERROR(Validate(shape.scheme, shape.k, shape.n));
  Rows usable;
  std::vector<RefusedRow> refused;
  for (const KernelRow* row : rows) {
    std::string why = WhyNot(*row, shape, device);
    if (why.empty() && StepsAside(*row, rows)) why = "only when asked for by name";
    if (why.empty()) {
      usable.push_back(row);
    } else {
      refused.push_back({std::string(row->name), std::move(why)});
    }
  }
  Candidate best;
  for (const Layout* layout : AllLayouts()) {
    if (!layout->refuses(shape).empty()) continue;
    Candidate candidate = PlanInLayout(layout, usable);
    if (candidate.score > best.score) best = std::move(candidate);
  }
  if (!best.score.has_value()) {
    return absl::UnimplementedError(absl::StrCat("no kernel for ", ToString(shape.scheme), " [",
                                                 shape.k, ", ", shape.n, "] on ", device.id, ": ",
                                                 Join(refused)));
  }
  for (const KernelRow* row : usable) {
    if (row->layout != nullptr && row->layout != best.layout) {
      refused.push_back(
          {std::string(row->name), absl::StrCat("reads layout ", row->layout->name,
                                                ", the weight is in ", best.layout->name)});
    }
  }
  Plan plan{best.layout, std::move(best.plan)};
  plan.rows.refused = std::move(refused);
  return plan;
}

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
  for (const RefusedRow& row : plan.rows.refused) {
    absl::StrAppend(&out, "; refused ", row.name, ": ", row.reason);
  }
  return out;
}

}  // namespace awqd
