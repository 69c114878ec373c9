// Collecting the settings of layers, and what has none.
#include "kernels/checkpoint/comfy_layers.h"

#include <string>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/checkpoint/quant_settings.h"
#include "kernels/checkpoint/tensor_names.h"

namespace awqd::model {
namespace {

using Tensors = std::map<absl::string_view, TensorLocation>;

constexpr absl::string_view kMetadata = "_quantization_metadata";
constexpr absl::string_view kLayers = "layers";
constexpr absl::string_view kMarker = ".comfy_quant";
constexpr absl::string_view kOldScale = ".scale_weight";
constexpr absl::string_view kWeight = ".weight";
constexpr absl::string_view kFp8 = "F8_E4M3";
constexpr int64_t kMostMarkerBytes = 64 << 10;
// Where diffusion models stand in files that have them beside others.
constexpr absl::string_view kPrefixes[] = {"", "model.diffusion_model.", "model.model.", "net."};

bool IsFp8(absl::string_view dtype) { return absl::StartsWith(dtype, "F8_E"); }

// The path of a tensor with that end of its name; empty for others.
absl::string_view PathBefore(absl::string_view end, absl::string_view name) {
  return absl::ConsumeSuffix(&name, end) ? name : "";
}

class Collector {
 public:
  Collector(const Tensors& tensors, bool alone, const std::atomic<bool>* cancelled)
      : tensors_(tensors), alone_(alone), cancelled_(cancelled) {}

  absl::Status AddMetadata(const TensorFile& file) {
    const absl::string_view metadata = file.FindMetadata(kMetadata);
    if (metadata.empty()) return absl::OkStatus();
    absl::Status status = AddLayers(metadata);
    if (status.ok()) return status;
    return Prefixed(absl::StrCat(file.file().shown_name(), ": __metadata__: ", kMetadata), status);
  }

