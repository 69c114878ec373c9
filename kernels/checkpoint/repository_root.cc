// Opening files beneath the repository root.
#include "kernels/checkpoint/repository_root.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"

namespace awqd::model {
namespace {

// O_NONBLOCK so that a FIFO cannot hold the loader up; File::Adopt refuses it afterwards.
constexpr int kFileFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
constexpr int kDirectoryFlags = O_RDONLY | O_CLOEXEC | O_DIRECTORY;

// EAGAIN from openat2: a rename raced with a "..", which the next try settles, or another process
// has a lease on the file, which may last.
constexpr int kMostTries = 100;

// A descriptor, or -1. On file systems over a network an open may be interrupted by a signal.
template <typename F>
int Uninterrupted(F&& open_it) {
  int fd = -1;
  do {
    fd = open_it();
  } while (fd < 0 && errno == EINTR);
  return fd;
}

absl::Status Escapes(absl::string_view relative) {
  return Invalid(Quoted(relative, 256), ": got a path that leads out of the model repository, ",
                 "expected one beneath it (symbolic links must be relative and stay inside)");
}

absl::Status FromErrno(int error, absl::string_view relative) {
  const std::string name = Quoted(relative, 256);
  switch (error) {
    case EXDEV:
      return Escapes(relative);
    case ELOOP:
      return Invalid(name, ": too many symbolic links");
    case ENOENT:
      return absl::NotFoundError(absl::StrCat(name, ": no such file or directory"));
    case ENOTDIR:
      return absl::NotFoundError(absl::StrCat(name, ": not a directory"));
    case ENXIO:
      return Invalid(name, ": got a socket or a device, expected a regular file");
    case EAGAIN:
      return absl::UnavailableError(absl::StrCat(
          name, ": another process has a lease on it, or renames directories on its path"));
    default:
      return FromSystem(error, absl::StrCat(name, ": open"));
  }
}

// The error of a process that may not read the file: names its owner and its mode.
absl::Status NotPermitted(int root, const std::string& inside, absl::string_view relative) {
  const std::string name = Quoted(relative, 256);
  const std::string process = absl::StrCat("this process has uid ", geteuid(), ", gid ", getegid());
  struct stat info = {};
  if (fstatat(root, inside.c_str(), &info, 0) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat(name, ": open: permission denied by a directory on its path; ", process));
  }
  return absl::PermissionDeniedError(absl::StrFormat(
      "%s: open: permission denied: it has mode %04o and belongs to uid %d, gid %d; %s", name,
      info.st_mode & 07777, info.st_uid, info.st_gid, process));
}

absl::Status CheckRelative(absl::string_view relative) {
  if (relative == ".") return absl::OkStatus();
  for (absl::string_view part : absl::StrSplit(relative, '/')) {
    if (!IsPlainFileName(part)) {
      return Invalid("path ", Quoted(relative, 256), ": expected plain names separated by '/'");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> RealPath(const std::string& path, absl::string_view relative) {
  char resolved[PATH_MAX];
  if (realpath(path.c_str(), resolved) == nullptr) return FromErrno(errno, relative);
  return std::string(resolved);
}

// Where the open file lies now.
absl::StatusOr<std::string> PathOf(const UniqueFd& fd, absl::string_view relative) {
  return RealPath(absl::StrCat("/proc/self/fd/", fd.get()), relative);
}

// openat2 without magic links. 0, or what errno was.
int TryOpen(const UniqueFd& directory, const std::string& path, int flags, uint64_t resolve,
            UniqueFd* out) {
  open_how how = {};
  how.flags = static_cast<uint64_t>(flags);
  how.resolve = resolve | RESOLVE_NO_MAGICLINKS;
  int error = EAGAIN;
  for (int i = 0; i < kMostTries && (error == EAGAIN || error == EINTR); ++i) {
    const long fd = syscall(SYS_openat2, directory.get(), path.c_str(), &how, sizeof(how));
    error = fd < 0 ? errno : 0;
    if (fd >= 0) *out = UniqueFd(static_cast<int>(fd));
  }
  return error;
}

// Kernels before 5.6, and sandboxes that do not know the call.
bool IsUnknownCall(int error) { return error == ENOSYS || error == EPERM; }

// Closes the descriptor.
absl::StatusOr<std::vector<std::string>> ListNames(UniqueFd fd, absl::string_view relative) {
  std::unique_ptr<DIR, int (*)(DIR*)> directory(fdopendir(fd.get()), closedir);
  if (directory == nullptr) return FromErrno(errno, relative);
  fd.Release();  // closedir closes it
  std::vector<std::string> names;
  for (;;) {
    errno = 0;  // which tells the end of the directory from an error
    const dirent* entry = readdir(directory.get());
    if (entry == nullptr) break;
    const absl::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  if (const int error = errno; error != 0) {
    return FromSystem(error, absl::StrCat(Quoted(relative, 256), ": listing it"));
  }
  std::sort(names.begin(), names.end());
  return names;
}

bool IsBeneath(absl::string_view path, absl::string_view root) {
  return path == root || root == "/" || absl::StartsWith(path, absl::StrCat(root, "/"));
}

}  // namespace

bool IsPlainFileName(absl::string_view name) {
  return !name.empty() && name.size() <= NAME_MAX && name != "." && name != ".." &&
         name.find('/') == name.npos && name.find('\0') == name.npos;
}

absl::StatusOr<RepositoryRoot> RepositoryRoot::Open(const std::string& path, Resolve how) {
  RepositoryRoot out;
  out.path_ = path;
  out.how_ = how;
  out.root_ = UniqueFd(Uninterrupted([&] { return open(path.c_str(), kDirectoryFlags); }));
  if (out.root_.ok()) return out;
  const int error = errno;
  const std::string what = absl::StrCat("model repository ", Quoted(path, 1024));
  if (error == ENOTDIR) {
    return Invalid(what, ": got a file, expected a directory");
  }
  return FromSystem(error, what);
}

absl::StatusOr<RepositoryRoot> RepositoryRoot::OpenFolder(const std::string& path,
                                                          const std::string& as, Resolve how) {
  AWQD_ASSIGN_OR_RETURN(RepositoryRoot out, Open(path, how));
  out.as_ = as;
  return out;
}

absl::StatusOr<std::string> RepositoryRoot::Inside(const std::string& relative) const {
  AWQD_RETURN_IF_ERROR(CheckRelative(relative));
  if (as_.empty()) return relative;
  if (relative == as_) return ".";
  absl::string_view rest = relative;
  if (absl::ConsumePrefix(&rest, as_) && absl::ConsumePrefix(&rest, "/")) return std::string(rest);
  return FromErrno(ENOENT, relative);
}

absl::StatusOr<UniqueFd> RepositoryRoot::OpenBeneath(const std::string& relative, int flags) const {
  AWQD_ASSIGN_OR_RETURN(const std::string inside, Inside(relative));
  const auto canonical = [&]() -> absl::StatusOr<UniqueFd> {
    AWQD_ASSIGN_OR_RETURN(const std::string root, RealRoot());
    return OpenCanonical(relative, absl::StrCat(root, "/", inside), flags);
  };
  if (how_ == Resolve::kCanonicalise) return canonical();
  UniqueFd fd;
  const int error = TryOpen(root_, inside, flags, RESOLVE_BENEATH, &fd);
  if (error == 0) return fd;
  if (IsUnknownCall(error)) return canonical();
  if (error == EACCES) return NotPermitted(root_.get(), inside, relative);
  return FromErrno(error, relative);
}

// The check comes before the open, so what was opened is compared once more: a component swapped
// for a link in between shows in the descriptor's own path.
absl::StatusOr<UniqueFd> RepositoryRoot::OpenCanonical(const std::string& relative,
                                                       const std::string& path, int flags) const {
  AWQD_ASSIGN_OR_RETURN(const std::string root, RealRoot());
  AWQD_ASSIGN_OR_RETURN(const std::string target, RealPath(path, relative));
  if (!IsBeneath(target, root)) return Escapes(relative);
  UniqueFd fd(Uninterrupted([&] { return open(target.c_str(), flags | O_NOFOLLOW); }));
  if (!fd.ok() && errno == EACCES) return NotPermitted(root_.get(), path, relative);
  if (!fd.ok()) return FromErrno(errno, relative);
  AWQD_ASSIGN_OR_RETURN(const std::string opened, PathOf(fd, relative));
  if (!IsBeneath(opened, root)) return Escapes(relative);
  return fd;
}

absl::StatusOr<File> RepositoryRoot::OpenFile(absl::string_view relative) const {
  AWQD_ASSIGN_OR_RETURN(UniqueFd fd, OpenBeneath(std::string(relative), kFileFlags));
  return File::Adopt(std::move(fd), std::string(relative));
}

absl::StatusOr<std::vector<std::string>> RepositoryRoot::ListDirectory(
    absl::string_view relative) const {
  AWQD_ASSIGN_OR_RETURN(UniqueFd fd, OpenBeneath(std::string(relative), kDirectoryFlags));
  return ListNames(std::move(fd), relative);
}

absl::StatusOr<std::string> RepositoryRoot::RealRoot() const {
  return RealPath(path_, "the model repository");
}

absl::StatusOr<RepositoryRoot::Held> RepositoryRoot::Hold(absl::string_view relative) const {
  Held out;
  AWQD_ASSIGN_OR_RETURN(out.fd, OpenBeneath(std::string(relative), kDirectoryFlags));
  AWQD_ASSIGN_OR_RETURN(const std::string root, PathOf(root_, "the model repository"));
  AWQD_ASSIGN_OR_RETURN(out.path, PathOf(out.fd, relative));
  if (!IsBeneath(out.path, root)) return Escapes(relative);  // moved out in between
  absl::string_view rest = absl::StripPrefix(out.path, root);
  absl::ConsumePrefix(&rest, "/");
  out.path = rest.empty() ? "." : std::string(rest);
  return out;
}

absl::StatusOr<File> RepositoryRoot::OpenFileIn(const Held& directory, const std::string& name,
                                                absl::string_view relative) const {
  if (!IsPlainFileName(name)) {
    return Invalid("path ", Quoted(relative, 256), ": expected one plain name in the directory");
  }
  AWQD_ASSIGN_OR_RETURN(UniqueFd fd, OpenIn(directory, name, std::string(relative)));
  return File::Adopt(std::move(fd), std::string(relative));
}

// A link is read from the directory that is held, and followed from where that lay when it was
// opened, so that ".." in it stays beneath the root.
absl::StatusOr<UniqueFd> RepositoryRoot::OpenIn(const Held& directory, const std::string& name,
                                                const std::string& relative) const {
  const auto canonical = [&]() -> absl::StatusOr<UniqueFd> {
    AWQD_ASSIGN_OR_RETURN(const std::string path, PathOf(directory.fd, relative));
    return OpenCanonical(relative, absl::StrCat(path, "/", name), kFileFlags);
  };
  if (how_ == Resolve::kCanonicalise) return canonical();
  UniqueFd fd;
  int error = TryOpen(directory.fd, name, kFileFlags, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS, &fd);
  if (error == ELOOP) {
    char link[PATH_MAX];
    const ssize_t size = readlinkat(directory.fd.get(), name.c_str(), link, sizeof(link));
    if (size < 0) return FromErrno(errno, relative);
    const absl::string_view to(link, static_cast<size_t>(size));
    if (absl::StartsWith(to, "/")) return Escapes(relative);
    error = TryOpen(root_, absl::StrCat(directory.path, "/", to), kFileFlags, RESOLVE_BENEATH, &fd);
  }
  if (error == 0) return fd;
  if (IsUnknownCall(error)) return canonical();
  return FromErrno(error, relative);
}

absl::StatusOr<std::vector<std::string>> RepositoryRoot::ListIn(const Held& directory,
                                                                absl::string_view relative) const {
  UniqueFd fd(Uninterrupted([&] { return openat(directory.fd.get(), ".", kDirectoryFlags); }));
  if (!fd.ok()) return FromErrno(errno, relative);
  return ListNames(std::move(fd), relative);
}

}  // namespace awqd::model
