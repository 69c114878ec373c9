// Reading of regular files.
#include "kernels/checkpoint/file.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <tuple>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/mutex.h"
#include "kernels/base/parallel_for.h"

namespace awqd::model {
namespace {

absl::string_view KindOf(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISCHR(mode)) return "a character device";
  if (S_ISBLK(mode)) return "a block device";
  if (S_ISSOCK(mode)) return "a socket";
  return "a special file";
}

bool SameTime(const timespec& a, const timespec& b) {
  return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

absl::Status ReadPart(const File& file, int fd, int64_t offset, absl::Span<uint8_t> out,
                      const std::atomic<bool>* cancelled) {
  constexpr size_t kPieceBytes = 8 << 20;
  size_t done = 0;
  while (done < out.size()) {
    AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled));
    const ssize_t got = pread(fd, out.data() + done, std::min(out.size() - done, kPieceBytes),
                              offset + static_cast<int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return absl::InternalError(absl::StrCat(file.shown_name(), ": reading ", out.size() - done,
                                              " bytes at ", offset + done, " failed, errno ",
                                              errno));
    }
    if (got == 0) {
      return Invalid(file.shown_name(), ": got end of file at byte ", offset + done, ", expected ",
                     out.size() - done, " more bytes (truncated while it was read?)");
    }
    done += static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status FileStamp::Check(const FileStamp& now, absl::string_view name) const {
  const std::string shown = absl::CHexEscape(name);
  if (!SameFileAs(now)) return Invalid(shown, ": the file was replaced while it was loaded");
  if (now.stat_.st_size != stat_.st_size) {
    return Invalid(shown, ": the file changed while it was loaded: got ", now.stat_.st_size,
                   " bytes, expected ", stat_.st_size);
  }
  // Writers may set the time of modification back (rsync does); that of the change is the kernel's.
  if (!SameTime(now.stat_.st_mtim, stat_.st_mtim) || !SameTime(now.stat_.st_ctim, stat_.st_ctim)) {
    return Invalid(shown,
                   ": the file was written to, or its attributes changed, while it was loaded");
  }
  return absl::OkStatus();
}

std::string FileStamp::Text() const {
  return absl::StrCat(stat_.st_ino, " ", stat_.st_size, " ", stat_.st_mtim.tv_sec, ".",
                      stat_.st_mtim.tv_nsec, " ", stat_.st_ctim.tv_sec, ".", stat_.st_ctim.tv_nsec);
}

absl::Time FileStamp::changed() const {
  return std::max(absl::TimeFromTimespec(stat_.st_mtim), absl::TimeFromTimespec(stat_.st_ctim));
}

absl::StatusOr<File> File::Adopt(UniqueFd fd, std::string name) {
  File out;
  if (fstat(fd.get(), &out.stat_) != 0) {
    return FromSystem(errno, absl::StrCat(absl::CHexEscape(name), ": fstat"));
  }
  if (!S_ISREG(out.stat_.st_mode)) {
    return Invalid(absl::CHexEscape(name), ": got ", KindOf(out.stat_.st_mode),
                   ", expected a regular file");
  }
  out.fd_ = std::move(fd);
  out.name_ = std::move(name);
  return out;
}

// Several threads read what is long: a core copies some GB a second from the page cache.
absl::Status File::ReadAt(int64_t offset, absl::Span<uint8_t> out,
                          const std::atomic<bool>* cancelled) const {
  Mutex mu;
  int64_t first_failure = static_cast<int64_t>(out.size());
  absl::Status status;
  ForEachPart(first_failure, 4096, first_failure, [&](int64_t begin, int64_t end) {
    absl::Status of_part =
        ReadPart(*this, fd_.get(), offset + begin, out.subspan(begin, end - begin), cancelled);
    if (of_part.ok()) return;
    MutexLock lock(&mu);
    if (begin >= first_failure) return;
    first_failure = begin;
    status = std::move(of_part);
  });
  return status;
}

absl::Status File::CheckNoLfsPointer() const {
  constexpr int64_t kMostPointerBytes = 1024;
  constexpr absl::string_view kBegin = "version https://git-lfs.github.com/spec/";
  if (size() > kMostPointerBytes || size() < static_cast<int64_t>(kBegin.size())) {
    return absl::OkStatus();
  }
  std::string text(kBegin.size(), '\0');
  AWQD_RETURN_IF_ERROR(
      ReadAt(0, absl::MakeSpan(reinterpret_cast<uint8_t*>(text.data()), text.size())));
  if (text != kBegin) return absl::OkStatus();
  return Invalid(shown_name(),
                 ": got a pointer of Git LFS, expected the file itself: it was not downloaded "
                 "(git lfs pull, or hf download)");
}

absl::Status File::CheckUnchanged() const {
  struct stat now = {};
  if (fstat(fd_.get(), &now) != 0) {
    return FromSystem(errno, absl::StrCat(shown_name(), ": fstat"));
  }
  return stamp().Check(FileStamp(now), name_);
}

std::string File::shown_name() const { return absl::CHexEscape(name_); }

std::vector<const TensorMap::value_type*> SortByOffset(const TensorMap& tensors) {
  std::vector<const TensorMap::value_type*> out;
  out.reserve(tensors.size());
  for (const auto& entry : tensors) out.push_back(&entry);
  std::sort(out.begin(), out.end(), [](const auto* a, const auto* b) {
    return std::tie(a->second.begin, a->second.end) < std::tie(b->second.begin, b->second.end);
  });
  return out;
}

absl::Status TensorFile::Read(const TensorInfo& tensor, absl::Span<uint8_t> out,
                              const std::atomic<bool>* cancelled) const {
  if (static_cast<int64_t>(out.size()) != tensor.bytes()) {
    return absl::InternalError(absl::StrCat(file_.shown_name(), ": got a buffer of ", out.size(),
                                            " bytes, expected ", tensor.bytes()));
  }
  return file_.ReadAt(data_offset_ + tensor.begin, out, cancelled);
}

absl::Status CheckCancelled(const std::atomic<bool>* cancelled) {
  if (cancelled == nullptr || !*cancelled) return absl::OkStatus();
  return absl::UnavailableError("loading the model was cancelled, the server is shutting down");
}

absl::Status FromSystem(int error, absl::string_view what) {
  const absl::Status status = absl::ErrnoToStatus(error, what);
  return absl::IsUnknown(status) ? absl::InternalError(status.message()) : status;
}

}  // namespace awqd::model