  absl::Status AddTensors() {
    for (const auto& [name, place] : tensors_) {
      AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled_));
      if (const absl::string_view path = PathBefore(kMarker, name); !path.empty()) {
        AWQD_RETURN_IF_ERROR(AddMarker(path, place));
      } else if (const absl::string_view old = PathBefore(kOldScale, name); !old.empty()) {
        const auto weight = tensors_.find(absl::StrCat(old, kWeight));
        if (weight != tensors_.end() && IsFp8(weight->second.info->dtype)) {
          layers_.emplace(old, OfFp8(weight->second.info->dtype));
        }
      }
    }
    found_ = !layers_.empty() || !broken_.empty();
    for (const auto& [name, place] : tensors_) {
      AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled_));
      AddUnmarked(name, *place.info);
    }
    return absl::OkStatus();
  }

  // Nothing where there is no layer.
  absl::StatusOr<std::optional<FoundFormat>> Finish() {
    if (!found_) return std::optional<FoundFormat>();
    FoundFormat out = {.format = &kComfyFormat,
                       .quant_method = std::string(kComfyFormat.quant_method)};
    if (lost_ > 0) {
      out.config.note = absl::StrCat(kMetadata, " names ", lost_,
                                     " layers that have no weight, such as ", first_lost_);
    }
    for (const auto& [path, reason] : broken_) layers_.erase(path);
    if (!layers_.empty()) {
      Setting config;
      config.members[std::string(kLayers)].members = std::move(layers_);
      AWQD_ASSIGN_OR_RETURN(const QuantConfig read, kComfyFormat.read(config));
      out.config.rules = read.rules;
    }
    std::map<std::string, LinearRule> unread;  // by reason
    for (const auto& [path, reason] : broken_) {
      LinearRule& rule = unread[reason.ToString()];
      rule.unread = reason;
      rule.targets.push_back({ModulePattern::Kind::kPath, path});
    }
    for (auto& [reason, rule] : unread) out.config.rules.push_back(std::move(rule));
    AWQD_RETURN_IF_ERROR(CheckRules(out.config.rules.size()));
    for (LinearRule& rule : out.config.rules) rule.format = &kComfyFormat;
    return std::optional<FoundFormat>(std::move(out));
  }

 private:
  static Setting OfFp8(absl::string_view dtype, bool scaled = true) {
    Setting out;
    out.members["format"] = Setting::String(dtype == kFp8 ? "float8_e4m3fn" : "float8_e5m2");
    if (!scaled) out.members["scaled"] = Setting::Literal(false);
    return out;
  }

  absl::Status AddLayers(absl::string_view text) {
    AWQD_ASSIGN_OR_RETURN(const Setting metadata, ParseSettingsJson(text));
    AWQD_ASSIGN_OR_RETURN(const Setting* layers, ReadObject(metadata, kLayers));
    if (layers == nullptr) return BadValue(kLayers, "nothing", "an object");
    for (const auto& [path, layer] : layers->members) {
      AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled_));
      const auto* const prefix = absl::c_find_if(kPrefixes, [&, name = &path](const auto& before) {
        return tensors_.contains(absl::StrCat(before, *name, kWeight));
      });
      if (prefix != std::end(kPrefixes)) {
        layers_.emplace(absl::StrCat(*prefix, path), layer);
      } else if (lost_++ == 0) {
        first_lost_ = Quoted(path);
      }
    }
    return absl::OkStatus();
  }

  absl::Status AddMarker(absl::string_view path, const TensorLocation& place) {
    if (layers_.contains(path)) return absl::OkStatus();  // the metadata counts
    const TensorInfo& info = *place.info;
    if (info.dtype != "U8" || info.shape.size() != 1 || info.bytes() > kMostMarkerBytes) {
      broken_[std::string(path)] =
          BadValue("tensor \"comfy_quant\"",
                   absl::StrCat(Quoted(info.dtype, 32), " [", absl::StrJoin(info.shape, ", "), "]"),
                   absl::StrCat("U8 [bytes of JSON], at most ", kMostMarkerBytes));
      return absl::OkStatus();
    }
    std::string text(info.bytes(), '\0');
    AWQD_RETURN_IF_ERROR(place.file->Read(
        info, absl::MakeSpan(reinterpret_cast<uint8_t*>(text.data()), text.size()), cancelled_));
    absl::StatusOr<Setting> layer = ParseSettingsJson(text);
    if (layer.ok()) {
      layers_.emplace(path, *std::move(layer));
    } else {
      broken_[std::string(path)] = Prefixed("tensor \"comfy_quant\"", layer.status());
    }
    return absl::OkStatus();
  }

  // Codes that nothing marks.
  void AddUnmarked(absl::string_view name, const TensorInfo& info) {
    const absl::string_view path = PathBefore(kWeight, name);
    if (path.empty() || layers_.contains(path) || broken_.contains(path)) return;
    if (!ParseCodes(name, info).certain) return;
    const auto beside = [&](absl::string_view suffix) {
      return tensors_.contains(absl::StrCat(path, suffix));
    };
    const bool scaled = beside(".weight_scale") || beside(".weight_scale_inv") || beside(kOldScale);
    if (IsFp8(info.dtype) && !scaled) {
      if (!found_ && !alone_) return;
      found_ = true;
      if (info.shape.size() == 2) {
        layers_.emplace(path, OfFp8(info.dtype, /*scaled=*/false));
        return;
      }
      broken_[std::string(path)] = absl::UnimplementedError(
          absl::StrCat("tensor \"weight\": got ", info.shape.size(), " dimensions, expected 2"));
    } else {
      broken_[std::string(path)] = absl::UnimplementedError(absl::StrCat(
          "tensor \"weight\": got ", Quoted(info.dtype, 32), " [", absl::StrJoin(info.shape, ", "),
          "], expected \"comfy_quant\" beside it, or an entry of ", kMetadata));
    }
  }

  const Tensors& tensors_;
  const bool alone_;
  const std::atomic<bool>* const cancelled_;
  std::map<std::string, Setting, std::less<>> layers_;
  std::map<std::string, absl::Status, std::less<>> broken_;
  bool found_ = false;
  int64_t lost_ = 0;  // layers of the metadata without a weight
  std::string first_lost_;
};

}  // namespace

bool HasComfyLayers(const TensorFile& file) {
  if (!file.FindMetadata(kMetadata).empty()) return true;
  return absl::c_any_of(file.tensors(), [&](const auto& tensor) {
    const auto& [name, info] = tensor;
    return absl::EndsWith(name, kMarker) || absl::EndsWith(name, kOldScale) ||
           (absl::EndsWith(name, kWeight) && IsFp8(info.dtype) &&
            !file.tensors().contains(absl::StrCat(name, "_scale")) &&
            !file.tensors().contains(absl::StrCat(name, "_scale_inv")));
  });
}

absl::StatusOr<std::optional<FoundFormat>> FindComfyLayers(
    absl::Span<const std::shared_ptr<const TensorFile>> files,
    const std::map<absl::string_view, TensorLocation>& tensors, bool alone,
    const std::atomic<bool>* cancelled) {
  Collector collector(tensors, alone, cancelled);
  for (const auto& file : files) AWQD_RETURN_IF_ERROR(collector.AddMetadata(*file));
  AWQD_RETURN_IF_ERROR(collector.AddTensors());
  return collector.Finish();
}

}  // namespace awqd::model
