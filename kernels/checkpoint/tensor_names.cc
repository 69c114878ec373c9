// Taking names of tensors apart.
#include "kernels/checkpoint/tensor_names.h"

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace awqd::model {

SplitName SplitTensorName(const Format& format, absl::string_view tensor) {
  SplitName out;
  for (absl::string_view suffix : format.suffixes) {
    absl::string_view path = tensor;
    if (suffix.size() <= out.suffix.size() || !absl::ConsumeSuffix(&path, suffix)) continue;
    if (path.empty() || absl::ConsumeSuffix(&path, format.separator)) out = {path, suffix};
  }
  return out;
}

std::string TensorName(const Format& format, absl::string_view path, absl::string_view suffix) {
  return absl::StrCat(path, format.separator, suffix);
}

bool IsOptional(const Format& format, absl::string_view suffix) {
  return absl::c_linear_search(format.optional_suffixes, suffix);
}

bool IsCommon(const Format& format, absl::string_view suffix) {
  return absl::c_linear_search(format.common_suffixes, suffix);
}

bool TellsOfLinear(const Format& format, absl::string_view suffix) {
  if (IsCommon(format, suffix)) return false;
  if (format.common_suffixes.empty()) return !IsOptional(format, suffix);
  const auto needed = [&](absl::string_view other) {
    return other != format.suffixes.front() && !IsOptional(format, other);
  };
  return needed(suffix) || absl::c_all_of(format.suffixes, [&](absl::string_view other) {
           return !needed(other) || IsCommon(format, other);
         });
}

bool IsMarker(const Format& format, absl::string_view suffix, const TensorInfo& tensor) {
  if (suffix != format.suffixes.front()) return false;
  return format.code_dtypes.empty() || absl::c_linear_search(format.code_dtypes, tensor.dtype);
}

absl::string_view ModuleOf(const Format& format, absl::string_view tensor) {
  if (!format.foreign_ending.empty() && absl::ConsumeSuffix(&tensor, format.foreign_ending)) {
    return tensor;
  }
  const size_t at = tensor.rfind(format.separator);
  return at == absl::string_view::npos ? "" : tensor.substr(0, at);
}

}  // namespace awqd::model
