// Norms and worst elements of two linears, then of two folders.
#include "client/tools/diff.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"

namespace awqd::tools {
namespace {

std::set<std::string> Paths(const Model& a, const Model& b) {
  std::set<std::string> out;
  for (const Model* model : {&a, &b}) {
    if (!model->checkpoint().ok()) continue;
    for (const auto& linear : model->checkpoint()->linears()) out.insert(linear.path);
    for (const auto& [path, reason] : model->checkpoint()->unserved()) out.insert(path);
  }
  for (const Model* model : {&a, &b}) {
    if (a.quantised() || b.quantised()) break;
    for (const auto& [name, place] : model->tensors().all()) {
      if (const std::string path = model->DensePath(name); !path.empty()) out.insert(path);
    }
  }
  return out;
}

int64_t BytesOf(const Model& model, const std::string& path) {
  if (const auto* const linear = model.FindLinear(path); linear != nullptr) return linear->bytes;
  const auto* const dense = model.tensors().Find(path + ".weight");
  return dense == nullptr ? 0 : dense->info->bytes();
}

// --- One linear ---

int64_t DifferentCodes(const HostWeight& a, const HostWeight& b) {
  RowReader left(&a), right(&b);
  std::vector<uint8_t> left_row(a.n), right_row(a.n);
  int64_t out = 0;
  for (int64_t k = 0; k < a.k; ++k) {
    left.ReadCodes(k, left_row.data());
    right.ReadCodes(k, right_row.data());
    for (int64_t col = 0; col < a.n; ++col) out += left_row[col] != right_row[col] ? 1 : 0;
  }
  return out;
}

void CompareParts(const Elements& a, const Elements& b, LinearDifference* out) {
  if (a.weight() == nullptr || b.weight() == nullptr) return;
  const HostWeight &left = *a.weight(), &right = *b.weight();
  const QuantizationScheme &d = left.scheme, &e = right.scheme;
  if (d.code != e.code || d.bits != e.bits || d.rows_of_code() > 1) return;
  out->different_codes = DifferentCodes(left, right);
  if (left.group_rows() != right.group_rows() || left.order != right.order ||
      d.block_cols != e.block_cols ||
      (d.zero_kind == ZeroKind::kRealAfter) != (e.zero_kind == ZeroKind::kRealAfter)) {
    return;
  }
  out->different_zeros = out->different_scales = 0;
  for (int64_t group = 0; group < left.groups(); ++group) {
    for (int64_t block = 0; block < left.shape().column_blocks(); ++block) {
      const int64_t col = block * left.shape().block_cols();
      *out->different_zeros += ZeroOf(left, group, col) != ZeroOf(right, group, col) ? 1 : 0;
      *out->different_scales += left.Scale(group, col) != right.Scale(group, col) ? 1 : 0;
    }
  }
}

LinearDifference CompareLinear(const Model& a, const Model& b, const std::string& path,
                               int64_t worst) {
  LinearDifference out;
  out.path = path;
  out.keep = static_cast<size_t>(worst);
  for (const Model* model : {&a, &b}) {
    if (!model->checkpoint().ok()) continue;
    const auto it = model->checkpoint()->unserved().find(path);
    if (it == model->checkpoint()->unserved().end()) continue;
    out.error = std::string(it->second.message());
    return out;
  }
  absl::StatusOr<Elements> left = ReadElements(a, path);
  absl::StatusOr<Elements> right = ReadElements(b, path);
  for (const auto* side : {&left, &right}) {
    if (side->ok()) continue;
    out.error = std::string(side->status().message());
    return out;
  }
  out.a = left->scheme();
  out.b = right->scheme();
  out.k = left->k();
  out.n = left->n();
  if (left->k() != right->k() || left->n() != right->n()) {
    out.error = absl::StrCat("shapes differ: [", left->k(), ", ", left->n(), "] and [", right->k(),
                             ", ", right->n(), "]");
    return out;
  }
  if (const absl::Status status = Compare(*left, *right, &out); !status.ok()) {
    out.error = std::string(status.message());
    return out;
  }
  CompareParts(*left, *right, &out);
  out.different_bias = DifferentBias(left->bias(), right->bias());
  return out;
}

// --- Other tensors ---

// A tensor of a quantised linear, read or not, or the weight or bias of a dense one that was
// compared above.
bool WasCompared(const Model& model, absl::string_view name, const std::set<std::string>& paths) {
  absl::string_view path = name;
  return model.IsQuantised(name) || paths.contains(model.DensePath(name)) ||
         (absl::ConsumeSuffix(&path, ".bias") && paths.contains(std::string(path)));
}

absl::Status CompareOthers(const Model& a, const Model& b, const std::set<std::string>& paths,
                           FolderDifference* out) {
  for (const auto& [name, place] : a.tensors().all()) {
    if (WasCompared(a, name, paths)) continue;
    const model::TensorLocation* const other = b.tensors().Find(name);
    if (other == nullptr || WasCompared(b, name, paths)) {
      out->only_in_a.emplace_back(name);
      continue;
    }
    AWQD_ASSIGN_OR_RETURN(const bool same, SameBytes(place, *other));
    out->same_tensors += same ? 1 : 0;
    if (!same) out->different_tensors.emplace_back(name);
  }
  for (const auto& [name, place] : b.tensors().all()) {
    if (WasCompared(b, name, paths)) continue;
    if (a.tensors().Find(name) == nullptr || WasCompared(a, name, paths)) {
      out->only_in_b.emplace_back(name);
    }
  }
  return absl::OkStatus();
}

// --- JSON ---

using Json = nlohmann::ordered_json;

// JSON has no infinity.
Json Number(double value) { return std::isfinite(value) ? Json(value) : Json(absl::StrCat(value)); }

Json Count(const std::optional<int64_t>& count) { return count ? Json(*count) : Json(nullptr); }

Json ToJson(const LinearDifference& linear) {
  if (!linear.error.empty()) return {{"path", linear.path}, {"error", linear.error}};
  Json worst = Json::array();
  for (const DifferentElement& element : linear.worst) {
    worst.push_back(
        {{"k", element.k}, {"n", element.n}, {"a", Number(element.a)}, {"b", Number(element.b)}});
  }
  return {{"path", linear.path},
          {"a", linear.a},
          {"b", linear.b},
          {"in_features", linear.k},
          {"out_features", linear.n},
          {"same", linear.same()},
          {"different_elements", linear.different},
          {"max_absolute_error", Number(linear.largest)},
          {"relative_error", Number(linear.norms.relative())},
          {"different_codes", Count(linear.different_codes)},
          {"different_zeros", Count(linear.different_zeros)},
          {"different_scales", Count(linear.different_scales)},
          {"different_bias", linear.different_bias},
          {"worst", std::move(worst)}};
}

}  // namespace

int64_t DifferentBias(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return static_cast<int64_t>(std::max(a.size(), b.size()));
  int64_t out = 0;
  for (size_t i = 0; i < a.size(); ++i) out += Distance(a[i], b[i]) != 0 ? 1 : 0;
  return out;
}

void Difference::AddNorms(const float* a, const float* b, int64_t count) {
  constexpr int64_t kLanes = 4;  // sums that do not wait for one another
  double errors[kLanes] = {}, squares[kLanes] = {}, most[kLanes] = {};
  const auto add = [&](int64_t i, int64_t lane) {
    const double error = Distance(a[i], b[i]);
    errors[lane] += error * error;
    squares[lane] += double{b[i]} * b[i];
    most[lane] = std::max(most[lane], error);
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
  }
  for (; i < count; ++i) add(i, 0);
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    norms.difference += errors[lane];
    norms.b += squares[lane];
    largest = std::max(largest, most[lane]);
  }
}

