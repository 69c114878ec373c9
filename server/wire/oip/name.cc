// Names of models and of what is done with them.
#include "server/wire/oip/name.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace awqd::wire::oip {
namespace {

constexpr absl::string_view kDequantize = ":dequantize";
constexpr absl::string_view kMlp = ":gated_mlp";

}  // namespace

ModelName SplitName(absl::string_view name) {
  ModelName out;
  const size_t slash = name.find('/');
  out.model = std::string(name.substr(0, slash));
  if (slash == absl::string_view::npos) return out;
  absl::string_view path = name.substr(slash + 1);
  if (absl::ConsumeSuffix(&path, kDequantize)) {
    out.kind = Kind::kDequantize;
  } else if (absl::ConsumeSuffix(&path, kMlp)) {
    out.kind = Kind::kMlp;
  } else if (absl::StrContains(path, "*")) {
    out.kind = Kind::kStack;
  }
  out.path = std::string(path);
  return out;
}

std::string JoinName(absl::string_view model, absl::string_view path, Kind kind) {
  const absl::string_view suffix = kind == Kind::kDequantize ? kDequantize
                                   : kind == Kind::kMlp      ? kMlp
                                                             : "";
  return absl::StrCat(model, "/", path, suffix);
}

}  // namespace awqd::wire::oip
