// OutputFile: a new file that is written from its beginning.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/base/unique_fd.h"
#include "kernels/checkpoint/file.h"

namespace awqd::tools {

// Errors name the path. Does not remove the file: whoever made the directory does.
class OutputFile {
 public:
  // ALREADY_EXISTS when there is a file of that name.
  static absl::StatusOr<std::unique_ptr<OutputFile>> Create(const std::string& path);

  absl::Status Append(absl::Span<const uint8_t> bytes);
  absl::Status Append(absl::string_view text);
  // Over what was appended before.
  absl::Status Overwrite(int64_t at, absl::string_view text);
  // To the disk.
  absl::Status Close();

 private:
  OutputFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  const std::string path_;
  UniqueFd fd_;
  int64_t size_ = 0;
};

// "cannot <what> <path>: <why>", as errno has it.
absl::Status PathError(absl::string_view what, absl::string_view path);

}  // namespace awqd::tools
