// Reads, adds and writes, linear by linear.
#include "client/tools/merge.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/tools/adapter.h"
#include "client/tools/convert.h"
#include "client/tools/elements.h"
#include "client/tools/gguf_metadata.h"
#include "client/tools/to_gguf.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/experts.h"

namespace awqd::tools {
namespace {

class Merger {
 public:
  Merger(const Model& base, const Adapter& adapter, const MergeOptions& options, Merged* report)
      : base_(base), adapter_(adapter), options_(options), report_(report) {}

  // Finds the linears and tensors that change, all of whose shapes fit.
  absl::Status Plan() {
    if (base_.tensors().gguf()) {
      AWQD_ASSIGN_OR_RETURN(const nlohmann::ordered_json config, ReadConfig(base_));
      AWQD_ASSIGN_OR_RETURN(names_, GgufNames::FromConfig(config));
    }
    for (const auto& [given, place] : adapter_.tensors()) {
      const size_t dot = given.rfind('.');
      const Module there = Find(given.substr(0, dot));
      const std::string name = there.path + given.substr(std::min(dot, given.size()));
      absl::Status status = PlanTensor(name, place);
      if (!there.rows.same()) {
        status = model::BadTensor(given, "the base model has its rows in another order");
      }
      if (!status.ok()) return Prefixed("adapter", status);
    }
    for (const auto& [name, parts] : adapter_.modules()) {
      Module there = Find(name);
      const absl::Status status = PlanModule(there.path, name);
      if (!status.ok()) return Prefixed(absl::StrCat("adapter: module ", Quoted(name)), status);
      const std::string path = there.path;
      there.path = name;
      modules_[path] = std::move(there);
    }
    report_->modules = static_cast<int64_t>(adapter_.modules().size());
    report_->replaced = static_cast<int64_t>(adapter_.tensors().size());
    replacement_.open = [this](const std::string& path) { return Open(path); };
    return absl::OkStatus();
  }

  const Replacement& replacement() const { return replacement_; }

  // A safetensors folder.
  absl::Status Write(const Progress& progress, FolderWriter* out) {
    FolderFacts facts = {.rtn = true, .search = options_.quantize.rtn.search};
    const auto replaced = [&](const std::string& tensor) -> Replaced {
      if (base_.IsPart(tensor)) {
        std::vector<std::string> paths;
        for (const auto* linear : base_.LinearsWithCodes(tensor)) paths.push_back(linear->path);
        return paths;
      }
      if (replacement_.tensors.contains(tensor)) return std::vector<std::string>{tensor};
      const std::string path = base_.DensePath(tensor);
      const bool stays = path.empty() || (!replacement_.paths.contains(path) &&
                                          !IsQuantisedTo(path) && options_.dtype.empty());
      return stays ? Replaced() : std::vector<std::string>{path};
    };
    for (const std::string& name : base_.tensors().InOrder()) {
      const std::string path = base_.DensePath(name);
      if (!path.empty() && !replaced(name)) facts.dense.push_back(path);
    }
    const auto encode = [&](const std::string& path) { return Encode(path); };
    const Target& target = *options_.quantize.target;
    const bool dense = target.settings == nullptr;
    return RewriteFolder(base_, target, dense ? ConfigTypeName(DenseType("")) : "",
                         std::move(facts), replaced, encode, progress, out, report_);
  }

 private:
  // A module of the adapter, and the order of its rows in the base.
  struct Module {
    std::string path;
    RowOrder rows;
  };

  // The same path, or where the base has none of that, it without its first component, which
  // transformers puts before those of a file that has only the inner model.
  std::string FindInBase(const std::string& path) const {
    const auto has = [&](const std::string& name) {
      const auto begins = base_.tensors().all().lower_bound(name + ".");
      return base_.FindLinear(name) != nullptr ||
             (begins != base_.tensors().all().end() && absl::StartsWith(begins->first, name + "."));
    };
    const size_t dot = path.find('.');
    if (dot == path.npos || has(path) || !has(path.substr(dot + 1))) return path;
    return path.substr(dot + 1);
  }

  // The path in the base, and the order of rows there: of a GGUF file its own.
  Module Find(const std::string& path) const {
    if (!names_) return {FindInBase(path), {}};
    const std::vector<GgufPlace> places = names_->Find(path);
    if (places.size() != 1) return {path, {}};
    const GgufPlace& place = places[0];
    return {place.expert < 0 ? place.path : model::PathOfExpert(place.path, place.expert),
            place.rows};
  }

