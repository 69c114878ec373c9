// Folders of a Hub cache, as `hf download` fills it: models--ORG--NAME with refs/main, which holds
// the commit hash of a revision, snapshots/<hash> with links, and blobs, which those lead to.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/checkpoint/repository_root.h"

namespace awqd::model {

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

}  // namespace awqd::model
