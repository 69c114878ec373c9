// FileSource: where the files of models are opened, by their paths beneath the repository.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/checkpoint/file.h"

namespace awqd::model {

class FileSource {
 public:
  virtual ~FileSource() = default;

  // A regular file. `relative` is a path of plain components ("model/config.json"). NOT_FOUND,
  // PERMISSION_DENIED, INVALID_ARGUMENT for a special file or a way out of the root, UNAVAILABLE
  // while another process has a lease on it. Never waits for another process.
  virtual absl::StatusOr<File> OpenFile(absl::string_view relative) const = 0;

  // Names in the directory `relative` ("." for the root itself), sorted, without "." and "..". All
  // of them, or an error.
  virtual absl::StatusOr<std::vector<std::string>> ListDirectory(
      absl::string_view relative) const = 0;
};

}  // namespace awqd::model