  absl::Status PlanTensor(const std::string& name, const model::TensorLocation& place) {
    absl::string_view path = name;
    if (absl::ConsumeSuffix(&path, ".bias") && base_.FindLinear(path) != nullptr) {
      AWQD_ASSIGN_OR_RETURN(const HostWeight described, Describe(*base_.FindLinear(path)));
      if (place.info->shape != std::vector<int64_t>{described.n}) {
        return BadShape(name, place, {described.n});
      }
      AWQD_ASSIGN_OR_RETURN(replacement_.tensors[name], ReadFloats(name, place));
      replacement_.paths.emplace(path);
      return absl::OkStatus();
    }
    path = name;
    const bool weight = absl::ConsumeSuffix(&path, ".weight");
    const model::LinearLocation* const linear = weight ? base_.FindLinear(path) : nullptr;
    const model::TensorLocation* const there = base_.tensors().Find(name);
    if (linear == nullptr && there == nullptr) {
      return model::BadTensor(name, "the base model has none of that name");
    }
    std::vector<int64_t> shape = there != nullptr ? there->info->shape : std::vector<int64_t>();
    if (linear != nullptr) {
      AWQD_ASSIGN_OR_RETURN(const HostWeight described, Describe(*linear));
      shape = {described.n, described.k};
    }
    if (place.info->shape != shape) return BadShape(name, place, shape);
    if (linear != nullptr || !base_.DensePath(name).empty()) {
      replacement_.paths.emplace(path);
      whole_[std::string(path)] = place;
      return IsFloatType(place.info->dtype)
                 ? absl::OkStatus()
                 : model::BadTensor(name, "got ", Quoted(place.info->dtype, 16),
                                    ", expected F16, BF16 or F32");
    }
    AWQD_ASSIGN_OR_RETURN(replacement_.tensors[name], ReadFloats(name, place));
    return absl::OkStatus();
  }

  static absl::Status BadShape(const std::string& name, const model::TensorLocation& got,
                               const std::vector<int64_t>& expected) {
    return model::BadTensor(name, "got shape [", absl::StrJoin(got.info->shape, ", "),
                            "], expected [", absl::StrJoin(expected, ", "), "] as of the base");
  }

  absl::Status PlanModule(const std::string& path, const std::string& module) {
    std::vector<float> own_bias;
    int64_t rows = 0, cols = 0;
    if (const auto* linear = base_.FindLinear(path); linear != nullptr) {
      AWQD_ASSIGN_OR_RETURN(const HostWeight described, Describe(*linear));
      rows = described.n;
      cols = described.k;
      own_bias = described.bias;
    } else if (!base_.DensePath(path + ".weight").empty()) {
      const auto& shape = base_.tensors().Find(path + ".weight")->info->shape;
      rows = shape[0];
      cols = shape[1];
    } else {
      return absl::NotFoundError("the base model has no linear or embedding of that path");
    }
    AWQD_RETURN_IF_ERROR(adapter_.Read(module, rows, cols).status());
    replacement_.paths.insert(path);
    AWQD_ASSIGN_OR_RETURN(const std::vector<float> bias, adapter_.ReadBias(module));
    if (bias.empty()) return absl::OkStatus();
    const std::string name = path + ".bias";
    if (const auto* there = base_.tensors().Find(name); there != nullptr && own_bias.empty()) {
      AWQD_ASSIGN_OR_RETURN(own_bias, ReadFloats(name, *there));
    }
    std::vector<float>& to = replacement_.tensors.try_emplace(name, own_bias).first->second;
    if (to.size() != bias.size()) {
      return BadValue("lora_B.bias", absl::StrCat(bias.size(), " numbers"),
                      absl::StrCat(to.size(), ", as many as the base's bias has"));
    }
    for (size_t i = 0; i < bias.size(); ++i) to[i] += bias[i];
    return absl::OkStatus();
  }

  absl::StatusOr<HostWeight> Describe(const model::LinearLocation& linear) const {
    std::vector<uint8_t> scratch;
    return base_.checkpoint()->Describe(linear, &scratch);
  }

  // Rows of the merged weight.
  absl::StatusOr<ReadRows> Open(const std::string& path) const {
    ReadRows read;
    int64_t k = 0, n = 0;
    const auto whole = whole_.find(path);
    const model::LinearLocation* const linear = base_.FindLinear(path);
    if (whole != whole_.end() || linear == nullptr) {
      const model::TensorLocation& place =
          whole != whole_.end() ? whole->second : *base_.tensors().Find(path + ".weight");
      n = place.info->shape[0];
      k = place.info->shape[1];
      read = RowsOfTensor(place, k);
    } else {
      AWQD_ASSIGN_OR_RETURN(HostWeight given, ReadWeight(*base_.checkpoint(), *linear));
      const auto weight = std::make_shared<const HostWeight>(std::move(given));
      n = weight->n;
      k = weight->k;
      read = [weight](int64_t begin, int64_t end, float* to) {
        return FillRows(*weight, DType::kFp32, begin, end, reinterpret_cast<uint8_t*>(to));
      };
    }
    const auto module = modules_.find(path);
    if (module == modules_.end()) return read;
    AWQD_ASSIGN_OR_RETURN(LowRank low, adapter_.Read(module->second.path, n, k));
    if (!module->second.rows.same()) low.SortRows(module->second.rows);
    return ReadRows([read = std::move(read), low = std::make_shared<const LowRank>(std::move(low))](
                        int64_t begin, int64_t end, float* to) {
      AWQD_RETURN_IF_ERROR(read(begin, end, to));
      low->AddTo(begin, end - begin, to);
      return absl::OkStatus();
    });
  }

