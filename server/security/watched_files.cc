// Polls files and applies new contents.
#include "server/security/watched_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "kernels/base/unique_fd.h"
#include "server/obs/logging.h"

namespace awqd::security {
namespace {

constexpr size_t kMaxBytes = size_t{1} << 20;

std::atomic<int> g_requests{0};  // of reloads
std::atomic<int> g_watched{0};   // files, by threads that poll

absl::Status CannotRead(const std::string& path, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("cannot read \"", obs::LogText(path, 1024), "\": ", why));
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
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat found = {};
  if (!fd.ok() || fstat(fd.get(), &found) != 0) return CannotRead(path, std::strerror(errno));
  if (!S_ISREG(found.st_mode)) return CannotRead(path, "it is not a regular file");
  std::string text;
  char piece[4096];
  while (text.size() <= kMaxBytes) {
    const ssize_t got = read(fd.get(), piece, sizeof(piece));
    if (got < 0) return CannotRead(path, std::strerror(errno));
    if (got == 0) return text;
    text.append(piece, static_cast<size_t>(got));
  }
  return CannotRead(path, "it has more than 1 MiB");
}

absl::StatusOr<std::unique_ptr<WatchedFiles>> WatchedFiles::Start(
    std::vector<std::string> paths, Apply apply, std::chrono::milliseconds interval,
    std::function<void()> polled) {
  std::unique_ptr<WatchedFiles> out(new WatchedFiles(std::move(paths), std::move(apply), interval));
  AWQD_ASSIGN_OR_RETURN(Contents contents, ReadFiles(out->paths_));
  AWQD_RETURN_IF_ERROR(out->apply_(contents));
  out->handled_ = out->last_ = std::move(contents);
  out->requests_ = g_requests;
  out->thread_ = std::thread([self = out.get(), polled = std::move(polled)] {
    while (self->pause_.WaitFor(absl::FromChrono(self->interval_))) {
      self->Poll();
      if (polled != nullptr) polled();
    }
  });
  g_watched += static_cast<int>(out->paths_.size());
  return out;
}

WatchedFiles::~WatchedFiles() {
  pause_.End();
  if (!thread_.joinable()) return;
  thread_.join();
  g_watched -= static_cast<int>(paths_.size());
}

int WatchedFiles::RequestReload() {
  ++g_requests;
  return g_watched;
}

void WatchedFiles::Poll() {
  const int requests = g_requests;
  const bool asked = std::exchange(requests_, requests) != requests;
  absl::StatusOr<Contents> now = ReadFiles(paths_);
  const bool unchanged = now == last_;
  last_ = now;
  if (!asked && (!unchanged || now == handled_)) return;
  const absl::Status status = now.ok() ? apply_(*now) : now.status();
  handled_ = std::move(now);
  const std::string files = absl::StrJoin(paths_, ", ");
  if (status.ok()) {
    obs::LogEvent(obs::LogLevel::kInfo,
                  asked ? "reloaded files on SIGHUP" : "loaded files that changed",
                  {{"files", files}});
  } else {
    obs::LogEvent(obs::LogLevel::kError,
                  asked ? "kept the previous contents of files that SIGHUP asked to reload"
                        : "kept the previous contents of files that changed",
                  {{"files", files}, {"error", status.message()}});
  }
}

}  // namespace awqd::security
