// ModelFolder: the root and the name beneath it of a model that a person gives by its path. Folders
// of a Hub cache.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/checkpoint/repository_root.h"

namespace awqd::model {

// --- A Hub cache ---
//
// As `hf download` fills it: models--ORG--NAME with refs/main, which holds the commit hash of a
// revision, snapshots/<hash> with links, and blobs, which those lead to.

// "ORG--NAME" for "models--ORG--NAME"; nothing for any other name of a folder.
std::optional<std::string> HubModelName(absl::string_view folder);

// "models--ORG--NAME" for "ORG--NAME".
std::string HubFolder(absl::string_view model);

// The name for `hf download`: "ORG/NAME" for "ORG--NAME".
std::string HubId(absl::string_view model);

// Whether a cache keeps something else under that name: "datasets--ORG--NAME".
bool IsOtherHubFolder(absl::string_view folder);

// "ORG--NAME" for "ORG/NAME", the reverse of HubId; other names as they are.
std::string NameOfHubId(absl::string_view id);

// Finds the snapshot of `folder`, a path beneath the root: "<folder>/snapshots/<hash>". The hash is
// in <folder>/refs/main; without that file, as where another revision was downloaded, it is the
// name of the only snapshot. Whether refs/main's snapshot is there is not looked at. NOT_FOUND
// without refs/main and snapshots, INVALID_ARGUMENT when refs/main holds no commit hash (40 to 64
// hexadecimal digits, blanks around them aside), or without it for several snapshots.
absl::StatusOr<std::string> FindSnapshot(const RepositoryRoot& root, absl::string_view folder);

// The folder of a Hub cache that a path in the file system leads into: what stands before
// "/snapshots/<hash>", which the path ends with or goes on behind. Nothing for other paths.
std::optional<std::string> FolderOfSnapshot(absl::string_view path);

// --- A model by its path ---

// The path without slashes at its end, but for the root's own.
absl::string_view WithoutSlashes(absl::string_view path);

struct ModelFolder {
  std::string path;  // as it was given, without slashes at its end
  // Its symbolic links may lead into this: the directory above it. For a snapshot in a cache of the
  // Hub ("models--org--name/snapshots/<hash>"), the directory that also has the blobs.
  RepositoryRoot root;
  std::string name;  // beneath `root`

  std::string PathOf(absl::string_view file) const;  // "<name>/<file>", as root takes it
};

// `path`: a directory, a .gguf or .safetensors file, a model's directory in a Hub cache, or the
// "ORG/NAME" of one in the user's cache. NOT_FOUND or INVALID_ARGUMENT naming the path.
absl::StatusOr<ModelFolder> OpenModelFolder(const std::string& path);

}  // namespace awqd::model
