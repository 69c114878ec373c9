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

// What `hf download` calls it: "ORG/NAME" for "ORG--NAME".
std::string HubId(absl::string_view model);

// Whether a cache keeps something else under that name: "datasets--ORG--NAME".
bool IsOtherHubFolder(absl::string_view folder);

// "<folder>/snapshots/<hash>", by <folder>/refs/main; `folder` is a path beneath the root. Whether
// the snapshot is there is not looked at. NOT_FOUND without refs/main, INVALID_ARGUMENT when it
// holds no commit hash (40 to 64 hexadecimal digits, blanks around them aside).
absl::StatusOr<std::string> FindSnapshot(const RepositoryRoot& root, absl::string_view folder);

}  // namespace awqd::model
