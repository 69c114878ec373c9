// Looking models up, in the order of the header's list.
#include "server/repository/model_folders.h"

#include <sys/stat.h>

#include <optional>
#include <set>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/checkpoint_files.h"
#include "kernels/checkpoint/model_folder.h"
#include "kernels/checkpoint/quant_settings.h"

namespace awqd::repository {
namespace {

using model::FindModel;
using model::kConfigFile;
using model::RepositoryRoot;

constexpr size_t kMaxNameBytes = 128;
// A repository such as "/" must not fill the log.
constexpr size_t kMaxWarnings = 20;
constexpr absl::string_view kNameRule =
    "1 to 128 letters, digits, '.', '_' and '-', not starting with '.'";

bool IsModel(const RepositoryRoot& root, absl::string_view folder) {
  return !absl::IsNotFound(FindModel(root, folder));
}

// As FindSnapshot; fails when the snapshot is no model.
absl::StatusOr<std::string> FindModelSnapshot(const RepositoryRoot& root,
                                              absl::string_view folder) {
  AWQD_ASSIGN_OR_RETURN(std::string snapshot, model::FindSnapshot(root, folder));
  AWQD_RETURN_IF_ERROR(FindModel(root, snapshot));
  return snapshot;
}

// The path in a folder that is a root of its own under `name`: as it was downloaded, or one of a
// Hub cache.
absl::StatusOr<std::string> PathInFolder(const RepositoryRoot& root, const std::string& name) {
  const absl::Status plain = FindModel(root, name);
  if (plain.ok()) return name;
  if (!absl::IsNotFound(plain)) return plain;
  // Where there is no refs/main, the folder was not meant as one of a cache.
  if (absl::IsNotFound(model::FindSnapshot(root, name).status())) return plain;
  return FindModelSnapshot(root, name);
}

// Opens a --model folder as a root, and sets its path beneath that. A snapshot of a Hub cache, or a
// folder in it, consists of links to the blobs beside "snapshots", so the folder of both is its root.
// The root of a file is the folder that holds it, and its other parts.
absl::StatusOr<RepositoryRoot> OpenNamed(const NamedFolder& folder, std::string* path) {
  const absl::string_view shown = model::WithoutSlashes(folder.path);
  *path = folder.name;
  const std::optional<std::string> cache = model::FolderOfSnapshot(shown);
  if (cache && !cache->empty()) {
    absl::StrAppend(path, shown.substr(cache->size()));
    return RepositoryRoot::OpenFolder(*cache, folder.name);
  }
  struct stat info = {};
  const bool is_folder = stat(folder.path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
  const bool is_model = absl::EndsWith(shown, ".gguf") || absl::EndsWith(shown, ".safetensors");
  if (is_folder || !is_model) {
    return RepositoryRoot::OpenFolder(folder.path, folder.name);
  }
  const size_t name = shown.rfind('/') + 1;  // 0 where there is none
  absl::StrAppend(path, "/", shown.substr(name));
  return RepositoryRoot::OpenFolder(name == 0 ? "." : std::string(shown.substr(0, name)),
                                    folder.name);
}

std::string Incomplete(absl::string_view model, const absl::Status& status) {
  return absl::StrCat(status.message(), ": complete the download with: hf download ",
                      model::HubId(model));
}

// Whether a folder that is no model was meant as one: it is empty, has weights, or has a model in it.
bool IsMeantAsModel(const RepositoryRoot& root, const std::string& folder) {
  constexpr size_t kMaxTried = 100;  // entries that may be models
  const absl::StatusOr<std::vector<std::string>> entries = root.ListDirectory(folder);
  if (!entries.ok()) return false;
  size_t tried = 0;
  return entries->empty() || absl::c_any_of(*entries, [&](const std::string& entry) {
           for (const absl::string_view weights : {".safetensors", ".bin", ".pt", ".pth"}) {
             if (absl::EndsWith(entry, weights)) return true;
           }
           return ++tried <= kMaxTried && IsModel(root, absl::StrCat(folder, "/", entry));
         });
}

// The warning about an entry of the repository; empty for models and for what is no folder.
std::string MakeWarning(const RepositoryRoot& root, const std::string& folder) {
  const std::string what = absl::StrCat("folder ", Quoted(folder));
  if (!CheckModelName(folder).ok()) {
    // Others are tools' own: lost+found, .snapshot, @eaDir.
    if (!FindModel(root, folder).ok()) return "";
    return absl::StrCat(what, ": no model can have that name: rename it to ", kNameRule,
                        ", or give it as --model NAME=DIR");
  }
  if (IsModel(root, folder) || model::IsOtherHubFolder(folder)) return "";
  if (const std::optional<std::string> name = model::HubModelName(folder)) {
    const absl::Status status = FindModelSnapshot(root, folder).status();
    if (!CheckModelName(*name).ok()) {
      return absl::StrCat(what, ": no model can have the name ", Quoted(*name),
                          ": give it as --model NAME=DIR");
    }
    if (!absl::IsNotFound(status)) return "";
    return absl::StrCat(what, ": ", Incomplete(*name, status));
  }
  if (!IsMeantAsModel(root, folder)) return "";
  return absl::StrCat(what, ": no ", kConfigFile, " in it, so it is no model: download it again ",
                      "with its ", kConfigFile,
                      ", or give a model that lies deeper as --model NAME=DIR");
}

}  // namespace

// One of the places where a model of some name may be.
struct ModelFolders::Candidate {
  std::string place;  // for messages
  std::shared_ptr<const RepositoryRoot> root;
  absl::StatusOr<std::string> path;
};

absl::Status CheckModelName(absl::string_view name) {
  bool good = !name.empty() && name.size() <= kMaxNameBytes && name.front() != '.';
  for (char c : name) {
    good = good &&
           (absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-');
  }
  if (good) return absl::OkStatus();
  return Invalid("model name: got ", Quoted(name), " (", name.size(), " bytes), expected ",
                 kNameRule);
}

void ModelFolders::AddNamed(absl::string_view name, std::vector<Candidate>* out) const {
  for (const NamedFolder& folder : named_) {
    if (folder.name != name) continue;
    Candidate candidate = {absl::StrCat("--model ", folder.name, "=", folder.path), nullptr, ""};
    std::string path;
    auto root = OpenNamed(folder, &path);
    if (root.ok()) {
      candidate.root = std::make_shared<RepositoryRoot>(*std::move(root));
      candidate.path = PathInFolder(*candidate.root, path);
    } else {
      candidate.path = root.status();
    }
    if (const absl::Status status = candidate.path.status(); !status.ok()) {
      candidate.path = Prefixed(candidate.place, status);
    }
    out->push_back(std::move(candidate));
  }
}

absl::Status ModelFolders::AddFromRepository(absl::string_view name, std::vector<Candidate>* out,
                                             std::string* lacks) const {
  absl::StatusOr<RepositoryRoot> opened = RepositoryRoot::Open(repository_);
  if (!opened.ok()) {
    const std::string path = absl::StrCat(" ", Quoted(repository_, 1024));
    return absl::Status(opened.status().code(),
                        absl::StrReplaceAll(opened.status().message(), {{path, ""}}));
  }
  const auto root = std::make_shared<const RepositoryRoot>(*std::move(opened));
  const absl::Status plain = FindModel(*root, name);
  if (!absl::IsNotFound(plain)) {
    out->push_back({absl::StrCat("folder ", Quoted(name)), root,
                    plain.ok() ? absl::StatusOr<std::string>(std::string(name)) : plain});
  }
  const std::string hub = model::HubFolder(name);
  if (IsModel(*root, hub)) return absl::OkStatus();  // a plain folder of that name
  absl::StatusOr<std::string> snapshot = FindModelSnapshot(*root, hub);
  if (absl::IsNotFound(snapshot.status())) {
    if (root->ListDirectory(hub).ok()) *lacks = Incomplete(name, snapshot.status());
    return absl::OkStatus();
  }
  out->push_back({absl::StrCat("folder ", Quoted(hub)), root, std::move(snapshot)});
  return absl::OkStatus();
}

absl::StatusOr<ModelFolder> ModelFolders::Locate(absl::string_view name, bool* seen) const {
  if (seen != nullptr) *seen = false;
  AWQD_RETURN_IF_ERROR(CheckModelName(name));
  std::vector<Candidate> found;
  AddNamed(name, &found);
  std::string lacks;
  const absl::Status repository =
      repository_.empty() ? absl::OkStatus() : AddFromRepository(name, &found, &lacks);
  if (seen != nullptr) *seen = !found.empty() || !lacks.empty();
  if (found.size() > 1) {
    return Invalid("model ", Quoted(name), ": got it twice, as ", found[0].place, " and as ",
                   found[1].place, ", expected it once: give one of them another name");
  }
  if (found.size() == 1) {
    AWQD_ASSIGN_OR_RETURN(std::string path, std::move(found[0].path));
    return ModelFolder{found[0].root, std::move(path)};
  }
  AWQD_RETURN_IF_ERROR(repository);
  if (lacks.empty()) lacks = absl::StrCat("no ", name, "/", kConfigFile, " beneath the repository");
  const absl::Status none = absl::NotFoundError(absl::StrCat("model ", Quoted(name), ": ", lacks));
  if (seen == nullptr) return none;  // a list reads no file of what is no model
  const absl::StatusOr<RepositoryRoot> root = RepositoryRoot::Open(repository_);
  return root.ok() ? model::NameFamily(*root, name, none) : none;
}

model::FolderState ModelFolders::InspectFolder(const absl::StatusOr<ModelFolder>& located) {
  if (located.ok()) return model::ReadFolderState(*located->root, located->path);
  return {.there = !absl::IsNotFound(located.status()), .files = located.status().ToString()};
}

std::string ModelFolders::RepositoryIdentity() const {
  struct stat info = {};
  if (repository_.empty() || stat(repository_.c_str(), &info) != 0) return "";
  return absl::StrCat(info.st_dev, ":", info.st_ino);
}

absl::StatusOr<std::map<std::string, absl::Status>> ModelFolders::ListModels() const {
  std::map<std::string, absl::Status> out;
  for (const NamedFolder& folder : named_) out[folder.name] = Locate(folder.name).status();
  if (repository_.empty()) return out;
  AWQD_ASSIGN_OR_RETURN(const RepositoryRoot root, RepositoryRoot::Open(repository_));
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> folders, root.ListDirectory("."));
  std::set<std::string> names;
  for (const std::string& folder : folders) {
    names.insert(folder);
    if (const std::optional<std::string> name = model::HubModelName(folder)) names.insert(*name);
  }
  for (const std::string& name : names) {
    if (!CheckModelName(name).ok() || out.contains(name)) continue;
    const absl::Status status = Locate(name).status();
    if (!absl::IsNotFound(status)) out.emplace(name, status);
  }
  return out;
}

absl::Status ModelFolders::CheckRepository(bool may_be_empty) const {
  if (repository_.empty()) return absl::OkStatus();
  AWQD_ASSIGN_OR_RETURN(const RepositoryRoot root, RepositoryRoot::Open(repository_));
  const std::string shown = Quoted(repository_, 1024);
  // A Hub cache has a folder with these two for each model.
  const bool of_hub = root.ListDirectory("snapshots").ok() && root.ListDirectory("blobs").ok();
  if (of_hub || root.OpenFile(kConfigFile).ok()) {
    return Invalid(shown,
                   " is itself a model: give the folder above it, or --model NAME=", repository_,
                   " instead");
  }
  AWQD_ASSIGN_OR_RETURN(const auto models, ListModels());
  if (may_be_empty || !models.empty()) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat(
      shown, " has no folder with a ", kConfigFile,
      " and no GGUF file or one of ComfyUI: put a model there, such as ",
      "with hf download ORG/NAME --local-dir ", repository_, "/NAME, give the folder of one as ",
      "--model NAME=DIR, or wait for models with --watch_repository"));
}

std::vector<std::string> ModelFolders::Warnings() const {
  std::vector<std::string> out;
  if (repository_.empty()) return out;
  const absl::StatusOr<RepositoryRoot> root = RepositoryRoot::Open(repository_);
  if (!root.ok()) return out;
  const absl::StatusOr<std::vector<std::string>> folders = root->ListDirectory(".");
  if (!folders.ok()) return out;
  size_t more = 0;
  for (const std::string& folder : *folders) {
    std::string warning = MakeWarning(*root, folder);
    if (warning.empty()) continue;
    if (out.size() < kMaxWarnings) {
      out.push_back(std::move(warning));
    } else {
      ++more;
    }
  }
  if (more > 0) out.push_back(absl::StrCat("and ", more, " more folders that are no models"));
  return out;
}

}  // namespace awqd::repository
