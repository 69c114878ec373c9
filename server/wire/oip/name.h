// Names of models of the inference protocol: each is a weight here, and an operation on it.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace awqd::wire::oip {

enum class Kind {
  kProduct,     // MODEL/PATH
  kDequantize,  // MODEL/PATH:dequantize
  kStack,       // MODEL/PATH with a '*' in the path
  kMlp,         // MODEL/PATH:gated_mlp
};

struct ModelName {
  std::string model;
  std::string path;  // empty: the name of a model alone
  Kind kind = Kind::kProduct;
};

// Splits any text, whether there is such a model and path or not.
ModelName SplitName(absl::string_view name);

// SplitName(name).kind.
Kind ParseKind(absl::string_view name);

// The inverse of SplitName.
std::string JoinName(absl::string_view model, absl::string_view path, Kind kind);

// Longer names than this name nothing.
inline constexpr int64_t kMaxNameBytes = 2048;

}  // namespace awqd::wire::oip
