// Names of tensors: which linear a tensor is of, and what it is of it, as a format spells them.
#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "kernels/checkpoint/safetensors.h"
#include "kernels/formats/format.h"

namespace awqd::model {

struct SplitName {
  absl::string_view path;
  absl::string_view suffix;  // empty for a tensor that is none of the format's
};

// The path and the longest of the format's suffixes that the tensor's name ends with.
SplitName SplitTensorName(const Format& format, absl::string_view tensor);

std::string TensorName(const Format& format, absl::string_view path, absl::string_view suffix);

bool IsOptional(const Format& format, absl::string_view suffix);
bool IsCommon(const Format& format, absl::string_view suffix);

// Whether a tensor of that suffix tells of a linear, its codes there or not: a needed one, or,
// where those are all common, any that is not.
bool TellsOfLinear(const Format& format, absl::string_view suffix);

// Whether a tensor of that suffix marks a linear as quantised in this format.
bool IsMarker(const Format& format, absl::string_view suffix, const TensorInfo& tensor);

// Of a tensor that has none of the format's suffixes: the module that it is of. Where its name ends
// with the format's foreign_ending that is what stands before it, else what stands before the last
// separator. Empty for a name without one.
absl::string_view ModuleOf(const Format& format, absl::string_view tensor);

}  // namespace awqd::model
