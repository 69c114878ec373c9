// Files that fail: calls on files in the repository.
#include <dirent.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tests/sweeps/shim.h"

using awqd::sweeps::Control;
using awqd::sweeps::Fails;
using awqd::sweeps::kEndOfFile;
using awqd::sweeps::kErrno;
using awqd::sweeps::kFiles;
using awqd::sweeps::kShortRead;
using awqd::sweeps::Next;
using awqd::sweeps::TheControl;

namespace awqd::sweeps {
namespace {

bool Watching() { return TheControl() != nullptr && TheControl()->kind == kFiles; }

// Whether it is a file or directory of the repository's file system, where no other file is open
// for reading.
bool IsOurs(int fd) {
  if (!Watching() || fd < 0) return false;
  struct stat info = {};
  static const auto real = Next<int(int, struct stat*)>("fstat");
  if (real(fd, &info) != 0) return false;
  return (S_ISREG(info.st_mode) || S_ISDIR(info.st_mode)) && info.st_dev == TheControl()->device;
}

bool IsOurs(const char* path) {
  const char* root = TheControl() == nullptr ? "" : TheControl()->repository;
  return Watching() && std::strncmp(path, root, std::strlen(root)) == 0;
}

// Calls that do not read ignore a twist.
bool FailsWithErrno(const char* name) {
  if (TheControl()->twist != kErrno || !Fails(kFiles, name)) return false;
  errno = TheControl()->error;
  return true;
}

// Whether the call fails; `size` becomes the number of bytes that it may read.
bool ReadFails(const char* name, size_t* size) {
  if (!Fails(kFiles, name)) return false;
  if (TheControl()->twist == kShortRead && *size > 1) {
    *size /= 2;
    return false;
  }
  errno = TheControl()->error;
  return true;
}

ssize_t WhenFailed() { return TheControl()->twist == kEndOfFile ? 0 : -1; }

}  // namespace

// For openat2, which has no function in the C library; shim_time.cc has `syscall`.
bool OpenAt2Fails(int directory) { return IsOurs(directory) && FailsWithErrno("openat2"); }

}  // namespace awqd::sweeps

using awqd::sweeps::FailsWithErrno;
using awqd::sweeps::IsOurs;

extern "C" {

int open(const char* path, int flags, ...) {
  static const auto real = Next<int(const char*, int, ...)>("open");
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  if (IsOurs(path) && FailsWithErrno("open")) return -1;
  return real(path, flags, mode);
}

int openat(int directory, const char* path, int flags, ...) {
  static const auto real = Next<int(int, const char*, int, ...)>("openat");
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  if (IsOurs(directory) && FailsWithErrno("openat")) return -1;
  return real(directory, path, flags, mode);
}

int fstat(int fd, struct stat* out) noexcept {
  static const auto real = Next<int(int, struct stat*)>("fstat");
  if (IsOurs(fd) && FailsWithErrno("fstat")) return -1;
  return real(fd, out);
}

int fstatat(int directory, const char* path, struct stat* out, int flags) noexcept {
  static const auto real = Next<int(int, const char*, struct stat*, int)>("fstatat");
  if (IsOurs(directory) && FailsWithErrno("fstatat")) return -1;
  return real(directory, path, out, flags);
}

char* realpath(const char* path, char* out) noexcept {
  static const auto real = Next<char*(const char*, char*)>("realpath");
  const bool ours =
      awqd::sweeps::Watching() && (IsOurs(path) || std::strncmp(path, "/proc/self/fd/", 14) == 0);
  if (ours && FailsWithErrno("realpath")) return nullptr;
  return real(path, out);
}

ssize_t readlinkat(int directory, const char* path, char* out, size_t size) noexcept {
  static const auto real = Next<ssize_t(int, const char*, char*, size_t)>("readlinkat");
  if (IsOurs(directory) && FailsWithErrno("readlinkat")) return -1;
  return real(directory, path, out, size);
}

ssize_t read(int fd, void* out, size_t size) {
  static const auto real = Next<ssize_t(int, void*, size_t)>("read");
  if (IsOurs(fd) && awqd::sweeps::ReadFails("read", &size)) return awqd::sweeps::WhenFailed();
  return real(fd, out, size);
}

ssize_t pread(int fd, void* out, size_t size, off_t at) {
  static const auto real = Next<ssize_t(int, void*, size_t, off_t)>("pread");
  if (IsOurs(fd) && awqd::sweeps::ReadFails("pread", &size)) return awqd::sweeps::WhenFailed();
  return real(fd, out, size, at);
}

dirent* readdir(DIR* directory) {
  static const auto real = Next<dirent*(DIR*)>("readdir");
  if (IsOurs(dirfd(directory)) && FailsWithErrno("readdir")) return nullptr;
  return real(directory);
}

DIR* fdopendir(int fd) {
  static const auto real = Next<DIR*(int)>("fdopendir");
  if (IsOurs(fd) && FailsWithErrno("fdopendir")) return nullptr;
  return real(fd);
}

void* mmap(void* at, size_t size, int protection, int flags, int fd, off_t offset) noexcept {
  static const auto real = Next<void*(void*, size_t, int, int, int, off_t)>("mmap");
  Dl_info caller;
  const bool ours =
      awqd::sweeps::Watching() && (fd >= 0 || (dladdr(__builtin_return_address(0), &caller) != 0 &&
                                               std::strstr(caller.dli_fname, "/awqd") != nullptr));
  if (ours && FailsWithErrno("mmap")) return MAP_FAILED;
  return real(at, size, protection, flags, fd, offset);
}

}  // extern "C"
