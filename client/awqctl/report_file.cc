// Open without truncation, truncate when there is something to write.
#include "client/awqctl/report_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace awqd::awqctl {
namespace {

absl::Status CannotWrite(const std::string& path, int error) {
  return absl::UnavailableError(absl::StrCat("cannot write ", path, ": ", std::strerror(error)));
}

}  // namespace

ReportFile::~ReportFile() {
  if (fd_ >= 0) close(fd_);
  if (created_) unlink(path_.c_str());
}

absl::Status ReportFile::Open(const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  path_ = path;
  fd_ = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  created_ = fd_ >= 0;
  if (created_) on_signal_ = client::RemoveOnSignal(path);
  // A device or what another bench left.
  if (fd_ < 0 && errno == EEXIST) fd_ = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  return fd_ < 0 ? CannotWrite(path, errno) : absl::OkStatus();
}

absl::Status ReportFile::Write(absl::string_view text) {
  if (fd_ < 0) return absl::OkStatus();
  created_ = false;
  on_signal_ = client::RemoveOnSignal();
  // A pipe or a terminal has nothing to truncate.
  if (ftruncate(fd_, 0) != 0 && errno != EINVAL) return CannotWrite(path_, errno);
  while (!text.empty()) {
    const ssize_t written = write(fd_, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return CannotWrite(path_, errno);
    text.remove_prefix(static_cast<size_t>(written));
  }
  const int fd = fd_;
  fd_ = -1;
  // Where a network file system tells that it is full.
  return close(fd) == 0 ? absl::OkStatus() : CannotWrite(path_, errno);
}

}  // namespace awqd::awqctl
