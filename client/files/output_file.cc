// Writing whole buffers, whatever write() takes at a time.
#include "client/files/output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"

namespace awqd::client {
namespace {

// Calls `write(data, size)` until nothing is left. False with errno set on an error.
template <typename Write>
bool WriteAll(absl::string_view bytes, Write write) {
  while (!bytes.empty()) {
    const ssize_t count = write(bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

}  // namespace

absl::Status FileError(absl::string_view what, absl::string_view path) {
  const absl::Status status = absl::ErrnoToStatus(errno, absl::StrCat("cannot ", what, " ", path));
  const bool told = absl::IsAlreadyExists(status) || absl::IsPermissionDenied(status) ||
                    absl::IsResourceExhausted(status);
  return told ? status : absl::FailedPreconditionError(status.message());
}

absl::StatusOr<std::unique_ptr<OutputFile>> OutputFile::Create(const std::string& path,
                                                               const std::string& shown) {
  const std::string& name = shown.empty() ? path : shown;
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) return FileError("write", name);
  return std::make_unique<OutputFile>(name, fd);
}

OutputFile::~OutputFile() {
  if (fd_ >= 0) close(fd_);
}

absl::Status OutputFile::Append(absl::string_view text) {
  const auto next = [this](const char* data, size_t size) { return write(fd_, data, size); };
  return WriteAll(text, next) ? absl::OkStatus() : FileError("write", path_);
}

absl::Status OutputFile::Append(absl::Span<const uint8_t> bytes) {
  return Append(absl::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
}

absl::Status OutputFile::Overwrite(int64_t at, absl::string_view text) {
  const auto next = [&](const char* data, size_t size) {
    return pwrite(fd_, data, size, at + (data - text.data()));
  };
  return WriteAll(text, next) ? absl::OkStatus() : FileError("write", path_);
}

absl::Status OutputFile::Truncate() {
  if (ftruncate(fd_, 0) != 0 && errno != EINVAL) return FileError("write", path_);
  return absl::OkStatus();
}

absl::Status OutputFile::Close() {
  // Pipes and terminals cannot be synchronised.
  if (fsync(fd_) != 0 && errno != EINVAL && errno != EROFS) return FileError("write", path_);
  // A network file system tells here that it is full.
  return close(std::exchange(fd_, -1)) == 0 ? absl::OkStatus() : FileError("write", path_);
}

}  // namespace awqd::client
