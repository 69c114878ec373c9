// Model, path and suffix of a name.
#include "server/wire/oip/name.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace awqd::wire::oip {
namespace {

constexpr absl::string_view kDequantize = ":dequantize";
constexpr absl::string_view kMlp = ":gated_mlp";

struct NameParts {
  absl::string_view model, path;
  Kind kind = Kind::kProduct;
};

NameParts SplitParts(absl::string_view name) {
  const size_t slash = name.find('/');
  NameParts out = {.model = name.substr(0, slash)};
  if (slash == absl::string_view::npos) return out;
  out.path = name.substr(slash + 1);
  if (absl::ConsumeSuffix(&out.path, kDequantize)) {
    out.kind = Kind::kDequantize;
  } else if (absl::ConsumeSuffix(&out.path, kMlp)) {
    out.kind = Kind::kMlp;
  } else if (absl::StrContains(out.path, "*")) {
    out.kind = Kind::kStack;
  }
  return out;
}

}  // namespace

ModelName SplitName(absl::string_view name) {
  const NameParts parts = SplitParts(name);
  return {std::string(parts.model), std::string(parts.path), parts.kind};
}

Kind ParseKind(absl::string_view name) { return SplitParts(name).kind; }

std::string JoinName(absl::string_view model, absl::string_view path, Kind kind) {
  const absl::string_view suffix = kind == Kind::kDequantize ? kDequantize
                                   : kind == Kind::kMlp      ? kMlp
                                                             : "";
  return absl::StrCat(model, "/", path, suffix);
}

}  // namespace awqd::wire::oip