void Difference::AddElement(int64_t k, int64_t n, float a, float b) {
  if (std::isfinite(b)) norms.b += static_cast<double>(b) * b;
  if (SameBits(a, b)) return;
  ++different;
  const double distance = Distance(a, b);
  norms.difference += distance * distance;
  largest = std::max(largest, distance);
  const bool full = worst.size() == keep;
  if (full && (worst.empty() || distance <= Distance(worst.back().a, worst.back().b))) return;
  const auto above = [](double x, const DifferentElement& y) { return x > Distance(y.a, y.b); };
  worst.insert(std::upper_bound(worst.begin(), worst.end(), distance, above), {k, n, a, b});
  if (worst.size() > keep) worst.pop_back();
}

absl::Status Compare(const Elements& a, const Elements& b, Difference* out) {
  const int64_t step = a.Step();
  std::vector<float> left(step * a.k()), right(step * a.k());
  for (int64_t begin = 0; begin < a.n(); begin += step) {
    const int64_t end = std::min(a.n(), begin + step), columns = end - begin;
    AWQD_RETURN_IF_ERROR(a.Read(begin, end, left.data()));
    AWQD_RETURN_IF_ERROR(b.Read(begin, end, right.data()));
    for (int64_t k = 0; k < a.k(); ++k) {
      for (int64_t col = 0; col < columns; ++col) {
        const int64_t at = k * columns + col;
        out->AddElement(k, begin + col, left[at], right[at]);
      }
    }
  }
  return absl::OkStatus();
}

double SquaredNorms::relative() const {
  if (difference == 0) return 0;
  return std::max(std::sqrt(difference / b), std::numeric_limits<double>::denorm_min());
}

bool LinearDifference::same() const {
  return error.empty() && different == 0 && different_bias == 0;
}

bool FolderDifference::same() const {
  return different_tensors.empty() && only_in_a.empty() && only_in_b.empty() &&
         absl::c_all_of(linears, [](const LinearDifference& linear) { return linear.same(); });
}

absl::StatusOr<FolderDifference> Diff(const std::string& a, const std::string& b, int64_t worst,
                                      const Progress& progress) {
  AWQD_ASSIGN_OR_RETURN(const Model left, Model::Open(a));
  AWQD_ASSIGN_OR_RETURN(const Model right, Model::Open(b));
  for (const Model* model : {&left, &right}) {
    if (model->quantised()) AWQD_RETURN_IF_ERROR(model->checkpoint().status());
  }
  const std::set<std::string> paths = Paths(left, right);
  FolderDifference out;
  const int64_t total = left.tensors().total_bytes() + right.tensors().total_bytes();
  int64_t done = 0;
  for (const std::string& path : paths) {
    out.linears.push_back(CompareLinear(left, right, path, worst));
    done += BytesOf(left, path) + BytesOf(right, path);
    progress(done, total);
  }
  AWQD_RETURN_IF_ERROR(CompareOthers(left, right, paths, &out));
  AWQD_RETURN_IF_ERROR(left.CheckUnchanged());
  AWQD_RETURN_IF_ERROR(right.CheckUnchanged());
  return out;
}

nlohmann::ordered_json ToJson(const FolderDifference& difference) {
  Json linears = Json::array();
  for (const LinearDifference& linear : difference.linears) linears.push_back(ToJson(linear));
  return {{"same", difference.same()},
          {"linears", std::move(linears)},
          {"same_tensors", difference.same_tensors},
          {"different_tensors", difference.different_tensors},
          {"only_in_a", difference.only_in_a},
          {"only_in_b", difference.only_in_b}};
}

}  // namespace awqd::tools
