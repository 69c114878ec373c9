// Planning: chooses the layout of a weight and the row for each token count.
#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "kernels/plan/plan.h"

namespace awqd {
namespace {

// A row that supports the weight, and the token count from which its priority counts.
struct Usable {
  const KernelRow* row;
  int64_t preferred_from;
};
using Rows = std::vector<Usable>;

Usable UsableOf(const KernelRow* row, const WeightShape& shape, const DeviceInfo& device) {
  return {row, row->preferred_from != nullptr ? row->preferred_from(shape, device) : 0};
}

// Whether a row that is only for forcing must yield to another row of the list for the same work.
bool StepsAside(const KernelRow& row, absl::Span<const KernelRow* const> rows) {
  return row.priority < 0 && std::any_of(rows.begin(), rows.end(), [&](const KernelRow* other) {
           return other->priority >= 0 && other->op == row.op && other->path == row.path &&
                  other->device == row.device;
         });
}

// The row of highest priority for m tokens on `path`, among rows whose priority counts there, or
// else among all; the first one of equals. Rows of other operations than a product of floating
// activations all have Path::kFused.
const KernelRow* Best(const Rows& rows, Op op, Path path, int64_t m) {
  const KernelRow* best = nullptr;
  std::pair<bool, int> highest;
  for (const auto& [row, preferred_from] : rows) {
    if (row->op != op || row->path != path) continue;
    if (m < row->min_m || (row->max_m >= 0 && m > row->max_m)) continue;
    const std::pair<bool, int> rank = {m >= preferred_from, row->priority};
    if (best == nullptr || rank > highest) best = row, highest = rank;
  }
  return best;
}

// Token counts at which the result of Best can change.
std::set<int64_t> Breakpoints(const Rows& rows, Op op, Path path) {
  std::set<int64_t> points = {1};
  for (const auto& [row, preferred_from] : rows) {
    if (row->op != op || row->path != path) continue;
    points.insert(std::max<int64_t>(row->min_m, 1));
    points.insert(std::max<int64_t>(preferred_from, 1));
    if (row->max_m >= 0) points.insert(row->max_m + 1);
  }
  return points;
}

void PlanPath(const Rows& rows, Op op, Path path, std::vector<PlanEntry>* plan) {
  const std::set<int64_t> points = Breakpoints(rows, op, path);
  for (auto it = points.begin(); it != points.end(); ++it) {
    const KernelRow* row = Best(rows, op, path, *it);
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

// The plan in one layout, and its score: the best priority of its products, then that of its
// dequantize.
struct Candidate {
  const Layout* layout = nullptr;
  WeightPlan plan;
  std::optional<std::pair<int, int>> score;  // nullopt: it cannot serve
};

Candidate PlanInLayout(const Layout* layout, const Rows& rows) {
  Candidate out{layout, {}, std::nullopt};
  Rows readers;
  for (const Usable& usable : rows) {
    const Layout* reads = usable.row->layout;
    if (reads == layout || reads == nullptr) readers.push_back(usable);
  }
  PlanPath(readers, Op::kMatmul, Path::kFused, &out.plan.matmul);
  PlanPath(readers, Op::kMatmul, Path::kDequantize, &out.plan.matmul);
  PlanPath(readers, Op::kQuantizedActivations, Path::kFused, &out.plan.quantized);
  PlanPath(readers, Op::kGroupedMatmul, Path::kFused, &out.plan.grouped);
  out.plan.dequantize = Best(readers, Op::kDequantize, Path::kFused, 1);
  out.plan.integer = Best(readers, Op::kIntegerMatmul, Path::kFused, 1);
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

absl::StatusOr<Plan> Select(const WeightShape& shape, const DeviceInfo& device,
                            absl::Span<const KernelRow* const> rows) {
  AWQD_RETURN_IF_ERROR(Validate(shape.scheme, shape.k, shape.n));
  Rows usable;
  std::vector<RefusedRow> refused;
  for (const KernelRow* row : rows) {
    std::string why = WhyNot(*row, shape, device);
    if (why.empty() && StepsAside(*row, rows)) why = "only when asked for by name";
    if (why.empty()) {
      usable.push_back(UsableOf(row, shape, device));
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
  for (const auto& [row, preferred_from] : usable) {
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

bool FusedReplacesDense(const WeightPlan& plan, int64_t m) {
  return std::any_of(plan.matmul.begin(), plan.matmul.end(), [m](const PlanEntry& entry) {
    return entry.path == Path::kFused && entry.row->replaces_dense && entry.min_m <= m &&
           entry.max_m < 0;
  });
}

}  // namespace awqd
