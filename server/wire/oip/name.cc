// Names of models and of what is done with them.
#include "server/wire/oip/name.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace awqd::wire::oip {
namespace {

constexpr absl::string_view kDequantize = ":dequantize";
constexpr absl::string_view kMlp = ":gated_mlp";

struct Parts {
  absl::string_view model, path;
  Kind kind = Kind::kProduct;
};

Parts PartsOf(absl::string_view name) {
  const size_t slash = name.find('/');
  Parts out = {.model = name.substr(0, slash)};
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
  const Parts parts = PartsOf(name);
  return {std::string(parts.model), std::string(parts.path), parts.kind};
}

Kind KindOf(absl::string_view name) { return PartsOf(name).kind; }

std::string JoinName(absl::string_view model, absl::string_view path, Kind kind) {
  const absl::string_view suffix = kind == Kind::kDequantize ? kDequantize
                                   : kind == Kind::kMlp      ? kMlp
                                                             : "";
  return absl::StrCat(model, "/", path, suffix);
}

}  // namespace awqd::wire::oip
