// A quantised folder, linear by linear.
#include "client/tools/convert.h"

#include <iterator>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "client/tools/elements.h"
#include "client/tools/encode/normal.h"
#include "kernels/base/status.h"

namespace awqd::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kReport[] = "verified.json";
constexpr int64_t kSuffixBytes = 32;
constexpr int64_t kMostTensors = 6;  // of an encoded linear

struct FloatName {
  absl::string_view safetensors, config;
};
constexpr FloatName kFloats[] = {{"F16", "float16"}, {"BF16", "bfloat16"}, {"F32", "float32"}};

std::string ConfigName(absl::string_view dtype) {
  for (const FloatName& name : kFloats) {
    if (name.safetensors == dtype) return std::string(name.config);
  }
  return "";
}

// The type of dense weights, empty for another target.
absl::StatusOr<std::string> DenseType(const ConvertOptions& options, const Model& source) {
  if (options.target != &kDenseTarget) {
    if (options.dtype.empty()) return std::string();
    return BadValue("dtype", options.dtype, "nothing, as only dense weights have one");
  }
  if (!options.dtype.empty()) return options.dtype;
  AWQD_ASSIGN_OR_RETURN(const Json config, ReadConfig(source));
  for (const char* key : {"dtype", "torch_dtype"}) {
    for (const FloatName& name : kFloats) {
      if (config.contains(key) && config[key] == std::string(name.config))
        return std::string(name.safetensors);
    }
  }
  return std::string("F16");
}

absl::Status CheckVerify(const ConvertOptions& options) {
  const absl::string_view format = options.target->format;
  if (!options.verify || format.empty() || FormatNamed(format) != nullptr) return absl::OkStatus();
  return BadValue("verify", absl::StrCat("format ", format), "one that can be read back");
}

// Its bias is of the type that it has in the file.
std::string BiasType(const model::LinearLocation& linear) {
  const auto it = linear.tensors.find("bias");
  const bool known = it != linear.tensors.end() && IsFloatType(it->second.info->dtype);
  return known ? it->second.info->dtype : "F32";
}

// The linears of a folder as its tensors follow one another.
std::vector<const model::LinearLocation*> InOrder(const Model& source) {
  std::vector<const model::LinearLocation*> out;
  for (const std::string& tensor : source.tensors().InOrder()) {
    absl::c_copy(source.LinearsWithCodes(tensor), std::back_inserter(out));
  }
  return out;
}

class Converter {
 public:
  Converter(const Model& source, const ConvertOptions& options, FolderWriter* out,
            Conversion* report)
      : source_(source),
        options_(options),
        out_(*out),
        report_(*report),
        weights_(*source.checkpoint(), InOrder(source)) {
    for (const std::string& name : source.tensors().InOrder()) {
      if (std::string path = source.DensePath(name); !path.empty()) facts_.dense.push_back(path);
    }
  }

  Rewritten Plan(const std::string& tensor) const {
    if (!source_.IsPart(tensor)) return {.carried = true};
    Rewritten out;
    for (const model::LinearLocation* linear : source_.LinearsWithCodes(tensor)) {
      const int64_t each = SafetensorsWriter::HeaderBytes(linear->path) + kSuffixBytes;
      out.header_bytes += kMostTensors * each;
    }
    return out;
  }

