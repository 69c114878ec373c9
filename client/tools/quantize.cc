// A dense folder, linear by linear.
#include "client/tools/quantize.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/tools/diff.h"
#include "client/tools/elements.h"
#include "kernels/base/status.h"

namespace awqd::tools {
namespace {

constexpr int64_t kSuffixBytes = 32;
constexpr int64_t kMostTensors = 6;  // of an encoded linear

absl::Status CheckOptions(const QuantizeOptions& options) {
  const Target& target = *options.target;
  if (target.settings == nullptr) return BadValue("to", target.name, "a quantised format");
  if (!absl::c_linear_search(target.widths, options.rtn.bits)) {
    return BadValue(
        "bits", options.rtn.bits,
        absl::StrCat(absl::StrJoin(target.widths, ", "), " (format ", target.name, ")"));
  }
  if (!options.rtn.symmetric && !target.asymmetric) {
    return BadValue("symmetric", "false",
                    absl::StrCat("true: format ", target.name, " holds no zero points"));
  }
  if (options.rtn.group_size == -1 || options.rtn.group_size >= 1) return absl::OkStatus();
  return BadValue("group_size", options.rtn.group_size, "-1 (all of K) or at least 1");
}

// Why a linear [N, K] stays dense; empty where it does not.
std::string WhyDense(const QuantizeOptions& options, const std::string& path, int64_t k,
                     int64_t n) {
  const auto within = [&](absl::string_view text) { return absl::StrContains(path, text); };
  for (absl::string_view text : kLeftOut) {
    if (within(text)) return absl::StrCat("\"", text, "\" is left out");
  }
  for (const std::string& text : options.leave_out) {
    if (within(text)) return absl::StrCat(Quoted(text), " is left out");
  }
  if (absl::EndsWith(path, ".gate")) return "a router is left out";
  const Target& target = *options.target;
  if (options.rtn.group_size != -1 && k % options.rtn.group_size != 0) {
    return absl::StrCat("K = ", k, " is no multiple of the group size");
  }
  if (k % target.k_multiple != 0 || n % target.n_multiple != 0) {
    return absl::StrCat("format ", target.name, " takes K in multiples of ", target.k_multiple,
                        " and N of ", target.n_multiple);
  }
  return "";
}

class Quantizer {
 public:
  Quantizer(const Model& source, const QuantizeOptions& options, FolderWriter* out)
      : source_(source), options_(options), out_(*out) {}

  // Sorts linears into those that are quantised and those that are not.
  void Choose(Quantization* report) {
    for (const std::string& name : source_.tensors().InOrder()) {
      const std::string path = source_.DensePath(name);
      if (path.empty()) continue;
      const auto& shape = source_.tensors().Find(name)->info->shape;
      const std::string why = WhyDense(options_, path, shape[1], shape[0]);
      if (why.empty()) {
        paths_[name] = path;
      } else {
        report->dense.push_back({path, why});
        facts_.dense.push_back(path);
      }
    }
    facts_.rtn = true;
    facts_.search = options_.rtn.search;
  }
  bool empty() const { return paths_.empty(); }

  Rewritten Plan(const std::string& tensor) const {
    const auto it = paths_.find(tensor);
    if (it == paths_.end()) return {.carried = true};
    const int64_t each = SafetensorsWriter::HeaderBytes(it->second) + kSuffixBytes;
    return {.header_bytes = kMostTensors * each};
  }

  absl::Status Write(const std::string& tensor, Quantization* report) {
    const std::string& path = paths_.at(tensor);
    absl::Status status = WriteLinear(tensor, path, report);
    return status.ok() ? status : Prefixed(absl::StrCat("linear ", Quoted(path)), status);
  }

  absl::StatusOr<nlohmann::ordered_json> Settings() const {
    return options_.target->settings(facts_);
  }

