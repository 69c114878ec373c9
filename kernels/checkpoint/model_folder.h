// ModelFolder: the root and the name beneath it of a model that a person gives by its path.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/checkpoint/repository_root.h"

namespace awqd::model {

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
