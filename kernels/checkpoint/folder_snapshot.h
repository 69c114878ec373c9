// FolderSnapshot: a model's folder, opened once, with a record of all that was read of it, so that
// no load serves files of two versions of a model.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/checkpoint/repository_root.h"

namespace awqd::model {

// What was found when files were looked for, by their paths beneath the root.
struct FilesRead {
  std::map<std::string, std::optional<FileStamp>> files;         // nothing: there was none
  std::map<std::string, std::vector<std::string>> tensor_files;  // of a directory that was listed

  // INVALID_ARGUMENT naming the first that is another one now, was written to, came or went; the
  // error of a look at one that failed.
  absl::Status CheckUnchanged(const RepositoryRoot& root) const;
};

// Used by one thread.
class FolderSnapshot final : public FileSource {
 public:
  // `folder`: what a path beneath the root leads to now. Where that is no directory, paths are
  // opened as the root does. `root` and `read` outlive it.
  FolderSnapshot(const RepositoryRoot& root, absl::string_view folder, FilesRead* read);

  absl::StatusOr<File> OpenFile(absl::string_view relative) const override;
  absl::StatusOr<std::vector<std::string>> ListDirectory(absl::string_view relative) const override;

 private:
  const RepositoryRoot& root_;
  const std::string folder_;
  const absl::StatusOr<RepositoryRoot::Held> held_;
  FilesRead* const read_;
};

}  // namespace awqd::model