 private:
  absl::Status WriteLinear(const std::string& tensor, const std::string& path,
                           Quantization* report) {
    const model::TensorLocation& place = *source_.tensors().Find(tensor);
    const DType type = FloatTypeNamed(place.info->dtype);
    const int64_t n = place.info->shape[0], k = place.info->shape[1];
    // A byte for each code, beside some rows.
    AWQD_RETURN_IF_ERROR(CheckRoom("codes", std::max(n, kDenseRowsBytes), k));
    std::vector<uint8_t> bytes;
    const auto read = [&](int64_t begin, int64_t end, float* to) {
      bytes.resize((end - begin) * k * SizeOf(type));
      AWQD_RETURN_IF_ERROR(ReadPart(place, begin * k * SizeOf(type), absl::MakeSpan(bytes)));
      for (int64_t i = 0; i < (end - begin) * k; ++i) to[i] = LoadElement(bytes.data(), type, i);
      return absl::OkStatus();
    };
    AWQD_ASSIGN_OR_RETURN(
        HostWeight weight,
        Rtn(k, n, options_.rtn, type == DType::kBf16 ? DType::kBf16 : DType::kFp16, read));
    const Elements made(std::move(weight)), given(DenseWeight{.k = k, .n = n, .tensor = place});
    AWQD_ASSIGN_OR_RETURN(const Difference error, Compare(made, given));
    AWQD_ASSIGN_OR_RETURN(EncodedLinear encoded, options_.target->encode(*made.weight(), {}));
    for (NewTensor& one : encoded.tensors) {
      one.name = absl::StrCat(path, ".", one.name);
      AWQD_RETURN_IF_ERROR(out_.AddTensor(std::move(one)));
    }
    report->linears.push_back(
        {path, made.scheme(), k, n, error.relative(), error.largest(), encoded.facts.zero_at_0});
    facts_.linears.emplace_back(path, encoded.facts);
    return absl::OkStatus();
  }

  const Model& source_;
  const QuantizeOptions& options_;
  FolderWriter& out_;
  std::map<std::string, std::string> paths_;  // of linears, by the name of their weight
  FolderFacts facts_;
};

}  // namespace

absl::StatusOr<Quantization> Quantize(const QuantizeOptions& options, const Progress& progress) {
  AWQD_RETURN_IF_ERROR(CheckOptions(options));
  AWQD_ASSIGN_OR_RETURN(const Model source, Model::Open(options.folder));
  if (source.quantised()) {
    return Invalid(source.folder().name,
                   ": got a model that is quantised, expected a dense "
                   "one ('awqctl convert' changes the format of the other)");
  }
  AWQD_ASSIGN_OR_RETURN(const auto out, FolderWriter::Create(options.output, options.guard));
  Quantization report = {.bytes_before = source.tensors().total_bytes()};
  Quantizer quantizer(source, options, out.get());
  quantizer.Choose(&report);
  if (quantizer.empty()) {
    return Invalid(source.folder().name,
                   ": got no linear to quantise, expected a tensor "
                   "\"<path>.weight\" of two dimensions that is not left out");
  }
  AWQD_RETURN_IF_ERROR(RewriteTensors(
      source, out.get(), &report.carried,
      [&](const std::string& tensor) { return quantizer.Plan(tensor); },
      [&](const std::string& tensor) { return quantizer.Write(tensor, &report); }, progress));
  AWQD_ASSIGN_OR_RETURN(const nlohmann::ordered_json settings, quantizer.Settings());
  AWQD_RETURN_IF_ERROR(RewriteRest(source, settings, "", out.get(), &report.carried));
  AWQD_RETURN_IF_ERROR(source.CheckUnchanged());
  report.bytes_after = out->tensor_bytes();
  AWQD_RETURN_IF_ERROR(out->Commit());
  return report;
}

nlohmann::ordered_json ToJson(const Quantization& quantization) {
  using Json = nlohmann::ordered_json;
  Json linears = Json::array(), dense = Json::array();
  for (const QuantizedLinear& linear : quantization.linears) {
    linears.push_back({{"path", linear.path},
                       {"description", linear.scheme},
                       {"in_features", linear.k},
                       {"out_features", linear.n},
                       {"relative_error", linear.relative},
                       {"max_absolute_error", linear.largest},
                       {"zero_point_0", linear.zero_at_0}});
  }
  for (const DenseLinear& linear : quantization.dense) {
    dense.push_back({{"path", linear.path}, {"why", linear.why}});
  }
  return {{"linears", std::move(linears)},
          {"dense", std::move(dense)},
          {"carried_tensors", quantization.carried.tensors},
          {"carried_files", quantization.carried.files.size()},
          {"left_out", quantization.carried.left_out},
          {"bytes_before", quantization.bytes_before},
          {"bytes_after", quantization.bytes_after}};
}

}  // namespace awqd::tools
