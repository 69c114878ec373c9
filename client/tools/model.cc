// A folder, its checkpoint, and which tensor is part of what.
#include "client/tools/model.h"

#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/checkpoint/checkpoint_files.h"

namespace awqd::tools {
namespace {

// Whether config.json, or a file beside it, says anything of quantisation.
absl::StatusOr<bool> HasSettings(const Folder& folder) {
  AWQD_ASSIGN_OR_RETURN(const std::string text, ReadText(folder, model::kConfigFile));
  const auto config = model::ParseConfigJson(text);
  if (!config.ok()) return Prefixed(folder.PathOf(model::kConfigFile), config.status());
  if (config->has_value()) return true;
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> files,
                        folder.root.ListDirectory(folder.name));
  return absl::c_any_of(kSettingsFiles,
                        [&](absl::string_view name) { return absl::c_linear_search(files, name); });
}

}  // namespace

bool IsFloatType(absl::string_view dtype) {
  return dtype == "F16" || dtype == "BF16" || dtype == "F32";
}

absl::StatusOr<Model> Model::Open(const std::string& path) {
  Model out;
  AWQD_ASSIGN_OR_RETURN(out.folder_, OpenFolder(path));
  AWQD_ASSIGN_OR_RETURN(const std::string gguf,
                        model::FindGguf(out.folder_.root, out.folder_.name));
  out.quantised_ = !gguf.empty();
  if (gguf.empty()) {
    AWQD_ASSIGN_OR_RETURN(out.quantised_, HasSettings(out.folder_));
  }
  out.checkpoint_ = absl::FailedPreconditionError(absl::StrCat(
      out.folder_.name, ": the model is not quantised: no settings in config.json or beside it"));
  if (out.quantised_) out.OpenCheckpoint();
  AWQD_ASSIGN_OR_RETURN(out.tensors_, out.checkpoint_.ok()
                                          ? Tensors::FromCheckpoint(*out.checkpoint_)
                                          : Tensors::Open(out.folder_));
  return out;
}

void Model::OpenCheckpoint() {
  checkpoint_ = model::Checkpoint::Open(folder_.root, folder_.name);
  if (!checkpoint_.ok()) return;
  for (size_t i = 0; i < checkpoint_->linears().size(); ++i) {
    const model::LinearLocation& linear = checkpoint_->linears()[i];
    const Format& format = *linear.rule->format;
    by_path_.emplace(linear.path, static_cast<int64_t>(i));
    const std::string& stored = linear.slice_of.empty() ? linear.path : linear.slice_of;
    for (const auto& [suffix, place] : linear.tensors) {
      auto& codes_of = linear_of_[absl::StrCat(stored, format.separator, suffix)];
      if (suffix == format.suffixes.front()) codes_of.push_back(static_cast<int64_t>(i));
    }
  }
}

const model::LinearLocation* Model::FindLinear(absl::string_view path) const {
  const auto it = by_path_.find(path);
  return it == by_path_.end() ? nullptr : &checkpoint_->linears()[it->second];
}

std::vector<const model::LinearLocation*> Model::LinearsWithCodes(absl::string_view tensor) const {
  std::vector<const model::LinearLocation*> out;
  const auto it = linear_of_.find(tensor);
  if (it == linear_of_.end()) return out;
  for (const int64_t index : it->second) out.push_back(&checkpoint_->linears()[index]);
  return out;
}

std::string Model::DensePath(absl::string_view tensor) const {
  const model::TensorLocation* const place = tensors_.Find(tensor);
  absl::string_view path = tensor;
  if (place == nullptr || IsPart(tensor) || place->info->shape.size() != 2 ||
      place->info->bytes() == 0 || !IsFloatType(place->info->dtype) ||
      !absl::ConsumeSuffix(&path, ".weight")) {
    return "";
  }
  return std::string(path);
}

std::string Model::WhyNotQuantised(absl::string_view tensor) const {
  const model::TensorLocation* const place = tensors_.Find(tensor);
  if (place->info->shape.size() < 2) return "fewer than two dimensions";
  if (!checkpoint_.ok()) return quantised_ ? "the checkpoint does not load" : "a dense model";
  absl::string_view path = tensor;
  if (absl::ConsumeSuffix(&path, ".weight")) {
    const absl::StatusOr<const LinearRule*> rule = checkpoint_->rules().RuleOf(path);
    if (!rule.ok()) return std::string(rule.status().message());
    if (*rule == nullptr) return "left out by the settings";
  }
  return absl::StrCat("dense (", OneLine(place->info->dtype.substr(0, 16)), ")");
}

absl::Status Model::CheckUnchanged() const {
  AWQD_RETURN_IF_ERROR(tensors_.CheckUnchanged());
  return checkpoint_.ok() ? checkpoint_->CheckUnchanged(folder_.root) : absl::OkStatus();
}

}  // namespace awqd::tools
