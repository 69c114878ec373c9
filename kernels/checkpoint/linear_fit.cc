// Looking a linear's tensors up by the suffixes of a format.
#include "kernels/checkpoint/linear_fit.h"

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/tensor_names.h"

namespace awqd::model {

TensorLocation* PathTensors::Find(absl::string_view name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

bool PathTensors::HasCompanions(const Format& format, absl::string_view path) const {
  return absl::c_all_of(format.suffixes, [&](absl::string_view suffix) {
    return suffix == format.suffixes.front() || IsOptional(format, suffix) ||
           IsCommon(format, suffix) || Find(TensorName(format, path, suffix)) != nullptr;
  });
}

absl::Status PathTensors::Error(absl::string_view path, absl::StatusCode code,
                                absl::string_view what) const {
  return absl::Status(code, absl::StrCat(model_, ": weight ", Quoted(path), ": ", what));
}

absl::Status PathTensors::VisitBeside(
    absl::string_view path, absl::string_view separator,
    absl::FunctionRef<absl::Status(absl::string_view last, TensorLocation& entry)> visit) const {
  const std::string prefix = absl::StrCat(path, separator);
  for (auto it = tensors_.lower_bound(prefix);
       it != tensors_.end() && absl::StartsWith(it->first, prefix);) {
    AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled_));
    const absl::string_view last = it->first.substr(prefix.size());
    const size_t dot = last.find('.');
    if (dot == last.npos || last.substr(0, dot) == "weight") {
      AWQD_RETURN_IF_ERROR(visit(last, it->second));
      ++it;
    } else {  // a module beneath: behind it, '/' being the character after '.'
      it = tensors_.lower_bound(absl::StrCat(prefix, last.substr(0, dot), "/"));
    }
  }
  return absl::OkStatus();
}

absl::Status PathTensors::CheckCodes(absl::string_view path, const Format& format) const {
  const absl::string_view suffix = format.suffixes.front();
  const TensorLocation* const codes =
      Find(path.empty() ? std::string(suffix) : TensorName(format, path, suffix));
  if (path.empty()) {
    return Invalid(codes == nullptr ? model_ : codes->file->file().shown_name(), ": tensor ",
                   Quoted(suffix), ": got no module path before it, expected \"<path>",
                   format.separator, suffix, "\"");
  }
  if (codes != nullptr && IsMarker(format, suffix, *codes->info)) return absl::OkStatus();
  const auto found = absl::c_find_if(format.suffixes, [&](absl::string_view other) {
    return other != suffix && TellsOfLinear(format, other) &&
           Find(TensorName(format, path, other)) != nullptr;
  });
  const std::string but =
      found == format.suffixes.end() ? "" : absl::StrCat(", but \"", *found, "\" exists");
  if (codes == nullptr) return Broken(path, "tensor \"", suffix, "\" is missing", but);
  return Broken(path, "tensor \"", suffix, "\" is ", Quoted(codes->info->dtype, 32), ", not ",
                absl::StrJoin(format.code_dtypes, " or "), but);
}

// A tensor that the format does not know may change what the codes mean, and so does a product of
// low rank that is added to theirs.
absl::Status PathTensors::CheckNoneUnread(absl::string_view path, const Format& format) const {
  const std::string adapter = absl::StrCat(path, ".lora_");
  const auto it = tensors_.lower_bound(adapter);
  if (it != tensors_.end() && absl::StartsWith(it->first, adapter)) {
    return Error(path, absl::StatusCode::kUnimplemented,
                 absl::StrCat("tensor ", Quoted(it->first),
                              ": an adapter of low rank in the model's own files is not read"));
  }
  return VisitBeside(path, format.separator, [&](absl::string_view last, const TensorLocation&) {
    const std::string name = absl::StrCat(path, format.separator, last);
    if (!SplitTensorName(format, name).suffix.empty() || IsWithoutEffect(last) ||
        absl::c_linear_search(format.suffixes_without_effect, last)) {
      return absl::OkStatus();
    }
    return Invalid(model_, ": tensor ", Quoted(name), ": format ", format.name,
                   " has no such tensor, expected \"<path>", format.separator, "\" and one of ",
                   absl::StrJoin(format.suffixes, ", "));
  });
}

absl::StatusOr<LinearFit> PathTensors::Fit(absl::string_view path, const LinearRule& rule) const {
  const Format& format = *rule.format;
  AWQD_RETURN_IF_ERROR(CheckCodes(path, format));
  LinearFit out = {.linear = {.path = std::string(path), .rule = &rule}};
  LinearLocation& linear = out.linear;
  for (absl::string_view suffix : format.suffixes) {
    TensorLocation* const entry = Find(TensorName(format, path, suffix));
    if (entry != nullptr && entry->also_in != nullptr) {
      return Broken(path, "tensor \"", suffix, "\" is in two files, ",
                    entry->file->file().shown_name(), " and ", entry->also_in->file().shown_name());
    }
    if (entry != nullptr) {
      linear.tensors.emplace(std::string(suffix), *entry);
      linear.bytes += entry->info->bytes();  // each is at most its file's size: no overflow
      out.entries.push_back(entry);
    } else if (!IsOptional(format, suffix)) {
      return Broken(path, "tensor \"", suffix, "\" is missing, expected ",
                    absl::StrJoin(format.suffixes, ", "),
                    " (optional: ", absl::StrJoin(format.optional_suffixes, ", "), ")");
    }
  }
  AWQD_RETURN_IF_ERROR(CheckNoneUnread(path, format));
  if (format.lacks == nullptr) return out;
  const auto has = [&](absl::string_view suffix) { return linear.tensors.contains(suffix); };
  if (const absl::string_view suffix = format.lacks(rule.settings, has); !suffix.empty()) {
    return Broken(path, "tensor \"", suffix, "\" is missing; the settings say that it exists");
  }
  return out;
}

}  // namespace awqd::model
