// Finding a checkpoint's files and the linears in them.
#include "checkpoint/checkpoint.h"

#include <iterator>
#include <tuple>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "checkpoint/checkpoint_files.h"
#include "checkpoint/expert_slices.h"
#include "checkpoint/gguf.h"
#include "checkpoint/gguf_model.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/tensor_names.h"
#include "kernels/base/huge_pages.h"
#include "kernels/base/status.h"

namespace awqd::model {
absl::StatusOr<Checkpoint> Checkpoint::Open(const RepositoryRoot& root, absl::string_view name) {
  Checkpoint out;
  out.name_ = std::string(name);
  AWQD_ASSIGN_OR_RETURN(const std::string gguf, FindGguf(root, name));
  TensorFiles files;
  if (gguf.empty()) {
    AWQD_RETURN_IF_ERROR(out.FindConfig(root));
    AWQD_ASSIGN_OR_RETURN(files, FindTensorFiles(root, name));
    AWQD_RETURN_IF_ERROR(out.OpenFiles(root, files.names));
  } else {
    AWQD_RETURN_IF_ERROR(out.OpenGgufFile(root, gguf));
  }
  AWQD_RETURN_IF_ERROR(out.IndexTensors());
  AWQD_RETURN_IF_ERROR(out.CheckIndex(files.weight_map));
  AWQD_RETURN_IF_ERROR(out.FindLinears());
  return out;
}

absl::Status Checkpoint::FindConfig(const RepositoryRoot& root) {
  AWQD_ASSIGN_OR_RETURN(const QuantSettings config, ReadQuantSettings(root, name_));
  absl::StatusOr<FoundFormat> found = FindFormat(config.settings);
  if (!found.ok()) return Prefixed(config.place, found.status());
  found_ = *std::move(found);
  absl::StatusOr<LinearRules> rules = LinearRules::Make(found_.config);
  if (!rules.ok()) return Prefixed(config.place, rules.status());
  rules_ = *std::move(rules);
  return absl::OkStatus();
}

absl::Status Checkpoint::OpenFiles(const RepositoryRoot& root,
                                   const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const std::string path = absl::StrCat(name_, "/", name);
    absl::StatusOr<File> file = root.OpenFile(path);
    if (absl::IsNotFound(file.status())) {
      return Invalid(name_, ": shard ", Quoted(name), " is missing, expected every file that ",
                     kIndexFile, " names");
    }
    if (!file.ok()) return file.status();
    AWQD_ASSIGN_OR_RETURN(TensorFile shard, OpenSafetensors(*std::move(file)));
    files_.push_back(std::make_unique<TensorFile>(std::move(shard)));
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::OpenGgufFile(const RepositoryRoot& root, const std::string& path) {
  AWQD_ASSIGN_OR_RETURN(File file, root.OpenFile(path));
  AWQD_ASSIGN_OR_RETURN(GgufFile gguf, OpenGguf(std::move(file)));
  found_ = FormatOfGguf(gguf);
  AWQD_ASSIGN_OR_RETURN(rules_, LinearRules::Make(found_.config));
  files_.push_back(std::make_unique<TensorFile>(std::move(gguf.tensors)));
  return absl::OkStatus();
}

absl::Status Checkpoint::IndexTensors() {
  for (const auto& file : files_) {
    for (const auto& [name, info] : file->tensors()) {
      const auto [it, fresh] = tensors_.emplace(name, TensorLocation{file.get(), &info});
      if (!fresh) {
        return Invalid("tensor ", Quoted(name), ": got it in both ",
                       it->second.file->file().shown_name(), " and ", file->file().shown_name(),
                       ", expected it in one file");
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::CheckIndex(const std::map<std::string, std::string>& weight_map) const {
  for (const auto& [tensor, file] : weight_map) {
    const auto it = tensors_.find(tensor);
    const std::string path = absl::StrCat(name_, "/", file);
    if (it != tensors_.end() && it->second.file->file().name() == path) continue;
    return Invalid(
        name_, "/", kIndexFile, ": tensor ", Quoted(tensor), ": expected in ", Quoted(file),
        it == tensors_.end() ? ", which does not hold it"
                             : absl::StrCat(", found in ", it->second.file->file().shown_name()));
  }
  return absl::OkStatus();
}

// Companions without the tensor that marks a linear: a linear that lost its codes, unless only one
// of several is there, which an unquantised module may well call "scales".
absl::Status Checkpoint::CheckNoOrphan(const Format& format, absl::string_view path,
                                       absl::string_view suffix) const {
  if (!HasCompanions(format, path)) return absl::OkStatus();
  if (HasCodes(format, path)) return absl::OkStatus();
  const absl::string_view marker = format.suffixes.front();
  const auto codes = tensors_.find(TensorName(format, path, marker));
  const std::string found = codes == tensors_.end()
                                ? "is missing"
                                : absl::StrCat("is ", Quoted(codes->second.info->dtype, 32),
                                               ", not ", absl::StrJoin(format.code_dtypes, " or "));
  return Invalid(name_, ": weight ", Quoted(path), ": tensor \"", marker, "\" ", found,
                 ", though its ", suffix, " are there");
}

bool Checkpoint::HasCodes(const Format& format, absl::string_view path) const {
  const absl::string_view marker = format.suffixes.front();
  const auto codes = tensors_.find(TensorName(format, path, marker));
  return codes != tensors_.end() && IsMarker(format, marker, *codes->second.info);
}

bool Checkpoint::HasCompanions(const Format& format, absl::string_view path) const {
  return absl::c_all_of(format.suffixes, [&](absl::string_view suffix) {
    return suffix == format.suffixes.front() || IsOptional(format, suffix) ||
           IsCommon(format, suffix) || tensors_.contains(TensorName(format, path, suffix));
  });
}

absl::StatusOr<LinearLocation> Checkpoint::Locate(absl::string_view path,
                                                  const LinearRule& rule) const {
  const Format& format = *rule.format;
  LinearLocation out = {.path = std::string(path), .rule = &rule};
  for (absl::string_view suffix : format.suffixes) {
    const auto it = tensors_.find(TensorName(format, path, suffix));
    if (it != tensors_.end()) {
      out.tensors.emplace(std::string(suffix), it->second);
      out.bytes += it->second.info->bytes();  // each is at most its file's size: no overflow
    } else if (!IsOptional(format, suffix)) {
      return Invalid(name_, ": weight ", Quoted(path), ": tensor \"", suffix,
                     "\" is missing, expected ", absl::StrJoin(format.suffixes, ", "),
                     " (optional: ", absl::StrJoin(format.optional_suffixes, ", "), ")");
    }
  }
  return out;
}

absl::Status Checkpoint::AddLinear(LinearLocation linear) {
  ignored_tensors_ -= static_cast<int>(linear.tensors.size());
  if (!HoldsAllExperts(linear)) {
    linears_.push_back(std::move(linear));
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<LinearLocation>> experts = SliceExperts(linear, &slices_);
  if (!experts.ok()) return Prefixed(name_, experts.status());
  absl::c_move(*experts, std::back_inserter(linears_));
  return absl::OkStatus();
}

// An expert may have tensors of its own, or be a slice of others, but not both.
absl::Status Checkpoint::CheckExpertsOnce() const {
  absl::flat_hash_set<absl::string_view> own;
  for (const LinearLocation& linear : linears_) {
    if (linear.slice_of.empty()) own.insert(linear.path);
  }
  for (const LinearLocation& linear : linears_) {
    if (linear.slice_of.empty() || !own.contains(linear.path)) continue;
    return Invalid(name_, ": weight ", Quoted(linear.path),
                   ": got it in tensors of its own and in those of ", Quoted(linear.slice_of),
                   ", expected it in one of the two");
  }
  return absl::OkStatus();
}

// Of a strict format: a tensor that has none of its suffixes.
absl::Status Checkpoint::CheckNoneUnread(const Format& format, absl::string_view name) const {
  const absl::string_view path = ModuleOf(format, name);
  const bool foreign =
      !format.foreign_ending.empty() && absl::EndsWith(name, format.foreign_ending);
  if (!foreign && !HasCodes(format, path)) return absl::OkStatus();
  const LinearRule* const rule = rules_.RuleOf(path);
  if (rule == nullptr || rule->format != &format) return absl::OkStatus();
  return Invalid(name_, ": tensor ", Quoted(name), ": got a name that format ", format.name,
                 " does not have, expected \"<path>", format.separator, "\" and one of ",
                 absl::StrJoin(format.suffixes, ", "));
}

// What a tensor is to the linears of `format`.
absl::Status Checkpoint::AddTensor(const Format& format, absl::string_view name,
                                   const TensorLocation& location) {
  const auto [path, suffix] = SplitTensorName(format, name);
  if (suffix.empty()) return format.strict ? CheckNoneUnread(format, name) : absl::OkStatus();
  const bool marks = IsMarker(format, suffix, *location.info);
  const LinearRule* const rule = rules_.RuleOf(path);
  if (rule == nullptr && format.strict && marks && HasCompanions(format, path)) {
    return Invalid(name_, ": weight ", Quoted(path), ": got codes of format ", format.name,
                   ", expected none: by the settings it is not quantised");
  }
  if (rule == nullptr || rule->format != &format) return absl::OkStatus();
  if (suffix != format.suffixes.front()) {
    return TellsOfLinear(format, suffix) ? CheckNoOrphan(format, path, suffix) : absl::OkStatus();
  }
  if (!marks) return absl::OkStatus();
  if (path.empty()) {
    return Invalid(location.file->file().shown_name(), ": tensor ", Quoted(name),
                   ": got no module path before it, expected \"<path>", format.separator, suffix,
                   "\"");
  }
  AWQD_ASSIGN_OR_RETURN(LinearLocation linear, Locate(path, *rule));
  return AddLinear(std::move(linear));
}

absl::Status Checkpoint::FindLinears() {
  std::vector<const Format*> formats;  // of the rules, mostly one
  for (const LinearRule& rule : found_.config.rules) {
    if (!absl::c_linear_search(formats, rule.format)) formats.push_back(rule.format);
  }
  ignored_tensors_ = static_cast<int>(tensors_.size());
  for (const auto& [name, location] : tensors_) {
    for (const Format* format : formats) {
      AWQD_RETURN_IF_ERROR(AddTensor(*format, name, location));
    }
  }
  if (linears_.empty()) {
    return Invalid(name_, ": got no quantised linear among ", tensors_.size(),
                   " tensors, expected some \"", format().suffixes.front(), "\"",
                   note().empty() ? "" : absl::StrCat(" (", note(), ")"));
  }
  AWQD_RETURN_IF_ERROR(CheckExpertsOnce());
  absl::c_sort(linears_, [&](const LinearLocation& a, const LinearLocation& b) {
    const TensorLocation& left = a.codes();
    const TensorLocation& right = b.codes();
    return std::tie(left.file->file().name(), left.info->begin) <
           std::tie(right.file->file().name(), right.info->begin);
  });
  return absl::OkStatus();
}

int64_t Checkpoint::total_bytes() const {
  int64_t bytes = 0;
  for (const LinearLocation& linear : linears_) bytes += linear.bytes;
  return bytes;
}

absl::StatusOr<HostWeight> Checkpoint::Read(const LinearLocation& linear,
                                            std::vector<uint8_t>* scratch) const {
  if (static_cast<int64_t>(scratch->size()) < linear.bytes) {
    *scratch = {};  // first free, then allocate
    scratch->reserve(linear.bytes);
    AdviseHugePages(scratch->data(), linear.bytes);
    scratch->resize(linear.bytes);
  }
  // What the file calls it, which is not what a slice is called.
  const Format& format = *linear.rule->format;
  const std::string& stored = linear.slice_of.empty() ? linear.path : linear.slice_of;
  LinearTensors tensors;
  int64_t at = 0;
  for (const auto& [suffix, location] : linear.tensors) {
    const auto bytes = absl::MakeSpan(*scratch).subspan(at, location.info->bytes());
    absl::Status status = location.file->Read(*location.info, bytes);
    if (!status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat(status.message(), " (tensor ",
                                       Quoted(TensorName(format, stored, suffix)), ")"));
    }
    tensors.emplace(suffix, TensorView{location.info->dtype, location.info->shape, bytes});
    at += location.info->bytes();
  }
  absl::StatusOr<HostWeight> out = format.decode(linear.rule->settings, tensors);
  if (out.ok()) return out;
  return Prefixed(
      absl::StrCat(linear.codes().file->file().shown_name(), ": weight ", Quoted(linear.path),
                   linear.slice_of.empty()
                       ? ""
                       : absl::StrCat(" (a slice of ", Quoted(linear.slice_of), ")")),
      out.status());
}

absl::Status Checkpoint::CheckUnchanged(const RepositoryRoot& root) const {
  for (const auto& file : files_) {
    const absl::StatusOr<File> now = root.OpenFile(file->file().name());
    if (!now.ok() || !now->SameFileAs(file->file())) {
      return Invalid(file->file().shown_name(), ": the file was replaced while it was loaded");
    }
    AWQD_RETURN_IF_ERROR(file->file().CheckUnchanged());
  }
  return absl::OkStatus();
}

}  // namespace awqd::model