  // Whether quantize would quantise the linear, or the base has it quantised.
  bool IsQuantisedTo(const std::string& path) const {
    if (options_.quantize.target->settings == nullptr) return false;
    const model::TensorLocation* const place = base_.tensors().Find(path + ".weight");
    if (base_.FindLinear(path) != nullptr || place == nullptr) return true;
    return WhyDense(options_.quantize, path, place->info->shape[1], place->info->shape[0]).empty();
  }

  std::string DenseType(const std::string& path) const {
    const model::TensorLocation* const place = base_.tensors().Find(path + ".weight");
    const bool own = place != nullptr && base_.FindLinear(path) == nullptr;
    return options_.dtype.empty() && own ? place->info->dtype : options_.dtype;
  }

  absl::StatusOr<EncodedLinear> Encode(const std::string& path) {
    if (const auto it = replacement_.tensors.find(path); it != replacement_.tensors.end()) {
      const model::TensorInfo& info = *base_.tensors().Find(path)->info;
      EncodedLinear out;
      if (!IsFloatType(info.dtype)) {
        return BadValue("dtype", info.dtype, "F16, BF16 or F32 of a tensor that is replaced");
      }
      // No name of its own: the path is the tensor's.
      out.tensors.push_back(RoundedTensor("", info.dtype, info.shape, it->second));
      return out;
    }
    const model::LinearLocation* const linear = base_.FindLinear(path);
    if (linear != nullptr) return EncodeQuantised(path, *linear);
    const model::TensorInfo& info = *base_.tensors().Find(path + ".weight")->info;
    AWQD_ASSIGN_OR_RETURN(const ReadRows read, Open(path));
    return EncodeRows(path, info.shape[0], info.shape[1],
                      info.dtype == "BF16" ? DType::kBf16 : DType::kFp16, read);
  }

  absl::StatusOr<EncodedLinear> EncodeQuantised(const std::string& path,
                                                const model::LinearLocation& linear) {
    const Target& target = *options_.quantize.target;
    const RtnOptions& rtn = options_.quantize.rtn;
    if (IsQuantisedTo(path) && !replacement_.paths.contains(path)) {
      // As it is, where the target holds that, with the settings that the others get.
      AWQD_ASSIGN_OR_RETURN(HostWeight weight, ReadWeight(*base_.checkpoint(), linear));
      absl::StatusOr<EncodedLinear> out =
          target.Encode(std::move(weight), {.bias_dtype = "F32", .dtype = options_.dtype});
      if (out.ok() && !out->facts.dense && out->facts.bits == rtn.bits &&
          (out->facts.group_rows == rtn.group_size ||
           (rtn.group_size == -1 && out->facts.groups() == 1))) {
        return out;
      }
    }
    AWQD_ASSIGN_OR_RETURN(const HostWeight described, Describe(linear));
    AWQD_ASSIGN_OR_RETURN(const ReadRows read, Open(path));
    AWQD_ASSIGN_OR_RETURN(
        EncodedLinear out,
        EncodeRows(path, described.n, described.k,
                   described.scheme.scale_dtype == DType::kBf16 ? DType::kBf16 : DType::kFp16,
                   read));
    const auto other = replacement_.tensors.find(path + ".bias");
    const std::vector<float>& bias =
        other != replacement_.tensors.end() ? other->second : described.bias;
    if (!bias.empty()) {
      out.tensors.push_back(RoundedTensor("bias", "F32", {described.n}, bias));
    }
    return out;
  }

  absl::StatusOr<EncodedLinear> EncodeRows(const std::string& path, int64_t n, int64_t k,
                                           DType scales, const ReadRows& read) {
    if (IsQuantisedTo(path) && WhyDense(options_.quantize, path, k, n).empty()) {
      return QuantizeRows(path, k, n, scales, options_.quantize, read, &report_->linears);
    }
    EncodedLinear out;
    out.facts.dense = true;
    out.tensors.push_back(MergedTensor(path, n, k, read));
    return out;
  }

