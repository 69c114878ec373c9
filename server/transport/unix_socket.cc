// Claiming, protecting and removing socket files.
#include "server/transport/unix_socket.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"

namespace awqd::transport {
namespace {

// Another awqd holds the lock from its check to its listen: milliseconds.
constexpr absl::Duration kLockLimit = absl::Seconds(5);
constexpr absl::Duration kLockPoll = absl::Milliseconds(5);

std::string Quoted(const std::string& path) { return absl::StrCat("\"", obs::LogText(path), "\""); }

absl::Status Refused(const std::string& path, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("address: cannot listen on unix:", obs::LogText(path), ": ", why));
}

absl::Status Refused(const std::string& path, absl::string_view what, int error) {
  return Refused(path, absl::StrCat(what, ": ", std::strerror(error)));
}

std::string DirectoryOf(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

// 0 when somebody accepts connections there, otherwise why not.
int TryConnect(const std::string& path) {
  sockaddr_un address = {.sun_family = AF_UNIX};
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.ok()) return errno;
  const auto* const to = reinterpret_cast<const sockaddr*>(&address);
  if (connect(fd.get(), to, sizeof(address)) == 0) return 0;
  return errno == EAGAIN ? 0 : errno;  // EAGAIN: alive, its backlog is full
}

// Leaves the path free, or says why it cannot be.
absl::Status RemoveDeadSocket(const std::string& path) {
  struct stat found = {};
  if (lstat(path.c_str(), &found) != 0) {
    if (errno == ENOENT) return absl::OkStatus();
    return Refused(path, "cannot look at it", errno);
  }
  if (!S_ISSOCK(found.st_mode)) {
    return Refused(path, "something that is not a socket is there; move it away first");
  }
  const int error = TryConnect(path);
  if (error == 0) {
    return absl::UnavailableError(absl::StrCat(
        "address: cannot listen on unix:", obs::LogText(path), ": another server listens there"));
  }
  if (error == ENOENT) return absl::OkStatus();
  if (error != ECONNREFUSED) return Refused(path, "cannot tell whether a server is there", error);
  if (unlink(path.c_str()) != 0 && errno != ENOENT) {
    return Refused(path, "cannot remove the socket that a dead server left", errno);
  }
  obs::LogEvent(obs::LogLevel::kInfo, "removed the socket of a server that is gone",
                {{"path", obs::LogText(path)}});
  return absl::OkStatus();
}

}  // namespace

UnixSockets::~UnixSockets() {
  Unlock();
  Remove();
}

void UnixSockets::Remove() {
  for (File& file : files_) {
    struct stat now = {};
    if (!std::exchange(file.bound, false) || lstat(file.path.c_str(), &now) != 0) continue;
    if (now.st_dev == file.device && now.st_ino == file.inode) unlink(file.path.c_str());
  }
}

absl::Status UnixSockets::LockDirectoryOf(const std::string& path) {
  const std::string directory = DirectoryOf(path);
  UniqueFd fd(open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.ok()) return Refused(path, "cannot open the directory " + Quoted(directory), errno);
  struct stat found = {};
  if (fstat(fd.get(), &found) != 0 || access(directory.c_str(), W_OK | X_OK) != 0) {
    return Refused(path, "cannot write to the directory " + Quoted(directory), errno);
  }
  const std::pair<dev_t, ino_t> id = {found.st_dev, found.st_ino};
  if (!names_.emplace(id, std::filesystem::path(path).filename().string()).second) {
    return Refused(path, "it is named twice");
  }
  if (!locked_.insert(id).second) return absl::OkStatus();
  const int lock = locks_.emplace_back(std::move(fd)).get();
  for (const absl::Time until = absl::Now() + kLockLimit; flock(lock, LOCK_EX | LOCK_NB) != 0;) {
    if (errno != EWOULDBLOCK || absl::Now() > until) {
      return Refused(path, "cannot lock the directory " + Quoted(directory), errno);
    }
    absl::SleepFor(kLockPoll);
  }
  return absl::OkStatus();
}

absl::Status UnixSockets::Claim(const std::string& path) {
  AWQD_RETURN_IF_ERROR(LockDirectoryOf(path));
  AWQD_RETURN_IF_ERROR(RemoveDeadSocket(path));
  if (!narrowed_) {
    // A socket is connectable from its bind on, before its permissions can be set.
    umask_ = umask(S_IRWXG | S_IRWXO);
    narrowed_ = true;
  }
  files_.push_back({.path = path});
  return absl::OkStatus();
}

absl::Status UnixSockets::Bound() {
  for (File& file : files_) {
    struct stat now = {};
    if (file.bound) continue;
    if (lstat(file.path.c_str(), &now) != 0) return Refused(file.path, "it is gone again", errno);
    file.device = now.st_dev;
    file.inode = now.st_ino;
    file.bound = true;
    if (chmod(file.path.c_str(), mode_) != 0) {
      return Refused(file.path, "cannot set its permissions", errno);
    }
  }
  Unlock();
  return absl::OkStatus();
}

void UnixSockets::Unlock() {
  if (narrowed_) umask(umask_);
  narrowed_ = false;
  locks_.clear();
  locked_.clear();
}

}  // namespace awqd::transport
