// Rounds groups to nearest; reads, rounds and writes a dense folder, linear by linear.
#include "client/tools/quantize.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/tools/elements.h"
#include "client/tools/to_gguf.h"
#include "kernels/base/status.h"
#include "kernels/formats/codes.h"

namespace awqd::tools {
namespace {

// --- Rounding ---

constexpr int64_t kElements = 1 << 20;  // read at a time
constexpr int kRatios = 26;             // 1, 0.98, ..., 0.5

// The smallest number above 0 that a scale may be.
float Least(DType type) { return type == DType::kFp16 ? 0x1p-24f : 0x1p-126f; }

struct Range {
  float low = 0, high = 0;
};

// False where the scale is infinite.
bool GroupOf(const Range& range, const RtnOptions& options, DType type, RtnGroup* out) {
  const int most = (1 << options.bits) - 1, middle = 1 << (options.bits - 1);
  const double scale =
      options.symmetric ? std::max(double{range.high} / (middle - 1), -double{range.low} / middle)
                        : (double{range.high} - double{range.low}) / most;
  out->scale = scale == 0 ? 1.0f : std::max(RoundTo(type, static_cast<float>(scale)), Least(type));
  out->zero = middle;
  out->bias = 0;
  if (options.real_zeros) {
    out->zero = 0;
    out->bias = RoundTo(type, range.low);
    return std::isfinite(out->scale) && std::isfinite(out->bias);
  }
  if (!options.symmetric && scale != 0) {
    out->zero = static_cast<int>(
        std::clamp(std::nearbyint(-range.low / out->scale), 0.0f, static_cast<float>(most)));
  }
  return std::isfinite(out->scale);
}

// To the nearest integer, even where two are as near, of numbers well below 2^22.
inline float Nearest(float value) {
  constexpr float kUnit = 0x1.8p23f;  // the last place of it is 1
  return (value + kUnit) - kUnit;
}

// The codes, and the sum of squared errors.
double Encode(absl::Span<const float> values, const RtnOptions& options, const RtnGroup& group,
              uint8_t* codes) {
  const float most = static_cast<float>((1 << options.bits) - 1);
  const auto zero = static_cast<float>(group.zero);
  for (size_t i = 0; i < values.size(); ++i) {
    const float code =
        Nearest(std::clamp((values[i] - group.bias) / group.scale, -1024.0f, 1024.0f)) + zero;
    codes[i] = static_cast<uint8_t>(std::clamp(code, 0.0f, most));
  }
  double sum = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const float value = (static_cast<float>(codes[i]) - zero) * group.scale + group.bias;
    const double error = double{value} - values[i];
    sum += error * error;
  }
  return sum;
}

// --- A folder ---

// ": K = 64 is no multiple of the group size 96 (12 linears); ..."; empty without linears.
std::string Reasons(const std::vector<DenseLinear>& dense) {
  std::map<std::string, int> linears;
  for (const DenseLinear& linear : dense) ++linears[linear.why];
  std::string out;
  for (const auto& [why, count] : linears) {
    absl::StrAppend(&out, out.empty() ? ": " : "; ", why, " (", count,
                    count == 1 ? " linear)" : " linears)");
  }
  return out;
}

// The paths of the linears that are quantised, by the names of their weights. The others go to
// `report`.
std::map<std::string, std::string> Choose(const Model& source, const QuantizeOptions& options,
                                          Quantization* report) {
  std::map<std::string, std::string> paths;
  for (const std::string& name : source.tensors().InOrder()) {
    const std::string path = source.DensePath(name);
    if (path.empty()) continue;
    const auto& shape = source.tensors().Find(name)->info->shape;
    const std::string why = WhyDense(options, path, shape[1], shape[0]);
    if (why.empty()) {
      paths[name] = path;
    } else {
      report->dense.push_back({path, why});
    }
  }
  return paths;
}

// The differences of `made` from the rows of the weight that it was made of.
absl::Status CompareRows(const Elements& made, ReadDenseRows read, Difference* out) {
  const int64_t k = made.k(), step = made.Step();
  std::vector<float> left(step * k), right(step * k);
  for (int64_t begin = 0; begin < made.n(); begin += step) {
    const int64_t end = std::min(made.n(), begin + step), columns = end - begin;
    AWQD_RETURN_IF_ERROR(made.Read(begin, end, left.data()));
    AWQD_RETURN_IF_ERROR(read(begin, end, right.data()));
    for (int64_t row = 0; row < k; ++row) {
      for (int64_t col = 0; col < columns; ++col) {
        out->AddElement(row, begin + col, left[row * columns + col], right[col * k + row]);
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Quantization> QuantizeToGguf(const Model& source, const QuantizeOptions& options,
                                            Quantization report, const Progress& progress,
                                            FolderWriter* out) {
  const GgufOptions gguf = {options.rtn.bits == 8 ? "Q8_0" : "Q4_0", options.leave_out};
  AWQD_ASSIGN_OR_RETURN(const GgufPlan plan, PlanGguf(source, gguf, {}));
  Conversion written;
  AWQD_RETURN_IF_ERROR(WriteGguf(source, plan, {}, &report.linears, progress, out, &written));
  static_cast<Rewritten&>(report) = written;
  AWQD_RETURN_IF_ERROR(source.CheckUnchanged());
  AWQD_RETURN_IF_ERROR(out->Commit());
  return report;
}

}  // namespace

std::string WhyLeftDense(absl::string_view path, absl::Span<const std::string> leave_out) {
  for (const absl::string_view text : kLeftOut) {
    if (absl::StrContains(path, text)) return absl::StrCat("\"", text, "\" is left out");
  }
  for (const std::string& text : leave_out) {
    if (absl::StrContains(path, text)) return absl::StrCat(Quoted(text), " is left out");
  }
  return absl::EndsWith(path, ".gate") ? "a router is left out" : "";
}

std::string WhyDense(const QuantizeOptions& options, const std::string& path, int64_t k,
                     int64_t n) {
  if (std::string why = WhyLeftDense(path, options.leave_out); !why.empty()) return why;
  const Target& target = *options.target;
  if (options.rtn.group_size != -1 && k % options.rtn.group_size != 0) {
    return absl::StrCat("K = ", k, " is no multiple of the group size ", options.rtn.group_size);
  }
  if (k % target.k_multiple != 0 || n % target.n_multiple != 0) {
    return absl::StrCat("format ", target.name, " takes K in multiples of ", target.k_multiple,
                        " and N of ", target.n_multiple);
  }
  return "";
}

QuantizeOptions WithDefaults(QuantizeOptions options) {
  const Target& target = *options.target;
  if (options.rtn.group_size == kGroupSizeOfTarget) options.rtn.group_size = target.group_size;
  options.rtn.real_zeros = target.real_zeros && !options.rtn.symmetric;
  return options;
}

absl::StatusOr<EncodedLinear> QuantizeRows(const std::string& path, int64_t k, int64_t n,
                                           DType scale_dtype, const QuantizeOptions& options,
                                           ReadDenseRows read, std::vector<QuantizedLinear>* told) {
  // A byte for each code, beside some rows.
  AWQD_RETURN_IF_ERROR(CheckRoom("codes", std::max(n, kDenseRowsBytes), k));
  AWQD_ASSIGN_OR_RETURN(HostWeight weight, Rtn(k, n, options.rtn, scale_dtype, read));
  const Elements made(std::move(weight));
  Difference error;
  AWQD_RETURN_IF_ERROR(CompareRows(made, read, &error));
  AWQD_ASSIGN_OR_RETURN(EncodedLinear encoded, options.target->Encode(*made.weight(), {}));
  told->push_back({path, made.scheme(), k, n, error.norms, error.largest, encoded.facts.zero_at_0});
  return encoded;
}

bool QuantizeGroup(absl::Span<const float> values, const RtnOptions& options, DType scale_dtype,
                   RtnGroup* group, uint8_t* codes) {
  Range range;
  if (options.real_zeros && !values.empty()) range = {values[0], values[0]};
  for (const float value : values) {
    range.low = std::min(range.low, value);
    range.high = std::max(range.high, value);
  }
  if (!GroupOf(range, options, scale_dtype, group)) return false;
  double least = Encode(values, options, *group, codes);
  if (!options.search || least == 0) return true;
  std::vector<uint8_t> other(values.size());
  for (int step = 1; step < kRatios; ++step) {
    const float ratio = 1.0f - 0.02f * static_cast<float>(step);
    RtnGroup narrow;
    const float middle = options.real_zeros ? (range.low + range.high) / 2 : 0;
    GroupOf({middle + (range.low - middle) * ratio, middle + (range.high - middle) * ratio},
            options, scale_dtype, &narrow);
    const double error = Encode(values, options, narrow, other.data());
    if (error >= least) continue;
    least = error;
    *group = narrow;
    std::copy(other.begin(), other.end(), codes);
  }
  return true;
}

absl::StatusOr<HostWeight> Rtn(int64_t k, int64_t n, const RtnOptions& options, DType scale_dtype,
                               ReadDenseRows read) {
  const int64_t rows = options.group_size == -1 ? k : options.group_size, groups = k / rows;
  HostWeight out = {.k = k, .n = n};
  const int64_t block = rows == k ? 0 : rows;
  out.scheme = options.symmetric ? Symmetric(options.bits, block, scale_dtype)
                                 : Asymmetric(options.bits, block, scale_dtype);
  if (options.real_zeros) {
    out.scheme.zero_kind = ZeroKind::kRealAfter;
    out.scheme.zero_dtype = scale_dtype;
  }
  std::vector<uint8_t> codes(n * k);  // [N, K]
  out.scales.resize(groups * n * SizeOf(scale_dtype));
  out.zeros.resize(groups * n * out.scheme.zero_bytes());
  const int64_t step = std::max<int64_t>(1, kElements / k);
  std::vector<float> values(step * k);
  for (int64_t begin = 0; begin < n; begin += step) {
    const int64_t end = std::min(n, begin + step);
    AWQD_RETURN_IF_ERROR(read(begin, end, values.data()));
    for (int64_t col = begin; col < end; ++col) {
      const float* const row = values.data() + (col - begin) * k;
      const float* const bad =
          std::find_if_not(row, row + k, [](float v) { return std::isfinite(v); });
      if (bad != row + k) {
        return BadValue("weight", absl::StrCat(*bad, " at [", col, ", ", bad - row, "]"),
                        "finite numbers");
      }
      for (int64_t g = 0; g < groups; ++g) {
        RtnGroup group;
        if (!QuantizeGroup({row + g * rows, static_cast<size_t>(rows)}, options, scale_dtype,
                           &group, codes.data() + col * k + g * rows)) {
          return BadValue("weight", absl::StrCat("a group at [", col, ", ", g * rows, "]"),
                          absl::StrCat("one whose scale ", Name(scale_dtype), " can hold"));
        }
        StoreRounded(group.scale, scale_dtype, out.scales.data() + 2 * (g * n + col));
        if (options.real_zeros) {
          StoreRounded(-group.bias, scale_dtype, out.zeros.data() + 2 * (g * n + col));
        } else if (!options.symmetric) {
          out.zeros[g * n + col] = static_cast<uint8_t>(group.zero);
        }
      }
    }
  }
  out.codes =
      PackTransposed(n, k, options.bits, [&](int64_t row, int64_t col, int64_t count, uint8_t* to) {
        std::copy_n(codes.data() + row * k + col, count, to);
      });
  return out;
}

absl::Status Validate(const QuantizeOptions& options) {
  const Target& target = *options.target;
  if (target.widths.empty()) return BadValue("to", target.name, "a quantised format");
  if (!absl::c_linear_search(target.widths, options.rtn.bits)) {
    return BadValue(
        "bits", options.rtn.bits,
        absl::StrCat(absl::StrJoin(target.widths, ", "), " (format ", target.name, ")"));
  }
  if (!options.rtn.symmetric && !target.asymmetric) {
    return BadValue("symmetric", "false",
                    absl::StrCat("true: format ", target.name, " holds no zero points"));
  }
  if (options.rtn.search && &target == &kGgufTarget) {
    return BadValue("search", "true", "false: format gguf has ggml's own rounding");
  }
  if (options.rtn.group_size == kGroupSizeOfTarget) return absl::OkStatus();
  if (!target.group_sizes.empty() &&
      !absl::c_linear_search(target.group_sizes, options.rtn.group_size)) {
    return BadValue(
        "group_size", options.rtn.group_size,
        absl::StrCat(absl::StrJoin(target.group_sizes, ", "), " (format ", target.name, ")"));
  }
  if (options.rtn.group_size == -1 || options.rtn.group_size >= 1) return absl::OkStatus();
  return BadValue("group_size", options.rtn.group_size, "-1 (all of K) or at least 1");
}

absl::StatusOr<Quantization> Quantize(const QuantizeOptions& given, const Progress& progress) {
  AWQD_RETURN_IF_ERROR(Validate(given));
  const QuantizeOptions options = WithDefaults(given);
  AWQD_ASSIGN_OR_RETURN(const Model source, Model::Open(options.folder));
  if (source.quantised()) {
    return Invalid(source.folder().name,
                   ": got a model that is quantised, expected a dense "
                   "one ('awqctl convert' changes the format of the other)");
  }
  AWQD_RETURN_IF_ERROR(source.CheckAllRead());
  AWQD_ASSIGN_OR_RETURN(const auto out, FolderWriter::Create(options.output, options.guard,
                                                             options.target == &kGgufTarget &&
                                                                 IsGgufName(options.output)));
  Quantization report;
  const std::map<std::string, std::string> paths = Choose(source, options, &report);
  if (paths.empty()) {
    return Invalid(source.folder().name,
                   ": got no linear to quantise, expected a tensor "
                   "\"<path>.weight\" of two dimensions that is not left out",
                   Reasons(report.dense));
  }
  if (options.target == &kGgufTarget) {
    return QuantizeToGguf(source, options, std::move(report), progress, out.get());
  }
  FolderFacts facts = {.rtn = true, .search = options.rtn.search};
  for (const DenseLinear& linear : report.dense) facts.dense.push_back(linear.path);
  const auto replaced = [&](const std::string& tensor) -> Replaced {
    const auto it = paths.find(tensor);
    if (it == paths.end()) return std::nullopt;
    return std::vector<std::string>{it->second};
  };
  const auto encode = [&](const std::string& path) {
    const model::TensorLocation& place = *source.tensors().Find(path + ".weight");
    const int64_t n = place.info->shape[0], k = place.info->shape[1];
    const DType scales = place.info->dtype == "BF16" ? DType::kBf16 : DType::kFp16;
    return QuantizeRows(path, k, n, scales, options, RowsOfTensor(place, k), &report.linears);
  };
  AWQD_RETURN_IF_ERROR(RewriteFolder(source, *options.target, "", std::move(facts), replaced,
                                     encode, progress, out.get(), &report));
  AWQD_RETURN_IF_ERROR(source.CheckUnchanged());
  AWQD_RETURN_IF_ERROR(out->Commit());
  return report;
}

nlohmann::ordered_json ToJson(const std::vector<QuantizedLinear>& linears) {
  auto out = nlohmann::ordered_json::array();
  for (const QuantizedLinear& linear : linears) {
    out.push_back({{"path", linear.path},
                   {"description", linear.scheme},
                   {"in_features", linear.k},
                   {"out_features", linear.n},
                   {"relative_error", linear.norms.relative()},
                   {"max_absolute_error", linear.largest},
                   {"zero_point_0", linear.zero_at_0}});
  }
  return out;
}

nlohmann::ordered_json ToJson(const Quantization& quantization) {
  using Json = nlohmann::ordered_json;
  Json dense = Json::array();
  for (const DenseLinear& linear : quantization.dense) {
    dense.push_back({{"path", linear.path}, {"why", linear.why}});
  }
  Json out = {{"linears", ToJson(quantization.linears)}, {"dense", std::move(dense)}};
  out.update(ToJson(static_cast<const Rewritten&>(quantization)));
  return out;
}

}  // namespace awqd::tools
