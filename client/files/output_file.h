// OutputFile: a file that is written from its beginning, and the errors of writing files.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace awqd::client {

// "cannot <what> <path>: <why>", from errno: ALREADY_EXISTS, PERMISSION_DENIED, RESOURCE_EXHAUSTED,
// or FAILED_PRECONDITION for every other reason.
absl::Status FileError(absl::string_view what, absl::string_view path);

// Owns the descriptor; never removes the file. Errors name the path. Not thread-safe.
class OutputFile {
 public:
  // Makes the file `path`. Errors name `shown` instead where it is not empty. ALREADY_EXISTS when
  // there is a file of that name.
  static absl::StatusOr<std::unique_ptr<OutputFile>> Create(const std::string& path,
                                                            const std::string& shown = "");
  // Takes over `fd`, open for writing.
  OutputFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  absl::Status Append(absl::Span<const uint8_t> bytes);
  absl::Status Append(absl::string_view text);
  // Replaces bytes from `at` on that were appended before.
  absl::Status Overwrite(int64_t at, absl::string_view text);
  // Removes all contents. Does nothing for a pipe or a terminal.
  absl::Status Truncate();
  // Writes the contents to the disk and closes the descriptor. A rename that follows must not reach
  // the disk before the data, or a crash leaves an empty file.
  absl::Status Close();

 private:
  const std::string path_;
  int fd_;
};

}  // namespace awqd::client
