// A model's folder as it is now: FolderSnapshot opens it once, FolderState is compared over time.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/checkpoint/repository_root.h"

namespace awqd::model {

// The files that a load opened or looked for, by their paths beneath the root.
struct FilesRead {
  std::map<std::string, std::optional<FileStamp>> files;         // nothing: there was none
  std::map<std::string, std::vector<std::string>> tensor_files;  // of a directory that was listed

  // INVALID_ARGUMENT naming the first file whose size, a time or inode differs now, or that came or
  // went. Another error where a file cannot be opened.
  absl::Status CheckUnchanged(const RepositoryRoot& root) const;
};

// A model's folder, opened once, with a record of all that is read of it, so that no load serves
// files of two versions of a model. Not thread-safe.
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

// The files of a model's folder, to tell whether they changed since they were last read, and
// whether somebody still writes to them.
struct FolderState {
  bool there = true;  // false: there is no such model
  // A line for each file that a model is made of: *.json, *.safetensors, *.gguf.
  std::string files;
  std::string others;  // the same of all other files, unfinished downloads among them
  absl::Time changed = absl::InfinitePast();  // the last time that a file was written or replaced

  // True where nothing was written between the two.
  bool SameAs(const FolderState& other) const {
    return there == other.there && files == other.files && others == other.others;
  }
};

// The state of a folder, or of a file that is a model and its other parts, beneath the root. Follows
// links as RepositoryRoot does, so that a link that leads elsewhere is a change. Reads inner folders
// as deep as `hf download` keeps unfinished files (.cache/huggingface/download), and the blobs
// beside a snapshot of a Hub cache. Opens each file: over NFS only that asks the server. Reads at most
// 20,000 files of a folder.
FolderState ReadFolderState(const RepositoryRoot& root, absl::string_view path);

}  // namespace awqd::model
