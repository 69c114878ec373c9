// Looking models up, in the order of the header's list.
#include "server/repository/model_folders.h"

#include <sys/stat.h>

#include <optional>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/checkpoint_files.h"
#include "kernels/checkpoint/hub_cache.h"

namespace awqd::repository {
namespace {

using model::kConfigFile;
using model::RepositoryRoot;

constexpr size_t kMaxNameBytes = 128;
// A repository such as "/" must not fill the log.
constexpr size_t kMaxWarnings = 20;
constexpr absl::string_view kNameRule =
    "1 to 128 letters, digits, '.', '_' and '-', not starting with '.'";

std::string ConfigPath(absl::string_view folder) { return absl::StrCat(folder, "/", kConfigFile); }

// A model has a config.json or a GGUF file. NOT_FOUND: the entry is no model. Another error: it is
// a model that cannot be opened.
absl::Status OpenModel(const RepositoryRoot& root, absl::string_view folder) {
  return model::FindModel(root, folder);
}

bool IsModel(const RepositoryRoot& root, absl::string_view folder) {
  return !absl::IsNotFound(OpenModel(root, folder));
}

// As FindSnapshot; fails when the snapshot is no model.
absl::StatusOr<std::string> FindModelSnapshot(const RepositoryRoot& root,
                                              absl::string_view folder) {
  AWQD_ASSIGN_OR_RETURN(std::string snapshot, model::FindSnapshot(root, folder));
  AWQD_RETURN_IF_ERROR(OpenModel(root, snapshot));
  return snapshot;
}

// The path in a folder that is a root of its own under `name`: as it was downloaded, or one of a
// Hub cache.
absl::StatusOr<std::string> PathInFolder(const RepositoryRoot& root, const std::string& name) {
  const absl::Status plain = OpenModel(root, name);
  if (plain.ok()) return name;
  if (!absl::IsNotFound(plain)) return plain;
  // Where there is no refs/main, the folder was not meant as one of a cache.
  if (absl::IsNotFound(model::FindSnapshot(root, name).status())) return plain;
  return FindModelSnapshot(root, name);
}

// Links of such a folder lead to blobs two folders above it.
absl::string_view AdviceOnLinks(absl::string_view path) {
  return absl::StrContains(path, "/snapshots/")
             ? "; a snapshot of a Hub cache consists of links out of it: give the folder "
               "models--ORG--NAME above it"
             : "";
}

std::string Incomplete(absl::string_view model, const absl::Status& status) {
  return absl::StrCat(status.message(), ": complete the download with: hf download ",
                      model::HubId(model));
}

// The warning about an entry of the repository; empty for models and for what is no folder.
std::string MakeWarning(const RepositoryRoot& root, const std::string& folder,
                        bool is_model_itself) {
  const std::string what = absl::StrCat("folder ", Quoted(folder));
  if (!CheckModelName(folder).ok()) {
    // Hidden folders are tools' own.
    const bool meant =
        folder.front() == '.' ? IsModel(root, folder) : root.ListDirectory(folder).ok();
    if (!meant) return "";
    return absl::StrCat(what, ": no model can have that name: rename it to ", kNameRule,
                        ", or give it as --model NAME=DIR");
  }
  if (IsModel(root, folder) || model::IsOtherHubFolder(folder) ||
      !root.ListDirectory(folder).ok()) {
    return "";
  }
  if (const std::optional<std::string> name = model::HubModelName(folder)) {
    const absl::Status status = FindModelSnapshot(root, folder).status();
    if (!CheckModelName(*name).ok()) {
      return absl::StrCat(what, ": no model can have the name ", Quoted(*name),
                          ": give it as --model NAME=DIR");
    }
    if (!absl::IsNotFound(status)) return "";
    return absl::StrCat(what, ": ", Incomplete(*name, status));
  }
  // A model's own subfolders are no models, and the first warning says what to do.
  if (is_model_itself) return "";
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

ModelFolders::ModelFolders(std::string repository, std::vector<NamedFolder> named)
    : repository_(std::move(repository)), named_(std::move(named)) {}

void ModelFolders::AddNamed(absl::string_view name, std::vector<Candidate>* out) const {
  for (const NamedFolder& folder : named_) {
    if (folder.name != name) continue;
    Candidate candidate = {absl::StrCat("--model ", folder.name, "=", folder.path), nullptr, ""};
    auto root = RepositoryRoot::OpenFolder(folder.path, folder.name);
    if (root.ok()) {
      candidate.root = std::make_shared<RepositoryRoot>(*std::move(root));
      candidate.path = PathInFolder(*candidate.root, folder.name);
    } else {
      candidate.path = root.status();
    }
    if (const absl::Status status = candidate.path.status(); !status.ok()) {
      candidate.path = absl::Status(
          status.code(),
          absl::StrCat(candidate.place, ": ", status.message(),
                       absl::IsInvalidArgument(status) ? AdviceOnLinks(folder.path) : ""));
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
  const absl::Status plain = OpenModel(*root, name);
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
  if (lacks.empty()) lacks = absl::StrCat("no ", ConfigPath(name), " beneath the repository");
  return absl::NotFoundError(absl::StrCat("model ", Quoted(name), ": ", lacks));
}

model::FolderState ModelFolders::InspectFolder(const absl::StatusOr<ModelFolder>& located) {
  if (located.ok()) return model::ReadFolderState(*located->root, located->path);
  return {.there = !absl::IsNotFound(located.status()), .files = located.status().ToString()};
}

model::FolderState ModelFolders::Inspect(absl::string_view name) const {
  return InspectFolder(Locate(name));
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

std::vector<std::string> ModelFolders::Warnings() const {
  std::vector<std::string> out;
  if (repository_.empty()) return out;
  const absl::StatusOr<RepositoryRoot> root = RepositoryRoot::Open(repository_);
  if (!root.ok()) return out;
  const absl::StatusOr<std::vector<std::string>> folders = root->ListDirectory(".");
  if (!folders.ok()) return out;
  const bool is_model = !absl::IsNotFound(root->OpenFile(kConfigFile).status());
  if (is_model) {
    out.push_back(absl::StrCat(
        "the repository ", Quoted(repository_, 1024),
        " is itself a model: give the folder above it, or --model NAME=", repository_, " instead"));
  }
  size_t more = 0;
  for (const std::string& folder : *folders) {
    std::string warning = MakeWarning(*root, folder, is_model);
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
