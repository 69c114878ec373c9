// Reads, encodes and writes a quantised folder, linear by linear; reads it back and compares it with
// its source.
#include "client/tools/convert.h"

#include <iterator>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "client/tools/diff.h"
#include "client/tools/elements.h"
#include "client/tools/to_gguf.h"
#include "kernels/base/status.h"

namespace awqd::tools {
namespace {

absl::Status Differs(absl::string_view what, absl::string_view how) {
  return absl::InternalError(absl::StrCat("verify: ", Quoted(what), ": ", how));
}

// Checks that every element of `got`, whose type is `type`, is the rounding of that of `want`. With
// FP32 both are the same.
absl::Status CompareRounded(const std::string& path, const Elements& got, const Elements& want,
                            DType type, Verification* out) {
  const int64_t step = want.Step(), k = want.k();
  std::vector<float> left(step * k), right(step * k);
  for (int64_t begin = 0; begin < want.n(); begin += step) {
    const int64_t end = std::min(want.n(), begin + step), columns = end - begin;
    AWQD_RETURN_IF_ERROR(got.Read(begin, end, left.data()));
    AWQD_RETURN_IF_ERROR(want.Read(begin, end, right.data()));
    for (int64_t i = 0; i < k * columns; ++i) {
      const float rounded = RoundTo(type, right[i]);
      if (!SameBits(left[i], rounded)) {
        return Differs(path, absl::StrCat("element [", i / columns, ", ", begin + i % columns,
                                          "]: got ", left[i], ", expected ", rounded));
      }
      out->rounded += SameBits(rounded, right[i]) ? 0 : 1;
    }
  }
  out->elements += k * want.n();
  return absl::OkStatus();
}

absl::Status CompareLinear(const Model& source, const Model& written, const std::string& path,
                           Verification* out) {
  AWQD_ASSIGN_OR_RETURN(const Elements want, ReadElements(source, path));
  AWQD_ASSIGN_OR_RETURN(const Elements got, ReadElements(written, path));
  if (got.k() != want.k() || got.n() != want.n()) return Differs(path, "another shape");
  if (DifferentBias(got.bias(), want.bias()) != 0) return Differs(path, "another bias");
  const DType type = got.weight() == nullptr ? FloatTypeNamed(got.scheme()) : DType::kFp32;
  AWQD_RETURN_IF_ERROR(CompareRounded(path, got, want, type, out));
  ++out->linears;
  out->biases += static_cast<int64_t>(want.bias().size());
  return absl::OkStatus();
}

absl::Status CompareTensors(const Model& source, const Model& written, Verification* out) {
  for (const auto& [name, place] : source.tensors().all()) {
    if (source.IsPart(name)) continue;
    const model::TensorLocation* const other = written.tensors().Find(name);
    if (other == nullptr) return Differs(name, "it was not copied");
    AWQD_ASSIGN_OR_RETURN(const bool same, SameBytes(*other, place));
    if (!same) return Differs(name, "other bytes");
    ++out->tensors;
    out->tensor_bytes += place.info->bytes();
  }
  return absl::OkStatus();
}

// --- Writing ---

using Json = nlohmann::ordered_json;

struct FloatName {
  absl::string_view safetensors, config;
};
constexpr FloatName kFloats[] = {{"F16", "float16"}, {"BF16", "bfloat16"}, {"F32", "float32"}};

constexpr char kReport[] = "verified.json";

// The type of dense weights, empty for another target.
absl::StatusOr<std::string> DenseType(const ConvertOptions& options, const Model& source) {
  const bool gguf = options.target == &kGgufTarget;
  if (!gguf && options.target != &kDenseTarget && options.target != &kMlxTarget) {
    if (options.dtype.empty()) return std::string();
    return BadValue("dtype", options.dtype, "nothing, as only dense weights have one");
  }
  if (!gguf && !options.dtype.empty() && !IsFloatType(options.dtype)) {
    return BadValue("dtype", options.dtype, "F16, BF16 or F32; only GGUF has blocks");
  }
  if (!options.dtype.empty() || !source.quantised()) return options.dtype;
  return DenseTypeOf(source);
}

absl::Status CheckVerify(const ConvertOptions& options) {
  const absl::string_view format = options.target->format;
  if (!options.verify || format.empty() || FormatNamed(format) != nullptr) return absl::OkStatus();
  return BadValue("verify", absl::StrCat("format ", format), "one that can be read back");
}

// The type that the bias of a linear has in its file.
std::string BiasType(const model::LinearLocation& linear) {
  const auto it = linear.tensors.find("bias");
  const bool known = it != linear.tensors.end() && IsFloatType(it->second.info->dtype);
  return known ? it->second.info->dtype : "F32";
}

// Encodes the linear that follows in `weights`, and adds it to the report.
absl::StatusOr<EncodedLinear> ConvertNext(const Model& source, const model::LinearLocation& linear,
                                          const Target& target, ReadAhead* weights,
                                          Conversion* report) {
  AWQD_ASSIGN_OR_RETURN(HostWeight weight, weights->Next());
  ConvertedLinear told = {.path = linear.path,
                          .scheme = ToString(weight.scheme),
                          .k = weight.k,
                          .n = weight.n,
                          .bytes_before = linear.bytes,
                          .slice = !linear.slice_of.empty()};
  // A GGUF file mixes widths: some linears of 5 or 6 bits must not keep it from being converted.
  if (source.tensors().gguf()) Widen(target.widths, &weight);
  report->activations += weight.activations.how == ActivationQuantization::kNone ? 0 : 1;
  AWQD_ASSIGN_OR_RETURN(
      EncodedLinear encoded,
      target.Encode(std::move(weight), {.bias_dtype = BiasType(linear), .dtype = report->dtype}));
  told.zero_at_0 = encoded.facts.zero_at_0;
  told.dense = encoded.facts.dense;
  for (const NewTensor& tensor : encoded.tensors) told.bytes_after += tensor.bytes;
  report->linears.push_back(std::move(told));
  return encoded;
}

absl::Status WriteVerified(const Verification& verified, FolderWriter* out, Conversion* report) {
  report->verified = verified;
  if (out->single_file()) return absl::OkStatus();
  Json text = {{"from", report->from}, {"to", report->to}};
  text.update(ToJson(verified));
  return out->WriteText(kReport, text.dump(2) + "\n");
}

absl::Status VerifyFolder(const Model& source, FolderWriter* out, Conversion* report,
                          const Progress& progress) {
  const auto is_dense = [](const ConvertedLinear& linear) { return linear.dense; };
  AWQD_ASSIGN_OR_RETURN(const Verification verified,
                        Verify(source, out->partial(), absl::c_count_if(report->linears, is_dense),
                               report->carried, progress));
  return WriteVerified(verified, out, report);
}

absl::StatusOr<Conversion> ConvertToGguf(const Model& source, const ConvertOptions& options,
                                         Conversion report, const Progress& progress) {
  const GgufOptions gguf = {.dtype = report.dtype};
  AWQD_ASSIGN_OR_RETURN(const GgufPlan plan, PlanGguf(source, gguf, {}));
  AWQD_ASSIGN_OR_RETURN(const auto out, FolderWriter::Create(options.output, options.guard,
                                                             IsGgufName(options.output)));
  const int64_t passes = options.verify ? 2 : 1;
  AWQD_RETURN_IF_ERROR(WriteGguf(
      source, plan, {}, nullptr,
      [&](int64_t done, int64_t total) { progress(done, passes * total); }, out.get(), &report));
  if (options.verify) {
    AWQD_ASSIGN_OR_RETURN(
        const Verification verified,
        VerifyGguf(source, plan, out->partial(), report.carried,
                   [&](int64_t done, int64_t total) { progress(total + done, passes * total); }));
    AWQD_RETURN_IF_ERROR(WriteVerified(verified, out.get(), &report));
  }
  AWQD_RETURN_IF_ERROR(source.CheckUnchanged());
  AWQD_RETURN_IF_ERROR(out->Commit());
  return report;
}
}  // namespace

std::string ConfigTypeName(absl::string_view dtype) {
  for (const FloatName& name : kFloats) {
    if (name.safetensors == dtype) return std::string(name.config);
  }
  return "";
}

absl::StatusOr<std::string> DenseTypeOf(const Model& source) {
  AWQD_ASSIGN_OR_RETURN(const Json config, ReadConfig(source));
  for (const char* key : {"dtype", "torch_dtype"}) {
    for (const FloatName& name : kFloats) {
      if (config.contains(key) && config[key] == std::string(name.config))
        return std::string(name.safetensors);
    }
  }
  return std::string("F16");
}

absl::Status CompareFiles(const Folder& source, const Folder& written, const Carried& carried,
                          Verification* out) {
  for (const std::string& name : carried.files) {
    AWQD_ASSIGN_OR_RETURN(const model::File a, source.root.OpenFile(source.PathOf(name)));
    AWQD_ASSIGN_OR_RETURN(const model::File b, written.root.OpenFile(written.PathOf(name)));
    AWQD_ASSIGN_OR_RETURN(const bool same, SameBytes(a, b));
    if (!same) return Differs(name, "other bytes");
    ++out->files;
    out->file_bytes += a.size();
  }
  return absl::OkStatus();
}

absl::StatusOr<Verification> Verify(const Model& source, const std::string& written, int64_t dense,
                                    const Carried& carried, const Progress& progress) {
  AWQD_ASSIGN_OR_RETURN(const Model other, Model::Open(written));
  const auto linears = source.checkpoint()->linears();
  const int64_t quantised = static_cast<int64_t>(linears.size()) - dense;
  if ((quantised > 0) != other.quantised()) return Differs(written, "settings of quantisation");
  if (quantised > 0) {
    AWQD_RETURN_IF_ERROR(other.checkpoint().status());
    const auto got = static_cast<int64_t>(other.checkpoint()->linears().size());
    if (got != quantised) {
      return Differs(written, absl::StrCat("got ", got, " linears, expected ", quantised));
    }
  }
  Verification out;
  const int64_t total = source.tensors().total_bytes();
  int64_t done = 0;
  for (const model::LinearLocation& linear : linears) {
    AWQD_RETURN_IF_ERROR(CompareLinear(source, other, linear.path, &out));
    done += linear.bytes;
    progress(done, total);
  }
  AWQD_RETURN_IF_ERROR(CompareTensors(source, other, &out));
  AWQD_RETURN_IF_ERROR(CompareFiles(source.folder(), other.folder(), carried, &out));
  return out;
}

nlohmann::ordered_json ToJson(const Verification& verification) {
  return {{"linears", verification.linears},
          {"elements_bit_for_bit", verification.elements - verification.rounded},
          {"elements_rounded_once", verification.rounded},
          {"bias_elements", verification.biases},
          {"other_tensors", verification.tensors},
          {"other_tensor_bytes", verification.tensor_bytes},
          {"files", verification.files},
          {"file_bytes", verification.file_bytes}};
}

absl::StatusOr<Conversion> Convert(const ConvertOptions& options, const Progress& progress) {
  AWQD_RETURN_IF_ERROR(CheckVerify(options));
  AWQD_ASSIGN_OR_RETURN(const Model source, Model::Open(options.folder));
  const bool gguf = options.target == &kGgufTarget;
  if (!gguf || source.quantised()) AWQD_RETURN_IF_ERROR(source.checkpoint().status());
  AWQD_RETURN_IF_ERROR(source.CheckAllRead());
  AWQD_RETURN_IF_ERROR(CheckRewritable(source));
  Conversion report;
  report.from = source.quantised() ? std::string(source.checkpoint()->format().name) : "dense";
  report.to = std::string(options.target->name);
  AWQD_ASSIGN_OR_RETURN(report.dtype, DenseType(options, source));
  if (gguf) return ConvertToGguf(source, options, std::move(report), progress);
  AWQD_ASSIGN_OR_RETURN(const auto out, FolderWriter::Create(options.output, options.guard));
  FolderFacts facts;
  std::vector<const model::LinearLocation*> linears;  // as their codes follow one another
  for (const std::string& tensor : source.tensors().InOrder()) {
    absl::c_copy(source.LinearsWithCodes(tensor), std::back_inserter(linears));
    if (std::string path = source.DensePath(tensor); !path.empty()) facts.dense.push_back(path);
  }
  ReadAhead weights(*source.checkpoint(), std::move(linears));
  const auto replaced = [&](const std::string& tensor) -> Replaced {
    if (!source.IsPart(tensor)) return std::nullopt;
    std::vector<std::string> paths;
    for (const auto* linear : source.LinearsWithCodes(tensor)) paths.push_back(linear->path);
    return paths;
  };
  const auto encode = [&](const std::string& path) {
    return ConvertNext(source, *source.FindLinear(path), *options.target, &weights, &report);
  };
  const int64_t passes = options.verify ? 2 : 1;
  AWQD_RETURN_IF_ERROR(RewriteFolder(
      source, *options.target, options.target == &kDenseTarget ? ConfigTypeName(report.dtype) : "",
      std::move(facts), replaced, encode,
      [&](int64_t done, int64_t total) { progress(done, passes * total); }, out.get(), &report));
  if (options.verify) {
    AWQD_RETURN_IF_ERROR(VerifyFolder(source, out.get(), &report, [&](int64_t done, int64_t total) {
      progress(total + done, passes * total);
    }));
  }
  AWQD_RETURN_IF_ERROR(source.CheckUnchanged());
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
                       {"zero_point_0", linear.zero_at_0},
                       {"dense", linear.dense}});
    if (!linear.type.empty()) linears.back()["type"] = linear.type;
  }
  Json out = {{"from", conversion.from}, {"to", conversion.to}, {"linears", std::move(linears)}};
  out.update(ToJson(static_cast<const Rewritten&>(conversion)));
  if (!conversion.dtype.empty()) out["dtype"] = conversion.dtype;
  if (conversion.verified) out["verified"] = ToJson(*conversion.verified);
  return out;
}

}  // namespace awqd::tools