  // The tensor "weight", whose loss is known when it is written.
  NewTensor MergedTensor(const std::string& path, int64_t n, int64_t k, ReadRows read) {
    const std::string dtype = DenseType(path);
    const size_t index = report_->linears.size();
    report_->linears.push_back({.path = path, .scheme = dtype, .k = k, .n = n});
    return DenseTensor(dtype, n, k,
                       [this, read = std::move(read), type = model::GgufTypeNamed(dtype), k, index](
                           int64_t begin, int64_t end, uint8_t* to) -> absl::Status {
                         const auto rows =
                             std::make_unique_for_overwrite<float[]>((end - begin) * k);
                         AWQD_RETURN_IF_ERROR(read(begin, end, rows.get()));
                         Difference loss;
                         AWQD_RETURN_IF_ERROR(StoreAs(*type, rows.get(), begin, end - begin, k,
                                                      /*finite=*/true, to, &loss));
                         const MutexLock lock(&mutex_);
                         QuantizedLinear& linear = report_->linears[index];
                         linear.norms.Add(loss.norms);
                         linear.largest = std::max(linear.largest, loss.largest);
                         return absl::OkStatus();
                       });
  }

  const Model& base_;
  const Adapter& adapter_;
  const MergeOptions& options_;
  Merged* const report_;
  Mutex mutex_;  // of what threads add to report_
  Replacement replacement_;
  std::optional<GgufNames> names_;         // of a GGUF file
  std::map<std::string, Module> modules_;  // by path in the base: their names in the adapter
  std::map<std::string, model::TensorLocation> whole_;  // by path: the adapter's own weight
};

}  // namespace

absl::Status Validate(const MergeOptions& options) {
  const Target& target = *options.quantize.target;
  if (&target == &kGgufTarget) return absl::OkStatus();
  if (!options.dtype.empty() && !IsFloatType(options.dtype)) {
    return BadValue("dtype", options.dtype, "F16, BF16 or F32; only GGUF has blocks");
  }
  return &target == &kDenseTarget ? absl::OkStatus() : Validate(options.quantize);
}

absl::StatusOr<Merged> Merge(const MergeOptions& given, const Progress& progress) {
  AWQD_RETURN_IF_ERROR(Validate(given));
  MergeOptions options = given;
  options.quantize = WithDefaults(options.quantize);
  AWQD_ASSIGN_OR_RETURN(const Model base, Model::Open(options.quantize.folder));
  if (base.quantised()) AWQD_RETURN_IF_ERROR(base.checkpoint().status());
  AWQD_RETURN_IF_ERROR(base.CheckAllRead());
  AWQD_RETURN_IF_ERROR(CheckRewritable(base));
  if (base.quantised() && options.dtype.empty()) {
    AWQD_ASSIGN_OR_RETURN(options.dtype, DenseTypeOf(base));
  }
  AWQD_ASSIGN_OR_RETURN(const Adapter adapter, Adapter::Open(options.adapter));
  Merged report;
  report.to = std::string(options.quantize.target->name);
  Merger merger(base, adapter, options, &report);
  AWQD_RETURN_IF_ERROR(merger.Plan());
  AWQD_ASSIGN_OR_RETURN(const auto out,
                        FolderWriter::Create(options.quantize.output, options.quantize.guard,
                                             options.quantize.target == &kGgufTarget &&
                                                 IsGgufName(options.quantize.output)));
  if (options.quantize.target == &kGgufTarget) {
    const GgufOptions gguf = {options.dtype, options.quantize.leave_out};
    AWQD_ASSIGN_OR_RETURN(const GgufPlan plan, PlanGguf(base, gguf, merger.replacement()));
    Conversion written;
    AWQD_RETURN_IF_ERROR(WriteGguf(base, plan, merger.replacement(), &report.linears, progress,
                                   out.get(), &written));
    static_cast<Rewritten&>(report) = written;
  } else {
    AWQD_RETURN_IF_ERROR(merger.Write(progress, out.get()));
  }
  AWQD_RETURN_IF_ERROR(base.CheckUnchanged());
  AWQD_RETURN_IF_ERROR(adapter.CheckUnchanged());
  AWQD_RETURN_IF_ERROR(out->Commit());
  return report;
}

nlohmann::ordered_json ToJson(const Merged& merged) {
  nlohmann::ordered_json out = {{"to", merged.to},
                                {"modules", merged.modules},
                                {"replaced_tensors", merged.replaced},
                                {"linears", ToJson(merged.linears)}};
  out.update(ToJson(static_cast<const Rewritten&>(merged)));
  return out;
}

}  // namespace awqd::tools
