// Writing with pwrite.
#include "client/tools/output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"

namespace awqd::tools {
namespace {

absl::Status WriteAt(int fd, int64_t at, const void* data, size_t size, const std::string& path) {
  const char* from = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t count = pwrite(fd, from, size, at);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return PathError("write", path);
    from += count;
    at += count;
    size -= static_cast<size_t>(count);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status PathError(absl::string_view what, absl::string_view path) {
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot ", what, " ", path));
}

absl::StatusOr<std::unique_ptr<OutputFile>> OutputFile::Create(const std::string& path) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) return PathError("write", path);
  return std::unique_ptr<OutputFile>(new OutputFile(path, fd));
}

absl::Status OutputFile::Append(absl::Span<const uint8_t> bytes) {
  AWQD_RETURN_IF_ERROR(WriteAt(fd_.get(), size_, bytes.data(), bytes.size(), path_));
  size_ += static_cast<int64_t>(bytes.size());
  return absl::OkStatus();
}

absl::Status OutputFile::Append(absl::string_view text) {
  return Append(absl::MakeSpan(reinterpret_cast<const uint8_t*>(text.data()), text.size()));
}

absl::Status OutputFile::Overwrite(int64_t at, absl::string_view text) {
  return WriteAt(fd_.get(), at, text.data(), text.size(), path_);
}

absl::Status OutputFile::Close() {
  // The directory's rename must not reach the disk before the data.
  if (fsync(fd_.get()) != 0 && errno != EINVAL) return PathError("write", path_);
  fd_ = UniqueFd();
  return absl::OkStatus();
}

}  // namespace awqd::tools
