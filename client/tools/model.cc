// Opens folders, the headers of their tensor files, and their checkpoints.
#include "client/tools/model.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <tuple>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/checkpoint/checkpoint_files.h"
#include "kernels/checkpoint/quant_settings.h"
#include "kernels/checkpoint/tensor_names.h"

namespace awqd::tools {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxTextBytes = 64 << 20;
constexpr int64_t kComparedBytes = 8 << 20;

using ReadBytes = absl::FunctionRef<absl::Status(int64_t at, absl::Span<uint8_t> to)>;

absl::StatusOr<bool> SameParts(int64_t bytes, ReadBytes a, ReadBytes b) {
  std::vector<uint8_t> left(std::min(kComparedBytes, bytes)), right(left.size());
  for (int64_t at = 0; at < bytes; at += kComparedBytes) {
    const int64_t count = std::min(kComparedBytes, bytes - at);
    AWQD_RETURN_IF_ERROR(a(at, absl::MakeSpan(left).first(count)));
    AWQD_RETURN_IF_ERROR(b(at, absl::MakeSpan(right).first(count)));
    if (std::memcmp(left.data(), right.data(), count) != 0) return false;
  }
  return true;
}

// Whether config.json, or a file beside it, says anything of quantisation.
absl::StatusOr<bool> HasSettings(const Folder& folder) {
  const absl::StatusOr<std::string> text = ReadText(folder, model::kConfigFile);
  if (absl::IsNotFound(text.status())) return false;
  if (!text.ok()) return text.status();
  const auto config = model::ParseConfigJson(*text);
  if (!config.ok()) return Prefixed(folder.PathOf(model::kConfigFile), config.status());
  if (config->has_value()) return true;
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> files,
                        folder.root.ListDirectory(folder.name));
  return absl::c_any_of(kSettingsFiles,
                        [&](absl::string_view name) { return absl::c_linear_search(files, name); });
}

// Adds the paths beneath `folder` of the models in it: of directories with a config.json, and of
// snapshots in a Hub cache.
void AddModels(const fs::path& folder, const std::string& prefix, std::vector<std::string>* out) {
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    std::error_code unreadable;
    if (fs::exists(it->path() / std::string(model::kConfigFile), unreadable)) {
      out->push_back(absl::StrCat(prefix, name));
    } else if (model::HubModelName(name) || name == "snapshots") {
      AddModels(it->path(), absl::StrCat(prefix, name, "/"), out);
    }
  }
}

// Why a directory without tensors is no model: it may hold models.
absl::Status NoModel(const std::string& path, const absl::Status& status) {
  constexpr size_t kMostNames = 20;
  std::vector<std::string> models;
  AddModels(path, "", &models);
  if (models.empty()) return status;
  absl::c_sort(models);
  const size_t more = models.size() - std::min(models.size(), kMostNames);
  models.resize(models.size() - more);
  return Invalid(Quoted(path, 1024),
                 ": got a folder of models, expected one of them: ", absl::StrJoin(models, ", "),
                 more > 0 ? absl::StrCat(" and ", more, " more") : "");
}

}  // namespace

absl::StatusOr<std::string> ReadText(const Folder& folder, absl::string_view file) {
  AWQD_ASSIGN_OR_RETURN(const model::File open, folder.root.OpenFile(folder.PathOf(file)));
  if (open.size() > kMaxTextBytes) {
    return Invalid(open.shown_name(), ": got ", open.size(), " bytes, expected at most ",
                   kMaxTextBytes);
  }
  std::string text(open.size(), '\0');
  AWQD_RETURN_IF_ERROR(
      open.ReadAt(0, absl::MakeSpan(reinterpret_cast<uint8_t*>(text.data()), text.size())));
  return text;
}

absl::StatusOr<Tensors> Tensors::Open(const Folder& folder) {
  Tensors out;
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> gguf,
                        model::FindGguf(folder.root, folder.name));
  out.gguf_ = !gguf.empty();
  AWQD_ASSIGN_OR_RETURN(model::TensorFiles opened,
                        out.gguf_ ? model::OpenGgufFiles(folder.root, gguf)
                                  : model::OpenTensorFiles(folder.root, folder.name));
  out.files_ = std::move(opened.files);
  out.tensors_ = std::move(opened.tensors);
  out.respelled_ = std::move(opened.respelled);
  return out;
}

Tensors Tensors::FromCheckpoint(const model::Checkpoint& checkpoint) {
  Tensors out;
  out.gguf_ = &checkpoint.format() == &kGgufFormat;
  out.files_.assign(checkpoint.files().begin(), checkpoint.files().end());
  out.tensors_ = checkpoint.tensors();
  return out;
}

std::vector<std::string> Tensors::FileNames() const {
  std::vector<std::string> out;
  for (const auto& file : files_) {
    out.push_back(fs::path(file->file().name()).filename().string());
  }
  return out;
}

