// Polls files and applies new contents.
#include "server/security/watched_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"

namespace awqd::security {
namespace {

constexpr size_t kMaxBytes = size_t{1} << 20;

absl::Status CannotRead(const std::string& path, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("cannot read \"", obs::LogText(path, 1024), "\": ", why));
}

absl::StatusOr<std::string> ReadAll(int fd, const std::string& path) {
  struct stat found = {};
  if (fstat(fd, &found) != 0) return CannotRead(path, std::strerror(errno));
  if (!S_ISREG(found.st_mode)) return CannotRead(path, "it is not a regular file");
  std::string text;
  char piece[4096];
  while (text.size() <= kMaxBytes) {
    const ssize_t got = read(fd, piece, sizeof(piece));
    if (got < 0) return CannotRead(path, std::strerror(errno));
    if (got == 0) return text;
    text.append(piece, static_cast<size_t>(got));
  }
  return CannotRead(path, "it has more than 1 MiB");
}

absl::StatusOr<WatchedFiles::Contents> ReadFiles(const std::vector<std::string>& paths) {
  WatchedFiles::Contents out;
  for (const std::string& path : paths) {
    AWQD_ASSIGN_OR_RETURN(out.emplace_back(), ReadSmallFile(path));
  }
  return out;
}

}  // namespace

absl::StatusOr<std::string> ReadSmallFile(const std::string& path) {
  // O_NONBLOCK, because opening a FIFO blocks until a writer opens it.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return CannotRead(path, std::strerror(errno));
  absl::StatusOr<std::string> text = ReadAll(fd, path);
  close(fd);
  return text;
}

absl::StatusOr<std::unique_ptr<WatchedFiles>> WatchedFiles::Start(
    std::vector<std::string> paths, Apply apply, std::chrono::milliseconds interval) {
  std::unique_ptr<WatchedFiles> out(new WatchedFiles(std::move(paths), std::move(apply), interval));
  AWQD_ASSIGN_OR_RETURN(Contents contents, ReadFiles(out->paths_));
  AWQD_RETURN_IF_ERROR(out->apply_(contents));
  out->handled_ = out->last_ = std::move(contents);
  out->thread_ = std::thread([self = out.get()] { self->Watch(); });
  return out;
}

WatchedFiles::~WatchedFiles() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
    wake_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

void WatchedFiles::Watch() {
  for (;;) {
    {
      MutexLock lock(&mu_);
      const auto next = std::chrono::steady_clock::now() + interval_;
      while (!stop_ && std::chrono::steady_clock::now() < next) wake_.WaitUntil(&mu_, next);
      if (stop_) return;
    }
    Poll();
  }
}

void WatchedFiles::Poll() {
  absl::StatusOr<Contents> now = ReadFiles(paths_);
  const bool unchanged = now == last_;
  last_ = now;
  if (!unchanged || now == handled_) return;
  const absl::Status status = now.ok() ? apply_(*now) : now.status();
  handled_ = std::move(now);
  const std::string files = absl::StrJoin(paths_, ", ");
  if (status.ok()) {
    obs::LogEvent(obs::LogLevel::kInfo, "loaded files that changed", {{"files", files}});
  } else {
    obs::LogEvent(obs::LogLevel::kError, "kept the previous contents of files that changed",
                  {{"files", files}, {"error", status.message()}});
  }
}

}  // namespace awqd::security
