// Finds a model by its path, also in the Hub's cache.
#include "kernels/checkpoint/model_folder.h"

#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/checkpoint/hub_cache.h"

namespace awqd::model {
namespace {

namespace fs = std::filesystem;

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

// The snapshot of a model in a Hub cache, given as "models--ORG--NAME" in it, or as "ORG/NAME" where
// there is no such path. Every other path as it is.
absl::StatusOr<std::string> FindInHubCache(const std::string& path) {
  std::error_code error;
  absl::string_view without = path;
  while (without.size() > 1 && absl::ConsumeSuffix(&without, "/")) {
  }
  fs::path folder = std::string(without);
  if (!fs::exists(folder, error) && std::distance(folder.begin(), folder.end()) == 2) {
    folder = HubCache() / HubFolder(NameOfHubId(std::string(without)));
  }
  const std::string name = folder.filename().string();
  if (!HubModelName(name) || !fs::is_directory(folder / "snapshots", error)) return path;
  const fs::path above = folder.has_parent_path() ? folder.parent_path() : fs::path(".");
  AWQD_ASSIGN_OR_RETURN(const auto root, RepositoryRoot::Open(above.string()));
  AWQD_ASSIGN_OR_RETURN(const std::string snapshot, FindSnapshot(root, name));
  return (above / snapshot).string();
}

}  // namespace

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
  absl::string_view shown = path;
  while (shown.size() > 1 && absl::ConsumeSuffix(&shown, "/")) {
  }
  ModelFolder out = {.path = std::string(shown), .name = real.lexically_relative(root).string()};
  AWQD_ASSIGN_OR_RETURN(out.root, RepositoryRoot::Open(root.string()));
  return out;
}

}  // namespace awqd::model
