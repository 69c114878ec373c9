// Finding the linears among a checkpoint's tensors.
#include <iterator>
#include <set>
#include <tuple>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/checkpoint.h"
#include "kernels/checkpoint/experts.h"
#include "kernels/checkpoint/safetensors.h"
#include "kernels/checkpoint/tensor_names.h"

namespace awqd::model {

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
  return Invalid(name_, ": weight ", Quoted(path), ": tensor \"", marker, "\" ", found, ", but \"",
                 suffix, "\" exists");
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
  if (format.lacks == nullptr) return out;
  const auto has = [&](absl::string_view suffix) { return out.tensors.contains(suffix); };
  if (const absl::string_view suffix = format.lacks(rule.settings, has); !suffix.empty()) {
    return Invalid(name_, ": weight ", Quoted(path), ": tensor \"", suffix,
                   "\" is missing; the settings say that it exists");
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
  std::set<absl::string_view> own;
  for (const LinearLocation& linear : linears_) {
    AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled_));
    if (linear.slice_of.empty()) own.insert(linear.path);
  }
  for (const LinearLocation& linear : linears_) {
    AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled_));
    if (linear.slice_of.empty() || !own.contains(linear.path)) continue;
    return Invalid(name_, ": weight ", Quoted(linear.path),
                   ": has tensors of its own and is also a slice of ", Quoted(linear.slice_of));
  }
  return absl::OkStatus();
}

// Of a strict format: a tensor that has none of its suffixes.
absl::Status Checkpoint::CheckNoneUnread(const Format& format, absl::string_view name) const {
  const absl::string_view path = ModuleOf(format, name);
  const bool foreign =
      !format.foreign_ending.empty() && absl::EndsWith(name, format.foreign_ending);
  if (!foreign && !HasCodes(format, path)) return absl::OkStatus();
  AWQD_ASSIGN_OR_RETURN(const LinearRule* rule, rules_.RuleOf(path, cancelled_));
  if (rule == nullptr || rule->format != &format) return absl::OkStatus();
  return Invalid(name_, ": tensor ", Quoted(name), ": format ", format.name,
                 " has no such tensor, expected \"<path>", format.separator, "\" and one of ",
                 absl::StrJoin(format.suffixes, ", "));
}

// What a tensor is to the linears of `format`.
absl::Status Checkpoint::AddTensor(const Format& format, absl::string_view name,
                                   const TensorLocation& location) {
  const auto [path, suffix] = SplitTensorName(format, name);
  if (suffix.empty()) return format.strict ? CheckNoneUnread(format, name) : absl::OkStatus();
  const bool marks = IsMarker(format, suffix, *location.info);
  AWQD_ASSIGN_OR_RETURN(const LinearRule* rule, rules_.RuleOf(path, cancelled_));
  if (rule == nullptr && format.strict && marks && HasCompanions(format, path)) {
    return Invalid(name_, ": weight ", Quoted(path), ": got codes of format ", format.name,
                   ", but the settings say that it is not quantised");
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
    AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled_));
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
  SortLinears();
  return absl::OkStatus();
}

// By keys: linears themselves are large, there may be a million, and no sort can be cancelled.
void Checkpoint::SortLinears() {
  std::map<const TensorFile*, size_t> number_of;  // files are in the order of their names
  for (const auto& file : files_) number_of.emplace(file.get(), number_of.size());
  std::vector<std::tuple<size_t, int64_t, size_t>> places;
  for (size_t i = 0; i < linears_.size(); ++i) {
    const TensorLocation& codes = linears_[i].codes();
    places.emplace_back(number_of.at(codes.file), codes.info->begin, i);
  }
  absl::c_sort(places);
  std::vector<LinearLocation> sorted;
  sorted.reserve(linears_.size());
  for (const auto& [file, begin, i] : places) sorted.push_back(std::move(linears_[i]));
  linears_ = std::move(sorted);
}

}  // namespace awqd::model
