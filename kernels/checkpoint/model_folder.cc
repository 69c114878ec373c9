// Names and revisions of a Hub cache; finding a model by its path, there too.
#include "kernels/checkpoint/model_folder.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"

namespace awqd::model {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kModels = "models--";
constexpr absl::string_view kOthers[] = {"datasets--", "spaces--", "kernels--"};
constexpr absl::string_view kSnapshots = "/snapshots/";
constexpr int64_t kMaxRefBytes = 256;
constexpr size_t kMinHashDigits = 40;  // SHA-1
constexpr size_t kMaxHashDigits = 64;  // SHA-256

bool IsCommitHash(absl::string_view text) {
  return text.size() >= kMinHashDigits && text.size() <= kMaxHashDigits &&
         std::all_of(text.begin(), text.end(),
                     [](char c) { return absl::ascii_isxdigit(static_cast<unsigned char>(c)); });
}

// `no_main`: the error that there is no refs/main.
absl::StatusOr<std::string> FindOnlySnapshot(const RepositoryRoot& root, absl::string_view folder,
                                             const absl::Status& no_main) {
  absl::StatusOr<std::vector<std::string>> hashes =
      root.ListDirectory(absl::StrCat(folder, "/snapshots"));
  if (!hashes.ok()) return no_main;
  std::erase_if(*hashes, [](absl::string_view name) { return !IsCommitHash(name); });
  if (hashes->empty()) return no_main;
  if (hashes->size() == 1) return absl::StrCat(folder, kSnapshots, hashes->front());
  return Invalid(Quoted(folder), ": got ", hashes->size(),
                 " snapshots and no refs/main, which says the one to serve: give one as --model "
                 "NAME=DIR/snapshots/HASH");
}

// The Hub's cache, as the package huggingface_hub finds it.
fs::path HubCache() {
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  if (const std::string cache = variable("HF_HUB_CACHE"); !cache.empty()) return cache;
  if (const std::string home = variable("HF_HOME"); !home.empty()) return fs::path(home) / "hub";
  return fs::path(variable("HOME")) / ".cache/huggingface/hub";
}

// The snapshot of a model in a Hub cache, given as "models--ORG--NAME" in it, or as "ORG/NAME"
// where there is no such path. Every other path as it is.
absl::StatusOr<std::string> FindInHubCache(const std::string& path) {
  std::error_code error;
  const std::string without(WithoutSlashes(path));
  fs::path folder = without;
  if (!fs::exists(folder, error) && std::distance(folder.begin(), folder.end()) == 2) {
    folder = HubCache() / HubFolder(NameOfHubId(without));
  }
  const std::string name = folder.filename().string();
  if (!HubModelName(name) || !fs::is_directory(folder / "snapshots", error)) return path;
  const fs::path above = folder.has_parent_path() ? folder.parent_path() : fs::path(".");
  AWQD_ASSIGN_OR_RETURN(const auto root, RepositoryRoot::Open(above.string()));
  AWQD_ASSIGN_OR_RETURN(const std::string snapshot, FindSnapshot(root, name));
  return (above / snapshot).string();
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

std::string NameOfHubId(absl::string_view id) {
  const std::vector<absl::string_view> parts = absl::StrSplit(id, '/');
  const bool hub = parts.size() == 2 && !parts[0].empty() && !parts[1].empty();
  return hub ? absl::StrCat(parts[0], "--", parts[1]) : std::string(id);
}

absl::StatusOr<std::string> FindSnapshot(const RepositoryRoot& root, absl::string_view folder) {
  const std::string path = absl::StrCat(folder, "/refs/main");
  absl::StatusOr<File> file = root.OpenFile(path);
  if (absl::IsNotFound(file.status())) return FindOnlySnapshot(root, folder, file.status());
  if (!file.ok()) return file.status();
  if (file->size() > kMaxRefBytes) {
    return Invalid(Quoted(path), ": got ", file->size(), " bytes, expected a commit hash");
  }
  std::string text(file->size(), '\0');
  AWQD_RETURN_IF_ERROR(
      file->ReadAt(0, absl::MakeSpan(reinterpret_cast<uint8_t*>(text.data()), text.size())));
  const absl::string_view hash = absl::StripAsciiWhitespace(text);
  // Nothing else may become a part of a path.
  if (!IsCommitHash(hash)) {
    return Invalid(Quoted(path), ": got ", Quoted(hash, 64), ", expected a commit hash");
  }
  return absl::StrCat(folder, kSnapshots, hash);
}

std::optional<std::string> FolderOfSnapshot(absl::string_view path) {
  const size_t at = path.rfind(kSnapshots);
  if (at == absl::string_view::npos) return std::nullopt;
  const absl::string_view rest = path.substr(at + kSnapshots.size());
  if (!IsCommitHash(rest.substr(0, rest.find('/')))) return std::nullopt;
  return std::string(path.substr(0, at));
}

absl::string_view WithoutSlashes(absl::string_view path) {
  while (path.size() > 1 && absl::ConsumeSuffix(&path, "/")) {
  }
  return path;
}

std::string ModelFolder::PathOf(absl::string_view file) const {
  return absl::StrCat(name, "/", file);
}

absl::StatusOr<ModelFolder> OpenModelFolder(const std::string& path) {
  std::error_code error;
  AWQD_ASSIGN_OR_RETURN(const std::string found, FindInHubCache(path));
  const fs::path real = fs::canonical(found, error);
  if (error) {
    return absl::NotFoundError(absl::StrCat(Quoted(path, 1024), ": ", error.message()));
  }
  const bool is_model = fs::is_directory(real, error) || real.extension() == ".gguf" ||
                        real.extension() == ".safetensors";
  if (!is_model || !real.has_relative_path()) {
    return Invalid(Quoted(path, 1024),
                   ": expected a model's directory, or a .gguf or .safetensors file");
  }
  const std::optional<std::string> cache = FolderOfSnapshot(real.string());
  const fs::path above = real.parent_path();
  const bool snapshot = above.filename() == "snapshots";
  const fs::path root = cache ? fs::path(*cache) : snapshot ? above.parent_path() : above;
  ModelFolder out = {.path = std::string(WithoutSlashes(path)),
                     .name = real.lexically_relative(root).string()};
  AWQD_ASSIGN_OR_RETURN(out.root, RepositoryRoot::Open(root.string()));
  return out;
}

}  // namespace awqd::model