  absl::Status Write(const std::string& tensor) {
    for (const model::LinearLocation* linear : source_.LinearsWithCodes(tensor)) {
      absl::Status status = WriteLinear(*linear);
      if (!status.ok()) {
        return Prefixed(absl::StrCat("linear ", Quoted(linear->path)), status);
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Json> Settings() const {
    return options_.target->settings == nullptr ? Json(nullptr) : options_.target->settings(facts_);
  }

 private:
  absl::Status WriteLinear(const model::LinearLocation& linear) {
    AWQD_ASSIGN_OR_RETURN(HostWeight weight, weights_.Next());
    ConvertedLinear told = {.path = linear.path,
                            .scheme = ToString(weight.scheme),
                            .k = weight.k,
                            .n = weight.n,
                            .bytes_before = linear.bytes,
                            .slice = !linear.slice_of.empty()};
    // A GGUF file mixes widths: some linears of 5 or 6 bits must not keep it from being converted.
    if (source_.tensors().gguf()) Widen(options_.target->widths, &weight);
    report_.activations += weight.activations.how == ActivationQuantization::kNone ? 0 : 1;
    AWQD_ASSIGN_OR_RETURN(
        EncodedLinear encoded,
        options_.target->encode(std::move(weight),
                                {.bias_dtype = BiasType(linear), .dtype = report_.dtype}));
    told.zero_at_0 = encoded.facts.zero_at_0;
    for (NewTensor& one : encoded.tensors) {
      told.bytes_after += one.bytes;
      one.name = absl::StrCat(linear.path, ".", one.name);
      AWQD_RETURN_IF_ERROR(out_.AddTensor(std::move(one)));
    }
    facts_.linears.emplace_back(linear.path, encoded.facts);
    report_.linears.push_back(std::move(told));
    return absl::OkStatus();
  }

  const Model& source_;
  const ConvertOptions& options_;
  FolderWriter& out_;
  Conversion& report_;
  ReadAhead weights_;
  FolderFacts facts_;
};

absl::Status VerifyFolder(const Model& source, FolderWriter* out, Conversion* report,
                          const Progress& progress) {
  AWQD_ASSIGN_OR_RETURN(
      const Verification verified,
      Verify(source, out->partial(), !report->dtype.empty(), report->carried, progress));
  report->verified = verified;
  Json text = {{"from", report->from}, {"to", report->to}};
  text.update(ToJson(verified));
  return out->WriteText(kReport, text.dump(2) + "\n");
}

}  // namespace

absl::StatusOr<Conversion> Convert(const ConvertOptions& options, const Progress& progress) {
  AWQD_RETURN_IF_ERROR(CheckVerify(options));
  AWQD_ASSIGN_OR_RETURN(const Model source, Model::Open(options.folder));
  AWQD_RETURN_IF_ERROR(source.checkpoint().status());
  AWQD_RETURN_IF_ERROR(CheckRewritable(source));
  Conversion report = {.from = std::string(source.checkpoint()->format().name),
                       .to = std::string(options.target->name),
                       .bytes_before = source.tensors().total_bytes()};
  AWQD_ASSIGN_OR_RETURN(report.dtype, DenseType(options, source));
  AWQD_ASSIGN_OR_RETURN(const auto out, FolderWriter::Create(options.output, options.guard));
  Converter converter(source, options, out.get(), &report);
  const int64_t passes = options.verify ? 2 : 1;
  AWQD_RETURN_IF_ERROR(RewriteTensors(
      source, out.get(), &report.carried,
      [&](const std::string& tensor) { return converter.Plan(tensor); },
      [&](const std::string& tensor) { return converter.Write(tensor); },
      [&](int64_t done, int64_t total) { progress(done, passes * total); }));
  AWQD_ASSIGN_OR_RETURN(const Json settings, converter.Settings());
  AWQD_RETURN_IF_ERROR(
      RewriteRest(source, settings, ConfigName(report.dtype), out.get(), &report.carried));
  if (options.verify) {
    AWQD_RETURN_IF_ERROR(VerifyFolder(source, out.get(), &report, [&](int64_t done, int64_t total) {
      progress(total + done, passes * total);
    }));
  }
  AWQD_RETURN_IF_ERROR(source.CheckUnchanged());
  report.bytes_after = out->tensor_bytes();
  AWQD_RETURN_IF_ERROR(out->Commit());
  return report;
}

nlohmann::ordered_json ToJson(const Conversion& conversion) {
  Json linears = Json::array();
  for (const ConvertedLinear& linear : conversion.linears) {
    linears.push_back({{"path", linear.path},
                       {"description", linear.scheme},
                       {"in_features", linear.k},
                       {"out_features", linear.n},
                       {"bytes_before", linear.bytes_before},
                       {"bytes_after", linear.bytes_after},
                       {"zero_point_0", linear.zero_at_0}});
  }
  Json out = {{"from", conversion.from},
              {"to", conversion.to},
              {"linears", std::move(linears)},
              {"carried_tensors", conversion.carried.tensors},
              {"carried_files", conversion.carried.files.size()},
              {"left_out", conversion.carried.left_out},
              {"bytes_before", conversion.bytes_before},
              {"bytes_after", conversion.bytes_after}};
  if (!conversion.dtype.empty()) out["dtype"] = conversion.dtype;
  if (conversion.verified) out["verified"] = ToJson(*conversion.verified);
  return out;
}

}  // namespace awqd::tools
