// Names and revisions of a Hub cache.
#include "kernels/checkpoint/hub_cache.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "kernels/base/status.h"

namespace awqd::model {
namespace {

constexpr absl::string_view kModels = "models--";
constexpr absl::string_view kOthers[] = {"datasets--", "spaces--", "kernels--"};
constexpr int64_t kMaxRefBytes = 256;
constexpr size_t kMinHashDigits = 40;  // SHA-1
constexpr size_t kMaxHashDigits = 64;  // SHA-256

bool IsCommitHash(absl::string_view text) {
  return text.size() >= kMinHashDigits && text.size() <= kMaxHashDigits &&
         std::all_of(text.begin(), text.end(),
                     [](char c) { return absl::ascii_isxdigit(static_cast<unsigned char>(c)); });
}

}  // namespace

std::optional<std::string> HubModelName(absl::string_view folder) {
  if (!absl::ConsumePrefix(&folder, kModels) || folder.empty()) return std::nullopt;
  return std::string(folder);
}

std::string HubFolder(absl::string_view model) { return absl::StrCat(kModels, model); }

std::string HubId(absl::string_view model) {
  const size_t dashes = model.find("--");
  if (dashes == absl::string_view::npos) return std::string(model);
  return absl::StrCat(model.substr(0, dashes), "/", model.substr(dashes + 2));
}

bool IsOtherHubFolder(absl::string_view folder) {
  return std::any_of(std::begin(kOthers), std::end(kOthers),
                     [folder](absl::string_view other) { return absl::StartsWith(folder, other); });
}

absl::StatusOr<std::string> FindSnapshot(const RepositoryRoot& root, absl::string_view folder) {
  const std::string path = absl::StrCat(folder, "/refs/main");
  AWQD_ASSIGN_OR_RETURN(const File file, root.OpenFile(path));
  if (file.size() > kMaxRefBytes) {
    return Invalid(Quoted(path), ": got ", file.size(), " bytes, expected a commit hash");
  }
  std::string text(file.size(), '\0');
  AWQD_RETURN_IF_ERROR(
      file.ReadAt(0, absl::MakeSpan(reinterpret_cast<uint8_t*>(text.data()), text.size())));
  const absl::string_view hash = absl::StripAsciiWhitespace(text);
  // Nothing else may become a part of a path.
  if (!IsCommitHash(hash)) {
    return Invalid(Quoted(path), ": got ", Quoted(hash, 64), ", expected a commit hash");
  }
  return absl::StrCat(folder, "/snapshots/", hash);
}

}  // namespace awqd::model