const model::TensorLocation* Tensors::Find(absl::string_view name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

std::vector<std::string> Tensors::InOrder() const {
  std::vector<const Map::value_type*> places;
  for (const auto& entry : tensors_) places.push_back(&entry);
  absl::c_sort(places, [](const auto* a, const auto* b) {
    return std::tie(a->second.file->file().name(), a->second.info->begin, a->first) <
           std::tie(b->second.file->file().name(), b->second.info->begin, b->first);
  });
  std::vector<std::string> out;
  for (const auto* place : places) out.emplace_back(place->first);
  return out;
}

int64_t Tensors::total_bytes() const {
  int64_t bytes = 0;
  for (const auto& [name, place] : tensors_) bytes += place.info->bytes();
  return bytes;
}

absl::Status ReadPart(const model::TensorLocation& place, int64_t at, absl::Span<uint8_t> out) {
  model::TensorInfo part = *place.info;
  part.begin += at;
  part.end = part.begin + static_cast<int64_t>(out.size());
  return place.file->Read(part, out);
}

absl::StatusOr<bool> SameBytes(const model::TensorLocation& a, const model::TensorLocation& b) {
  if (a.info->dtype != b.info->dtype || a.info->shape != b.info->shape) return false;
  return SameParts(
      a.info->bytes(), [&](int64_t at, absl::Span<uint8_t> to) { return ReadPart(a, at, to); },
      [&](int64_t at, absl::Span<uint8_t> to) { return ReadPart(b, at, to); });
}

absl::StatusOr<bool> SameBytes(const model::File& a, const model::File& b) {
  if (a.size() != b.size()) return false;
  return SameParts(
      a.size(), [&](int64_t at, absl::Span<uint8_t> to) { return a.ReadAt(at, to); },
      [&](int64_t at, absl::Span<uint8_t> to) { return b.ReadAt(at, to); });
}

absl::Status Tensors::CheckUnchanged() const {
  for (const auto& file : files_) AWQD_RETURN_IF_ERROR(file->file().CheckUnchanged());
  return absl::OkStatus();
}

bool IsFloatType(absl::string_view dtype) {
  return dtype == "F16" || dtype == "BF16" || dtype == "F32";
}

absl::StatusOr<Model> Model::Open(const std::string& path) {
  Model out;
  AWQD_ASSIGN_OR_RETURN(out.folder_, model::OpenModelFolder(path));
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> gguf,
                        model::FindGguf(out.folder_.root, out.folder_.name));
  out.quantised_ = !gguf.empty();
  if (gguf.empty()) {
    AWQD_ASSIGN_OR_RETURN(out.quantised_, HasSettings(out.folder_));
  }
  out.OpenCheckpoint();
  out.quantised_ |= out.checkpoint_.ok();  // tensors alone may tell
  if (!out.quantised_ && absl::IsInvalidArgument(out.checkpoint_.status())) {
    out.checkpoint_ = absl::FailedPreconditionError(absl::StrCat(
        out.folder_.name, ": the model is not quantised: no settings in config.json or beside it"));
  }
  if (out.checkpoint_.ok()) {
    out.tensors_ = Tensors::FromCheckpoint(*out.checkpoint_);
  } else {
    absl::StatusOr<Tensors> tensors = Tensors::Open(out.folder_);
    if (!tensors.ok()) return NoModel(path, tensors.status());
    out.tensors_ = *std::move(tensors);
  }
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
    for (const absl::string_view suffix : format.suffixes_without_effect) {
      const std::string name = absl::StrCat(stored, format.separator, suffix);
      if (checkpoint_->tensors().contains(name)) linear_of_[name];
    }
  }
}

bool Model::IsQuantised(absl::string_view tensor) const {
  if (!checkpoint_.ok()) return false;
  const auto it = checkpoint_->tensors().find(tensor);
  return it != checkpoint_->tensors().end() && it->second.quantised();
}

absl::Status Model::CheckAllRead() const {
  for (const auto& [name, place] : tensors_.all()) {
    if (place.also_in == nullptr) continue;
    return Invalid("tensor ", Quoted(name), ": is in two files, ", place.file->file().shown_name(),
                   " and ", place.also_in->file().shown_name());
  }
  if (checkpoint_.ok()) {
    const model::UnservedLinears& unserved = checkpoint_->unserved();
    if (unserved.empty()) return absl::OkStatus();
    const absl::Status& first = unserved.begin()->second;
    return absl::Status(
        first.code(), absl::StrCat(first.message(), " (", unserved.size(), " quantised linears of ",
                                   folder_.name, " cannot be read, and would be lost)"));
  }
  for (const auto& [name, place] : tensors_.all()) {
    if (!model::ParseCodes(name, *place.info).certain) continue;
    return absl::UnimplementedError(
        absl::StrCat(folder_.name, ": tensor ", Quoted(name), " of ", Quoted(place.info->dtype, 32),
                     " is quantised, and the folder has no settings to read it with"));
  }
  return absl::OkStatus();
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
  if (place == nullptr || IsQuantised(tensor) || place->info->shape.size() != 2 ||
      place->info->bytes() == 0 || !IsFloatType(place->info->dtype) ||
      !absl::ConsumeSuffix(&path, ".weight")) {
    return "";
  }
  return std::string(path);
}

std::string Model::WhyNotQuantised(absl::string_view tensor) const {
  const model::TensorLocation* const place = tensors_.Find(tensor);
  if (place->info->shape.size() < 2) return "fewer than two dimensions";
  if (absl::IsFailedPrecondition(checkpoint_.status())) return "a dense model";
  if (model::ParseCodes(tensor, *place->info).certain) return "codes that are not read";
  if (!checkpoint_.ok()) return "the checkpoint does not load";
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
