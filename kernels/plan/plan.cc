// Planning: the reasons why a row cannot serve a weight, the choice of layout and rows, and plans
// in words.
#include "kernels/plan/plan.h"

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

// --- Refusals ---

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
  const bool is_exact = row.op == Op::kDequantize || row.op == Op::kIntegerMatmul;
  if (device.batch_invariant && !is_exact && !row.batch_invariant) {
    return "its sums depend on the batch";
  }
  return "";
}

bool Has(uint32_t mask, uint32_t of) { return (mask & of) != 0; }

std::string WhyNotCode(const Claims& claims, const QuantizationScheme& d) {
  if (!Has(claims.codes, MaskOf(d.code))) {
    return absl::StrCat("has no codes like those of ", ToString(d));
  }
  if (d.is_integer() && (claims.bits >> d.bits & 1) == 0) {
    return absl::StrCat("has no ", d.bits, "-bit codes");
  }
  return "";
}

std::string WhyNotZero(const Claims& claims, const QuantizationScheme& d) {
  if (Has(claims.zeros, MaskOf(d.zero_kind))) return "";
  switch (d.zero_kind) {
    case ZeroKind::kConstant:
      return "needs stored zero points";
    case ZeroKind::kStored:
      return "takes no zero points";
    case ZeroKind::kRealBefore:
    case ZeroKind::kRealAfter:
      break;
  }
  return "takes no real zeros";
}

std::string WhyNotScale(const Claims& claims, const WeightShape& shape) {
  const QuantizationScheme& d = shape.scheme;
  if (d.scale_dtype && !Has(claims.scales, MaskOf(*d.scale_dtype))) {
    return absl::StrCat("takes no ", Name(*d.scale_dtype), " scales");
  }
  if (d.block_cols != 1 && d.scale_dtype && !claims.column_blocks) {
    return "takes one scale per column at least";
  }
  if (shape.group_rows() != shape.k && shape.group_rows() % claims.group_multiple != 0) {
    return absl::StrCat("group size ", shape.group_rows(), " is not a multiple of ",
                        claims.group_multiple);
  }
  return "";
}

// --- The choice ---

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
  PlanPath(readers, Op::kIntegerMatmul, Path::kFused, &out.plan.integer);
  PlanPath(readers, Op::kQuantizedActivations, Path::kFused, &out.plan.quantized);
  PlanPath(readers, Op::kFloat8Activations, Path::kFused, &out.plan.float8);
  PlanPath(readers, Op::kGroupedMatmul, Path::kFused, &out.plan.grouped);
  PlanPath(readers, Op::kGroupedFloat8, Path::kFused, &out.plan.grouped_float8);
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
  if (std::string why = WhyNotCode(row.claims, shape.scheme); !why.empty()) return why;
  if (std::string why = WhyNotZero(row.claims, shape.scheme); !why.empty()) return why;
  if (std::string why = WhyNotScale(row.claims, shape); !why.empty()) return why;
  if (row.op == Op::kIntegerMatmul) {
    if (std::string why = WhyNoIntegers(shape); !why.empty()) return why;
  }
  if (row.op == Op::kQuantizedActivations) {
    if (std::string why = WhyNoQuantizedActivations(shape); !why.empty()) return why;
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

std::optional<int64_t> DenseFrom(const WeightPlan& plan, int64_t m, const WeightShape& shape,
                                 const DeviceInfo& device) {
  for (const PlanEntry& entry : plan.matmul) {
    if (entry.path == Path::kFused && entry.min_m <= m && entry.max_m < 0 &&
        entry.row->dense_from != nullptr) {
      const int64_t tokens = entry.row->dense_from(shape, device);
      if (tokens > 0) return tokens;
    }
  }
  return std::nullopt;
}

int64_t DenseThreshold(const WeightPlan& plan, const WeightShape& shape, const DeviceInfo& device) {
  return DenseFrom(plan, kDefaultDenseFrom, shape, device).value_or(kDefaultDenseFrom);
}

Path ChoosePath(const WeightPlan& plan, int64_t m, ActivationQuantization quantization,
                int64_t threshold) {
  if (IsFloat8(quantization) && plan.Float8(m) != nullptr) return Path::kFused;
  return m < threshold ? Path::kFused : Path::kDequantize;
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
  for (const PlanEntry& entry : plan.rows.integer) {
    absl::StrAppend(&out, "; INT8 M >= ", entry.min_m, ": ", entry.row->name);
  }
  for (const PlanEntry& entry : plan.rows.quantized) {
    absl::StrAppend(&out, "; quantised activations M >= ", entry.min_m, ": ", entry.row->name);
  }
  if (plan.rows.float8.empty())
    absl::StrAppend(&out, "; E4M3 activations: rounded, then as others");
  for (const PlanEntry& entry : plan.rows.float8) {
    absl::StrAppend(&out, "; E4M3 activations M >= ", entry.min_m, ": ", entry.row->name);
  }
  for (const PlanEntry& entry : plan.rows.grouped) {
    absl::StrAppend(&out, "; experts M >= ", entry.min_m, ": ", entry.row->name);
  }
  for (const PlanEntry& entry : plan.rows.grouped_float8) {
    absl::StrAppend(&out, "; experts, E4M3 activations M >= ", entry.min_m, ": ", entry.row->name);
  }
  for (const RefusedRow& row : plan.rows.refused) {
    absl::StrAppend(&out, "; refused ", row.name, ": ", row.reason);
  }
  return out;
}

}  // namespace awqd
