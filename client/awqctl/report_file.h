// ReportFile: a file that is opened before the work and written after it.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/remove_on_signal.h"

namespace awqd::awqctl {

// Unless Write was called, the file is left as it was found, by signals too where
// RemoveFilesOnSignals was called.
class ReportFile {
 public:
  ReportFile() = default;
  ReportFile(const ReportFile&) = delete;
  ReportFile& operator=(const ReportFile&) = delete;
  ~ReportFile();

  // An error says why `path` cannot be written. An empty path is no file: OK, and so is Write.
  absl::Status Open(const std::string& path);
  // Once; replaces what the file holds.
  absl::Status Write(absl::string_view text);

 private:
  std::string path_;
  int fd_ = -1;
  bool created_ = false;  // by Open, and empty still
  client::RemoveOnSignal on_signal_;
};

}  // namespace awqd::awqctl
