// ModelFolders: from a model's name to the folder with its files, in the repository or beside it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/checkpoint/folder_snapshot.h"
#include "kernels/checkpoint/repository_root.h"

namespace awqd::repository {

// A single folder, or a file that is a model, that is served under a name: --model NAME=DIR. Of a model in parts
// the first one is given.
struct NamedFolder {
  std::string name;
  std::string path;
};

// A model's files are at `path` beneath `root`.
struct ModelFolder {
  std::shared_ptr<const model::RepositoryRoot> root;
  std::string path;
};

// OK for names that may be looked up beneath the root: letters, digits, '.', '_' and '-', not
// starting with '.', 1 to 128 bytes. INVALID_ARGUMENT otherwise (the message shows the name
// escaped).
absl::Status CheckModelName(absl::string_view name);

// The model NAME is one of
//   - the named folder NAME, which is a root of its own,
//   - the folder NAME of the repository,
//   - the folder models--NAME of the repository, which is then a Hub cache: its revision main.
// A named folder may be a models--NAME as well. Thread-safe: reads directories afresh every time.
class ModelFolders {
 public:
  // `repository`: a directory, which need not be there yet; empty for none. `named`: their names
  // are legal and differ.
  // NOLINTNEXTLINE(google-explicit-constructor): a repository alone is the common case.
  ModelFolders(std::string repository, std::vector<NamedFolder> named = {})
      : repository_(std::move(repository)), named_(std::move(named)) {}

  // The folder with the model's config.json. NOT_FOUND when there is none, INVALID_ARGUMENT when
  // there are two, naming both, or when config.json leads out of the root; else why it cannot be
  // opened.
  // `seen`, if given, tells whether anything of that name is there, also where that cannot be
  // opened. No message has the repository's path, as clients get it.
  absl::StatusOr<ModelFolder> Locate(absl::string_view name, bool* seen = nullptr) const;

  // The state of a model's files now, to be compared with a later one. Where Locate fails, its
  // error stands for the files.
  model::FolderState Inspect(absl::string_view name) const { return InspectFolder(Locate(name)); }
  static model::FolderState InspectFolder(const absl::StatusOr<ModelFolder>& located);

  // Identifies the repository's directory by device and inode; empty when it cannot be read, or
  // there is none. It changes when a link is made to lead elsewhere, or a file system is unmounted.
  std::string RepositoryIdentity() const;

  // Every named folder and every model of the repository, each with what Locate says of it.
  // NOT_FOUND or PERMISSION_DENIED when the repository itself cannot be read.
  absl::StatusOr<std::map<std::string, absl::Status>> ListModels() const;

  // INVALID_ARGUMENT when the repository itself is a model, whose folders are no models; NOT_FOUND
  // when there is no model in it or beside it, unless it may be empty. Both say what to do.
  absl::Status CheckRepository(bool may_be_empty) const;

  // A line for each thing in the repository that looks like a model, is none, and what to do about
  // it. Empty when the repository cannot be read.
  std::vector<std::string> Warnings() const;

  const std::vector<NamedFolder>& named() const { return named_; }

 private:
  struct Candidate;

  void AddNamed(absl::string_view name, std::vector<Candidate>* out) const;
  // Sets `lacks` to what a folder models--NAME lacks, if it is no model. An error when the
  // repository cannot be opened.
  absl::Status AddFromRepository(absl::string_view name, std::vector<Candidate>* out,
                                 std::string* lacks) const;

  const std::string repository_;
  const std::vector<NamedFolder> named_;
};

}  // namespace awqd::repository
